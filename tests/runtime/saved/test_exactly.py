"""What `compress_saved_tensors` must not round: what enters under an exponential, as a divisor or near a pole."""

import gc

import fewbit
import pytest
import torch
from counting import Counting
from fewbit import compress_saved_tensors
from fewbit.quantizers import Outlier, PerGroup
from glu_cases import relative
from in_threads import in_threads
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# An older torch does not tell of the hooks in force; a profile then shows what is saved without them.
needs_top_hooks = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch is too old"
)

CLASSES = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(0))
IGNORED = torch.where(torch.arange(64) % 3 == 0, -100, CLASSES)
TARGETS = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))


def gradient(call, *leaves, quantizer=None):
    """Gradient of the sum of what `call` returns, of all leaves together; what is saved goes through `quantizer`."""
    for leaf in leaves:
        leaf.grad = None
    if quantizer is None:
        y = call()
    else:
        with compress_saved_tensors(quantizer):
            y = call()
    y.sum().backward()
    return torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None])


# By name; each takes a positive tensor (64, 64) of numbers below 1, with history.
EXACT = {
    "log": torch.log,
    "log1p": lambda h: h.log1p(),
    "log2": torch.log2,
    "logit": torch.logit,
    "log in place": lambda h: (h + 0).log_(),
    "xlogy": lambda h: torch.xlogy(TARGETS, h),
    "sqrt": torch.sqrt,
    "rsqrt": lambda h: h.rsqrt(),
    "reciprocal": torch.reciprocal,
    "number / x": lambda h: 1 / h,
    "tensor / x": lambda h: TARGETS / h,
    "torch.div": lambda h: torch.div(TARGETS, other=h),
    "square root by **": lambda h: h**0.5,
    "inverse by **": lambda h: h**-1,
    "pow(-2)": lambda h: torch.pow(h, -2),
    "pow of tensors": lambda h: torch.pow(h, TARGETS),
    "norm": lambda h: h.norm(dim=0),
    "vector_norm": lambda h: torch.linalg.vector_norm(h, dim=1),
    "std": lambda h: h.std(1),
    "normalize": lambda h: F.normalize(h, dim=1),
    "cosine_similarity": lambda h: F.cosine_similarity(h, TARGETS),
    "pairwise_distance": lambda h: F.pairwise_distance(h, TARGETS),
    "cdist": lambda h: torch.cdist(h, TARGETS),
    "cumprod": lambda h: h.cumprod(1),
    "prod": lambda h: h.prod(1),
    "relu": lambda h: torch.relu(h - 0.5),
    "leaky_relu": lambda h: F.leaky_relu(h - 0.5, 0.1),
    "acos": torch.acos,
    "atanh": torch.atanh,
    "cosh": torch.cosh,
    "erfinv": torch.erfinv,
    "inv": lambda h: torch.linalg.inv(h + 20 * torch.eye(64)),
    "solve": lambda h: torch.linalg.solve(h + 20 * torch.eye(64), TARGETS),
    "logsumexp": lambda h: h.logsumexp(1),
    "logaddexp": lambda h: torch.logaddexp(h, TARGETS),
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "log_softmax": lambda h: h.log_softmax(1) * TARGETS,
    "cross_entropy": lambda h: F.cross_entropy(9 * h, CLASSES),
    "cross_entropy, label smoothing": lambda h: F.cross_entropy(9 * h, CLASSES, label_smoothing=0.1),
    "cross_entropy, ignored": lambda h: F.cross_entropy(9 * h, IGNORED),
    "cross_entropy of probabilities": lambda h: F.cross_entropy(9 * h, TARGETS.softmax(1)),
    "nll_loss": lambda h: F.nll_loss(F.log_softmax(9 * h, 1), CLASSES),
    "binary_cross_entropy": lambda h: F.binary_cross_entropy(h, TARGETS),
    "BCEWithLogits": lambda h: nn.BCEWithLogitsLoss()(h, TARGETS),
    "kl_div": lambda h: F.kl_div(h.log_softmax(1), TARGETS.log_softmax(1), log_target=True),
    "kl_div of two": lambda h: F.kl_div(h.log_softmax(1), (2 * h).log_softmax(1), log_target=True),
    "gaussian_nll_loss": lambda h: F.gaussian_nll_loss(h, TARGETS, h + 0.1),
    "poisson_nll_loss": lambda h: F.poisson_nll_loss(h, TARGETS),
    "ctc_loss": lambda h: F.ctc_loss(
        h.view(64, 8, 8).log_softmax(2), torch.ones(8, 4, dtype=torch.long), torch.full((8,), 64), torch.full((8,), 4)
    ),
}
# As `EXACT`; their gradients are linear in what they save, or err by no more than the rounding.
ROUNDED = {
    "square": torch.square,
    "cube by **": lambda h: h**3,
    "pow(2)": lambda h: h.pow(2),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "product": lambda h: h * h,
    "var": lambda h: h.var(1),
    "layer_norm": lambda h: F.layer_norm(h, (64,)),
    "group_norm": lambda h: F.group_norm(h, 4),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "linear": lambda h: F.linear(h, torch.ones(8, 64, requires_grad=True)),
    "conv": lambda h: F.conv1d(h[None], torch.ones(8, 64, 3, requires_grad=True)),
    "dividend": lambda h: h * h / torch.ones(64, 1, requires_grad=True),
}


