"""`torch.compile` with few bits between the passes: what is computed, what is kept, what it goes together with.

Most tests run the divided graphs op by op; those of the class TestInductor compile them as users do.
"""

import copy
import inspect
import os
import subprocess
import sys
import time

import fewbit
import pytest
import torch
from compiled import (
    Block,
    LanguageModel,
    exactly,
    few_bits,
    forward_of,
    gradient_error,
    gradients,
    kept_bytes,
    kept_tensors,
    op_by_op,
)
from fewbit import FewbitError
from fewbit.runtime.compile.backend import with_budget
from fewbit.runtime.compile.cut import rounded
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner
from fewbit.runtime.compile.roles import Role
from fewbit.tables import compiling
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import partitioners
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOKENS = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(0))


def error(model, tokens=TOKENS, **options):
    """The relative error of the gradients, and the share of the bytes that torch's own partitioner keeps."""
    owned = [*model.parameters(), tokens]
    exact = exactly(copy.deepcopy(model))
    loss, true = gradients(exact, tokens)
    shared = [*exact.parameters(), tokens]
    all_bytes = kept_bytes(exact(tokens), shared)
    few = few_bits(model, **options)
    few_loss, near = gradients(few, tokens)
    assert torch.equal(loss, few_loss)
    return float((near - true).norm() / true.norm()), kept_bytes(few(tokens), owned) / all_bytes


class TestGradients:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("bits", "most", "share"), [(8, 0.01, 0.27), (4, 0.12, 0.145), (2, 0.8, 0.08), ("auto", 0.06, 0.2)]
    )
    def test_err_little_for_the_bytes_kept_and_the_loss_is_exact(self, bits, most, share):
        found, kept = error(LanguageModel(), bits=bits, rounding="nearest", smallest=1024)
        assert found < most and kept < share

    def test_rounded_at_random_have_no_bias_but_that_of_nonlinear_uses(self):
        """The mean of 64 draws errs by an eighth of one draw's error, or 1.3 of that by chance."""
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.LayerNorm(128, elementwise_affine=False))
        x, w = torch.randn(64, 128), torch.randn(64, 128)
        _, true = gradients(few_bits(Weighted(model, w), bits=None), x)
        few = few_bits(Weighted(model, w), bits=4, smallest=1024)
        draws = torch.stack([gradients(few, x)[1] for _ in range(64)])
        one = (draws - true).norm(dim=1).mean()
        assert one / true.norm() > 0.01
        assert (draws.mean(0) - true).norm() < 1.3 / 8 * one

    def test_follow_the_seed(self):
        few = few_bits(LanguageModel(), bits=4)
        torch.manual_seed(1)
        first = gradients(few, TOKENS)[1]
        other = gradients(few, TOKENS)[1]
        torch.manual_seed(1)
        again = gradients(few, TOKENS)[1]
        # Products on several threads, as MKL divides them, are not the same bit for bit.
        assert (again - first).norm() < 1e-5 * first.norm() < 1e-2 * (other - first).norm()

    def test_a_row_of_zeros_has_none_in_weights(self):
        model = Weighted(nn.Linear(128, 64), torch.zeros(64, 64).index_fill(0, torch.tensor(3), 1.0))
        x = torch.randn(64, 128).index_fill(0, torch.tensor(3), 0.0)
        gradients(few_bits(model, bits=2, smallest=1024), x * 1)
        assert torch.all(model.model.weight.grad == 0)

    def test_masks_of_minus_infinity_give_finite_ones(self):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(64, 64)

            def forward(self, x):
                scores = self.layer(x) @ x.transpose(1, 2)
                mask = torch.full((64, 64), float("-inf")).triu(1)
                return (torch.softmax(scores + mask, -1) @ x).square().mean()

        model, x = Masked(), torch.randn(4, 64, 64)
        assert gradient_error(model, x, bits=8, rounding="nearest", smallest=1024) < 0.02

    def test_of_relu_have_its_sign_exactly(self):
        """A rounded sign would let a gradient pass where none does."""
        model = Weighted(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(64, 64))
        x = torch.randn(64, 64)
        gradients(model, x)
        exact_first = model.model[0].bias.grad.clone()
        gradients(few_bits(model, bits=2, smallest=1024), x)
        assert torch.allclose(model.model[0].bias.grad, exact_first, rtol=1e-4, atol=1e-4)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        "layer",
        [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ReLU(), nn.Tanh(), nn.Softplus(), nn.Mish(), nn.ELU()],
        ids=str,
    )
    def test_of_activations(self, layer):
        model = Weighted(nn.Sequential(nn.Linear(64, 256), layer, nn.Linear(256, 64)), torch.randn(64, 64))
        x = torch.randn(64, 64)
        assert gradient_error(model, x, bits=8, smallest=1024) < 0.02

    def test_of_convolutions_with_batch_norm(self):
        layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3), nn.Flatten()
        model = Weighted(nn.Sequential(*layers), torch.randn(8, 8 * 13 * 13))
        x = torch.randn(8, 3, 32, 32)
        assert gradient_error(model, x, bits=8, smallest=1024) < 0.02


