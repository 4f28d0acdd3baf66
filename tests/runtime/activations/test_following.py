"""Tables that follow the training: exchanged at their steps, right for earlier codes, compiled, kept and resumed."""

import copy
import io
import pickle

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.fewbit_gen import parse_activation
from fewbit.fewbit_gen.certify import table_error
from fewbit.runtime import ops
from fewbit.runtime.activations.following import Adaptation, FollowingTable, adaptation_of, is_due
from processes import FSDP, said_by_two
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def model(activation=nn.GELU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), activation(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 4))


def batches(count, scale=1.0):
    draw = torch.Generator().manual_seed(1)
    return [scale * torch.randn(64, 16, generator=draw) for _ in range(count)]


def train(trained, given, call=None):
    """Train on each batch; return the keys of the first activation's table during each step, and all gradients."""
    optimizer = torch.optim.SGD(trained.parameters(), 0.01)
    keys, gradients = [], []
    for x in given:
        optimizer.zero_grad()
        (call or trained)(x).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trained.parameters()]))
        optimizer.step()
        keys.append(trained[1].table.key)
    return keys, gradients


def changes(keys):
    """The steps whose table is not that of the step before."""
    return [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]


class TestSchedule:
    @pytest.mark.parametrize(
        ("every", "due"), [(2, [0, 2, 4, 6, 8]), (10, [0, 8, 10, 20]), (100, [0, 8, 16, 32, 64, 100, 200])]
    )
    def test_inputs_are_counted_at_multiples_and_before_at_doubling_steps(self, every, due):
        assert [step for step in range(due[-1] + 1) if is_due(step, every)] == due

    def test_tables_are_exchanged_eight_steps_after_they_were_counted_or_before_the_next(self):
        trained = model()
        report = fewbit.convert(trained, 2, adapt=20)
        assert any("adapt=20: 2 tables will follow" in note for note in report.notes)
        keys, _ = train(trained, batches(60))
        assert changes(keys) == [7, 15, 19, 28, 48]  # for 0, 8, 16, 20 and 40

    def test_every_second_step(self):
        trained = model()
        fewbit.convert(trained, 1, adapt=2)
        keys, _ = train(trained, batches(7))
        assert changes(keys) == [1, 3, 5]

    def test_evaluation_and_passes_without_gradients_are_no_steps(self):
        trained = model()
        fewbit.convert(trained, 2, adapt=10)
        trained(batches(1)[0])
        before = adaptation_of(trained).steps
        trained.eval()
        trained(batches(1)[0]).sum().backward()
        trained.train()
        with torch.no_grad():
            trained(batches(1)[0])
        fewbit.calibrate(trained, batches(1), lambda y, _: y.square().mean())
        assert adaptation_of(trained).steps == before == 1


class TestTables:
    @pytest.mark.parametrize("bits", [1, 2, 3])
    def test_fit_what_arrives_better_than_the_default(self, bits):
        trained = model()
        fewbit.convert(trained, bits, adapt=10)
        given = batches(9, scale=0.5)
        train(trained, given)
        measured = fewbit.calibrate(trained, given[-1:], lambda y, _: y.square().mean())
        for name in ("1", "3"):
            table, weight = trained.get_submodule(name).table, measured.weight(name)
            activation = parse_activation(table.activation)
            default = fewbit.load_table(table.activation, bits)
            assert table_error(table, activation, weight) < 0.8 * table_error(default, activation, weight)
            assert trained.get_submodule(name).bits == bits

    def test_outputs_stay_torchs_and_gradients_are_the_tables_in_use(self):
        trained, exact = model(), model()
        fewbit.convert(trained, 3, adapt=10)
        train(trained, batches(9))
        exact.load_state_dict(trained.state_dict())
        x = batches(1)[0]
        assert torch.equal(trained(x), exact(x))
        inner = torch.randn(500, requires_grad=True)
        (gradient,) = torch.autograd.grad(trained[1](inner).sum(), inner)
        expected = torch.from_numpy(trained[1].table(inner.detach().numpy())).float()
        assert torch.equal(gradient, expected)

    def test_codes_of_an_earlier_table_are_read_by_it(self):
        table, other = fewbit.load_table("gelu", 2), fewbit.load_table("gelu", 2, weight="normal:0,1")
        act = fewbit.GELU(table=table)
        act.following = FollowingTable("gelu", table)
        x = torch.randn(300, requires_grad=True)
        y = act(x)
        act.following.use(other)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, torch.from_numpy(table(x.detach().numpy())).float())
        y = act(x)
        for _ in range(9):
            act.following.use(other)
        with pytest.raises(FewbitError, match="8 tables after its forward pass"):
            y.sum().backward()

    def test_a_table_of_fewer_bits_keeps_the_size_of_codes(self):
        act = fewbit.GELU(bits=3)
        act.following = FollowingTable("gelu", act.table)
        act.following.use(fewbit.load_table("gelu", 1))
        x = torch.randn(100, requires_grad=True)
        assert fewbit.memory.profile(act, x * 1).total >= 13 * 3
        (gradient,) = torch.autograd.grad(act(x).sum(), x)
        assert torch.equal(gradient, torch.from_numpy(act.table(x.detach().numpy())).float())

    def test_rounded_at_random(self):
        trained = model()
        fewbit.convert(trained, 2, rounding="stochastic", adapt=10)
        keys, _ = train(trained, batches(12))
        assert changes(keys) and trained[1].table.kind == "stochastic"

    def test_at_a_level_too(self):
        trained = model()
        fewbit.convert(trained, 4, level="L2", adapt=10)
        keys, _ = train(trained, batches(10))
        assert changes(keys) == [7, 9]

    def test_exact_ones_and_those_of_the_user_stay(self):
        trained = model(nn.ReLU)
        report = fewbit.convert(trained, 2, adapt=10, include="*", tables={"silu": fewbit.load_table("silu", 1)})
        assert adaptation_of(trained) is None
        assert any("adapt=10: nothing to do here" in note for note in report.notes)

    @pytest.mark.parametrize("bad", [0, 1, -3, 2.5, True, "200"])
    def test_a_wrong_number_of_steps_is_refused_and_the_model_left(self, bad):
        trained = model()
        with pytest.raises(FewbitError, match="adapt is an integer not below 2"):
            fewbit.convert(trained, 2, adapt=bad)
        assert type(trained[1]) is nn.GELU

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_inputs_that_are_not_finite_do_not_spoil_them(self, bad):
        trained = model()
        fewbit.convert(trained, 2, adapt=10)
        given = batches(10)
        given[0][3, 3] = bad
        train(trained, given)
        assert trained[1].table.levels.size == 4

    def test_checkpoints_in_a_model_are_no_steps(self):
        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model()

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

        around, plain = Around(), model()
        fewbit.convert(around, 2, adapt=10)
        fewbit.convert(plain, 2, adapt=10)
        for x in batches(12):
            around(x).square().mean().backward()
            plain(x).square().mean().backward()
        assert adaptation_of(around).steps == adaptation_of(plain).steps == 12
        assert around.inner[1].table == plain[1].table