class TestFunctions:
    @pytest.mark.parametrize("name", EXACT)
    def test_saves_exactly(self, name):
        x = (TARGETS * 0.8 + 0.1).requires_grad_()
        counting = Counting(PerGroup(2))
        exact = gradient(lambda: EXACT[name](x + 0), x)
        assert torch.equal(gradient(lambda: EXACT[name](x + 0), x, quantizer=counting), exact)
        assert counting.shapes == []

    @pytest.mark.parametrize("name", ROUNDED)
    def test_is_rounded(self, name):
        x = (TARGETS * 0.8 + 0.1).requires_grad_()
        counting = Counting(PerGroup(8))
        ours = gradient(lambda: ROUNDED[name](x + 0) * TARGETS.sum(), x, quantizer=counting)
        assert ours.isfinite().all()
        assert counting.shapes != []

    def test_a_divisor_that_was_rounded_before_is_exact(self):
        x = (TARGETS * 0.8 + 0.1).requires_grad_()

        def call():
            h = x + 0
            return h.cos() + TARGETS / h

        exact = gradient(call, x)
        assert relative(gradient(call, x, quantizer=PerGroup(8)), exact) < 0.01

    def test_log_probabilities_are_exact_wherever_they_are_saved(self):
        x = torch.randn(64, 64, requires_grad=True)
        counting = Counting()
        gradient(lambda: x.log_softmax(1).view(32, 128).exp() * 2, x, quantizer=counting)
        assert counting.shapes == [(32, 128)]  # exp's output