class Weighted(nn.Module):
    """A model with the loss Σ w · model(x)."""

    def __init__(self, model, weights):
        super().__init__()
        self.model = model
        self.register_buffer("weights", weights)

    def forward(self, x):
        return (self.model(x) * self.weights).sum()


class TestKept:
    def test_parameters_under_autocast_are_cast_again_and_not_kept(self):
        model = LanguageModel()
        few = few_bits(model, bits=4, smallest=1024)
        with torch.autocast("cpu", torch.bfloat16):
            loss = few(TOKENS)
        sizes = {p.shape for p in model.parameters()} | {p.t().shape for p in model.parameters() if p.dim() == 2}
        assert not [x.shape for x in kept_tensors(loss, [*model.parameters(), TOKENS]) if x.shape in sizes]

    def test_truth_values_take_a_bit(self):
        layers = nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 256)
        model = Weighted(nn.Sequential(*layers), torch.randn(64, 256))
        few = few_bits(model, bits=8)
        assert any(x.numel() == 64 * 256 // 8 for x in kept_tensors(few(torch.randn(64, 256))))

    def test_frozen_weights_keep_nothing_for_their_gradients(self):
        layers = [nn.Linear(128, 128) for _ in range(4)]
        for layer in layers[1:]:
            layer.weight.requires_grad_(False)
        model, x = Weighted(nn.Sequential(*layers), torch.randn(64, 128)), torch.randn(64, 128)
        assert kept_bytes(few_bits(model, bits=8, smallest=64)(x), [*model.parameters(), model.weights, x]) == 0

    def test_what_the_caller_gets_is_kept_as_it_is(self):
        """A compressed copy of an output would add memory while the caller holds the output."""
        few = few_bits(nn.Sequential(nn.Linear(128, 128), nn.Softmax(-1)), bits=4, smallest=1024)
        y = few(torch.randn(64, 128))
        assert any(x.data_ptr() == y.data_ptr() for x in kept_tensors(y))

    @pytest.mark.skipif("no_vc_check" not in inspect.getsource(partitioners), reason="torch checks all that it saves")
    def test_what_a_context_has_of_a_function_is_read_though_it_was_written_since(self):
        """Torch knows such tensors by their place behind all others: codes among the last took that of a weight."""

        class Stashing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.x, ctx.w = x, w
                return x @ w

            @staticmethod
            def backward(ctx, g):
                return g @ ctx.w, ctx.x.t() @ g

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))

            def forward(self, x):
                return Stashing.apply(self.layer(x), self.weight).square().mean()

        model, x, found = Model(), torch.randn(64, 64), []
        for kind in (copy.deepcopy(model), few_bits(model, bits=8, smallest=1024)):
            loss = kind(x)
            with torch.no_grad():
                kind.weight.mul_(2)
            loss.backward()
            found.append(kind.layer.weight.grad)
        assert (found[1] - found[0]).norm() < 0.01 * found[0].norm()

    @pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, *filter(None, [getattr(torch, "float4_e2m1fn_x2", None)])])
    def test_exponents_and_pairs_of_numbers_in_a_byte_are_kept_as_they_are(self, dtype):
        graph = fx.Graph()
        node = graph.placeholder("scales")
        node.meta["val"] = torch.empty(64, 128, dtype=dtype, device="meta")
        choice = rounded(node, Role.LINEAR, 2, CompileOptions())
        assert choice.bits is None and choice.nbytes == 64 * 128

    def test_modules_by_pattern(self):
        model = LanguageModel()
        owned = [*model.parameters(), TOKENS]
        sizes = []
        for options in ({"bits": 4}, {"bits": 4, "keep": ("blocks.1*",)}, {"bits": {"blocks.1*": None, "linear": 4}}):
            torch._dynamo.reset()
            sizes.append(kept_bytes(few_bits(model, smallest=1024, **options)(TOKENS), owned))
        assert sizes[0] < sizes[1] < 8 * sizes[0] and sizes[0] < sizes[2]


