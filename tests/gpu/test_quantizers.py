"""The quantizers' CUDA kernels on a GPU: large tensors, layouts, streams. Without a GPU skipped.

That they give the reference's bits: tests/runtime/quantizers.
"""

import pytest
import torch
from backends import needs_gpu
from fewbit import layers
from fewbit.quantizers import FixedPoint, Outlier, PerGroup
from fewbit.runtime.allocation.mixed_precision import MixedPrecision
from fewbit.runtime.backends.cuda import fixed_point, outlier
from fewbit.runtime.backends.cuda import per_group as cuda
from fewbit.runtime.quantizers.outlier import masked
from quantizer_cases import OUTLIER_KINDS, OUTLIER_PARTS, check_form, generator, outlier_numbers, same_bits

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_the_kernels_serve_and_not_the_reference(monkeypatch):
    names = []
    launch = cuda._launch
    monkeypatch.setattr(cuda, "_launch", lambda name, *rest: (names.append(name), launch(name, *rest)))
    PerGroup().compress(torch.randn(4, 1000, device="cuda")).decompress()
    assert names == ["quantize", "dequantize"]


def test_the_current_stream():
    x = torch.zeros(1_000_000, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(2.0)
        y = PerGroup().compress(x).decompress()
    side.synchronize()
    assert (y == 2).all()


def test_samples_with_bits_of_their_own_wait_for_nothing():
    chain = [layers.Linear(256, 256, bits=2, device="cuda") for _ in range(3)]
    model, x = torch.nn.Sequential(*chain), torch.randn(16, 256, device="cuda", requires_grad=True)
    MixedPrecision(model, 2.5)

    def passes():
        torch.cuda.set_sync_debug_mode("default")
        loss = model(x[:1]).sum()  # each iteration begins with a wait: the bits of the layers
        torch.cuda.set_sync_debug_mode("error")
        hidden = x
        for layer in chain:
            hidden = layer(hidden)
        (loss + hidden.sum()).backward()

    try:
        passes()  # compiles and loads
        passes()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_2_31_elements():
    n = 2**31 + 4096
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * n:
        pytest.skip(f"{5 * n / 2**30:.0f} GiB of GPU memory are needed, {free / 2**30:.0f} are free")
    x = torch.empty(n, dtype=torch.bfloat16, device="cuda").normal_()
    y = PerGroup(8).compress(x).decompress()
    for begin in (0, 2**31 - 2048, n - 4096):
        assert (y[begin : begin + 4096] - x[begin : begin + 4096]).abs().max() < 0.1


class TestFixedPoint:
    def test_the_kernels_serve_and_not_the_reference(self, monkeypatch):
        names = []
        launch = fixed_point.launch
        monkeypatch.setattr(
            fixed_point, "launch", lambda name, *rest, **how: (names.append(name), launch(name, *rest, **how))
        )
        γ, β = torch.ones(5, device="cuda"), torch.zeros(5, device="cuda")
        FixedPoint().compress(torch.randn(4, 5, device="cuda"), scale=γ, shift=β).decompress()
        assert names == ["tabulate", "quantize", "tabulate", "dequantize"]


def assert_outliers_like_the_cpu(x, quantizer):
    theirs, ours = quantizer.compress(x), quantizer.compress(x.cuda())
    for name in OUTLIER_PARTS:
        assert same_bits(getattr(ours, name).cpu(), getattr(theirs, name)), name
    y = ours.decompress()
    check_form(y, x.cuda())
    assert same_bits(y.cpu(), theirs.decompress())


class TestOutlier:
    @pytest.mark.parametrize("relu", [False, True])
    @pytest.mark.parametrize("ratio", [0.001, 0.3])
    @pytest.mark.parametrize("kind", OUTLIER_KINDS)
    @pytest.mark.parametrize("n", [20_003, 3_000_001])
    def test_the_digits_find_what_selection_finds(self, n, kind, ratio, relu):
        x = outlier_numbers(kind, n)
        for every, share in ((1, ratio), (17, ratio), (17, 0)):
            assert_outliers_like_the_cpu(x, Outlier(3, share, relu, sample_every=every))
        assert_outliers_like_the_cpu(x.bfloat16(), Outlier(3, ratio, relu))

    @pytest.mark.parametrize("room", [0, 1 / 960])
    def test_candidates_that_are_looked_for_again(self, room, monkeypatch):
        monkeypatch.setattr(outlier, "_LISTED", room)
        x = torch.randn(2_000_003, generator=generator())
        for one in (x, x.bfloat16(), x.round()):
            assert_outliers_like_the_cpu(one, Outlier(3, 0.02))

    def test_relus_gradient_follows_from_the_codes(self):
        x, grad = (torch.randn(100, 1000, generator=generator(seed), device="cpu").cuda() for seed in (1, 2))
        exact = torch.ops.aten.threshold_backward(grad, x, 0)
        packed = Outlier(3, 0.02, relu=True).compress(x).packed
        assert torch.equal(masked(grad, packed, 3), exact)

    def test_the_kernels_serve_and_not_the_reference(self, monkeypatch):
        names = []
        launch = outlier._launch
        monkeypatch.setattr(outlier, "_launch", lambda name, *rest: (names.append(name), launch(name, *rest)))
        Outlier(3, 0.02).compress(torch.randn(4, 1000, device="cuda")).decompress()
        search = ["first", "survey", "refine", "count", "add", "scan"]
        assert names == [*search, "quantize", "add", "locate", "dequantize"]

    def test_an_exact_threshold_waits_for_nothing(self):
        quantizer, x = Outlier(3, 0.02), torch.randn(100_000, device="cuda")
        quantizer.compress(x).decompress()  # compiles and loads
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            quantizer.compress(x).decompress()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_the_current_stream(self):
        x = torch.zeros(1_000_000, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            x.fill_(2.0)
            y = Outlier(3, 0.02).compress(x).decompress()
        side.synchronize()
        assert (y == 2).all()

    def test_more_than_2_31_elements(self):
        n = 2**31 + 4096
        free, _ = torch.cuda.mem_get_info()
        if free < 9 * n:
            pytest.skip(f"{9 * n / 2**30:.0f} GiB of GPU memory are needed, {free / 2**30:.0f} are free")
        x = torch.empty(n, dtype=torch.bfloat16, device="cuda").normal_()
        x[n - 5] = 100
        y = Outlier(8, 0.001).compress(x).decompress()
        assert y[n - 5] == 100
        for begin in (0, 2**31 - 2048, n - 4096):
            assert (y[begin : begin + 4096] - x[begin : begin + 4096]).abs().max() < 0.1