class TestNotFinite:
    @pytest.mark.parametrize("quantizer", [PerGroup(4), Outlier(3)])
    @pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
    def test_is_left_alone(self, quantizer, number):
        x, y = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

        def call():
            h = x * 1
            h = h.masked_fill(torch.arange(64) == 5, number)
            return (h * y)[:, 6:]

        exact = gradient(call, y)
        assert torch.equal(gradient(call, y, quantizer=quantizer).nan_to_num(7), exact.nan_to_num(7))

    def test_half_precision_that_overflows(self):
        x, y = (torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        call = lambda: (x * 3e38) * 10 * y  # noqa: E731
        exact = gradient(call, y)
        assert torch.equal(gradient(call, y, quantizer=PerGroup(4)).nan_to_num(7), exact.nan_to_num(7))


def attention(mask):
    """Leaves of one attention, and the call."""
    x = torch.randn(4, 2, 32, 16, requires_grad=True)
    call = lambda: F.scaled_dot_product_attention(x / 2, x / 3, x * 1, mask).square()  # noqa: E731
    return call, x


def causal(value):
    return torch.full((32, 32), value).triu(1).expand(4, 1, 32, 32)


def distances(slope=0.5):
    return -slope * (torch.arange(32)[:, None] - torch.arange(32)).abs().float().expand(4, 2, 32, 32)


MASKS = {
    "none": None,
    "-inf": causal(-torch.inf),
    "finfo.min": causal(torch.finfo(torch.float32).min),
    "-1e4": causal(-1e4),
    "ALiBi": distances(),
    "boolean": torch.ones(32, 32, dtype=torch.bool).tril(),
}


class TestAttention:
    @pytest.mark.parametrize("mask", MASKS)
    def test_masks_and_log_sum_exp_are_exact(self, mask):
        call, x = attention(MASKS[mask])
        exact = gradient(call, x)
        counting = Counting(PerGroup(8))
        ours = gradient(call, x, quantizer=counting)
        assert relative(ours, exact) < 0.05
        assert counting.shapes == [(4, 2, 32, 16)] * len(counting.shapes)
        assert len(counting.shapes) >= 4  # query, key, value, output

    @pytest.mark.parametrize("autocast", [False, True])
    def test_a_bias_that_learns_is_exact(self, autocast):
        bias = torch.randn(1, 2, 32, 32, requires_grad=True)
        x = torch.randn(4, 2, 32, 16, requires_grad=True)
        counting = Counting(PerGroup(8))

        def call():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return F.scaled_dot_product_attention(x / 2, x / 3, x * 1, bias * 2).float().square()

        ours = gradient(call, x, bias, quantizer=counting)
        assert relative(ours, gradient(call, x, bias)) < 0.05
        assert (1, 2, 32, 32) not in counting.shapes

    def test_grouped_queries(self):
        q = torch.randn(4, 8, 32, 16, requires_grad=True)
        k = torch.randn(4, 2, 32, 16, requires_grad=True)
        call = lambda: F.scaled_dot_product_attention(q / 2, k / 2, k * 1, is_causal=True, enable_gqa=True)  # noqa: E731
        assert relative(gradient(call, q, k, quantizer=PerGroup(8)), gradient(call, q, k)) < 0.05

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_torchs_own_with_padding(self, need_weights):
        net = nn.MultiheadAttention(64, 4, batch_first=True)
        x = torch.randn(4, 32, 64, requires_grad=True)
        padding = (torch.arange(32) >= 28).expand(4, 32)
        call = lambda: net(x * 1, x * 1, x * 1, padding, need_weights)[0].square()  # noqa: E731
        leaves = [x, *net.parameters()]
        assert relative(gradient(call, *leaves, quantizer=PerGroup(8)), gradient(call, *leaves)) < 0.05


class TestDropout:
    @pytest.mark.parametrize(
        "dropout", [nn.Dropout(0.1), nn.Dropout2d(0.5), lambda h: F.dropout(h, 0.3), lambda h: F.alpha_dropout(h, 0.2)]
    )
    def test_masks_are_exact(self, dropout):
        x = torch.randn(8, 16, 8, 8, requires_grad=True)

        def call():
            torch.manual_seed(5)
            return dropout(x * 2) * 3

        exact = gradient(call, x)
        counting = Counting(PerGroup(2))
        assert torch.equal(gradient(call, x, quantizer=counting), exact)
        assert counting.shapes == []

    @needs_top_hooks
    def test_masks_take_a_bit(self):
        x = torch.randn(64, 64, requires_grad=True)
        with compress_saved_tensors(PerGroup(2)):
            kept = fewbit.memory.profile(nn.Dropout(0.5), x * 2)
        assert kept.total < 64 * 64 / 8 + 64


class TestCompiled:
    def test_compiled_once_for_all_contexts(self):
        net, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(64, 64)
        compilations = []

        def backend(graph, inputs):
            compilations.append(graph)
            return graph

        compiled = torch.compile(net, backend=backend)
        for _ in range(3):
            with compress_saved_tensors(PerGroup(4)):
                compiled(x).sum().backward()
        assert len(compilations) == 1


class TestUse:
    def test_layers_that_hold_codes_are_left_alone(self):
        net = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 64))
        fewbit.convert(net, level="L2")
        x, counting = torch.randn(512, 256, requires_grad=True), Counting()
        gradient(lambda: net(x * 1), x, *net.parameters(), quantizer=counting)
        assert counting.shapes == []

    def test_rows_of_zeros_come_back(self):
        w = torch.randn(64, 64, requires_grad=True)
        x = torch.randn(64, 96, requires_grad=True)
        zeros = (torch.arange(64) % 2)[:, None]

        def call():
            return (w @ (x * zeros)) * 1

        saved = []

        class Watching(Counting):
            def within(self, features):
                return self

            def compress(self, h):
                c = PerGroup(2).within(h.shape[-1]).compress(h)
                saved.append(c.decompress())
                return c

        gradient(call, w, quantizer=Watching())
        assert any((h[::2] == 0).all() for h in saved)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoints_start_from_exact_inputs(self, reentrant):
        net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 64))
        x = torch.randn(64, 64, requires_grad=True)
        counting = Counting(PerGroup(2))

        def call():
            torch.manual_seed(3)
            return checkpoint(net, x * 2, use_reentrant=reentrant) * 1

        exact = gradient(call, x, *net.parameters())
        assert torch.equal(gradient(call, x, *net.parameters(), quantizer=counting), exact)
        assert counting.shapes == []

    def test_outputs_that_are_left_alone_are_freed_without_backward(self):
        x = torch.randn(64, 64, requires_grad=True)
        with compress_saved_tensors(PerGroup(4)):
            y = (x * 1).log_softmax(1)
        gone = StorageWeakRef(y.untyped_storage())
        del y
        gc.collect()
        assert gone.expired()

    def test_the_same_context_again_and_inside_itself(self):
        x, counting = (TARGETS + 0.1).requires_grad_(), Counting()
        context = compress_saved_tensors(counting)
        for _ in range(2):
            with context:
                a = (x * 1).log()
                with context:
                    b = (x * 1).sqrt()
                c = (x * 1).reciprocal()
        (a + b + c).sum().backward()
        assert counting.shapes == []
        assert (x * 1).log().sum().isfinite()

    def test_after_an_exception_nothing_is_compressed(self):
        x, counting = torch.randn(64, 64, requires_grad=True), Counting()
        with pytest.raises(ZeroDivisionError), compress_saved_tensors(counting):
            _ = 1 // 0
        gradient(lambda: (x * 2).exp(), x)
        assert counting.shapes == []

    def test_threads_do_not_mistake_each_others_functions(self):
        context = compress_saved_tensors(Counting())

        def work(function):
            x = (TARGETS + 0.1).clone().requires_grad_()
            for _ in range(30):
                with context:
                    y = function(x + 0)
                (g,) = torch.autograd.grad(y.sum(), x)
                (exact,) = torch.autograd.grad(function(x + 0).sum(), x)
                assert torch.equal(g, exact)

        in_threads(work, (torch.log, torch.sqrt, torch.reciprocal))

    @needs_top_hooks
    def test_profile_sees_what_is_kept(self):
        net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
        x = torch.randn(256, 256)
        exact = fewbit.memory.profile(net, x).total
        with compress_saved_tensors(PerGroup(4)):
            assert fewbit.memory.profile(net, x).total < exact / 2


