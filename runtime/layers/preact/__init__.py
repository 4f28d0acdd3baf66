"""Backprop with Approximate Activations (BLPA): exact forward, few bits backward, for pre-activation layers.

layers.py     PreActConv1d, 2d, 3d and PreActLinear: BN → (leaky) ReLU → [average pooling] → linear
function.py   the mathematics: one function of autograd, equations (1) to (8)
codes.py      the packed code that is kept, and all that is computed from it; meaning.py says what codes mean
linear.py     the linear part and its gradients
cpu.py        fused CPU kernels of codes.py
fuse.py       finds such chains in existing models, for `fewbit.convert(model, fuse_preact=4)`
"""

from .layers import PreActConv1d, PreActConv2d, PreActConv3d, PreActLayer, PreActLinear, preactivate

__all__ = ["PreActConv1d", "PreActConv2d", "PreActConv3d", "PreActLayer", "PreActLinear", "preactivate"]
