"""Appendix B of *Few-bit Backward*: its seventeen models, and the same rows measured.

`transformers` builds ten of them; DenseNet and VGG, which it lacks, are those of networks.py.

The paper does not fully describe its measurement. These settings reproduce its numbers: 256 tokens or 256×256 pixels,
float32, no dropout, attention scores in memory, GELU in place of ReLU (its Section 4.3), each storage counted once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...runtime.plan import zoo
from ...runtime.plan.comparison import compare_each
from ...runtime.plan.memory import BITS, Need, need_by_formula, need_of
from .networks import APPENDIX_B

MIB = 2**20
GPU_MEMORY = 32 * 1024 * MIB
SIZE = 256  # tokens, or pixels of a side


@dataclass(frozen=True)
class Row:
    """One model: sizes in MiB, activations per sample; largest batches with exact and with 1- to 4-bit activations."""

    model: float
    activations: float
    nonlinear: float
    batches: tuple[int, ...]

    def by_formula(self) -> tuple[int, ...]:
        """Return the largest batches that the paper's formula gives for the printed sizes."""
        need = need_by_formula(self.model * MIB, self.activations * MIB, self.nonlinear * MIB)
        return batches_of(need)


PAPER: Mapping[str, Row] = MappingProxyType(
    {
        "resnet18": Row(44.6, 40.0, 11.5, (813, 1127, 1113, 1100, 1086)),
        "resnet50": Row(99.2, 156.8, 47.9, (206, 293, 289, 285, 281)),
        "resnet101": Row(171.4, 234.5, 73.4, (136, 196, 193, 190, 188)),
        "resnet152": Row(232.3, 328.2, 104.9, (97, 140, 138, 136, 134)),
        "densenet121": Row(30.9, 243.8, 79.1, (133, 195, 192, 189, 186)),
        "densenet161": Row(112.4, 458.8, 147.0, (70, 102, 100, 99, 97)),
        "densenet169": Row(54.7, 296.3, 95.3, (109, 159, 157, 155, 152)),
        "densenet201": Row(77.4, 382.2, 123.9, (84, 123, 122, 120, 118)),
        "efficientnet-b0": Row(20.4, 112.4, 32.4, (290, 403, 398, 393, 388)),
        "efficientnet-b3": Row(47.5, 218.6, 59.5, (149, 202, 200, 197, 195)),
        "efficientnet-b7": Row(256.3, 674.8, 179.3, (47, 63, 62, 61, 61)),
        "vgg11": Row(507.2, 100.9, 37.0, (304, 472, 464, 456, 448)),
        "vgg16": Row(528.2, 163.8, 68.5, (187, 314, 307, 301, 295)),
        "vgg19": Row(548.4, 178.8, 75.0, (171, 288, 281, 275, 270)),
        "roberta-base": Row(480.7, 185.6, 36.0, (166, 204, 203, 201, 200)),
        "roberta-large": Row(1355.6, 482.1, 96.0, (56, 70, 69, 69, 68)),
        "gpt2": Row(491.0, 297.1, 146.2, (103, 198, 192, 187, 182)),
    }
)


@dataclass(frozen=True)
class Reproduced:
    """One model of Appendix B: the paper's row and the measured one."""

    name: str
    paper: Row
    measured: Row

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as JSON values."""
        return {**asdict(self), "unit": "MiB"}


def reproduce(name: str) -> Reproduced:
    """Measure one model of `PAPER`; the few-bit batches are measured on the converted model, not by the formula."""
    model = _build(name)
    for module in list(model.modules()):
        for attribute, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, attribute, nn.GELU())
    need = need_of(model, {batch: compare_each(model, bits=BITS, **_inputs(name, batch)) for batch in (8, 16)})
    activations = need.kept[None].per_sample
    measured = Row(need.model / MIB, activations / MIB, need.nonlinear / MIB, batches_of(need))
    return Reproduced(name, PAPER[name], measured)


def _build(name: str) -> nn.Module:
    if name not in APPENDIX_B:
        return zoo.build(name, SIZE, dropout=False, attention="eager")
    with torch.device("meta"):
        return APPENDIX_B[name]().train()


def _inputs(name: str, batch: int) -> dict[str, Any]:
    if name not in APPENDIX_B:
        return zoo.inputs(name, batch, SIZE)
    return {"input": torch.zeros(batch, 3, SIZE, SIZE, device="meta")}


def batches_of(need: Need) -> tuple[int, ...]:
    """Return the largest batches in `GPU_MEMORY`, with exact activations and with 1- to 4-bit ones."""
    return tuple(need.largest_batch(GPU_MEMORY, bits) for bits in (None, *BITS))
