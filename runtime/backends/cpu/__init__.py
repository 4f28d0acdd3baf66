"""CPU kernels, in Numba, on torch's threads: each gives the bits of its reference in plain torch.

`threads.py` runs a kernel on torch's threads; `numba_tools.py` has the building blocks of the quantizers' kernels.
Float32, float16 and bfloat16 are distinguished by a number at run time (`KINDS`), once per block, so that one compiled
kernel serves all three.
"""