class TestPlaces:
    """Where values are quantized: right after the kernel that reads them last."""

    def test_what_one_kernel_reads_last_is_quantized_in_one_call(self):
        """A gate is read where its product with up is computed: compilers fuse its activation with that."""

        class Gated(nn.Module):
            def __init__(self):
                super().__init__()
                self.before, self.gate, self.up, self.down = (nn.Linear(128, 128, bias=False) for _ in range(4))

            def forward(self, x):
                x = self.before(x)
                return self.down(nn.functional.silu(self.gate(x)) * self.up(x)).square().mean()

        forward = forward_of(Gated(), torch.randn(64, 128), bits=4, smallest=1024)
        first, _ = (n for n in forward if n.target is torch.ops.fewbit.per_group_quantize_buffers.default)
        assert len(first.args[0]) == 3  # x, gate and up; what the second call takes is squared

    def test_what_a_product_reads_last_is_not_kept_for_it_longer(self):
        """GELU's input is quantized before the product of its output, which may take much memory."""
        layers = nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 512, bias=False)
        forward = forward_of(Weighted(nn.Sequential(*layers), torch.randn(64, 512)), torch.randn(64, 128), bits=4)
        names = [str(n.target) for n in forward]
        assert names.index("fewbit.per_group_quantize_buffers.default") < names.index("aten.mm.default")


