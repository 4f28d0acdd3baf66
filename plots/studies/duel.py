"""Few-bit tables against ActNN's derivatives (Few-bit Backward, Section 4.4 and Appendix E): losses, bias and noise.

    python -m fewbit.plots.studies.duel -o duel.json     resumes where it was broken off
    python -m fewbit.plots.studies.duel -o duel.json --network transformer --activation GELU --bits 1 --bits 2

Networks differ in nothing but how the derivatives f'(x) of their activations are saved:

    default       the table of the least error for inputs uniform on [−10, 10], the same level for the same x
    stochastic    the table of kind stochastic for normal:0,1, rounded at random
    following     the table of the least error for the inputs that arrive, solved anew every 200 steps
    groups        ActNN's: between the least and the greatest f' of 256, rounded at random; 0.125 bits more

All start from the same weights and see the same batches as exact training. Bias and noise are those of the gradient of
all parameters at the exact training's end: the norm of the mean error over draws, and the deviation of one draw, both
relative to the gradient.

Losses are compared with exact training's of the same seed, by 95 % intervals (plots/intervals.py). The rule of the
first run, twice the standard error, is an interval of 88 % with five seeds.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ...runtime.activations.following import adaptation_of
from ...runtime.convert.api import convert
from ...runtime.layers.activation import Activation
from .. import compact_json
from ..demo import trainer
from ..demo.data import digits, endless_batches, endless_windows, spread_windows, standard_library
from ..demo.settings import Size
from ..demo.small_networks import Transformer, resnet
from ..demo.trainer import Loss, Trainee, cross_entropy, learning_rate_factor, next_character
from ..intervals import interval
from .default_weight import gradient

_KINDS = nn.GELU, nn.SELU, nn.SiLU
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in _KINDS}
BITS = (1, 2, 3, 4)
STEPS, DRAWS = 400, 24
_SIZE = Size(width=96, depth=3, heads=4, context=64)
_BLOCKS = tuple((8 << stage, 2 if stage and first else 1) for stage in range(4) for first in (True, False))


@dataclass(frozen=True)
class Network:
    """A network with its loss and data.

    Attributes:
        make: constructs it, given the constructor of its activations.
        loss: of the network on a batch.
        batches: an endless stream, equal for equal seeds.
        held_out: batches that nobody trains on.
        learning_rate: of AdamW, the largest.
    """

    make: Callable[[Callable[[], nn.Module]], nn.Module]
    loss: Loss
    batches: Callable[[int], Iterator[Any]]
    held_out: Callable[[], Sequence[Any]]
    learning_rate: float


def _windows(seed: int) -> Iterator[Tensor]:
    return endless_windows(_text().training, 16, _SIZE.context, seed)


def _images(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    return endless_batches(_digits(), 64, seed)


_text, _digits = cache(standard_library), cache(digits)

NETWORKS: Mapping[str, Network] = {
    "transformer": Network(
        partial(Transformer, _SIZE),
        next_character,
        _windows,
        lambda: spread_windows(_text().validation, 512, _SIZE.context).split(64),
        3e-3,
    ),
    "ResNet-18": Network(
        partial(resnet, blocks=_BLOCKS),
        cross_entropy,
        _images,
        lambda: [(_digits().test, _digits().test_classes)],
        2e-3,
    ),
}


def in_groups(model: nn.Module, bits: int) -> nn.Module:
    """Let the activations of `model` save derivatives by ActNN's groups, in place; return it."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, _KINDS):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Activation(module, bits=bits))
    return model


VARIANTS: Mapping[str, Callable[[nn.Module, int], Any]] = {
    "default": lambda model, bits: convert(model, bits, include="*"),
    "stochastic": lambda model, bits: convert(model, bits, include="*", rounding="stochastic"),
    "following": lambda model, bits: convert(model, bits, include="*", adapt=200),
    "groups": in_groups,
}


