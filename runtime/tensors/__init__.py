"""What every part of the runtime knows about tensors, and nothing of what uses them.

packing           8 consecutive b-bit codes in b bytes, the one format of all codes; rows.py packs samples one by one
layout            memory order: kernels walk a tensor as it lies
abstract          tensors without values: the meta device and fake tensors
table_registry    tables in use, by key, and cast for the arithmetic of each dtype
philox            random bits from a counter; key_stream.py the stream of its keys, apart from torch's generators
host_memory       memory of the host that kernels write into, used again
glu_parts         what a gated linear unit saves, and its bytes
"""
