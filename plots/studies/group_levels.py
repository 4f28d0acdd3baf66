"""Variance of `PerGroup` by its levels on what layers of real models save: the evidence for fitted levels.

    python -m fewbit.plots.studies.group_levels -o group-levels.json

Of each model, fresh and after exact training, every input of a layer of torch.nn (or of transformers) is compressed by
uniform, normal, skewed and fitted levels at 2, 3 and 4 bits: a row has the squared errors of each number of bits,
relative to those of uniform levels, and which module made the tensor. Queries, keys, values and probabilities of
attention are rows too. Rows of tokens have groups of their own, as layers make them (`PerGroup.within`).
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.quantizers import PerGroup
from ...runtime.tensors.levels import SHAPES, UNIFORM
from .. import compact_json
from ..demo.small_networks import resnet
from .default_weight import CASES, STEPS, Case, train

MODELS: Mapping[str, Case] = {
    **CASES,
    "ResNet with ReLU": replace(CASES["ResNet with GELU"], make=partial(resnet, nn.ReLU)),
}
BITS = (2, 3, 4)
NAMES = tuple(levels for levels in SHAPES if levels != UNIFORM)
_DRAWS, _MOST = 4, 1 << 17  # draws of a tensor, and elements of it


@dataclass(frozen=True)
class Seen:
    """A tensor that a layer saves.

    Attributes:
        layer: the name of the module, or of an attention's operand.
        kind: its class.
        made_by: class of the module that made the tensor, "" if none did.
        rows: the tensor, of consecutive tokens or of samples.
        by_token: whether groups do not span tokens.
    """

    layer: str
    kind: str
    made_by: str
    rows: Tensor
    by_token: bool


@contextmanager
def _recording(model: nn.Module, found: list[Seen]) -> Iterator[None]:
    """Record the inputs of the layers of `model`, and the operands of attention, in `found`."""
    makers: dict[int, tuple[Tensor, str]] = {}  # the tensors are held, so that no other has their address
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention

    def before(module: nn.Module, inputs: tuple[Any, ...], name: str) -> None:
        x = inputs[0] if inputs else None
        if isinstance(x, Tensor) and x.is_floating_point():
            maker = makers.get(x.data_ptr(), (x, ""))[1]
            found.append(Seen(name, type(module).__name__, maker, x.detach().clone(), x.dim() == 3))

    def after(module: nn.Module, _: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            makers[result.data_ptr()] = result, type(module).__name__

    def recorded(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        scores = q.float() @ k.float().mT / q.shape[-1] ** 0.5
        if options.get("is_causal"):
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        for name, x in (("q", q), ("k", k), ("v", v), ("probabilities", scores.softmax(-1))):
            rows = x if name == "probabilities" else x.transpose(1, 2).flatten(2)
            found.append(Seen(f"attention.{name}", "attention", name, rows.detach().clone(), True))
        return attention(q, k, v, *rest, **options)

    handles = []
    for name, module in model.named_modules():
        if not [*module.children()]:
            handles.append(module.register_forward_pre_hook(partial(before, name=name)))
            handles.append(module.register_forward_hook(after))
    F.scaled_dot_product_attention = recorded
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        for handle in handles:
            handle.remove()


def record(name: str, steps: int) -> list[Seen]:
    """Return the tensors that the layers of a model save, after so many steps of exact training."""
    case = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.make()
    stream = case.batches(0)
    train(model, case.loss, stream, steps)
    found: list[Seen] = []
    with torch.no_grad(), _recording(model, found):
        case.loss(model, next(stream))
    return found


def measure(name: str, steps: int) -> list[dict[str, Any]]:
    """Return a row for each tensor that is not constant in all groups, after so many steps of exact training."""
    rows = []
    for seen in record(name, steps):
        uniform = [_squared_error(seen, PerGroup(bits)) for bits in BITS]
        if all(uniform):
            tensor = {"model": name, "steps": steps, "layer": seen.layer, "kind": seen.kind, "of": seen.made_by}
            for levels in NAMES:
                errors = [_squared_error(seen, PerGroup(bits, levels=levels)) for bits in BITS]
                tensor[levels] = [float(f"{a / b:.4g}") for a, b in zip(errors, uniform, strict=True)]
            rows.append(tensor)
    return rows


def _squared_error(seen: Seen, quantizer: PerGroup) -> float:
    rows = seen.rows
    if seen.by_token:
        quantizer = quantizer.within(rows.shape[-1])
    rows = rows[: max(1, _MOST // rows[0].numel())]
    draw = torch.Generator().manual_seed(0)
    errors = [(quantizer.compress(rows, generator=draw).decompress() - rows).double() for _ in range(_DRAWS)]
    return float(torch.stack(errors).square().sum())


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield mean, greatest and least ratio of each number of bits and name of levels; then fitted levels by kind."""
    for i, bits in enumerate(BITS):
        for levels in NAMES:
            of = [row[levels][i] for row in rows]
            above = sum(ratio > 1.02 for ratio in of)
            yield f"{bits} bits {levels:8} {fmean(of):.3f}  {min(of):.3f} to {max(of):.3f}, {above} of {len(of)} > 1.02"
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(f"{row['kind']} of {row['of'] or 'a function'}", []).extend(row["fitted"])
    for kind, of in sorted(kinds.items()):
        yield f"    {kind:45} {fmean(of):.3f}  {min(of):.3f} to {max(of):.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models, write the rows and print the ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON")
    chosen = parser.parse_args(arguments)
    rows = [row for name in MODELS for steps in (0, STEPS) for row in measure(name, steps)]
    compact_json.write(chosen.output, {"rows": rows})
    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    main()
