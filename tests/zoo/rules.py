"""What every row of the zoo must hold."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from .measure import Row, fresh
from .methods import METHODS, WIDE_METHODS
from .models import Case, outputs_of

# Errors of the gradient, of all methods that save tensors in 4 bits without measuring which need more.
LARGEST_ERRORS = dict.fromkeys(
    ("L2", "glu=parts + L2", "hooks", "L2 + hooks", "checkpoint", "compile", "divided", "divided 4"), 0.25
)


@dataclass(frozen=True)
class Reason:
    """Why a row may err by more.

    Attributes:
        most: the error of either gradient that it may have.
        text: what the model or its input does.
        without: returns the case without it, in which the rule holds: a test measures that.
    """

    most: float
    text: str
    without: Callable[[Case], Case]


def violations(row: Row) -> list[str]:
    """Return what a row breaks, each in a few words that begin with the name of the rule."""
    if row.failure:
        return [f"failure: {row.failure}"]
    found = [
        f"{rule}: {text}"
        for rule, text in (
            ("revert", row.reverted),
            ("state_dict", row.state_dict),
            ("deepcopy", row.copied),
            ("pickle", row.pickled),
            ("silent", row.silent and f"{row.silent} found nothing, and the report does not say so"),
        )
        if text
    ]
    for rule, holds, text in (
        ("forward", row.evaluation, "outputs differ in evaluation mode"),
        ("forward", row.training, "a training step without dropout differs"),
        ("masks", row.masks, "a training step with dropout differs"),
        ("generator", row.state, "torch's generator is moved"),
    ):
        if not holds:
            found.append(f"{rule}: {text}")
    if row.kept_bytes > row.exact_bytes:
        found.append(f"bytes: {row.kept_bytes:,}, exact {row.exact_bytes:,} ({row.kept_bytes / row.exact_bytes:.3f})")
    errors = (row.weights, row.inputs)
    if not all(map(math.isfinite, errors)):
        found.append(f"gradient: not finite ({row.worst})")
    elif row.method == "exact" and max(errors) > 0:
        found.append(f"gradient: {max(errors):.3g} in exact training")
    elif max(errors) > largest_error(row):
        found.append(f"gradient: weights {row.weights:.3f}, inputs {row.inputs:.3f} (worst: {row.worst})")
    return found


def across(rows: Iterable[Row]) -> dict[tuple[str, str], list[str]]:
    """Return, by model and method, what rows break together: methods that must do the same and do not."""
    by_key = {(row.model, row.method): row for row in rows}
    found: dict[tuple[str, str], list[str]] = {}
    for key, row in by_key.items():
        other = by_key.get((row.model, (METHODS | WIDE_METHODS)[row.method].same_as))
        if other is None or row.failure or other.failure:
            continue
        for what, a, b in (("bytes", row.kept_bytes, other.kept_bytes), ("gradients", row.digest, other.digest)):
            if a != b:
                found.setdefault(key, []).append(f"same {what}: {a} here, {b} at {other.method}")
    return found


def largest_error(row: Row) -> float:
    """Return the error of the gradient that a row may have."""
    reason = REASONS.get((row.model, row.method))
    return reason.most if reason is not None else LARGEST_ERRORS.get(row.method, math.inf)


# ---- reasons, each with what makes an end of it ----------------------------------------------------------------------


def _smaller_weights(case: Case, factor: float) -> Case:
    case = fresh(case)
    with torch.no_grad():
        for p in case.model.parameters():
            p.mul_(factor if p.dim() > 1 else 1)
    return case


def _no_token_of_zeros(case: Case) -> Case:
    case = fresh(case)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in case.model.modules():
            if isinstance(module, nn.Embedding):
                row = torch.randn(module.embedding_dim, generator=generator) * module.weight.std()
                module.weight[module.weight.norm(dim=1) == 0] = row
    return case


def _flat_scores(case: Case) -> Case:
    case = fresh(case)
    with torch.no_grad():
        for name, p in case.model.named_parameters():
            p.mul_(0 if "logit_scale" in name else 1)  # a logarithm
    return case


def _relus(case: Case) -> Case:
    case = fresh(case)
    for module in list(case.model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "GELUActivation":
                setattr(module, name, nn.ReLU())
    return case


def _next_words(case: Case) -> Case:
    case = fresh(case)
    return replace(case, inputs={**case.inputs, "labels": case.inputs["labels"].roll(1, -1)})


def _torchs_weights(case: Case) -> Case:
    case = fresh(case)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in case.model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.reset_parameters()
    return case


def _random_direction(case: Case) -> Case:
    def loss(output: object) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        found = [(t, torch.randn(t.shape, generator=generator)) for t in outputs_of(output)]
        return sum(((t * r).sum() / t.numel() for t, r in found), torch.zeros(()))

    return replace(fresh(case), loss=loss)


_COPIES = (
    "its labels are its input, so the gradient at the last normalization is nearly parallel to x̄, which it removes"
)
_OF_ZEROS = (
    "the padding token's embedding is zeros: a norm multiplies its gradient by 1/√ε, and it has noise of neighbours"
)
_SHARP = "weights of deviation 1: attention is a choice of one key"
_CONSTANT = "the loss's direction hardly changes within a token: the last normalization removes .993 of the gradient"

REASONS: Mapping[tuple[str, str], Reason] = MappingProxyType(
    {
        ("cpmant", "checkpoint"): Reason(0.7, _SHARP, partial(_smaller_weights, factor=0.3)),
        ("cpmant", "divided 4"): Reason(0.7, _SHARP, partial(_smaller_weights, factor=0.1)),
        ("plbart", "L2"): Reason(0.55, _COPIES, _next_words),
        ("plbart", "hooks"): Reason(0.55, _COPIES, _next_words),
        ("plbart", "divided 4"): Reason(0.6, _COPIES, _next_words),
        ("yolos", "L2"): Reason(0.4, _CONSTANT, _random_direction),
        ("yolos", "divided 4"): Reason(0.4, _CONSTANT, _random_direction),
        ("dinov3_vit", "hooks"): Reason(0.3, _CONSTANT, _random_direction),
        ("mobilevit", "L2"): Reason(
            1.0,
            "its first activations are of 1e-6, where SiLU is linear and biases before a batch normalization cancel",
            _torchs_weights,
        ),
        **{
            (name, "divided 4"): Reason(1.2, _OF_ZEROS, _no_token_of_zeros) for name in ("deepseek_v4", "lfm2", "olmoe")
        },
        ("deepseek_v4", "divided"): Reason(0.6, _OF_ZEROS, _no_token_of_zeros),
        ("bailing_hybrid", "divided 4"): Reason(
            0.6, "noise goes through 63 substitutions of the delta rule", partial(_smaller_weights, factor=0.3)
        ),
        ("swinv2", "divided 4"): Reason(0.5, "cosines times 10 are its scores, from rounded features", _flat_scores),
        ("pp_lcnet_v4", "divided 4"): Reason(
            0.4, "13 GELUs in a row, whose derivatives are read at their rounded arguments", _relus
        ),
        ("pop2piano", "divided 4"): Reason(
            0.35, "weights as T5 begins: the gradient of the first queries is a third of all", _torchs_weights
        ),
    }
)
