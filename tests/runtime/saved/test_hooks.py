import gc
import weakref
from contextlib import nullcontext

import fewbit
import pytest
import torch
from counting import Counting
from fewbit import FewbitError, compress_saved_tensors
from fewbit.quantizers import FixedPoint, Outlier, PerGroup
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))


def gradients(net, x, *contexts):
    net.zero_grad()
    x = x.clone().requires_grad_()
    if contexts:
        with contexts[0]:
            y = net(x)
    else:
        y = net(x)
    y.square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


class TestTraining:
    @pytest.mark.parametrize(
        ("quantizer", "most"), [(PerGroup(8), 0.02), (PerGroup(4), 0.2), (Outlier(8), 0.02), (Outlier(3), 0.4)]
    )
    def test_gradients_are_close(self, quantizer, most):
        net, x = model(), torch.randn(100, 64)
        pairs = zip(gradients(net, x, compress_saved_tensors(quantizer)), gradients(net, x), strict=True)
        assert 0 < max(float((found - exact).norm() / exact.norm()) for found, exact in pairs) < most

    def test_forward_is_exact(self):
        net, x = model(), torch.randn(100, 64)
        with compress_saved_tensors(PerGroup(2)):
            assert torch.equal(net(x), net(x.clone()))

    def test_gradients_that_are_linear_in_what_is_saved_are_unbiased(self):
        net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
        exact = gradients(net, x)[3].clone()  # of the second weight, 2 yᵀh
        draws = [gradients(net, x, compress_saved_tensors(PerGroup(2)))[3].clone() for _ in range(300)]
        z = (torch.stack(draws).mean(0) - exact) / (torch.stack(draws).std(0) / 300**0.5)
        assert z.abs().max() < 5.5
        assert abs(z.mean()) < 5 / 8  # rows share their noise

    @pytest.mark.parametrize("activation", [torch.relu, F.leaky_relu])
    def test_signs_are_exact_and_take_a_bit_beside_the_codes_of_the_values(self, activation):
        net = nn.Linear(64, 64, bias=False)
        x = torch.cat([torch.randn(64, 64), 1e-3 * torch.randn(64, 64), torch.full((1, 64), float("nan"))])
        x.requires_grad_()

        def gradient(*contexts):
            with contexts[0] if contexts else nullcontext():
                y = net(activation(x * 1))
            return torch.autograd.grad(y, x, torch.ones_like(y))[0]

        counting = Counting(PerGroup(1))
        assert torch.equal(gradient(compress_saved_tensors(counting)), gradient())
        assert counting.shapes == [(129, 64)]  # of the Linear's input alone

    @pytest.mark.parametrize("dimension", [0, -1])
    def test_probabilities_sum_to_one(self, dimension):
        """Values with a mean that is large beside their deviation: the gradient is of the deviation alone."""
        scores, values = torch.randn(128, 128, requires_grad=True), 5 + 0.1 * torch.randn(128, 128)
        found = []
        for context in (nullcontext(), compress_saved_tensors(PerGroup(8))):
            with context:
                loss = ((2 * scores).softmax(dimension) * values).sum()
            found += torch.autograd.grad(loss, scores)
        assert (found[1] - found[0]).norm() < 0.1 * found[0].norm()

    def test_what_is_saved_is_freed(self):
        x = torch.randn(100, 64, requires_grad=True)
        with compress_saved_tensors(PerGroup(4)):
            h = x * 2
            gone = weakref.ref(h)
            loss = h.exp().sum()
        del h
        gc.collect()
        assert gone() is None
        loss.backward()


