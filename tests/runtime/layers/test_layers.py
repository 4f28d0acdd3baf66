"""What holds for every compressed layer."""

import copy
import pickle

import fewbit
import pytest
import torch
from fewbit import layers, memory
from fewbit.layers import ExactSaver, QuantizerSaver
from fewbit.quantizers import PerGroup
from fewbit.runtime.layers import layer_norm, normalization
from fewbit.runtime.layers.normalization import KeepOutput, standardised
from layer_cases import BATCH_NORMS, CASES, NORMS, Draws
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

each = pytest.mark.parametrize("case", CASES, ids=str)
DRAWS, FEWER_DRAWS = 300, 40
# One case of each kind of layer has all draws: the codes are unbiased whatever the layer (test_per_group.py), and the
# others only have to pass them on.
FIRST = {case.name.rstrip("123d"): case for case in reversed(CASES)}.values()


def results(layer, x, gradient=None, **call):
    """Output, and gradients of the input and the weights."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    y = layer(x, **call)
    layer.zero_grad()
    y.backward(torch.ones_like(y) if gradient is None else gradient)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def gradient_for(case):
    torch.manual_seed(3)
    return torch.randn_like(case.torchs()(case.input(), **case.call))


@each
@pytest.mark.parametrize("training", [True, False])
def test_with_all_saved_exactly_the_gradients_are_torchs(case, training):
    ours, torchs = case.compressed(saver=ExactSaver()).train(training), case.torchs().train(training)
    x, g = case.input(), gradient_for(case)
    for a, b in zip(results(ours, x, g, **case.call), results(torchs, x, g, **case.call), strict=True):
        # Torch's own backward ops in torch's order, or the same sums in another: a few roundings of numbers near 1.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(45)
@each
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_output_and_the_statistics_are_torchs_bit_for_bit(case, training, dtype):
    ours, torchs = (layer.to(dtype).train(training) for layer in (case.compressed(bits=1), case.torchs()))
    for seed in range(2):
        x = case.input(seed).to(dtype).requires_grad_()
        torch.manual_seed(7)
        y = ours(x, **case.call)
        torch.manual_seed(7)
        assert torch.equal(y, torchs(x, **case.call))
        assert y.requires_grad
    for a, b in zip(ours.state_dict().values(), torchs.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "Activation"], ids=str)
def test_names_and_parameters_are_torchs(case):
    ours, torchs = case.compressed(), case.torchs()
    assert isinstance(ours, type(torchs))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert repr(ours).startswith(repr(torchs)[:-1].rstrip())


@pytest.mark.sample(1)
@each
def test_gradients_are_unbiased(case):
    """The mean of N draws lies within 5 standard errors of torch's gradient, everywhere.

    Of 10,000 normal numbers one is beyond 5 in 170 runs of a right layer, and the draws are seeded.
    """
    options = {"copies": 2} if case in NORMS else {}
    ours = case.compressed(bits=2, **options)
    x, g = case.input(), gradient_for(case)
    exact = results(case.torchs(), x, g, **case.call)[1:]
    draws = [Draws() for _ in exact]
    for seed in range(DRAWS if case in FIRST else FEWER_DRAWS):
        torch.manual_seed(seed)
        y = ours(leaf := x.clone().requires_grad_(), **case.call)
        ours.zero_grad()
        y.backward(g)
        for drawn, gradient in zip(draws, [leaf.grad, *(p.grad for p in ours.parameters())], strict=True):
            drawn.add(gradient)
    for drawn, gradient in zip(draws, exact, strict=True):
        assert drawn.standard_errors_from(gradient) < 5
    assert any(drawn.variance().max() > 1e-6 for drawn in draws)  # something was drawn at all


@each
def test_nothing_is_kept_without_a_gradient(case):
    ours = case.compressed()
    with torch.no_grad():
        assert memory.profile(ours, case.input()).total == 0
    ours.requires_grad_(False)
    assert memory.profile(ours, case.input()).total == 0


@each
def test_second_derivatives_are_refused(case):
    x = case.input().requires_grad_()
    y = case.compressed()(x, **case.call)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_transforms_of_torch_func_are_refused_by_name():
    """Torch's own words are of how to write an autograd.Function."""
    x, linear = torch.randn(4, 64), layers.Linear(64, 64)
    with pytest.raises(fewbit.FewbitError, match=r"no transform of torch\.func"):
        torch.func.grad(lambda x: linear(x).sum())(x)


