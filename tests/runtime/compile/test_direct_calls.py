"""The code that Inductor writes calls the CPU's kernels, with the results of the ops."""

import pytest
import torch
from fewbit.runtime import ops
from fewbit.runtime.backends.cpu import per_group
from fewbit.runtime.compile import direct_calls

pytest.importorskip("torch._inductor.codegen.custom_extern_kernel_codegen", reason="this torch cannot be told")


def there_and_back(x, y, seeds):
    """Return what two tensors come back as, of sizes, bits and dtypes of their own."""
    buffers = ops.per_group_quantize_buffers([x * 2, y + 1], [5, 3], [64, 8], seeds, [True, False])
    return ops.per_group_dequantize_buffers(buffers, [5, 3], [64, 8], torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_calls_the_kernels(dynamic, monkeypatch):
    x, y, seeds = torch.randn(6, 128), torch.randn(3, 4, 40).bfloat16(), torch.tensor([5, 6])
    expected = there_and_back(x, y, seeds)
    direct_calls.install()
    called = []
    for name in ("quantize_buffers", "dequantize_buffers"):
        function = getattr(per_group, name)
        monkeypatch.setattr(per_group, name, lambda *a, f=function, **k: called.append([f.__name__, *k]) or f(*a, **k))
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        found = torch.compile(there_and_back, fullgraph=True, dynamic=dynamic)(x, y, seeds)
    # With an allocator: ops call them without.
    assert called == [["quantize_buffers", "levels", "empty"], ["dequantize_buffers", "levels", "empty"]]
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted) and one.stride() == wanted.stride()
