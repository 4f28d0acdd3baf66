"""The ops of the runtime: a file for each family, in which each op is declared once (declare.py).

    activation   f(x) and codes of f'(x)           per_group    minimum and range of groups (ActNN)
                 also by a table that moves        fixed_point  by a normalization's parameters (BLPA)
    glu          gated linear units                outlier      large values exactly (V-Quant)
    preact       pre-activation layers (BLPA)      pooling      places of maxima
    rotated      turned groups (DRIVE, EDEN)       attention    with dropout
    graphs       copies, mixed precision: what keeps place and order in compiled graphs

Each op runs on the backend of its tensors' device, or in plain torch if that backend has no kernel for it. What the
parts of a quantizer are is said in quantizers/.
"""

from .activation import (
    activation,
    activation_following,
    draw_seeds,
    encode,
    encode_at_random,
    gradient,
    multiply,
    multiply_following,
    separate,
)
from .attention import attention, attention_backward
from .fixed_point import fixed_point_dequantize, fixed_point_quantize
from .glu import copy_in_groups, glu, glu_backward, read_copy
from .graphs import allocate_bits, another, begin_iteration, observe, share_bits, to_device_of, to_host
from .outlier import outlier_dequantize, outlier_quantize
from .per_group import (
    per_group_dequantize,
    per_group_dequantize_buffers,
    per_group_dequantize_samples,
    per_group_quantize,
    per_group_quantize_buffers,
    per_group_quantize_samples,
)
from .pooling import max_pool, max_pool_backward
from .preact import preact_backward, preact_decode, preact_encode
from .rotated import (
    rotated_dequantize,
    rotated_dequantize_buffers,
    rotated_quantize,
    rotated_quantize_buffers,
)

__all__ = [
    "activation",
    "activation_following",
    "allocate_bits",
    "another",
    "attention",
    "attention_backward",
    "begin_iteration",
    "copy_in_groups",
    "draw_seeds",
    "encode",
    "encode_at_random",
    "fixed_point_dequantize",
    "fixed_point_quantize",
    "glu",
    "glu_backward",
    "gradient",
    "max_pool",
    "max_pool_backward",
    "multiply",
    "multiply_following",
    "observe",
    "outlier_dequantize",
    "outlier_quantize",
    "per_group_dequantize",
    "per_group_dequantize_buffers",
    "per_group_dequantize_samples",
    "per_group_quantize",
    "per_group_quantize_buffers",
    "per_group_quantize_samples",
    "preact_backward",
    "preact_decode",
    "preact_encode",
    "read_copy",
    "rotated_dequantize",
    "rotated_dequantize_buffers",
    "rotated_quantize",
    "rotated_quantize_buffers",
    "separate",
    "share_bits",
    "to_device_of",
    "to_host",
]
