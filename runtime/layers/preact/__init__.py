"""Backprop with Approximate Activations (BLPA): exact forward, few bits backward, for pre-activation layers.

layers.py     PreActConv1d, 2d, 3d and PreActLinear: BN → (leaky) ReLU → [average pooling] → linear
function.py   the mathematics: one function of autograd, equations (1) to (8), and the packed codes that it saves
linear.py     the linear part and its gradients

The codes' scales and zero points are in backends/reference/preact.py, fused kernels in backends/cpu/preact.py and
backends/cuda/preact.py; convert/preact_chains.py finds such chains for `fewbit.convert(model, fuse_preact=4)`.
"""

from .layers import PreActConv1d, PreActConv2d, PreActConv3d, PreActLayer, PreActLinear, preactivate

__all__ = ["PreActConv1d", "PreActConv2d", "PreActConv3d", "PreActLayer", "PreActLinear", "preactivate"]