@each
def test_copies_and_pickles_work(case):
    ours = case.compressed(bits=3)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is type(ours) and again.saver == ours.saver
        results(again, case.input(), **case.call)


@each
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients_and_keeps_the_input_alone(case, reentrant):
    ours = case.compressed(bits=2)
    x = case.input()

    def again(x):
        return checkpoint(ours, x, use_reentrant=reentrant, **case.call)

    if reentrant and case.call:
        pytest.skip("reentrant checkpoints take no keywords")
    torch.manual_seed(7)
    y = ours(plain := x.clone().requires_grad_(), **case.call)
    y.sum().backward()
    expected = [p.grad for p in ours.parameters()]
    ours.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    again(kept := x.clone().requires_grad_()).sum().backward()
    # The same seed draws the same codes again. Statistics that the second forward has moved do not count in training.
    torch.testing.assert_close(kept.grad, plain.grad)
    for a, b in zip((p.grad for p in ours.parameters()), expected, strict=True):
        torch.testing.assert_close(a, b)


@each
@pytest.mark.parametrize("shape", ["channels last", "strided"])
def test_any_layout_will_do(case, shape):
    x = case.input()
    if shape == "channels last":
        if x.dim() != 4:
            pytest.skip("of four dimensions")
        x = x.contiguous(memory_format=torch.channels_last)
    else:
        x = torch.stack([x, x], -1)[..., 0]
    g = gradient_for(case)
    for a, b in zip(
        results(case.compressed(saver=ExactSaver()), x, g, **case.call),
        results(case.torchs(), x, g, **case.call),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Observer(QuantizerSaver):
    """Notes what it is shown."""

    def __init__(self):
        super().__init__(PerGroup(bits=4))
        object.__setattr__(self, "shapes", [])

    def observe(self, gradient, rstd=None):
        self.shapes.append(gradient.shape)


@each
def test_the_saver_sees_the_gradient_of_every_sample(case):
    observer = Observer()
    ours = case.compressed(saver=observer)
    y = ours(case.input().requires_grad_(), **case.call)
    y.sum().backward()
    batched = y if case.input().dim() == len(case.shape) and y.shape[0] == case.shape[0] else y.unsqueeze(0)
    assert observer.shapes in ([y.shape], [batched.shape], [y.unsqueeze(0).shape])


@pytest.mark.parametrize("saver", [ExactSaver(), None])
@pytest.mark.parametrize("layout", ["rows", "features last", "channels last"])
def test_cudnns_batch_normalization_gets_its_input_in_a_format_of_torch(monkeypatch, layout, saver):
    """As forward: it refused the input of a layer between two transpositions. Its operators are torch's own here."""
    aten, given = torch.ops.aten, []
    forward, backward = aten._batch_norm_impl_index, aten._batch_norm_impl_index_backward
    monkeypatch.setattr(aten, "_batch_norm_impl_index", lambda *arguments: (*forward(*arguments)[:4], 1))
    monkeypatch.setattr(
        aten, "_batch_norm_impl_index_backward", lambda _, *rest: (given.append(rest[0]), backward(0, *rest))[1]
    )
    name, x = ("BatchNorm2d", torch.randn(8, 3, 6, 5)) if layout != "features last" else ("BatchNorm1d", None)
    x = torch.randn(8, 30, 3).transpose(1, 2) if x is None else x
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    ours, torchs = getattr(layers, name)(3, saver=saver, bits=8), getattr(torch.nn, name)(3)
    g = torch.randn(x.shape)
    found, expected = results(ours, x, g), results(torchs, x, g)
    assert given[0].is_contiguous(memory_format=suggest_memory_format(given[0]))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 0.1 * b.norm()  # 8 bits and 240 numbers a channel: .02 to .03


class Operators(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class TestAutocast:
    @each
    def test_output_and_gradients_are_torchs(self, case):
        x, outs = case.input(), []
        for layer in (case.compressed(saver=ExactSaver()), case.torchs()):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(7)
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(leaf, **case.call)
            y.float().square().sum().backward()
            outs.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
        assert outs[0][0].dtype == outs[1][0].dtype and torch.equal(outs[0][0], outs[1][0])
        for a, b in zip(*outs, strict=True):
            assert a.dtype == b.dtype
            # bfloat16 has 8 bits, and torch rounds once or twice more or less than we do.
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * b.abs().max().item())

    @pytest.mark.parametrize("norm", [layer_norm._OfLastDimensions((8,), 1e-5), layer_norm._OfGroups(2, 1e-5)], ids=str)
    def test_what_a_gpu_normalizes_in_float32_has_gradients_beside_weights_of_16_bits(self, norm):
        """As autocast does there, with the weights of a model in bfloat16 too, and not on the CPU."""
        shape = (3, 8, 8)
        x, g, weight, bias = (torch.randn(size) for size in (shape, shape, 8, 8))
        weight, bias = weight.bfloat16(), bias.bfloat16()
        _, mean, rstd = norm.forward(x, weight.float(), bias.float())
        normed = [standardised(norm.grouped(x), mean, rstd).view(shape)]
        ours, expected = (
            norm.backward(g, normed, mean, rstd, w, b, [True] * 3)
            for w, b in ((weight, bias), (weight.float(), bias.float()))
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))

    def test_group_norm_on_a_gpu_takes_all_that_has_16_bits_in_float32(self, monkeypatch):
        taken, run = [], torch.native_group_norm
        monkeypatch.setattr(layer_norm, "is_autocast", lambda _: True)
        monkeypatch.setattr(torch, "native_group_norm", lambda *given: (taken.extend(given[:3]), run(*given))[1])
        norm = layer_norm._OfGroups(2, 1e-5)
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            norm.forward(*(torch.empty(size, dtype=dtype, device="meta") for size in ((3, 8, 5), 8, 8)))
            assert [t.dtype for t in taken[-3:]] == [wide] * 3