class TestCompiled:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("rounding", ["deterministic", "stochastic"])
    def test_is_eagers_without_compiling_again(self, rounding):
        eager, compiled = model(), model()
        for each in (eager, compiled):
            fewbit.convert(each, 2, adapt=10, rounding=rounding)
        counter = CompileCounterWithBackend("aot_eager")
        call = torch.compile(compiled, fullgraph=True, backend=counter)
        torch.manual_seed(3)
        keys, gradients = train(eager, batches(24))
        torch.manual_seed(3)
        ours, found = train(compiled, batches(24), call)
        assert ours == keys and changes(keys)
        assert all(map(torch.equal, found, gradients))
        assert counter.frame_count == 1

    def test_opcheck(self):
        following = FollowingTable("gelu", fewbit.load_table("gelu", 2))
        x = torch.randn(5, 9)
        tests = ("test_schema", "test_faketensor")
        arguments = (x, "gelu", (), following.handle, 2, None)
        torch.library.opcheck(ops.activation_following, arguments, test_utils=tests)
        _, packed, version = ops.activation_following(*arguments)
        arguments = (x, packed, version, following.handle, 2, [9, 1])
        torch.library.opcheck(ops.multiply_following, arguments, test_utils=tests)

    def test_arguments_that_would_be_read_or_written_out_of_bounds_are_refused(self):
        """On a GPU, whose kernels look at none of them."""
        following = FollowingTable("gelu", fewbit.load_table("gelu", 2))
        x = torch.randn(5, 9)
        _, packed, version = ops.activation_following(x, "gelu", (), following.handle, 2, None)
        for given, bits, stride, said in (
            (packed[:-1], 2, [9, 1], "^45 codes of 2 bits take 12 bytes"),
            (packed[:6], 1, [9, 1], "^45 codes of 2 bits take 12 bytes"),  # as of another table than the one in use
            (packed.char(), 2, [9, 1], "^45 codes of 2 bits take 12 bytes"),
            (packed, 2, [0, 1], "^the stride .* is not that of a dense tensor"),
            (packed, 2, [1], "^the stride has 2 numbers"),
        ):
            for there in ("cpu", "meta"):
                if there == "meta" and bits == 1:
                    continue  # nobody knows the table there
                tensors = (x.to(there), given.to(there), version, following.handle)
                with pytest.raises(FewbitError, match=said):
                    ops.multiply_following(*tensors, bits, stride)
        with pytest.raises(FewbitError, match=r"^gelu takes no parameters"):
            ops.activation_following(x, "gelu", (1.0,), following.handle, 2, None)


