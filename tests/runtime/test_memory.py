import fewbit
import pytest
import torch
from fewbit import memory
from runtime_cases import INPLACE, pair, table_of_bits
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint


def mlp(activation, features=64):
    return nn.Sequential(nn.Linear(32, features), activation, nn.Linear(features, 8))


class Watched:
    """Tells whether the storage of a tensor is alive, without keeping it."""

    def __init__(self, tensor):
        self._reference = StorageWeakRef(tensor.untyped_storage())

    @property
    def alive(self):
        return not self._reference.expired()


class TestNothingElseStaysAlive:
    @pytest.mark.parametrize("name", ["ReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "SELU", "Softplus"])
    def test_the_input_is_freed_after_forward(self, name):
        """The output of the first Linear is gone while the graph is alive; torch's own module keeps it."""
        alive = []
        for activation in pair(name, {}):
            pointers = []
            activation.register_forward_pre_hook(lambda _, inputs, seen=pointers: seen.append(Watched(inputs[0])))
            model = mlp(activation)
            loss = model(torch.randn(16, 32)).sum()
            alive.append(pointers[0].alive)
            loss.backward()
        assert alive[0] is False
        if name in ("GELU", "SiLU", "Softplus"):  # torch keeps the output of the others
            assert alive[1] is True, "the test cannot see a tensor that is kept"

    def test_a_large_input_is_freed_too(self):
        """Its result takes the path over huge pages."""
        x = torch.randn(9 << 20, requires_grad=True) * 1
        watched = Watched(x)
        y = fewbit.GELU()(x)
        del x
        assert not watched.alive
        y.sum().backward()

    def test_backward_frees_the_code(self):
        x = torch.randn(100, requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(Watched(t)) or t, lambda t: t):
            y = fewbit.GELU()(x)
        y.sum().backward()
        assert [w.alive for w in kept] == [False]


class TestProfile:
    @pytest.mark.parametrize("bits", range(1, 9))
    @pytest.mark.parametrize("n", [1, 7, 8, 9, 1001])
    def test_of_one_activation_is_its_packed_code(self, bits, n):
        module = fewbit.GELU(table=table_of_bits(bits))
        profile = memory.profile(module, torch.zeros(n, requires_grad=True))
        assert profile.total == -(-n // 8) * bits
        assert profile.saved == (memory.Saved("", "GELU", profile.total, torch.uint8),)

    @pytest.mark.parametrize("name", INPLACE)
    def test_of_an_inplace_activation_is_its_packed_code(self, name):
        module, _ = pair(name, {}, inplace=True)
        profile = memory.profile(nn.Sequential(nn.Linear(5, 5), module), torch.zeros(3, 5))
        assert profile.of_kind(name) == 2 * module.bits
        assert profile.by_module()["1"] == 2 * module.bits

    def test_lists_modules_in_order_with_their_bytes(self):
        model = mlp(fewbit.GELU(bits=3))
        profile = memory.profile(model, torch.zeros(16, 32))
        assert profile.by_module() == {"0": 16 * 32 * 4, "1": 16 * 64 * 3 // 8, "2": 16 * 64 * 4}
        assert profile.total == sum(profile.by_module().values())
        assert profile.of_kind("Linear") == 16 * 32 * 4 + 16 * 64 * 4
        assert profile.of_kind("GELU") == 16 * 64 * 3 // 8
        assert profile.of_kind("Conv2d") == 0

    def test_shows_what_torchs_activation_keeps(self):
        assert memory.profile(mlp(nn.GELU()), torch.zeros(16, 32)).by_module()["1"] == 16 * 64 * 4

    def test_counts_a_storage_once_under_the_module_that_saved_it_first(self):
        model = nn.Sequential(nn.Sigmoid(), nn.Linear(4, 4))  # both keep the output of the first
        profile = memory.profile(model, torch.zeros(2, 4, requires_grad=True))
        assert profile.by_module() == {"0": 32}

    def test_counts_a_view_as_the_whole_storage_it_keeps(self):
        model = nn.Sequential(nn.Linear(4, 1))
        profile = memory.profile(model, torch.zeros(100, 4)[:2])
        assert profile.total == 1600

    def test_does_not_count_parameters_and_buffers(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval())
        model.requires_grad_(False)
        x = torch.zeros(3, 8, requires_grad=True)
        assert memory.profile(model[0], x).total == 0  # it keeps its weight alone

    def test_counts_nothing_without_a_gradient(self):
        model = mlp(fewbit.GELU())
        with torch.no_grad():
            assert memory.profile(model, torch.zeros(2, 32)).saved == ()
        assert memory.profile(model.requires_grad_(False), torch.zeros(2, 32)).saved == ()

    def test_of_a_shared_module_has_its_first_name(self):
        activation = fewbit.GELU(bits=2)
        model = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 8), activation)
        assert memory.profile(model, torch.zeros(2, 8)).by_module()["1"] == 2 * 4

    def test_takes_keywords(self):
        class Scaled(nn.Module):
            def forward(self, x, *, power):
                return x**power

        x = torch.ones(5, requires_grad=True)
        assert memory.profile(Scaled(), x, power=3).total == 20

    def test_of_a_call_goes_on_to_the_loss(self):
        model = mlp(fewbit.GELU())
        x, target = torch.zeros(4, 32), torch.zeros(4, dtype=torch.long)
        profile = memory.profile_call(model, lambda: nn.functional.cross_entropy(model(x), target))
        assert profile.by_module()[""] > 0
        assert profile.of_kind("Sequential") == profile.by_module()[""]

    def test_on_the_meta_device_is_the_same(self):
        real = memory.profile(mlp(fewbit.GELU()), torch.zeros(16, 32))
        meta = memory.profile(mlp(fewbit.GELU()).to("meta"), torch.zeros(16, 32, device="meta"))
        assert meta == real

    def test_under_checkpointing_counts_what_stays_until_backward(self):
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = mlp(fewbit.GELU())

            def forward(self, x):
                return checkpoint(self.body, x, use_reentrant=True)

        x = torch.zeros(16, 32, requires_grad=True)
        assert memory.profile(Checkpointed(), x).total == 16 * 32 * 4

    def test_leaves_no_hooks_behind(self):
        model = mlp(fewbit.GELU())
        memory.profile(model, torch.zeros(2, 32))
        assert hooks_of(model) == 0

    def test_leaves_no_hooks_behind_after_an_exception(self):
        class Broken(nn.Module):
            def forward(self, x):
                raise ZeroDivisionError

        model = nn.Sequential(nn.Linear(32, 32), Broken())
        with pytest.raises(ZeroDivisionError):
            memory.profile(model, torch.zeros(2, 32))
        assert hooks_of(model) == 0
        kept = memory.profile(model[0], torch.zeros(2, 32))
        assert kept.total == 256, "saved-tensor hooks of the broken profile are still there"

    def test_names_the_right_module_after_one_has_failed_and_been_passed_over(self):
        class Failing(nn.Module):
            def forward(self, x):
                raise ZeroDivisionError

        class Forgiving(nn.Module):
            def __init__(self):
                super().__init__()
                self.failing = Failing()

            def forward(self, x):
                try:
                    return self.failing(x)
                except ZeroDivisionError:
                    return x.sin()

        assert memory.profile(Forgiving(), torch.zeros(5, requires_grad=True)).by_module() == {"": 20}

    def test_frees_everything_it_saw(self):
        seen = []
        model = mlp(fewbit.GELU())
        model[1].register_forward_hook(lambda module, inputs, output: seen.append(Watched(output)))
        memory.profile(model, torch.zeros(16, 32))
        assert [w.alive for w in seen] == [False]

    def test_lets_training_go_on_as_before(self):
        torch.manual_seed(0)
        model = mlp(fewbit.GELU())
        x = torch.randn(4, 32)
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        memory.profile(model, x)
        after = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(expected, after, strict=True))
        assert all(p.grad is None for p in model.parameters())


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