class TestGoesTogetherWith:
    @pytest.mark.deep
    def test_sizes_that_vary_without_compiling_again(self):
        compiled = []

        class Counting(FewbitPartitioner):
            def __call__(self, *args, **kwargs):
                compiled.append(1)
                return super().__call__(*args, **kwargs)

        model = LanguageModel()
        backend = op_by_op(Counting(CompileOptions(bits=8, rounding="nearest")))
        few = torch.compile(model, backend=backend, fullgraph=True)
        exact = LanguageModel()
        exact.load_state_dict(model.state_dict())
        for rows in (4, 6, 9, 3, 7):
            tokens = torch.randint(0, 320, (rows, 64))
            _, true = gradients(exact, tokens)
            _, near = gradients(few, tokens)
            assert (near - true).norm() < 0.02 * true.norm()
        assert len(compiled) == 2

    def test_accumulated_gradients(self):
        model = LanguageModel()
        few = few_bits(model, bits=8, rounding="nearest")
        _, once = gradients(few, TOKENS)
        few(TOKENS).backward()
        twice = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.allclose(twice, 2 * once, rtol=1e-4, atol=1e-6)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("outside", (False, True))
    def test_checkpointing(self, outside):
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(2))

            def forward(self, x):
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return x.square().mean()

        model, x = Checkpointed(), torch.randn(4, 64, 128)
        if outside:
            for block in model.blocks:
                block.compile(backend=op_by_op(FewbitPartitioner(CompileOptions(bits=8))), fullgraph=True)
            few = model
        else:
            few = few_bits(model, bits=8)
        plain = copy.deepcopy(model)
        for module in plain.modules():
            module._compiled_call_impl = None
        exact_loss, true = gradients(plain, x)
        loss, near = gradients(few, x)
        assert torch.allclose(loss, exact_loss) and (near - true).norm() < 0.03 * true.norm()

    def test_parts_of_a_model_compiled_by_themselves_with_options_of_their_own(self):
        model = LanguageModel()
        _, true = gradients(model, TOKENS)
        for bits, block in zip((8, 4), model.blocks, strict=True):
            backend = op_by_op(FewbitPartitioner(CompileOptions(bits=bits, rounding="nearest", smallest=1024)))
            block.compile(backend=backend, fullgraph=True)
        _, near = gradients(model, TOKENS)
        assert 0.001 < (near - true).norm() / true.norm() < 0.1

    @pytest.mark.deep
    def test_adapters_of_low_rank(self):
        class Adapted(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer.requires_grad_(False)
                self.down, self.up = nn.Linear(128, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)

            def forward(self, x):
                return self.layer(x) + self.up(self.down(x))

        model = LanguageModel().requires_grad_(False)
        for block in model.blocks:
            block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)
        assert gradient_error(model, TOKENS, bits=8, smallest=1024) < 0.03

    def test_converted_layers_whose_codes_stay_as_they_are(self):
        layers = nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128).requires_grad_(False)
        model, x = Weighted(nn.Sequential(*layers), torch.randn(64, 128)), torch.randn(64, 128)
        fewbit.convert(model, bits=3)
        _, true = gradients(model, x)
        _, near = gradients(few_bits(model, bits=4, smallest=64), x)
        assert torch.allclose(near, true, rtol=1e-4, atol=1e-4)

    @pytest.mark.deep
    def test_less_by_computing_more_again(self):
        model = LanguageModel()
        owned = [*model.parameters(), TOKENS]
        all_kept = kept_bytes(few_bits(model, bits=4, smallest=1024)(TOKENS), owned)
        torch._dynamo.reset()
        half = kept_bytes(few_bits(model, bits=4, smallest=1024, recompute=0.4)(TOKENS), owned)
        assert half < 0.8 * all_kept

    @pytest.mark.deep
    def test_recompute_without_bits_is_torchs_own_budget(self):
        model = LanguageModel()
        owned = [*model.parameters(), TOKENS]
        kept = {}
        for recompute in (1.0, 0.3):
            torch._dynamo.reset()
            few = torch.compile(model, backend="fewbit", options={"bits": None, "recompute": recompute})
            kept[recompute] = kept_bytes(few(TOKENS), owned)
            torch._dynamo.reset()
            by_torch = torch.compile(model, backend=with_budget(recompute))
            assert kept_bytes(by_torch(TOKENS), owned) == kept[recompute]
        assert kept[0.3] < 0.5 * kept[1.0]

    @pytest.mark.deep
    @pytest.mark.parametrize("options", [{"keep": ("*",), "smallest": 10**9}, {"bits": 4, "smallest": 10**9}])
    def test_where_nothing_is_rounded_torchs_own_cut_is_left(self, options):
        model = LanguageModel()
        owned = [*model.parameters(), TOKENS]
        exact = kept_bytes(torch.compile(model, backend="inductor")(TOKENS), owned)
        torch._dynamo.reset()
        few = torch.compile(model, backend="fewbit", options=options)
        assert kept_bytes(few(TOKENS), owned) == exact

    @pytest.mark.deep
    def test_a_budget_lowers_bits_until_it_is_met(self):
        model = LanguageModel()
        owned = [*model.parameters(), TOKENS]
        all_kept = kept_bytes(few_bits(model, smallest=1024)(TOKENS), owned)
        for share, least in ((0.75, 0.4), (0.5, 0.2)):
            torch._dynamo.reset()
            budget = int(share * all_kept)
            assert least * all_kept < kept_bytes(few_bits(model, smallest=1024, budget=budget)(TOKENS), owned) <= budget

    @pytest.mark.deep
    def test_a_budget_out_of_reach_is_refused_in_one_line(self):
        with pytest.raises(BackendCompilerFailed, match=r"1 bit for each value takes .* bytes, the budget is 1,000"):
            few_bits(LanguageModel(), budget=1000)(TOKENS)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"bits": 9}, "bits is an integer from 1 to 8"),
            ({"bits": "four"}, "bits is 'auto', an integer from 1 to 8, a mapping by role or None, not 'four'"),
            ({"bits": True}, "bits is an integer"),
            ({"bits": {"linear": 0}}, "bits of 'linear'"),
            ({"rounding": "up"}, "'stochastic' or 'nearest'"),
            ({"quantizer": "turned"}, "'auto', 'groups' or 'rotated'"),
            ({"group": 1}, "group is an integer not below 32"),
            ({"smallest": -1}, "smallest"),
            ({"keep": "blocks*"}, "a sequence of patterns"),
            ({"keep": 5}, "a sequence of patterns"),
            ({"bits": {3: 4}}, "have names"),
            ({"bits": None, "budget": 10}, "with bits=None there are none"),
            ({"recompute": True}, "from 0 to 1"),
            ({"recompute": 2}, "from 0 to 1"),
            ({"bits": None, "recompute": 0.5}, "recompute without bits is the backend fewbit's"),
            ({"tables": 3}, "tables is True or False"),
            ({"budget": -1}, "budget is an integer not below 0"),
            ({"budget": "many"}, "'many' is not a size"),
            ({"bit": 4}, "is no option of the backend fewbit: bits"),
        ],
    )
    def test_that_are_wrong_are_refused_in_one_line(self, options, words):
        with pytest.raises(FewbitError, match=words) as caught:
            fewbit.inductor_options(**options)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("bits", "quantizer", "of_scores"),
        [
            *((1, "groups", 2), (2, "groups", 4), (3, "groups", 6), (4, "auto", 8), (8, "auto", 8)),
            (None, "auto", None),
            *((1, "auto", 2), (2, "auto", 3), (3, "auto", 4), (4, "rotated", 5), (8, "rotated", 8)),
        ],
    )
    def test_queries_and_keys_have_twice_the_bits_of_all_else_or_one_more(self, bits, quantizer, of_scores):
        options = CompileOptions(bits=bits, quantizer=quantizer)
        assert options.bits_for(Role.LINEAR, ()) == bits
        assert options.bits_for(Role.SCORES, ()) == of_scores
        assert CompileOptions(bits={"scores": 3}).bits_for(Role.SCORES, ()) == 3

    def test_each_change_is_another_compilation_to_caches(self):
        changes = [
            *({}, {"bits": 4}, {"bits": 3}, {"bits": {"linear": 4}}, {"bits": {"linear": 3}}),
            {"rounding": "nearest"},
        ]
        changes += [
            *({"group": 256}, {"keep": ("head",)}, {"smallest": 1}, {"recompute": 0.5}, {"budget": 10**6}),
            *({"tables": False}, {"quantizer": "rotated"}, {"bits": {"nonlinear": 4}}),
        ]
        assert len({CompileOptions.of(change).uuid() for change in changes}) == len(changes)
        assert CompileOptions(bits=4).uuid() == CompileOptions(bits=4).uuid()

    def test_no_bits_is_inductor_itself(self):
        assert fewbit.inductor_options(bits=None) == {}

    @pytest.mark.parametrize(
        ("given", "reuses"),
        [
            ({}, False),
            ({"allow_buffer_reuse": True}, True),
            ({"allow-buffer-reuse": True}, True),
        ],  # as torch takes names
    )
    def test_inductor_frees_buffers_early_unless_it_is_told_otherwise(self, monkeypatch, given, reuses):
        found = []
        compiler = "torch._inductor.compile_fx.compile_fx"
        monkeypatch.setattr(compiler, lambda graph, inputs, config_patches: found.append(config_patches) or graph)
        torch.compile(nn.Linear(4, 4), backend="fewbit", options={"bits": 4, **given})(torch.ones(4, 4))
        assert [patches["allow_buffer_reuse"] for patches in found] == [reuses] and not any("-" in n for n in found[0])

    def test_torchs_compiler_is_spoken_for_where_it_takes_long(self, monkeypatch, caplog):
        def said():
            return [record.getMessage() for record in caplog.records if record.name == "fewbit.compiling"]

        def compile_fx(graph, inputs, **_):
            over = time.monotonic() + 60
            while not said() and time.monotonic() < over:
                time.sleep(0.01)
            return graph.forward

        monkeypatch.setattr(compiling, "SOON", 0.0)
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
        torch.compile(nn.Linear(4, 4), backend="fewbit")(torch.ones(2, 4))
        assert said()[0].startswith("fewbit: torch's compiler builds a graph of the step")

    def test_the_partitioner_is_not_an_option(self):
        with pytest.raises(BackendCompilerFailed, match="'custom_partitioner_fn' is no option of the backend fewbit"):
            torch.compile(nn.Linear(4, 4), backend="fewbit", options={"custom_partitioner_fn": 1})(torch.ones(4, 4))

    def test_torch_without_the_hook_says_what_is_needed(self, monkeypatch):
        from torch._inductor import config

        without = {name: value for name, value in config.get_config_copy().items() if name != "custom_partitioner_fn"}
        monkeypatch.setattr("fewbit.runtime.compile.backend._known", lambda: without)
        with pytest.raises(FewbitError, match=r"needs torch 2\.9 or newer"):
            fewbit.inductor_options(bits=4)


