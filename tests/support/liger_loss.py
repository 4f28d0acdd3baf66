"""A process in which Triton interprets Liger's kernel: prints by case how loss and gradient compare with torch's."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import fewbit
import torch
from fewbit.runtime.layers import chunked_loss
from torch.nn import functional as F

chunked_loss._serves = lambda hidden: True
calls = []
loss_by_liger = chunked_loss.loss_by_liger


def by_liger(*args, **options):
    calls.append(loss_by_liger(*args, **options))
    return calls[-1]


chunked_loss.loss_by_liger = by_liger


def compare(name, served, dtype=torch.float32, trains=False, **options):
    torch.manual_seed(0)
    hidden = torch.randn(2, 12, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(40, 16, dtype=dtype, requires_grad=trains)
    labels = torch.randint(40, (2, 12))
    labels[0, : options.pop("ignored", 3)] = -100
    logits = F.linear(hidden, weight).float()
    cap = options.get("softcap")
    capped = cap * torch.tanh(logits / cap) if cap else logits
    known = {key: value for key, value in options.items() if key in ("reduction", "label_smoothing")}
    expected = F.cross_entropy(capped.flatten(0, 1), labels.flatten(), **known)
    if z := options.get("z_loss"):
        expected = expected + z * (torch.logsumexp(capped, -1).square() * (labels >= 0)).sum() / (labels >= 0).sum()
    (right,) = torch.autograd.grad(3 * expected, hidden)
    calls.append(None)  # if it is not asked at all
    with fewbit.compress_saved_tensors(fewbit.quantizers.PerGroup(1)):
        loss = fewbit.layers.chunked_cross_entropy(hidden, weight, labels, **options)
    (found,) = torch.autograd.grad(3 * loss, hidden)
    near = 2e-2 if dtype == torch.bfloat16 else 1e-5
    same = torch.allclose(loss.float(), expected, rtol=near) and (found - right).norm() <= near * right.norm()
    print(name, bool(same), (calls[-1] is not None) == served)


compare("frozen", True)
compare("bfloat16", True, torch.bfloat16)
compare("options", True, label_smoothing=0.1, z_loss=1e-2)
compare("capped", False, softcap=5.0)
compare("sum", True, reduction="sum")
compare("trained", False, trains=True)
compare("chunks of one's own", False, chunk_size=7)
hidden = torch.randn(4, 16, requires_grad=True)
none = fewbit.layers.chunked_cross_entropy(hidden, torch.randn(40, 16), torch.full((4,), -100))
print("no token", bool(none.isnan()), calls[-1] is not None)