def test_a_graph_s_capture_does_not_look_at_a_weight(monkeypatch):
    """To look waits for the GPU, which ends a capture; the input is saved until there was a look before it."""
    looks = []

    class OnGPU:
        device, is_meta = torch.device("cuda"), False

        def __add__(self, offset):
            looks.append(offset)
            return torch.ones(3)

    saver = KeepOutput()
    for capturing, divides, many in ((True, False, 0), (False, True, 1), (True, True, 1)):
        monkeypatch.setattr(normalization, "is_capturing", lambda _, capturing=capturing: capturing)
        assert (saver.divides_by(OnGPU(), 0.0), len(looks)) == (divides, many)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_without_an_epsilon_rms_normalization_takes_torchs(dtype):
    """That of the arithmetic: bfloat16's own, .0078, made the gradients of inputs of deviation .01 wrong by .9."""
    x = torch.randn(16, 64).mul(0.01).to(dtype)
    ours, torchs = layers.RMSNorm(64, saver=ExactSaver()).to(dtype), torch.nn.RMSNorm(64).to(dtype)
    g = torch.randn(16, 64).to(dtype)
    for a, b in zip(results(ours, x, g), results(torchs, x, g), strict=True):
        assert (a - b).norm() <= 2 * torch.finfo(dtype).eps * b.norm()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_bytes_kept_are_those_of_the_codes(bits):
    convolution = layers.Conv2d(16, 8, 3, bits=bits)
    x = torch.randn(4, 16, 16, 8)  # 2,048 elements a sample: eight groups
    assert memory.profile(convolution, x).total == x.numel() * bits // 8 + 4 * x.numel() // 256


def test_a_normalization_keeps_two_copies_if_asked_to():
    x = torch.randn(4, 16, 16, 8, requires_grad=True)
    once = x.numel() * 2 // 8 + 4 * x.numel() // 256
    statistics = 2 * 16 * 4
    for copies in (1, 2):
        assert memory.profile(layers.BatchNorm2d(16, bits=2, copies=copies), x).total == copies * once + statistics


