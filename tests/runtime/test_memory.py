import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.runtime.memory.graph import op_name
from runtime_cases import INPLACE, pair, table_of_bits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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
        assert profile.saved == (memory.Saved("", "GELU", "fewbit_activation", profile.total, torch.uint8),)

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
        assert profile.again == (memory.Saved("1", "Linear", "addmm", 32, torch.float32),)
        assert (profile.total, profile.total_by_each) == (32, 64)

    def test_counts_an_op_that_saves_three_views_of_a_storage_once(self):
        x = torch.zeros(4, 6, requires_grad=True) * 1
        profile = memory.profile_call(nn.Identity(), lambda: torch.addcmul(x[:, :2], x[:, 2:4], x[:, 4:]))
        assert [(s.op, s.bytes) for s in profile.saved] == [("addcmul", 96)]
        assert profile.again == ()

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

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_under_checkpointing_counts_what_stays_until_backward(self, reentrant):
        body = mlp(fewbit.GELU())
        calls = []
        body.register_forward_hook(lambda *_: calls.append(1))

        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = body

            def forward(self, x):
                return checkpoint(self.body, x, use_reentrant=reentrant).sin()

        x = torch.zeros(16, 32, requires_grad=True)
        profile = memory.profile(Checkpointed(), x)
        assert profile.total == 16 * 32 * 4 + 16 * 8 * 4
        assert list(profile.by_op()) == ["checkpoint", "sin"]
        assert calls == [1], "counting ran the checkpointed part again"

    def test_counts_nothing_for_a_result_that_is_gone(self):
        class Wasteful(nn.Module):
            def forward(self, x):
                x.sigmoid()
                return x.exp()

        assert memory.profile(Wasteful(), torch.zeros(5, requires_grad=True)).by_op() == {"exp": 20}

    def test_of_a_module_called_twice_counts_both_calls(self):
        activation = fewbit.GELU(bits=2)
        model = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 8), activation)
        profile = memory.profile(model, torch.zeros(2, 8))
        assert [s.bytes for s in profile.saved if s.module == "1"] == [4, 4]

    def test_of_nested_modules_names_the_innermost(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU())))
        assert memory.profile(model, torch.zeros(2, 4)).by_module() == {"0.0": 32, "0.1.0": 32}

    def test_counts_the_parts_of_a_tensor_that_is_more_than_one(self):
        sparse = torch.eye(4).to_sparse()
        x = torch.zeros(4, 2, requires_grad=True)
        profile = memory.profile_call(nn.Identity(), lambda: torch.sparse.mm(sparse, x))
        assert profile.by("dtype") == {("int64",): 2 * 4 * 8, ("float32",): 4 * 4}

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


