"""`fewbit.memory.compare` by every method, the peaks beside what is kept, and models measured without values."""

import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.quantizers import Outlier, PerGroup
from small_modules import llama
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

METHODS = {
    "bits": {"bits": 2},
    "L0": {"level": "L0"},
    "L1": {"level": "L1"},
    "L2": {"level": "L2"},
    "L3": {"level": "L3", "bits": 1.5},
    "L4": {"level": "L4"},
    "L5": {"level": "L5"},
    "preact": {"fuse_preact": 4},
    "V-Quant": {"outliers": 0.02, "bits": 3},
    "V-Quant, a mask": {"outliers": 0.05, "bits": 1},
    "together": {"glu": "parts", "fuse_preact": 4, "level": "L3"},
    "hooks": {"saved": PerGroup(bits=4)},
    "hooks of large values": {"saved": Outlier(bits=3, ratio=0.02)},
    "L2 and hooks": {"level": "L2", "saved": PerGroup(bits=4)},
}


def network():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1)),
        *(nn.GroupNorm(2, 16), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64)),
        *(nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


def numbers(comparison):
    return comparison.before.total, comparison.after.total, comparison.peak_before.bytes


class TestMethods:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
    def test_count_the_same_with_values_on_the_meta_device_and_on_fake_tensors(self, options):
        real = memory.compare(network(), torch.randn(8, 3, 8, 8), **options)
        with torch.device("meta"):
            meta = memory.compare(network(), torch.randn(8, 3, 8, 8), **options)
        with FakeTensorMode():
            fake = memory.compare(network(), torch.randn(8, 3, 8, 8), **options)
        assert numbers(meta) == numbers(fake) == numbers(real)
        # Kernels of the CPU have few temporary tensors of their own, and none on the meta device.
        assert meta.peak_after == fake.peak_after
        assert meta.peak_after.bytes == pytest.approx(real.peak_after.bytes, rel=0.01)
        # L1: the caller holds what the first convolution gets, and a ReLU what the second does.
        if options not in ({"level": "L0"}, {"level": "L1"}):
            assert real.saved > 0

    @pytest.mark.parametrize("name", [name for name in METHODS if "hooks" not in name and name != "L5"])
    def test_keep_what_a_converted_model_keeps(self, name):
        model, x = network(), torch.randn(8, 3, 8, 8)
        found = memory.compare(model, x, **METHODS[name]).after.total
        fewbit.convert(model, **METHODS[name])
        assert found == memory.profile(model, x).total

    def test_of_a_transformer_are_never_handed_to_the_model(self):
        with torch.device("meta"):
            model, tokens = llama(32, 64, 1, 32, heads=2), torch.zeros(2, 16, dtype=torch.long)
            comparison = memory.compare(model, input_ids=tokens, level="L2", glu="parts")
        assert comparison.method == "level L2, glu parts"
        assert {"model.layers.0.mlp", "model.layers.0.self_attn.q_proj"} <= {r.name for r in comparison.report.replaced}
        assert comparison.saved > 0 and comparison.peak_saved > 0

    def test_that_are_estimated_say_so(self):
        with torch.device("meta"):
            mixed = memory.compare(network(), torch.randn(8, 3, 8, 8), level="L3", peak=False)
            large = memory.compare(network(), torch.randn(8, 3, 8, 8), outliers=0.02, peak=False)
        assert "average of bits" in str(mixed).splitlines()[-1]
        assert "as the ratio says" in str(large).splitlines()[-1]
        assert mixed.peak_saved is None
        assert memory.compare(network(), torch.randn(8, 3, 8, 8), outliers=0.02).notes == ()

    def test_leave_the_model_its_gradients_statistics_and_random_numbers_as_they_were(self):
        model, x = network(), torch.randn(8, 3, 8, 8)
        model[0].weight.grad = kept = torch.ones_like(model[0].weight)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        before, parts = torch.get_rng_state(), [*model.modules(), *model.parameters()]
        memory.compare(model, x, level="L3", saved=PerGroup())
        assert all(a is b for a, b in zip(parts, [*model.modules(), *model.parameters()], strict=True))
        assert torch.equal(before, torch.get_rng_state())
        assert model[0].weight.grad is kept and torch.equal(kept, torch.ones_like(kept))
        assert model[3].weight.grad is None
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Keywords(nn.Module):
    """Takes whatever it is given, and a keyword that is called as an option."""

    def forward(self, x, scale=1.0, level=0, **others):
        assert not others or set(others) == {"free"}
        return (x * scale + level).exp()


class TestArguments:
    @pytest.mark.parametrize("name", ["levle", "bit", "glue", "outlier", "fuse_pre_act", "gradients", "input_ids"])
    @pytest.mark.parametrize("model", [nn.Sequential(nn.GELU()), Keywords()], ids=["Sequential", "Keywords"])
    def test_a_keyword_that_is_neither_option_nor_input_is_refused(self, model, name):
        with pytest.raises(fewbit.FewbitError, match=f"'{name}' is neither an option of convert") as error:
            memory.compare(model, torch.zeros(4, requires_grad=True), **{name: 1})
        assert "\n" not in str(error.value)

    def test_names_of_options_are_options_and_model_kwargs_are_the_models(self):
        x = torch.zeros(64, requires_grad=True)
        assert memory.compare(Keywords(), x, scale=2.0, bits=1).before.total == 256
        assert memory.compare(Keywords(), x, model_kwargs={"level": 3, "free": 1}).before.total == 256
        with pytest.raises(fewbit.FewbitError, match="level is one of"):
            memory.compare(Keywords(), x, level=3)
        with pytest.raises(fewbit.FewbitError, match="model_kwargs is a mapping"):
            memory.compare(Keywords(), x, model_kwargs=3)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"bits": 1.5}, "bits must be"),
            ({"level": "L2", "outliers": 0.1}, "exclude each other"),
            ({"glu": "everything"}, "keep is one of"),
            ({"include": "nowhere"}, "nowhere"),
            ({"saved": 4}, "compress_saved_tensors takes a quantizer"),
        ],
    )
    def test_wrong_options_are_refused_in_one_line(self, options, said):
        with pytest.raises(fewbit.FewbitError, match=said) as error:
            memory.compare(network(), torch.randn(8, 3, 8, 8), **options)
        assert "\n" not in str(error.value)