class TestLeftAlone:
    def saved(self, call, **options):
        """Shapes of what is compressed of what `call` saves."""
        counting = Counting()
        with compress_saved_tensors(counting, **options):
            result = call()
        result.sum().backward()
        return counting.shapes

    @pytest.mark.parametrize(
        ("call", "shapes"),
        [
            (lambda x, w, c: F.linear(x, w), []),
            (lambda x, w, c: (x @ w.t()) * w[:, None].squeeze(1), [(64, 64)]),  # the product alone
            (lambda x, w, c: F.linear(x, w.requires_grad_(False)), []),
            (lambda x, w, c: x @ w.requires_grad_(False).t(), []),
            (lambda x, w, c: x * c, []),
            (lambda x, w, c: F.linear(c, x), []),
            (lambda x, w, c: F.layer_norm((x * 2).repeat(32, 1), (64,)), [(2048, 64)]),
            (lambda x, w, c: F.embedding(torch.arange(2000) % 50, x), []),
            (lambda x, w, c: (x * 2)[(x > 0)], []),
            (lambda x, w, c: torch.fft.fft(x).exp().real, []),
            (lambda x, w, c: fewbit.functional.gelu(x * 2, bits=3), []),
        ],
        ids=[
            *(
                "parameters and leaves",
                "views of parameters",
                "frozen",
                "views of frozen",
                "constants",
                "before a leaf",
            ),
            *("statistics", "integers", "booleans", "complex numbers", "few-bit codes"),
        ],
    )
    def test_all_but_values_of_the_graph(self, call, shapes):
        x, w, c = torch.randn(64, 64, requires_grad=True), nn.Parameter(torch.randn(64, 64)), torch.rand(64, 64)
        assert self.saved(lambda: call(x, w, c)) == shapes

    def test_weights_that_autocast_has_cast(self):
        net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), torch.randn(100, 64)

        def call():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return net(x).float()

        assert (64, 32) not in self.saved(call)
        assert (32, 64) not in self.saved(call)
        assert (100, 64) in self.saved(call)

    def test_small_tensors(self):
        x = torch.randn(10, 10, requires_grad=True)
        assert self.saved(lambda: (x * 2).exp()) == []
        assert self.saved(lambda: (x * 2).exp(), smallest=100) == [(10, 10)]

    def test_what_is_to_be_kept(self):
        x = torch.randn(64, 64, requires_grad=True)
        h = x * 2
        assert self.saved(lambda: x * h) == [(64, 64)]
        h = x * 2
        assert self.saved(lambda: x * h, keep=[h]) == []
        h = x * 2
        assert self.saved(lambda: x * h.t(), keep=iter([h])) == []

    def test_what_would_not_get_smaller(self):
        x = torch.randn(2000, 2, requires_grad=True)
        with compress_saved_tensors(PerGroup(8)):
            y = (x * 2).exp()
        y.sum().backward()
        assert torch.equal(x.grad, 2 * y)


def views(h):
    return [h.t(), h.view(-1), h.view(8, 8, 64).permute(2, 0, 1), h[3:60, ::2], h.view(-1)[7:4000]]


