"""Autocast changes what torch's own functions return, and no code of ours: of 16-bit numbers of another type either.

Torch then refuses to join them ("Unexpected floating ScalarType in at::autocast::prioritize"): gated units, whose
groups are bfloat16, failed under autocast to float16, and activations of large float16 tensors under bfloat16.
"""

from contextlib import contextmanager

import fewbit
import pytest
import torch
from fewbit.runtime.activations import dispatch, gated
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.backends.forwards import as_autocast, forward_of
from fewbit.runtime.backends.reference import glu as plain_glu
from fewbit.runtime.backends.reference import per_group as plain_per_group
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.runtime.convert.formulas import COMPOSITES
from glu_cases import same
from runtime_cases import HALVES, key_of, normal, table_of_bits
from torch._subclasses.fake_tensor import FakeTensorMode

PLAN = ("silu", (), plan_of("silu", (), 3, 4, "parts", None).table, 3, 4)


def assert_untouched(call, *given):
    """What `call` returns is what it returns under autocast to each type, bit for bit."""
    expected = call(*given)
    for dtype in HALVES:
        with torch.autocast(given[0].device.type, dtype):
            assert all(map(same, call(*given), expected))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("derived", [False, True])
def test_gated_units(backend, dtype, derived):
    gate, up = (backend.put(normal(600, dtype, seed)) for seed in range(2))
    for glu in (backend.module("glu"), plain_glu):
        assert_untouched(lambda gate, up, glu=glu: glu.forward(gate, up, (1, 2), *PLAN, derived), gate, up)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_groups_in_plain_torch(dtype):
    assert_untouched(lambda x: plain_per_group.quantize(x, 4, 40, 1), normal(300, dtype).view(3, 100))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_large_activations(backend, dtype, function):
    activation, key = backend.module("activation"), key_of(table_of_bits(3))
    x = backend.put(normal((1 << 18) + 3, dtype))
    cached = getattr(activation, "_values", None)
    if cached is not None:
        cached.cache_clear()
        activation._entries.cache_clear()
    with torch.autocast(x.device.type, next(other for other in HALVES if other != dtype)):
        y, packed = activation.activation(x, function, [], key)
    expected = getattr(torch.nn.functional, function)(x)
    assert backend.name == "host-cuda" or same(y, expected)  # whose f is g++'s
    assert torch.equal(packed, activation.encode(x, key))


@contextmanager
def autocast_without_a_gpu(monkeypatch, device):
    """Fake tensors of a device under torch's own autocast, and the numbers of 16 bits of one of them."""
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.float16)
    try:
        with FakeTensorMode():
            yield torch.empty(4, 512, device=f"{device}:0", dtype=torch.float16)
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_all_that_autocast_widens_is_known(monkeypatch, device):
    """Squared ReLU was not: infinity in float16 where torch's has 90000; nor was GPT-2's GELU in a compiled graph."""
    assert {f"formula:{name}" for name in COMPOSITES} < FORWARDS.keys()
    with autocast_without_a_gpu(monkeypatch, device) as x:
        for name, forward in FORWARDS.items():
            parameters = [1.0 if default is None else default for _, default in forward.parameters]
            assert as_autocast(x, name).dtype == forward_of(name).call(x, *parameters).dtype, name


@pytest.mark.parametrize("rounding", ["deterministic", "stochastic"])
def test_ops_return_what_autocast_widens(monkeypatch, rounding):
    """Where ops are traced, no function in them sees autocast: 16 bits came out where eager torch has float32."""
    for module in (dispatch, gated):  # a CPU's torch has no gradients for a GPU, nor for fakes of one
        monkeypatch.setattr(module, "keeps", lambda _: True)
    module, plan = fewbit.Softplus(rounding=rounding), plan_of("softplus", (1.0, 20.0), 3, rounding=rounding)
    with autocast_without_a_gpu(monkeypatch, "cuda") as x:
        assert module(x).dtype == gated.apply(x, x, plan).dtype == torch.float32