class TestPeakOfStep:
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    @pytest.mark.parametrize("depth", [1, 2, 5, 9])
    def test_of_a_chain_of_linears_is_all_outputs_and_two_gradients(self, device, depth):
        """Outputs of each layer; when backward begins, a gradient of the last, then one of its input beside it."""
        with torch.device(device):
            model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(depth)))
            peak = memory.peak_of_step(model, torch.zeros(256, 32))
        unit = 256 * 32 * 4
        assert peak.bytes == (depth + (2 if depth > 1 else 1)) * unit
        assert peak.with_gradients >= peak.bytes

    def test_counts_gradients_of_parameters_apart(self):
        """A wide layer: its weight is far larger than what flows through it."""
        peak = memory.peak_of_step(nn.Linear(1000, 1000, bias=False), torch.zeros(1, 1000))
        assert peak == memory.Peak(2 * 4000, 2 * 4000 + 4_000_000)

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_is_lower_with_checkpoints(self, device, reentrant):
        class Net(nn.Module):
            def __init__(self, checkpointed):
                super().__init__()
                self.parts = nn.ModuleList(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))) for _ in range(4))
                self.checkpointed = checkpointed

            def forward(self, x):
                for part in self.parts:
                    x = checkpoint(part, x, use_reentrant=reentrant) if self.checkpointed else part(x)
                return x

        with torch.device(device):
            x = torch.zeros(256, 32, requires_grad=True)
            plain, less = (memory.peak_of_step(Net(checkpointed), x).bytes for checkpointed in (False, True))
        assert less < 0.75 * plain
        assert x.grad is None

    def test_begins_at_the_loss_if_there_is_one_and_else_at_every_output(self):
        class Two(nn.Module):
            def __init__(self, wrap):
                super().__init__()
                self.a, self.b, self.wrap = nn.Linear(8, 8), nn.Linear(8, 800), wrap
                self.seen = []

            def forward(self, x):
                a, b = self.a(x), self.b(x)
                b.register_hook(self.seen.append) if b.requires_grad else None
                return self.wrap(a, b)

        x = torch.zeros(2, 8)
        for wrap, count in ((lambda a, b: {"loss": a.sum(), "b": b}, 0), (lambda a, b: (a, [b]), 1)):
            model = Two(wrap)
            memory.peak_of_step(model, x)
            assert len(model.seen) == count

    def test_is_at_least_what_is_kept_and_the_same_each_time(self):
        model, x = network(), torch.randn(8, 3, 8, 8)
        peaks = {memory.peak_of_step(model, x) for _ in range(3)}
        assert len(peaks) == 1
        assert peaks.pop().bytes >= memory.profile(model, x).total