class TestOneStorage:
    def shapes(self, call):
        x = torch.randn(64, 64, requires_grad=True)
        counting = Counting()
        with compress_saved_tensors(counting):
            y = call(x * 2)
        y.backward()
        ours = x.grad.clone()
        x.grad = None
        call(x * 2).backward()
        assert (ours - x.grad).norm() < 0.02 * x.grad.norm()
        return counting.shapes

    @pytest.mark.parametrize(
        ("call", "expected"),
        [
            (lambda h: (h.sin() + h.cos()).sum(), [(64, 64)]),
            (lambda h: h.sin().sum() + sum(part.cos().sum() for part in views(h)), [(64, 64)]),
            (lambda h: (h[:32].sin() * 1).sum() + h[32:].cos().sum(), [(32, 64), (32, 64)]),
            (lambda h: h.unsqueeze(1).expand(64, 5, 64).sin().sum(), [(64, 1, 64)]),
            (lambda h: h[:, :48].sin().sum(), [(64, 48)]),
        ],
        ids=["saved twice", "views", "parts have codes of their own", "expanded, without repeats", "gaps"],
    )
    def test_is_compressed_once(self, call, expected):
        assert self.shapes(call) == expected

    def test_overlapping_windows_come_back(self):
        self.shapes(lambda h: h.view(-1).unfold(0, 128, 64).sin().sum())

    def test_what_was_changed_in_place_is_another_tensor(self):
        x, z = torch.randn(64, 64, requires_grad=True), torch.rand(64, 64, requires_grad=True)
        with compress_saved_tensors(PerGroup(8)):
            factor = z * 1
            before = (x * factor).sum()
            factor.add_(1)
            after = (x * factor).sum()
        (before,), (after,) = torch.autograd.grad(before, x), torch.autograd.grad(after, x)
        assert ((after - before) - 1).abs().max() < 0.02

    def test_what_is_left_alone_must_not_be_changed_in_place(self):
        x, factor = torch.randn(64, 64, requires_grad=True), torch.rand(64, 64)
        with compress_saved_tensors(PerGroup(8)):
            y = (x * factor).sum()
        factor.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    @pytest.mark.parametrize(
        "saving",
        [
            lambda x: ((mask := x > 0), x.masked_fill(mask, 0.0)),
            lambda x: ((places := torch.arange(64)), x.index_select(0, places)),
            lambda x: ((y := torch.complex(x, x).exp()), y.abs()),
        ],
        ids=["booleans", "integers", "complex numbers"],
    )
    def test_nor_what_is_never_rounded(self, saving):
        x = torch.randn(64, 64, requires_grad=True)
        with compress_saved_tensors(PerGroup(8)):
            saved, y = saving(x)
        saved.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_a_function_s_complex_result_goes_with_its_graph(self):
        x = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)
        with compress_saved_tensors(PerGroup(8)):
            y = x.exp()
        y.grad_fn.metadata["life"] = life = nn.Module()
        life = weakref.ref(life)
        del y
        gc.collect()
        assert life() is None

    def test_lazily_negated_numbers_have_codes_of_their_own(self):
        z = torch.randn(64, 256, dtype=torch.complex64)

        def gradient(*contexts):
            x = z.clone().requires_grad_()
            with contexts[0] if contexts else nullcontext():
                h = x * 1
                part, negated = h.imag, h.conj().imag
                loss = part.square().sum() + (negated * part.sin() + negated.square()).sum()
            return torch.autograd.grad(loss, x)[0]

        assert z.conj().imag.is_neg()
        exact = gradient()
        assert (gradient(compress_saved_tensors(PerGroup(8))) - exact).norm() < 0.02 * exact.norm()

    def test_memory_that_is_used_again_is_not_mistaken(self):
        counting = Counting()
        x, ones = torch.randn(64, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
        losses = []
        with compress_saved_tensors(counting):
            for i in range(20):  # the allocator hands out the same memory
                losses.append((x * (ones * i)).sum())
        assert len(counting.shapes) == 20
        for i, loss in enumerate(losses):
            assert torch.autograd.grad(loss, x)[0].eq(i).all()

    def test_nothing_is_kept_when_the_graph_is_gone(self):
        counting = Counting()
        x = torch.randn(64, 64, requires_grad=True)
        h = torch.randn(64, 64, requires_grad=True) * 2
        context = compress_saved_tensors(counting)
        with context:
            torch.autograd.grad((x * h).sum(), x)
            torch.autograd.grad((x * h).sum(), x)
        assert len(counting.shapes) == 2  # the first codes went with their graph


class TestUse:
    def test_the_innermost_counts(self):
        outer, inner = Counting(), Counting()
        x = torch.randn(64, 64, requires_grad=True)
        with compress_saved_tensors(outer):
            a = (x * 2).exp()
            with compress_saved_tensors(inner):
                b = (x * 3).exp()
            c = (x * 4).exp()
        (a + b + c).sum().backward()
        assert (len(outer.shapes), len(inner.shapes)) == (2, 1)

    def test_second_derivative_is_that_at_the_decompressed_values(self):
        x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
        with compress_saved_tensors(PerGroup(8)):
            h = x * 1
            y = (h * h * h).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            (gg,) = torch.autograd.grad(g.sum(), x)
        assert (g - 3 * x**2).norm() < 0.05 * (3 * x**2).norm()
        assert (gg - 6 * x).norm() < 0.05 * (6 * x).norm()

    def test_backward_twice(self):
        x = torch.randn(64, 64, requires_grad=True)
        with compress_saved_tensors(PerGroup(4)):
            y = (x * 2).exp().sum()
        (a,) = torch.autograd.grad(y, x, retain_graph=True)
        (b,) = torch.autograd.grad(y, x)
        assert torch.equal(a, b)

    @pytest.mark.parametrize("around", ["forward", "both"])
    def test_checkpointed_attention_is_torchs(self, around):
        def attend(v):
            q, k, w = (v * f for f in (1.0, 2.0, 3.0))
            return F.scaled_dot_product_attention(q, k, w).square()

        def run(context, backward_context):
            x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
            with context:
                y = checkpoint(attend, x * 1, use_reentrant=False).sum()
            with backward_context:
                y.backward()
            return x.grad

        exact = run(nullcontext(), nullcontext())
        backward = compress_saved_tensors(PerGroup(8)) if around == "both" else nullcontext()
        found = run(compress_saved_tensors(PerGroup(8)), backward)
        assert torch.equal(found, exact)  # all that is saved is the checkpoint's input, exactly

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("inside", [False, True])
    def test_what_a_compiled_graph_saves_is_exact(self, inside):
        net, x, counting = model(), torch.randn(100, 64), Counting()

        def within(v):
            with compress_saved_tensors(counting):
                return net(v)

        def around(v):
            with compress_saved_tensors(counting):
                return compiled(v)

        compiled = torch.compile(within if inside else net, backend="aot_eager")
        found = []
        for call in (net, compiled if inside else around):
            net.zero_grad()
            v = x.clone().requires_grad_()
            call(v * 1).square().sum().backward()
            found.append([v.grad, *(p.grad.clone() for p in net.parameters())])
        assert all(map(torch.allclose, *found))
        assert counting.shapes == []

    def test_torch_func_refuses_hooks(self):
        with compress_saved_tensors(PerGroup(8)), pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(lambda v: v.exp().sum())(torch.randn(64, 64))

    @pytest.mark.parametrize("quantizer", [FixedPoint(4), PerGroup, None, 4, "PerGroup"])
    def test_what_cannot_compress_by_itself_is_refused(self, quantizer):
        with pytest.raises(FewbitError, match=r"^compress_saved_tensors takes a quantizer [^\n]*, not [^\n]*$"):
            compress_saved_tensors(quantizer)


class TestAttention:
    """`scaled_dot_product_attention` saves query, key and value, and is computed again."""

    def inputs(self, scale=2.0, heads=4, kv_heads=4):
        torch.manual_seed(0)
        shapes = (2, heads, 96, 32), (2, kv_heads, 96, 32), (2, kv_heads, 96, 32)
        return [(torch.randn(s) * f).requires_grad_() for s, f in zip(shapes, (scale, scale, 1), strict=True)]

    def gradients(self, inputs, context, **options):
        with context:
            # Through a product, as a projection's output comes: leaves are saved exactly.
            y = F.scaled_dot_product_attention(*(x * 1.0 for x in inputs), **options)
        return torch.autograd.grad(y, inputs, torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(96, 96).tril().bool()}])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_sharp_scores_do_not_blow_up(self, options, kv_heads):
        inputs = self.inputs(kv_heads=kv_heads)
        options = {**options, "enable_gqa": kv_heads < 4}
        exact = self.gradients(inputs, nullcontext(), **options)
        found = self.gradients(inputs, compress_saved_tensors(PerGroup(4)), **options)
        for one, two in zip(found, exact, strict=True):
            # From the exact log-sum-exp it would be 1.3 to 1.6.
            assert (one - two).norm() < 0.6 * two.norm()

    def test_neither_output_nor_statistics_are_saved(self):
        inputs, counting = self.inputs(kv_heads=2), Counting(PerGroup(4))
        self.gradients(inputs, compress_saved_tensors(counting), enable_gqa=True)
        assert counting.shapes == [x.shape for x in inputs]

    def test_a_backward_pass_within_the_context_saves_nothing_again(self):
        inputs, counting = self.inputs(), Counting()
        exact = self.gradients(inputs, nullcontext())
        with compress_saved_tensors(counting):
            found = self.gradients(inputs, nullcontext())
        assert len(counting.shapes) == 3
        assert all((one - two).norm() < 0.05 * two.norm() for one, two in zip(found, exact, strict=True))

    def test_small_queries_and_masks_with_gradients_are_torchs(self):
        few = [x[:1, :1, :8].detach().requires_grad_() for x in self.inputs()]
        exact = self.gradients(few, nullcontext())
        assert all(map(torch.equal, self.gradients(few, compress_saved_tensors(PerGroup(2))), exact))
        mask = torch.zeros(96, 96, requires_grad=True)
        with compress_saved_tensors(PerGroup(4)):
            y = F.scaled_dot_product_attention(*self.inputs(), attn_mask=mask)
        y.sum().backward()
        assert mask.grad is not None


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, inplace: F.relu6(x, inplace),
        lambda x, inplace: nn.ReLU6(inplace)(x),
        lambda x, inplace: F.hardtanh(x, -0.5, 1.5, inplace),
        lambda x, inplace: F.hardtanh(x, max_val=0.7, inplace=inplace),
    ],
)
def test_what_lies_between_bounds_is_exact(function, inplace):
    x = torch.cat([torch.randn(4000) * 4, torch.tensor([0.0, 6.0, -0.5, 1.5, 1e-4, 5.9999, torch.inf])])
    x.requires_grad_()
    gradient = torch.randn_like(x)
    (exact,) = torch.autograd.grad(function(x * 1.0, inplace), x, gradient)
    with compress_saved_tensors(PerGroup(2)):
        y = function(x * 1.0, inplace)
    assert torch.equal(torch.autograd.grad(y, x, gradient)[0], exact)


