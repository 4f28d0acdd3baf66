"""Adapters of low rank (LoRA, Hu et al. 2021): a frozen layer beside a product of two small matrices that learn.

adapt(model, rank=8)                      every linear layer of the model but its last; only the adapters learn
adapt(model, rank=8, pattern="*.attn.*")  those of attention alone
"""

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """W x + B A x of a frozen layer W; B is 0 at first, so that training starts from the layer's own output.

    Args:
        layer: `nn.Linear`, or `Conv1D` of `transformers`.
        rank: rows of A.
    """

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        self.layer = layer
        features = _features(layer)
        assert features is not None
        inputs, outputs = features
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (…, outputs) for inputs (…, inputs)."""
        return self.layer(x) + self.up(self.down(x))


def adapt(model: nn.Module, rank: int = 8, pattern: str = "*") -> nn.Module:
    """Freeze a model, put an adapter beside each linear layer within its blocks, and return it.

    The output layer, which often shares its weight with the embedding, stays as it is.

    Args:
        model: with linear layers.
        rank: of the adapters.
        pattern: of the names of those layers that get one.
    """
    model.requires_grad_(False)
    linear = [name for name, layer in model.named_modules() if _features(layer) is not None]
    for name in (name for name in linear[:-1] if fnmatchcase(name, pattern)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(model.get_submodule(name), rank))
    return model


def _features(layer: nn.Module) -> "tuple[int, int] | None":
    """Return the numbers of inputs and outputs of a linear layer, None of another."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ == "Conv1D" and isinstance(weight, torch.Tensor):
        return weight.shape[0], weight.shape[1]
    return None