class Everything(nn.Module):
    """A piece of most things that models are made of."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.linear = nn.Linear(16, 16)
        self.layer_norm = nn.LayerNorm(16)
        self.few = fewbit.GELU(bits=3)
        self.dropout = nn.Dropout(0.1)
        self.lstm = nn.LSTMCell(16, 8)

    def forward(self, x):
        x = self.pool(self.batch_norm(self.conv(x)).relu()).flatten(2)  # batch, 4, 16
        x = x + self.dropout(self.few(self.layer_norm(self.linear(x))))
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        hidden, cell = self.lstm(x[:, 0])
        hidden[:, 1].mul_(cell[:, 0])
        return torch.cat([hidden, cell]).to(torch.float64)


class TestOps:
    """Autograd does not tell a hook which op saves; it is found from the graph."""

    @pytest.mark.parametrize(
        ("call", "op"),
        [
            (torch.exp, "exp"),
            (torch.Tensor.sin, "sin"),
            (lambda x: x.clone().exp_(), "exp"),
            (lambda x: nn.functional.gelu(x), "gelu"),
            (lambda x: nn.functional.layer_norm(x, (4,)), "native_layer_norm"),
            (lambda x: x.log_softmax(-1), "log_softmax"),
            (lambda x: torch.where(x > 0, x, 0), "where"),
            (lambda x: x.t() @ torch.ones(4, 2), "mm"),
            (lambda x: x[torch.tensor([0, 1])], "index"),
            (lambda x: fewbit.functional.gelu(x), "fewbit_activation"),
        ],
    )
    def test_is_named_as_its_function(self, call, op):
        profile = memory.profile_call(nn.Identity(), lambda: call(torch.ones(4, 4, requires_grad=True)))
        assert {s.op for s in profile.saved} == {op}

    def test_of_a_custom_function_is_its_class_whatever_it_computes_inside(self):
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                with torch.enable_grad():  # a graph within takes numbers too
                    (x.detach().requires_grad_().exp() * 2).sum()
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            def backward(ctx, grad):
                return 3 * ctx.saved_tensors[0] ** 2 * grad

        x = torch.ones(5, requires_grad=True)
        profile = memory.profile_call(nn.Identity(), lambda: Cube.apply(x.exp()).cos())
        assert [s.op for s in profile.saved] == ["exp", "cos"]
        assert [s.op for s in profile.again] == ["Cube"]

    def test_in_place_on_a_view_is_told_from_the_op_before(self):
        def call():
            x = torch.ones(4, 4, requires_grad=True).exp()
            x[:2].mul_(torch.full((2, 4), 2.0).requires_grad_())
            return x

        profile = memory.profile_call(nn.Identity(), lambda: torch.ones(4, 4, requires_grad=True).sin() * 1 + call())
        assert {s.op for s in (*profile.saved, *profile.again)} == {"sin", "exp", "copy_slices"}

    def test_of_an_input_changed_through_another_view_is_the_op_not_the_view(self):
        def call():
            base = torch.ones(4, 4, requires_grad=True) * 1
            one, two = base[:2], base[2:]
            one.add_(1)
            return two.sin()  # the graph of `two` is made anew here

        assert memory.profile_call(nn.Identity(), call).by_op() == {"sin": 64}

    def test_is_found_where_the_result_hides_its_tensors(self):
        class Opaque:
            def __init__(self, tensor):
                self.tensor = tensor

        x = torch.ones(4, requires_grad=True)
        assert memory.profile_call(nn.Identity(), lambda: Opaque(x.exp())).by_op() == {"exp": 16}

    def test_agrees_with_what_the_nodes_themselves_hold(self):
        """Each node of a large graph is read directly, which profile does not do since that runs foreign hooks."""
        model, x = Everything(), torch.rand(2, 3, 8, 8)
        result = model(x)
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        held, seen, todo = set(), set(), [result.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            values = [getattr(node, name) for name in dir(node) if name.startswith("_saved")]
            values += getattr(node, "saved_tensors", ())
            for t in torch.utils._pytree.tree_leaves(values):
                if isinstance(t, torch.Tensor) and t.numel() and t.untyped_storage().data_ptr() not in own:
                    held.add((op_name(node), t.untyped_storage().nbytes(), t.dtype))
        profile = memory.profile(model, x)
        ours = {(s.op, s.bytes, s.dtype) for s in (*profile.saved, *profile.again) if s.op != "copy_slices"}
        assert held <= ours and len(held) > 12
        assert {op for op, _, _ in ours - held} <= {"mul"}


class TestWithoutTheMemory:
    """The same bytes on the meta device and on fake tensors."""

    def test_on_the_meta_device(self):
        real = memory.profile(Everything(), torch.rand(2, 3, 8, 8))
        with torch.device("meta"):
            meta = memory.profile(Everything(), torch.rand(2, 3, 8, 8))
        assert meta == real

    def test_on_fake_tensors_in_and_out_of_their_mode(self):
        real = memory.profile(Everything(), torch.rand(2, 3, 8, 8))
        with FakeTensorMode():
            model, x = Everything(), torch.rand(2, 3, 8, 8)
            assert memory.profile(model, x) == real
        assert memory.profile(model, x) == real

    def test_of_a_model_larger_than_the_machine(self):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), fewbit.GELU(bits=3))
            profile = memory.profile(model, torch.empty(1 << 20, 1 << 20))
        assert profile.by_module() == {"0": 1 << 42, "1": 3 << 37}


class TestShown:
    @pytest.fixture
    def profile(self):
        return memory.profile(mlp(nn.GELU()), torch.zeros(16, 32))

    def test_is_a_row_for_each_module_op_and_dtype(self, profile):
        assert str(profile).splitlines() == [
            "module  kind    op     dtype     bytes  share",
            "0       Linear  addmm  float32   2,048  20.0%",
            "1       GELU    gelu   float32   4,096  40.0%",
            "2       Linear  addmm  float32   4,096  40.0%",
            "total                           10,240",
        ]

    def test_sums_up_by_the_fields_asked_for_in_the_order_asked_for(self, profile):
        rows = [line.split()[:2] for line in profile.table("op", sort="bytes").splitlines()]
        assert rows == [["op", "bytes"], ["addmm", "6,144"], ["gelu", "4,096"], ["total", "10,240"]]
        assert profile.table("kind", sort="name").splitlines()[1].startswith("GELU")

    def test_sums_up_what_is_beyond_the_limit(self, profile):
        assert profile.table("module", limit=1).splitlines()[2].split() == ["2", "more", "8,192", "80.0%"]

    def test_of_nothing_is_a_total_of_nothing(self):
        assert str(memory.Profile(())).splitlines()[-1].split() == ["total", "0"]

    @pytest.mark.parametrize(
        ("fields", "options", "said"),
        [(["size"], {}, "no 'size'"), ([], {"sort": "age"}, "no 'age'"), ([], {"limit": 0}, "limit must be")],
    )
    def test_refuses_what_there_is_not(self, profile, fields, options, said):
        with pytest.raises(fewbit.FewbitError, match=said):
            profile.table(*fields, **options)


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
