"""Blocks that save few bits as a whole, for models written anew: `fewbit.nn`.

    fewbit.nn.GatedMLP(256, 704, bits=3)      down(silu(gate(x)) · up(x)), with the MLP's four tensors in 11.25 bits

`fewbit.layers` has torch's layers one by one, and `fewbit.convert(model, glu="parts")` finds gated MLPs in a model.
"""

from .gated_mlp import GatedMLP

__all__ = ["GatedMLP"]