class Calls(nn.Module):
    """A module that calls a function of an activation."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.function(x * 1, self.weight)


class TestBits:
    """What the gradient passes through is saved in more bits."""

    def kept(self, function, quantizer=None, **options):
        x = torch.randn(64, 64, requires_grad=True)
        with compress_saved_tensors(quantizer or PerGroup(4), **options):
            return fewbit.memory.profile(Calls(function), x).total

    @pytest.mark.parametrize(
        ("function", "more"),
        [
            *((lambda x, w: F.gelu(x), 1), (lambda x, w: F.silu(x), 1), (lambda x, w: torch.tanh(x), 1)),
            *((lambda x, w: x.softmax(-1), 2), (lambda x, w: x @ x.T, 2)),
            (lambda x, w: F.scaled_dot_product_attention(x[None], x[None], x[None]), 6),
            *((lambda x, w: F.linear(x, w), 0), (lambda x, w: x @ w, 0)),
            *((lambda x, w: torch.bmm(x[None], w[None]), 0), (lambda x, w: F.layer_norm(x, (64,)), 0)),
        ],
    )
    def test_activations_get_one_more_and_scores_two(self, function, more):
        assert self.kept(function) - self.kept(function, finer=False) == more * 64 * 64 // 8

    @pytest.mark.parametrize(
        ("function", "quantizer"),
        [
            (F.gelu, Outlier(3)),
            (F.gelu, PerGroup(2, levels=fewbit.solve("gelu", bits=2, kind="stochastic"))),
            (lambda x: x.softmax(-1), PerGroup(8)),
        ],
        ids=["another quantizer", "levels of a table", "eight bits"],
    )
    def test_what_has_no_finer_codes_keeps_its_own(self, function, quantizer):
        kept = [self.kept(lambda x, w: function(x), quantizer, finer=finer) for finer in (True, False)]
        assert kept[0] == kept[1]

    @pytest.mark.parametrize("converted", [False, True])
    def test_batch_normalization_of_few_elements_is_exact(self, converted):
        for samples, most in ((16, 0.0), (64, 0.1)):
            net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.BatchNorm1d(256))
            if converted:
                fewbit.convert(net, level="L2", include=nn.BatchNorm1d)
            x, g = torch.randn(samples, 64), torch.randn(samples, 256)
            found = []
            for context in (nullcontext(), compress_saved_tensors(PerGroup(4))):
                given = x.clone().requires_grad_()
                with context:
                    y = net(given)
                (gradient,) = torch.autograd.grad(y, given, g)
                found.append(gradient)
            error = float((found[1] - found[0]).norm() / found[0].norm())
            assert error <= most and (error > 0) == (most > 0)

    def test_equal_samples_stay_equal(self):
        """So that what cancels between them does, as a batch of the same queries less its first."""
        weight, g = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64)
        found = []
        for context in (nullcontext(), compress_saved_tensors(PerGroup(8))):
            with context:
                h = (torch.linspace(-2, 2, 64) @ weight).expand(32, 64) * 1.0
                y = h.sin() + torch.linspace(0, 1, 64)
                (gradient,) = torch.autograd.grad(((y - y[:1]) * g).sum() + 1e-3 * y.sum(), weight)
            found.append(gradient)
        assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()

    @pytest.mark.parametrize("features", [8, 16, 20, 48, 64, 96])
    @pytest.mark.parametrize("square", [lambda h: h.pow(2), torch.square, lambda h: h * h, lambda h: h**2])
    def test_rows_of_zeros_stay_where_rows_are_normalized(self, features, square):
        """1/norm of such a row is a thousand, and its third power multiplies the error."""
        base, g = torch.randn(4, 32, 2, features), torch.randn(4, 32, 2, features)
        base[1, 21::3] = 0  # among others, with which they would share a group
        found = []
        for context in (nullcontext(), compress_saved_tensors(PerGroup(4))):
            x = base.clone().requires_grad_()
            with context:  # RMSNorm by rows, as Qwen3 computes it for each head
                h = x * 1
                y = h * torch.rsqrt(square(h).mean(-1, keepdim=True) + 1e-6)
            (gradient,) = torch.autograd.grad(y, x, g)
            found.append(gradient)
        assert torch.equal(found[1][1, 21::3], found[0][1, 21::3])


@pytest.mark.parametrize(("streams", "times"), [((1, 1), 1), ((1, 2), 2)])
def test_codes_of_one_stream_serve_none_on_another(monkeypatch, streams, times):
    # Freed codes are written over by work of their own stream, while the backward pass on another still reads them.
    current = [0]
    for module in ("saved.store", "saved.forms", "tensors.graphs"):
        monkeypatch.setattr(f"fewbit.runtime.{module}.current_stream", lambda _: current[0])
    h, counting = torch.randn(100, 64, requires_grad=True).exp(), Counting()
    with compress_saved_tensors(counting, smallest=1):
        y = 0
        for current[0] in streams:
            y = y + h @ torch.randn(64, 64, requires_grad=True)
    assert counting.shapes == [(100, 64)] * times
    y.sum().backward()