def duel(name: str, activation: str, seed: int, bits: Sequence[int], steps: int = STEPS) -> list[dict[str, Any]]:
    """Return a row for exact training and for each variant and number of bits: losses, bias and noise."""
    network = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = network.make(ACTIVATIONS[activation])
        models: dict[tuple[str, int], nn.Module] = {("exact", 0): copy.deepcopy(start)}
        for b in bits:
            for variant, prepare in VARIANTS.items():
                models[variant, b] = copy.deepcopy(start)
                prepare(models[variant, b], b)
        stream = network.batches(seed)
        trainer.train(
            [_trainee(model, network, steps) for model in models.values()], (next(stream) for _ in range(steps))
        )
        exact, batch = models["exact", 0], next(stream)
        rows = []
        for (variant, b), model in models.items():
            found: dict[str, float] = {}
            if variant != "exact":
                prepare = VARIANTS[variant]
                found = bias_and_noise(exact, network.loss, batch, lambda few, b=b, to=prepare: to(few, b))
            with torch.no_grad():
                loss = fmean(network.loss(model.eval(), held_out).item() for held_out in network.held_out())
            rows.append(
                {"network": name, "activation": activation, "seed": seed, "variant": variant, "bits": b}
                | {"loss": float(f"{loss:.6g}"), **{key: float(f"{value:.4g}") for key, value in found.items()}}
            )
    return rows


def _trainee(model: nn.Module, network: Network, steps: int) -> Trainee:
    optimizer = torch.optim.AdamW(model.parameters(), network.learning_rate, fused=True)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    return Trainee(model, network.loss, optimizer, schedule, largest_gradient=1.0)


def bias_and_noise(
    exact: nn.Module, loss: Loss, batch: Any, prepare: Callable[[nn.Module], object], draws: int = DRAWS
) -> dict[str, float]:
    """Return bias and noise of the gradient of a copy of `exact` that was given to `prepare`.

    Tables that follow have followed the batch itself, and stay so. The squared bias is that of the mean, less what
    noise adds to it.
    """
    true, few = gradient(copy.deepcopy(exact).train(), loss, batch, "float32"), copy.deepcopy(exact).train()
    prepare(few)
    for _ in range(10):
        gradient(few, loss, batch, "float32")
    adaptation = adaptation_of(few)
    if adaptation is not None:
        adaptation.is_paused = True
    found = torch.stack([gradient(few, loss, batch, "float32") for _ in range(draws)])
    noise = float(found.var(0).sum())
    bias = max(0.0, float((found.mean(0) - true).square().sum()) - noise / draws)
    size = float(true.norm())
    return {"bias": bias**0.5 / size, "noise": noise**0.5 / size}


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each network, activation, number of bits and variant: loss less exact's, bias, noise."""
    exact = {(r["network"], r["activation"], r["seed"]): r["loss"] for r in rows if r["variant"] == "exact"}
    cases: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for r in rows:
        if r["variant"] != "exact":
            cases.setdefault((r["network"], r["activation"], r["bits"], r["variant"]), []).append(r)
    for (network, activation, bits, variant), found in sorted(cases.items()):
        gaps = [r["loss"] - exact[network, activation, r["seed"]] for r in found]
        bias, noise = (fmean(row[name] for row in found) for name in ("bias", "noise"))
        yield (
            f"{network:12} {activation:5} {bits} bits {variant:11} "
            f"loss {interval(gaps)} of {len(gaps)}, bias {bias:.4f}, noise {noise:.4f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the file does not have yet, write it after every seed, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON; what it has is not trained again")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="default: all")
    parser.add_argument("--activation", action="append", choices=ACTIVATIONS, help="default: all")
    parser.add_argument("--bits", action="append", type=int, choices=BITS, help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args(arguments)
    rows = json.loads(chosen.output.read_text())["rows"] if chosen.output.exists() else []
    for seed in range(chosen.seeds):
        for name in chosen.network or NETWORKS:
            for activation in chosen.activation or ACTIVATIONS:
                case = {"network": name, "activation": activation, "seed": seed}
                done = {row["bits"] for row in rows if case.items() <= row.items() and row["variant"] != "exact"}
                todo = [b for b in chosen.bits or BITS if b not in done]
                if not todo:
                    continue
                new = duel(name, activation, seed, todo, chosen.steps)
                rows += new if not done else new[1:]  # exact training is the same again
                compact_json.write(chosen.output, {"steps": chosen.steps, "rows": rows})
    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
