"""The quantizers' CUDA kernels, launched on torch's stream and device: each gives the bits of its reference.

Their source is in runtime/codegen; they are compiled at first use, as backends/cuda.py does it with the activations'.
"""
