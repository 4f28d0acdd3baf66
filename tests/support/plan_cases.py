"""Small models to plan for, with their batches."""

import small_modules
import torch
from fewbit.runtime.plan.eager_planner import Planner
from fewbit.runtime.plan.problem import Limits, Price, Solution
from fewbit.runtime.plan.static import static_bytes
from fewbit.runtime.plan.step import Step
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, layers=4, width=64, dropout=0.0):
        super().__init__()
        self.start = nn.Linear(16, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x, labels=None):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        return y if labels is None else {"loss": F.cross_entropy(y.flatten(0, -2), labels.flatten()), "logits": y}


class Composed(Net):
    """A net whose GELU is written in several operations, each of which saves a tensor."""

    def __init__(self):
        super().__init__()
        from transformers.activations import NewGELUActivation

        for layer in self.layers:
            layer.act = NewGELUActivation()


class Stack(nn.Module):
    """Blocks between two linear maps, with the loss alone for an output."""

    def __init__(self, blocks, width=64):
        super().__init__()
        self.start, self.layers, self.head = nn.Linear(16, width), nn.ModuleList(blocks), nn.Linear(width, 10)

    def forward(self, x, labels):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())}


class Attending(Stack):
    """Two layers of attention, whose weights are large enough for it to be uneven."""

    def __init__(self, width=64, heads=4, shares_output=True, dropout=0.0):
        super().__init__((AttentionBlock(width, heads, shares_output, dropout) for _ in range(2)), width)
        with torch.no_grad():
            for layer in self.layers:
                layer.qkv.weight[: 2 * width] *= 4


class AttentionBlock(nn.Module):
    def __init__(self, width, heads, shares_output, dropout):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.shares_output, self.dropout = heads, shares_output, dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        y = y.transpose(1, 2).flatten(2)
        return x + self.out(y if self.shares_output else y + 0)


class ByHand(Attending):
    """Attention by hand: of q, k and v, which lie in one memory, it saves v as it is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(HandBlock() for _ in range(2))


class HandBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q / 3 @ (k / 3).mT).softmax(-1) @ v)


class Gated(Stack):
    """Two gated MLPs as Llama's."""

    def __init__(self, width=64):
        super().__init__((GatedBlock(width) for _ in range(2)), width)


class GatedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), small_modules.Gated(width, 3 * width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class ConvBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class Convs(nn.Module):
    def __init__(self, block=ConvBlock, layers=3):
        super().__init__()
        self.start = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.Sequential(*(block(16) for _ in range(layers)))
        self.head = nn.Linear(16, 10)

    def forward(self, x, labels):
        y = self.head(self.layers(self.start(x)).mean((2, 3)))
        return {"loss": F.cross_entropy(y, labels)}


def batch(count=8):
    return {"x": torch.randn(count, 32, 16), "labels": torch.randint(0, 10, (count, 32))}


def images(count=8):
    return {"x": torch.randn(count, 3, 16, 16), "labels": torch.randint(0, 10, (count,))}


def gradient(model, inputs, seed=1):
    torch.manual_seed(seed)
    model.zero_grad()
    model(**inputs)["loss"].backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def errs_as_predicted(plan, model, inputs, exact):
    """Whether the mean error of four draws of the gradient, beside the exact one, is as a plan says, within a half."""
    errors = [((gradient(model, inputs, s) - exact).norm() / exact.norm()).item() for s in range(1, 5)]
    return plan.error / 1.5 <= sum(errors) / 4 <= 1.5 * plan.error


def fixed(plan):
    return plan.peak.parameters + plan.peak.optimizer


class Chained(Convs):
    """Blocks of batch normalization, ReLU and convolution, as pre-activation networks have."""

    def __init__(self, layers=3):
        super().__init__(ChainedBlock, layers)


class ChainedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.act, self.conv = nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(self.act(self.norm(x)))


class Spiked(Net):
    """A net whose activations have a large number in each row, as those of large language models do."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.start.weight[3] *= 100


def planned_by(model, inputs, wanted):
    """Return the plan that saves all exactly but what an option serves that is `wanted`; and how many of these it has.

    It is predicted like any plan, whether or not a solver would choose it.
    """
    step = Step(model, (), inputs)
    planner = Planner(step, Limits(error=1.0), Price(), static_bytes(model, "adamw"), None, True)
    known = planner.measured_eagerly()
    problem = planner.problem(known)
    chosen, covered = [], set()
    for option in sorted(filter(wanted, problem.options), key=lambda o: -len(o.covers)):
        if not covered & {*option.covers}:
            chosen.append(option)
            covered |= {*option.covers}
    count = len(chosen)
    chosen += [o for o in problem.options if o.method == "exact" and o.covers[0] not in covered]
    return planner.document(known, problem, Solution(tuple(chosen), 0.0, 0.0), []), count
