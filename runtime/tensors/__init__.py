"""Tensors as the whole runtime uses them; this package imports nothing of its users.

packing           8 consecutive b-bit codes in b bytes, the one format of all codes; rows.py packs samples one by one
layout            memory order: kernels walk a dense tensor in memory order, whatever its strides
plain             what a tensor is: plain memory that kernels take, or without values (the meta device, fake tensors)
table_registry    registered tables, by key, cast for the arithmetic of each dtype
philox            random bits from a counter; key_stream.py: the stream of its keys, apart from torch's generators
host_memory       host memory for kernel results, reused
glu_parts         what a gated linear unit saves, and its size in bytes
"""