def models():
    """Small models of transformers by name: the model, its inputs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    words = torch.randint(1, 100, (4, 64))
    padding = (torch.arange(64) < torch.tensor([64, 50, 40, 30])[:, None]).long()
    size = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

    def made(name, labels, padded=True, **options):
        model = getattr(transformers, name)
        inputs = {"input_ids": words, "labels": labels} | ({"attention_mask": padding} if padded else {})
        return lambda: (model(model.config_class(**size, **options)), inputs)

    no_cache = {"use_cache": False}
    of_gpt2 = {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **no_cache}
    of_t5 = {
        "num_decoder_layers": 2,
        "d_kv": 16,
        "d_ff": 128,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        **no_cache,
    }
    masked = torch.where(padding == 1, words, -100)
    return {
        "GPT-2": made("GPT2LMHeadModel", words, padded=False, **of_gpt2),
        "BERT with padding": made("BertForMaskedLM", masked, **quiet, intermediate_size=128),
        "T5": made("T5ForConditionalGeneration", words, **of_t5),
        "Llama with grouped queries": made(
            "LlamaForCausalLM", words, intermediate_size=128, num_key_value_heads=2, **no_cache
        ),
        "Bloom with ALiBi": made("BloomForCausalLM", words, **no_cache),
    }


class TestModels:
    NAMES = ("GPT-2", "BERT with padding", "T5", "Llama with grouped queries", "Bloom with ALiBi")

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", NAMES)
    def test_gradients_err_no_more_than_at_L2(self, name, attention):
        """Hooks round the same tensors and besides what functions keep; L2's error is all but that of linear layers.

        T5 does not divide its scores by √d, so that what attention keeps weighs more, and L2 leaves that exact.
        """
        net, inputs = models()[name]()
        if attention == "sdpa" and not net._supports_sdpa:
            pytest.skip("has no such attention")
        net.set_attn_implementation(attention)
        leaves = list(net.parameters())
        call = lambda: net(**inputs).loss  # noqa: E731
        exact = gradient(call, *leaves)
        hooks = relative(gradient(call, *leaves, quantizer=PerGroup(4)), exact)
        fewbit.convert(net, level="L2")
        level = relative(gradient(call, *leaves), exact)
        both = relative(gradient(call, *leaves, quantizer=PerGroup(4)), exact)
        factor = 3 if name == "T5" else 1.2
        assert hooks < factor * level
        assert both < factor * level
