"""What a new user does first with an installed fewbit: two steps of training by each method. `make dist` runs it."""

import fewbit
import torch
from torch import nn
from torch.nn import functional as F

METHODS = {
    "few-bit activations": {"bits": 3},
    "ActNN": {"level": "L2"},
    "BLPA": {"fuse_preact": 4},
    "V-Quant": {"outliers": 0.02, "bits": 3},
}


def network():
    """A small convolutional network that every method finds something in."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))


def losses(model):
    """The losses of two steps on one batch, and that after them."""
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main():
    exact = losses(network())
    print(f"fewbit {fewbit.__version__}, torch {torch.__version__}")
    for name, settings in METHODS.items():
        model = network()
        report = fewbit.convert(model, **settings)
        found = losses(model)
        assert report.replaced and found[0] == exact[0] and found[2] < found[0], (name, found, exact)
        print(f"{name}: {len(report.replaced)} replaced, losses {' '.join(f'{loss:.4f}' for loss in found)}")
    model = network()
    with fewbit.compress_saved_tensors(fewbit.quantizers.PerGroup(bits=4)):
        found = losses(model)
    assert found[0] == exact[0] and found[2] < found[0], (found, exact)
    print(f"hooks: losses {' '.join(f'{loss:.4f}' for loss in found)}")


if __name__ == "__main__":
    main()
