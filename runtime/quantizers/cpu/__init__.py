"""The quantizers' CPU kernels, in Numba, on torch's threads: each gives the bits of its reference in plain torch.

They are built as those of backends/kernels.py are, and share their pieces; `pieces` has what quantizers need besides.
Float32, float16 and bfloat16 are told apart by a number at run time (common.KINDS), a block at a time, so that one
compiled kernel serves all three.
"""
