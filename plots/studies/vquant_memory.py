"""V-Quant's Table 4: memory of activations in training, by formula beside the paper's values, and measured.

The paper does not define what it counts. These rules reproduce its table, in 10^9 bytes, for 256 images of 224×224:

* Full: the inputs of convolutions and linear layers, each tensor once.
* Quantized: the peak over the layers. While layer l runs, memory holds the network's own input in full precision,
  every input stored so far (including that of l) in b/32 + 2·AR of its size, as CSR doubles an outlier's 32 bits, and
  the input of l in full, unless it is the network's input.

They reproduce the three quantized columns of six networks to within 1 %. MobileNet-v2 (about twice the paper's) and
DenseNet-201 (10 % less) follow another, unknown rule.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.inference.vquant import value_aware
from ...runtime.plan.memory import profile
from .networks import NETWORKS

BATCH = 256
GB = 1e9
CONFIGURATIONS = ((2, 0.0), (3, 0.0), (3, 0.02))

# Table 4, GB: full, and RV-Quant of (bits, AR) as in `CONFIGURATIONS`.
PAPER = {
    "AlexNet": (0.35, 0.23, 0.23, 0.24),
    "ResNet-18": (1.86, 0.42, 0.46, 0.50),
    "SqueezeNet-1.1": (1.58, 0.59, 0.61, 0.64),
    "MobileNet-v2": (7.34, 0.74, 0.84, 1.13),
    "ResNet-50": (9.27, 1.22, 1.34, 1.52),
    "VGG-16": (9.30, 3.65, 3.75, 3.88),
    "ResNet-152": (20.99, 1.64, 2.27, 3.09),
    "DenseNet-201": (24.53, 2.09, 2.85, 3.83),
}


@dataclass(frozen=True)
class Elements:
    """Sizes of the layers' inputs for one image, in elements.

    Attributes:
        image: the network's own input.
        inputs: all other inputs of convolutions and linear layers, each tensor once, in the order of first use.
    """

    image: int
    inputs: tuple[int, ...]

    def full(self) -> float:
        """Return GB of a batch in full precision."""
        return _gigabytes(self.image + sum(self.inputs))

    def quantized(self, bits: int, ratio: float, cost: float = 64.0) -> float:
        """Return GB of a batch under V-Quant, at its peak; `cost` is the bits of a large value and its position."""
        share = (bits + cost * ratio) / 32
        stored = accumulate(share * size for size in self.inputs)
        working = (kept + size for kept, size in zip(stored, self.inputs, strict=True))
        return _gigabytes(self.image + max(working, default=0.0))


def _gigabytes(elements_of_an_image: float) -> float:
    return 4 * BATCH * elements_of_an_image / GB


def elements(model: nn.Module) -> Elements:
    """Return the sizes of the inputs of `model`'s layers for one image, on the meta device."""
    taken: dict[int, Tensor] = {}

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        taken.setdefault(inputs[0].untyped_storage()._cdata, inputs[0])

    model.to("meta")
    handles = [m.register_forward_pre_hook(take) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        model.eval()(torch.empty(1, 3, 224, 224, device="meta"))
    for handle in handles:
        handle.remove()
    image, *inputs = (tensor.numel() for tensor in taken.values())
    return Elements(image, tuple(inputs))


def by_formula(name: str) -> dict[str, Any]:
    """Return a row of Table 4: the paper's GB, the formula's, and the formula's with our cost per outlier.

    Our outlier takes 16 bits and about 10 for its position, where CSR takes 64.
    """
    with torch.device("meta"):
        found = elements(NETWORKS[name]())
    formula = [found.full(), *(found.quantized(*c) for c in CONFIGURATIONS)]
    ours = [found.full(), *(found.quantized(b, r, 24 + 8 / (240 * r) if r else 0.0) for b, r in CONFIGURATIONS)]
    sizes = {"image": found.image, "stored": sum(found.inputs)}
    return {"network": name, "paper": list(PAPER[name]), "formula": formula, "ours": ours, **sizes}


def measured(name: str, batch: int = 1) -> dict[str, Any]:
    """Return the bytes per image that one forward pass of a real network saves for backward, exact and with V-Quant.

    All tensors that autograd saves are counted, including those of normalization and pooling. "layers" compresses the
    tensors that the paper does, "norms" the inputs of normalizations as well.
    """
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    row: dict[str, Any] = {"network": name}
    for kind in ("exact", "layers", "norms"):
        torch.manual_seed(0)
        model = NETWORKS[name]().train()
        if kind != "exact":
            value_aware(model, 3, 0.02, norms=kind == "norms")
        row[kind] = profile(model, images).total / batch
    return row