class TestKept:
    @pytest.mark.deep
    def test_a_training_that_is_resumed_has_the_same_tables(self):
        """Broken off at every kind of step: while counting, while solving, between."""
        given = batches(40)
        for stop in (1, 2, 5, 9, 17, 25):
            whole, first = model(), model()
            fewbit.convert(whole, 2, adapt=20)
            fewbit.convert(first, 2, adapt=20)
            keys, _ = train(whole, given)
            train(first, given[:stop])
            file = io.BytesIO()
            torch.save({"model": first.state_dict(), "fewbit": fewbit.adaptation_state(first)}, file)
            file.seek(0)
            loaded, second = torch.load(file, weights_only=True), model()
            fewbit.convert(second, 2, adapt=20)
            second.load_state_dict(loaded["model"])
            fewbit.load_adaptation_state(second, loaded["fewbit"])
            ours, _ = train(second, given[stop:])
            assert ours == keys[stop:]

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
    def test_copies_and_pickles_follow_on_their_own(self, copied):
        trained = model()
        fewbit.convert(trained, 2, adapt=10)
        train(trained, batches(3))
        twin = copied(trained)
        assert adaptation_of(twin) is not adaptation_of(trained)
        assert adaptation_of(twin).following["1"] is twin[1].following is not trained[1].following
        keys, _ = train(trained, batches(20)[3:])
        ours, _ = train(twin, batches(20)[3:])
        assert ours == keys and changes(keys)

    def test_revert_and_another_conversion_end_it(self):
        trained = model()
        fewbit.convert(trained, 2, adapt=10)
        train(trained, batches(10))
        table = trained[1].table
        fewbit.convert(trained, 3, include="3")
        assert adaptation_of(trained) is None and trained[1].table == table and trained[1].following is None
        assert fewbit.revert(trained) is trained and type(trained[1]) is nn.GELU
        assert not trained._forward_pre_hooks

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda s: {}, "no state of an adaptation"),
            (lambda s: {**s, "tables": {"0": s["tables"]["1"]}}, "of other activations: 0, 1, 3"),
            (lambda s: {**s, "tables": {**s["tables"], "1": {"levels": 3}}}, "table"),
            (lambda s: {**s, "counts": {"1": 5}}, "no state of an adaptation"),
            (lambda s: {**s, "every": 1}, "every is an integer not below 2"),
        ],
    )
    def test_a_wrong_state_is_refused_in_one_line(self, change, says):
        trained = model()
        fewbit.convert(trained, 2, adapt=10)
        with pytest.raises(FewbitError, match=says) as raised:
            fewbit.load_adaptation_state(trained, change(fewbit.adaptation_state(trained)))
        assert "\n" not in str(raised.value)

    def test_without_one_there_is_no_state(self):
        with pytest.raises(FewbitError, match="no tables that follow its training"):
            fewbit.adaptation_state(model())


def test_processes_have_the_same_tables(monkeypatch):
    """Counts are summed by all_reduce: two processes that see other batches, played by one after the other."""
    sums = []

    def record(counts):
        sums.append(counts.clone())

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", record)
    given = batches(2), [2 * x for x in batches(2)]
    for part in given:
        one = model()
        fewbit.convert(one, 2, adapt=10)
        train(one, part)
    total = sum(sums)
    tables = []
    for part in given:
        one = model()
        fewbit.convert(one, 2, adapt=10)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts: counts.copy_(total))
        train(one, part)
        adaptation_of(one)._exchange()
        tables.append(one[1].table)
    assert tables[0] == tables[1] and len(sums) == 2


def test_in_place_and_functions_of_parameters():
    trained = nn.Sequential(nn.Linear(8, 32), nn.ELU(0.5, inplace=True), nn.Linear(32, 32), nn.Softplus(3.0))
    fewbit.convert(trained, 2, adapt=4, include="*")
    for x in (torch.randn(16, 8) for _ in range(6)):
        trained(x).sum().backward()
    assert {m.table.activation for m in (trained[1], trained[3])} == {"elu(alpha=0.5)", "softplus(beta=3)"}
    x = torch.randn(4, 32, requires_grad=True)
    y = x * 1
    assert trained[1](y) is y and torch.equal(y, F.elu(x, 0.5))


def test_an_adaptation_of_ones_own():
    act = fewbit.GELU(bits=1)
    act.following = FollowingTable("gelu", act.table)
    adaptation = Adaptation(act, {"": act.following}, 2)
    for _ in range(3):
        act(torch.randn(200, requires_grad=True)).sum().backward()
    assert adaptation.steps == 3 and act.table != fewbit.GELU(bits=1).table
    adaptation.remove()
    assert adaptation_of(act) is None


def test_passes_that_end_in_another_order_count_their_own_inputs():
    """As a pipeline's do: after the first had ended, a third one was counted in place of the second."""
    act = fewbit.GELU(bits=2)
    act.following = FollowingTable("gelu", act.table)
    act.following.count()
    xs = [torch.full((4,), value, requires_grad=True) for value in (0.5, 1.0, 2.0)]
    first, second = act(xs[0]), act(xs[1])
    first.sum().backward()
    third = act(xs[2])
    for y in (second, third):
        y.sum().backward()
    assert act.following.counts[act.following.counts > 0].tolist() == [4.0, 4.0, 4.0]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What two processes that train together say, replicated and sharded."""
    return said_by_two("tables", tmp_path_factory.mktemp("tables"))


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["ddp", FSDP])
def test_two_processes_have_the_same_tables(kind, said):
    one, two = ([line for line in text.splitlines() if line.startswith(kind)] for text in said)
    assert one == two and len(one) == 9, said[0]
    assert len(set(one)) == 3  # the default's, and those for the steps 0 and 4
