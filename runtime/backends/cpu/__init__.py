"""CPU kernels, in Numba, on torch's threads: each gives the bits of its reference in plain torch.

`threads.py` runs a kernel on the threads that torch computes with; `numba_tools.py` has the pieces that the kernels of
the quantizers share. Float32, float16 and bfloat16 are told apart by a number at run time (`KINDS`), a block at a time,
so that one compiled kernel serves all three.
"""
