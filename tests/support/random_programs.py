"""Random differentiable programs of 20 to 40 operations, and what remains of one that fails.

program = Program.draw(seed)
loss = program.module()(torch.randn(ROWS, WIDTH))
print(shrunk(program, fails))       the least program that fails likewise

Values are matrices of ROWS × WIDTH. A step reads one or two earlier ones, is scaled to about unit size, and may be next
to a pole, where rounding does most harm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH = 32, 64
_PLACES = torch.arange(ROWS * WIDTH).mul(37).remainder(WIDTH).view(ROWS, WIDTH)
_ROWS = torch.arange(ROWS).mul(5).remainder(ROWS)


def _changed_in_place(p: Tensor, q: Tensor) -> Tensor:
    h = p + 0
    h[:, : WIDTH // 2].add_(q[:, : WIDTH // 2])
    h.mul_(0.7)
    return h.relu_() - h[:1]


def _written(p: Tensor, q: Tensor) -> Tensor:
    h = p.clone()
    h[_ROWS[:8]] = q[:8].sin()
    return h.index_add_(0, _ROWS, q)


def _heads(x: Tensor) -> Tensor:
    return x.view(ROWS, 4, WIDTH // 4).transpose(0, 1)[None]


POINTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "abs": torch.abs,
    "clamp": lambda t: t.clamp(-1, 1),
    "sin": torch.sin,
    "sin of 20": lambda t: torch.sin(20 * t),
    "square": torch.square,
    "softplus": F.softplus,
    "exp": torch.exp,
    "exp of 3": lambda t: (3 * t).exp(),
    "log": lambda t: (t.abs() + 1e-2).log(),
    "log1p": lambda t: t.relu().log1p(),
    "sqrt": lambda t: (t.relu() + 1e-4).sqrt(),
    "rsqrt": lambda t: (t * t + 0.5).rsqrt(),
    "power": lambda t: (t.abs() + 1e-3) ** 0.3,
    "reciprocal": lambda t: 1 / (t * t + 0.1),
    "acos": lambda t: t.clamp(-0.99, 0.99).acos(),
    "atanh": lambda t: (0.99 * t.tanh()).atanh(),
    "where": lambda t: torch.where(t > 0, t, 0.1 * t.exp()),
}
ROWWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda t: 8 * t.softmax(-1),
    "log softmax": lambda t: t.log_softmax(-1),
    "softmax by hand": lambda t: 8 * t.exp() / t.exp().sum(-1, keepdim=True),
    "layer norm": lambda t: F.layer_norm(t, (WIDTH,)),
    "rms norm": lambda t: F.rms_norm(t, (WIDTH,)),
    "normalize": lambda t: 8 * F.normalize(t, dim=-1),
    "cumsum": lambda t: t.cumsum(-1),
    "centred": lambda t: t - t.mean(0, keepdim=True),
    "below its maximum": lambda t: t - t.amax(-1, keepdim=True),
    "in deviations": lambda t: t / (t.std(-1, keepdim=True) + 0.1),
    "above its logsumexp": lambda t: t * t.logsumexp(-1, keepdim=True),
    "sorted": lambda t: t.sort(-1).values,
    "largest": lambda t: t.topk(WIDTH // 2, -1).values.repeat(1, 2),
}
VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda t: t.roll(1, 0),
    "flip": lambda t: t.flip(-1),
    "reshaped transpose": lambda t: t.mT.reshape(t.shape),
    "halves": lambda t: torch.cat(t.chunk(2, -1)[::-1], -1),
    "interleaved": lambda t: t.unflatten(-1, (4, -1)).permute(0, 2, 1).flatten(1),
    "lower": lambda t: t.tril() + t,
    "gathered": lambda t: t.gather(1, _PLACES),
    "rows": lambda t: t[_ROWS],
    "first row": lambda t: t[:1].expand(t.shape) + t,
}
PAIRS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "difference": torch.sub,
    "product": torch.mul,
    "quotient": lambda a, b: a / (0.1 + b.abs()),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "gate": lambda a, b: a * b.sigmoid(),
    "choice": lambda a, b: torch.where(a > b, a, b * 0.5),
    "angle": lambda a, b: torch.atan2(a, b),
    "logaddexp": torch.logaddexp,
    "margin": lambda a, b: F.logsigmoid(a - b),
    "matrix product": lambda a, b: (a @ b.mT) @ b / WIDTH,
    "weights": lambda a, b: (a @ b.mT / 8).softmax(-1) @ a,
    "attention": lambda a, b: (
        F.scaled_dot_product_attention(_heads(a), _heads(b), _heads(a - b), is_causal=True)[0]
        .transpose(0, 1)
        .flatten(1)
    ),
    "scattered": lambda a, b: a.scatter(1, _PLACES[:, :8], b[:, :8]),
    "added": lambda a, b: a.scatter_add(1, _PLACES, b),
    "changed in place": _changed_in_place,
    "written": _written,
}
# What has a pole, a steep exponential or several periods, which a hook that sees tensors alone cannot know.
DELICATE = {"sin of 20", "exp of 3", "log", "sqrt", "power", "reciprocal", "acos", "atanh", "quotient", "angle"}
KINDS = (POINTWISE, POINTWISE, ROWWISE, VIEWS, PAIRS, PAIRS, {"linear": None})


@dataclass(frozen=True)
class Step:
    """An operation and the places, counted back from the last, of what it reads."""

    name: str
    back: tuple[int, int]


@dataclass(frozen=True)
class Program:
    """Steps from two linear maps of the input to a loss."""

    seed: int
    steps: tuple[Step, ...]

    @classmethod
    def draw(cls, seed: int, delicate: bool = True) -> "Program":
        """Return the program of a seed, with or without what is `DELICATE`."""
        random = Random(seed)
        steps = []
        for _ in range(random.randrange(20, 41)):
            back = (0 if random.random() < 0.6 else random.randrange(1, 8), random.randrange(8))
            names = sorted(random.choice(KINDS))
            steps.append(Step(random.choice([name for name in names if delicate or name not in DELICATE]), back))
        return cls(seed, tuple(steps))

    def module(self) -> nn.Module:
        """Return the program as a module whose output is a loss."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return _Module(self)

    def input(self) -> Tensor:
        """Return what it is called with."""
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(self.seed))

    def __str__(self) -> str:
        return f"Program.draw({self.seed}), of which: {[(step.name, *step.back) for step in self.steps]}"


class _Module(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.body = _Body(program)
        self.scale = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).mean()


class _Body(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        values = [self.layers[0](x), self.layers[1](x)]
        for step in self.program.steps:
            p, q = (values[-1 - back % len(values)] for back in step.back)
            y = self.layers[2](p) if step.name == "linear" else _apply(step.name, p, q)
            values.append(y / (y.detach().std() + 0.1))
        return values[-1] + 0.5 * values[-2]


def _apply(name: str, p: Tensor, q: Tensor) -> Tensor:
    if name in PAIRS:
        return PAIRS[name](p, q)
    unary: Any = {**POINTWISE, **ROWWISE, **VIEWS}[name]
    return unary(p)


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return the program without the steps that it fails without."""
    size = len(program.steps) // 2
    while size:
        at = 0
        while at < len(program.steps):
            less = replace(program, steps=program.steps[:at] + program.steps[at + size :])
            if fails(less):
                program = less
            else:
                at += size
        size //= 2
    return program