TRAIN = """
import sys, torch
from compiled import Perceptron, gradients
assert "fewbit.runtime.compile.backend" not in sys.modules
torch.manual_seed(0)
model, x = Perceptron(), torch.randn(64, 128)
options = {"bits": 4, "rounding": "nearest", "smallest": 1024}
few = torch.compile(model, backend="fewbit", options=options, fullgraph=True)
loss, near = gradients(few, x)
import fewbit
report = fewbit.compile_report(few)
from torch._dynamo.utils import counters
print(float(loss), float(near.norm()), report.nbytes, counters["aot_autograd"]["autograd_cache_hit"])
"""


class Images(nn.Module):
    """Three convolutions, and behind the first two a normalization and an activation."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.first, self.second, self.last = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 24, 3), nn.Conv2d(24, 8, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(24)])

    def forward(self, x):
        x = self.activation(self.norms[0](self.first(x)))
        return self.last(self.activation(self.norms[1](self.second(x))))


class TestInductor:
    @pytest.mark.parametrize(
        ("activation", "bits", "dynamic"), [(F.leaky_relu, 8, False), (F.elu, 4, True)], ids=["signs", "table"]
    )
    def test_convolutions_are_laid_out_otherwise_than_in_the_graph(self, activation, bits, dynamic):
        """Inductor computes them channels last: what the graph reads in memory has to lie there as the graph says."""
        model = Images(activation)
        few = torch.compile(model, backend="fewbit", options={"bits": bits}, dynamic=dynamic)
        for samples in (4, 7) if dynamic else (4,):
            x, w = torch.randn(samples, 8, 18, 18), torch.randn(samples, 8, 16, 16)
            true, near = (gradients(Weighted(own, w), x)[1] for own in (model, few))
            assert (near - true).norm() < 0.1 * true.norm()
            if samples == 4:
                kept = kept_bytes(Weighted(few, w)(x), [*model.parameters(), x, w])
                # Inductor's copy of the picture is kept, and none of the weights.
                assert kept == pytest.approx(fewbit.compile_report(few).nbytes + x.nbytes, rel=0.02)

    @pytest.mark.deep
    def test_found_by_its_name_and_again_in_the_cache_by_a_second_process(self, tmp_path):
        """The second process compiles nothing, computes the same, and has the report if its description is there."""

        def trained(descriptions):
            folders = {
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
                "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
                "FEWBIT_CACHE": str(tmp_path / descriptions),
            }
            path = os.pathsep.join(p for p in sys.path if p)
            return subprocess.run(
                [sys.executable, "-c", TRAIN], env=os.environ | folders | {"PYTHONPATH": path},
                capture_output=True, text=True, check=False,
            )  # fmt: skip

        first, second, without = trained("fewbit"), trained("fewbit"), trained("another")
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert first.stdout.split()[:3] == second.stdout.split()[:3]
        assert (first.stdout.split()[3], second.stdout.split()[3]) == ("0", "1")
        assert "FewbitError: torch found a graph of this model in its cache" in without.stderr.splitlines()[-1]

    # Without the cache of graphs, but with what g++ has built: half of the time goes into its headers.
    @torch._inductor.config.patch(fx_graph_cache=False)
    @torch._functorch.config.patch(enable_autograd_cache=False)
    def test_computes_what_the_graphs_say(self):
        """Beside Inductor alone: the loss bit for bit with dropout, the gradients near, the bytes of the report."""
        model = LanguageModel(blocks=1, dropout=0.1)
        plain = torch.compile(copy.deepcopy(model), fullgraph=True)
        torch.manual_seed(0)
        loss, true = gradients(plain, TOKENS)
        few = torch.compile(model, options=fewbit.inductor_options(bits=4, smallest=1024), fullgraph=True)
        torch.manual_seed(0)
        few_loss, near = gradients(few, TOKENS)
        assert torch.equal(loss, few_loss)
        assert 0.01 < (near - true).norm() / true.norm() < 0.2
        report = fewbit.compile_report(few)
        assert kept_bytes(few(TOKENS), [*model.parameters(), TOKENS]) == pytest.approx(report.nbytes, rel=0.02)
        assert kept_bytes(plain(TOKENS), [*plain.parameters(), TOKENS]) == pytest.approx(
            report.exact_graph_bytes, rel=0.02
        )
