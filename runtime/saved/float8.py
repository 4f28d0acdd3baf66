"""The operands of torchao's float8 training, saved as the 8 bits that their layers multiply with.

A `Float8Linear` saves its input as it is, and casts it to float8 in the backward pass, as it did in the forward pass:

    y = Q(x) Q(W)ᵀ,    ∂W = Q(∂y)ᵀ Q(x)

Saved as Q(x), it takes half of a bfloat16, and the gradient is the same bit for bit: torchao's backward pass takes an
operand that is in float8 already. The layers of TransformerEngine save Q(x) themselves, in memory that no hook rounds.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_LAYERS = "torchao.float8.float8_linear"


@dataclass(frozen=True)
class Float8Operand:
    """The quantizer of what float8 layers of one configuration save of their input.

    Attributes:
        config: torchao's, of the layers.
        products: torchao's, of their matrix products.
    """

    config: Any
    products: Any

    @classmethod
    def of(cls, layer: nn.Module) -> "Float8Operand | None":
        """Return that of a layer; None if the gradient of its weight is not that of Q(x), with one scale for all.

        Recipes with a scale a row cast the input along another dimension in the backward pass.
        """
        if type(layer).__module__ != _LAYERS:
            return None
        config: Any = layer.config
        cast = config.cast_config_input_for_grad_weight
        is_cast_with_one_scale = (cast.scaling_type.value, cast.scaling_granularity.value) == ("dynamic", "tensorwise")
        return cls(config, layer.linear_mm_config) if is_cast_with_one_scale else None

    def compress(self, x: Tensor) -> "_Operand":
        """Return Q(x), as the backward pass computes it."""
        from torchao.float8.float8_scaling_utils import (  # pyright: ignore[reportMissingImports]
            GemmInputRole,
            hp_tensor_to_float8_dynamic,
        )

        cast = self.config.cast_config_input_for_grad_weight
        operand = hp_tensor_to_float8_dynamic(
            x.detach(),
            cast.target_dtype,
            self.products,
            gemm_input_role=GemmInputRole.INPUT,
            scaling_granularity=cast.scaling_granularity,
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return _Operand(operand)


@dataclass(frozen=True)
class _Operand:
    """Q(x), a tensor of torchao's class."""

    operand: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and their scale."""
        return self.operand._data.nbytes + self.operand._scale.nbytes

    def decompress(self) -> Tensor:
        """Return it; float8 layers take it for x."""
        return self.operand
