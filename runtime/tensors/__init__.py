"""Tensors as the whole runtime uses them; this package imports nothing of its users.

traits            what a tensor is: its dtype, plain memory that kernels take, or without values (meta and fake tensors)
spec              dense tensors: shape, strides, and the memory order in which kernels walk them, whatever their strides
packing           8 consecutive b-bit codes in b bytes, the one format of all codes, and where those of samples lie
levels            registered tables, by key, and levels of groups, in the forms that kernels take
philox            random bits from a counter, and the stream of its keys, apart from torch's generators
host_memory       host memory for kernel results, reused
glu_parts         what a gated linear unit saves, and its size in bytes
graphs            autograd's graph, torch.compile's and CUDA's: where a tensor stands in them
"""