class TestWithoutValues:
    """What a model asks of tensors that it makes itself is answered; what it asks of its inputs is refused."""

    class Asking(nn.Module):
        def __init__(self, ask):
            super().__init__()
            self.ask, self.linear = ask, nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) if self.ask(x) else self.linear(x).exp()

    @pytest.mark.parametrize(
        ("ask", "answer"),
        [
            (lambda x: bool((torch.arange(5, device=x.device).diff() == 1).all()), True),
            (lambda x: int(torch.arange(4, device=x.device).sum()) == 6, True),
            (lambda x: torch.ones(3, 3, dtype=torch.bool, device=x.device).tril().all().item(), False),
            (lambda x: len((torch.arange(6, device=x.device) > 2).nonzero()) == 3, True),
            (lambda x: torch.arange(6, device=x.device).add_(1).view(2, 3)[1, 2].item() == 6, True),
        ],
    )
    @pytest.mark.parametrize("where", ["meta", "fake"])
    def test_what_follows_from_nothing_is_known(self, ask, answer, where):
        real = memory.profile(self.Asking(ask), torch.zeros(2, 8))
        with torch.device("meta") if where == "meta" else FakeTensorMode():
            found = memory.profile(self.Asking(ask), torch.zeros(2, 8))
        assert found == real
        assert ("exp" in found.by_op()) is not answer

    @pytest.mark.parametrize(
        "ask", [lambda x: bool((x > 0).all()), lambda x: x.sum().item() > 0, lambda x: len(x.nonzero()) > 1]
    )
    @pytest.mark.parametrize("where", ["meta", "fake"])
    def test_what_follows_from_inputs_is_refused_in_one_line(self, ask, where):
        with torch.device("meta") if where == "meta" else FakeTensorMode():
            model, x = self.Asking(ask), torch.zeros(2, 8)
        with pytest.raises(fewbit.FewbitError, match=r"asks for values .* measure it on the CPU") as error:
            memory.profile(model, x)
        assert "\n" not in str(error.value)

    def test_values_that_are_overwritten_by_unknown_ones_are_forgotten(self):
        def ask(x):
            whole = torch.arange(4, device=x.device)
            whole[1:].copy_(x.flatten()[:3])
            return bool((whole == 0).all())

        with torch.device("meta"):
            model, x = self.Asking(ask), torch.zeros(2, 8)
        with pytest.raises(fewbit.FewbitError, match="asks for values"):
            memory.profile(model, x)

    def test_a_llama_without_a_cache_is_profiled(self):
        without = {"use_cache": False, "attn_implementation": "eager"}
        totals = []
        for device in ("cpu", "meta"):
            with torch.device(device):
                model, tokens = llama(32, 64, 1, 32, heads=2, **without), torch.zeros(2, 16, dtype=torch.long)
                totals.append((memory.profile(model, input_ids=tokens).total, memory.peak_of_step(model, tokens)))
        assert totals[0] == totals[1]


class TestQuantizersWithoutValues:
    @pytest.mark.parametrize("shape", [(8, 64), (3, 5, 7), (1,), (4, 1000), (2, 8, 4, 4)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize(
        "quantizer", [PerGroup(2), PerGroup(3, 64), Outlier(), Outlier(2, 0.1, relu=True), Outlier(1, 0.0)], ids=repr
    )
    def test_have_the_sizes_of_those_with(self, quantizer, dtype, shape):
        real = quantizer.compress(torch.randn(shape, dtype=dtype))
        meta = quantizer.compress(torch.randn(shape, dtype=dtype, device="meta"))
        assert meta.nbytes == real.nbytes
        again = meta.decompress()
        assert (again.shape, again.dtype, again.stride(), again.is_meta) == (
            shape,
            dtype,
            real.decompress().stride(),
            True,
        )

    def test_have_bits_of_each_sample(self):
        x, bits = torch.randn(4, 100), [1, 8, 3, 2]
        real = PerGroup().compress(x, sample_bits=bits)
        assert PerGroup().compress(x.to("meta"), sample_bits=bits).nbytes == real.nbytes
        assert PerGroup().compress(x.to("meta"), sample_bits=torch.tensor(bits)).nbytes == real.nbytes
        with pytest.raises(fewbit.FewbitError, match="sample_bits are 4 integers"):
            PerGroup().compress(x.to("meta"), sample_bits=[1, 2, 3, 9])


def test_what_the_model_itself_calls_has_a_name_in_the_table():
    class Wave(nn.Module):
        def forward(self, x):
            return x.sin()

    found = memory.profile(Wave(), torch.ones(4, 4, requires_grad=True))
    assert found.table("module", "op").splitlines()[1].split() == ["(the", "model)", "sin", "64", "100.0%"]
    assert found.by("module") == {("",): 64}