class TestFrozen:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_bias_of_a_batch_normalization_alone_takes_no_operator_of_an_input(self, dtype):
        """Nothing of the input is saved, and cuDNN's operator refused what stood in its place."""
        ours, torchs = (place.BatchNorm2d(3, dtype=dtype).requires_grad_(False) for place in (layers, torch.nn))
        x, g = (torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
        for layer in (ours, torchs):
            layer.bias.requires_grad_()
        torchs(x).backward(g)
        with Operators() as operators:
            ours(x).backward(g)
        assert not [name for name in operators.names if "norm_backward" in name]
        torch.testing.assert_close(ours.bias.grad, torchs.bias.grad)

    def test_a_frozen_weight_saves_no_input(self):
        for case in (c for c in CASES if c.name.startswith(("Conv", "Linear"))):
            ours = case.compressed()
            ours.weight.requires_grad_(False)
            x = case.input().requires_grad_()
            assert memory.profile(ours, x).total == 0
            torchs = case.torchs()
            torchs.weight.requires_grad_(False)
            a, b = results(ours, x.detach(), **case.call)[1], results(torchs, x.detach(), **case.call)[1]
            torch.testing.assert_close(a, b)

    def test_in_evaluation_batch_normalization_with_a_frozen_weight_saves_no_input(self):
        layer = layers.BatchNorm2d(3).eval().requires_grad_(False)
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        assert memory.profile(layer, x).total <= 2 * 3 * 4

    @pytest.mark.parametrize("case", BATCH_NORMS, ids=str)
    def test_only_what_is_wanted_has_a_gradient(self, case):
        ours = case.compressed()
        y = ours(case.input(), **case.call)
        if y.requires_grad:
            y.sum().backward()
            assert all(p.grad is not None for p in ours.parameters())


@pytest.mark.deep
def test_one_copy_of_a_normalization_is_biased_and_two_are_not():
    """Over 8 elements at 1 bit, Var[x̂] h/n is large: here the rule of 5 standard errors tells the two apart."""
    far = {}
    torch.manual_seed(0)
    x, g = torch.randn(3, 8), torch.randn(3, 8)
    exact = results(torch.nn.GroupNorm(1, 8), x, g)[1]
    for copies in (1, 2):
        draws = Draws()
        for seed in range(4 * DRAWS):  # a bias shows by the root of how many there are
            torch.manual_seed(seed)
            leaf = x.clone().requires_grad_()
            layers.GroupNorm(1, 8, copies=copies, saver=Unequal())(leaf).backward(g)
            draws.add(leaf.grad)
        far[copies] = draws.standard_errors_from(exact)
    assert far[2] < 5 < far[1]


class Unequal(QuantizerSaver):
    """One bit, even where it takes more memory than the tensor."""

    def __init__(self):
        super().__init__(PerGroup(bits=1))

    def compress(self, x):
        return self.quantizer.compress(x)


SCALED = {
    "LayerNorm": (lambda: layers.LayerNorm(8, eps=1e-30, bits=2), (4, 16, 8), (4, 16, 1)),
    "RMSNorm": (lambda: layers.RMSNorm(8, eps=1e-30, bits=2), (4, 16, 8), (4, 16, 1)),
    "GroupNorm": (lambda: layers.GroupNorm(8, 8, eps=1e-30, bits=2), (4, 8, 6, 6), (4, 8, 1, 1)),
    "BatchNorm": (lambda: layers.BatchNorm2d(8, eps=1e-30, bits=2), (4, 8, 4, 4), (1, 8, 1, 1)),
    "InstanceNorm": (lambda: layers.InstanceNorm2d(8, eps=1e-30, affine=True, bits=2), (4, 8, 8, 8), (4, 8, 1, 1)),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("copies", [1, 2])
def test_gradients_in_few_bits_do_not_depend_on_what_rows_and_channels_are_divided_by(name, copies):
    make, shape, of_scales = SCALED[name]
    torch.manual_seed(0)
    x, g = torch.randn(shape), torch.randn(shape)
    scale = torch.exp2(torch.randint(-12, 13, of_scales).float())  # powers of two: nothing is rounded by it
    layer = make()
    layer.copies = copies
    torch.manual_seed(1)
    _, grad, *others = results(layer, x, g)
    torch.manual_seed(1)
    _, grad_scaled, *others_scaled = results(layer, x * scale, g)
    # The codes are the same; sums of 8 to 64 float32 numbers near 1 are not in the same order.
    torch.testing.assert_close(grad_scaled * scale, grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(others_scaled, others, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", ["L2", "L3"])
@pytest.mark.parametrize(("samples", "exact"), [(31, True), (32, False)])
def test_batch_normalization_over_few_elements_keeps_its_input(samples, exact, level):
    """Rounding there changes the gradient by more than depth forgives; from 32 elements a channel on it has codes."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    ours = fewbit.convert(copy.deepcopy(model), level=level, include="1").model
    x, g = torch.randn(samples, 16), torch.randn(samples, 4)
    a, b = (results(m, x, g)[1] for m in (model, ours))
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-6) == exact
