import collections
import copy
import gc

import fewbit
import numpy as np
import pytest
import torch
from fewbit.fewbit_gen.activations import parse_activation
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.weights import ruler
from fewbit.runtime.calibrate import calibrate
from fewbit.runtime.tensors import input_histogram
from fewbit.runtime.tensors.input_histogram import bins_of
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st
from processes import said_by_two
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

EDGES = ruler.edges()


def mlp(*activations, width=8, dtype=torch.float32):
    layers = [layer for activation in activations for layer in (nn.Linear(width, width), activation)]
    return nn.Sequential(*layers, nn.Linear(width, 1)).to(dtype)


def squared(output, batch):
    return output.square().mean()


def batches_of(count, rows=64, width=8, dtype=torch.float32):
    return [torch.randn(rows, width, dtype=dtype) * 2 for _ in range(count)]


def same(first, second):
    assert first.names == second.names
    for a, b in zip(first, second, strict=True):
        assert (a.activation, a.elements, a.skipped) == (b.activation, b.elements, b.skipped)
        np.testing.assert_allclose(a.counts, b.counts, rtol=1e-4)


class TestBins:
    @given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
    def test_are_those_that_the_edges_cut(self, values):
        x = np.array(values)
        expected = np.clip(np.searchsorted(EDGES, x, side="left") - 1, 0, ruler.BINS - 1)
        assert bins_of(torch.tensor(x, dtype=torch.float32)).tolist() == expected.tolist()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_of_edges_and_their_neighbours_are_closed_on_the_right(self, dtype):
        edges = torch.tensor(EDGES, dtype=torch.float32)
        beside = torch.nextafter(edges, torch.tensor(torch.inf)), torch.nextafter(edges, torch.tensor(-torch.inf))
        x = torch.cat([edges, *beside]).to(dtype)
        x = x[x.isfinite()]
        expected = np.clip(np.searchsorted(EDGES, x.double().numpy(), side="left") - 1, 0, ruler.BINS - 1)
        assert bins_of(x).tolist() == expected.tolist()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_of_what_is_not_finite_are_none(self, dtype):
        x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0], dtype=dtype)
        assert bins_of(x).tolist() == [-1, -1, -1, ruler.BINS_OF_SIGN - 1, ruler.BINS_OF_SIGN - 1]

    def test_of_the_largest_are_the_last(self):
        x = torch.tensor([1e308, -1e308, 1e-320, -1e-320], dtype=torch.float64)
        assert bins_of(x)[:2].tolist() == [ruler.BINS - 1, 0]
        assert bins_of(x.float().clamp(-3e38, 3e38))[:2].tolist() == [ruler.BINS - 1, 0]

    def test_of_any_layout_have_its_shape(self):
        x = torch.randn(4, 6).t()[::2]
        assert bins_of(x).shape == x.shape
        assert torch.equal(bins_of(x), bins_of(x.contiguous()))
        assert bins_of(torch.zeros(0, 3)).shape == (0, 3)
        assert bins_of(torch.tensor(1.0)).shape == ()


def gradients(model, batch):
    """The gradient that comes to the activation of a model of one, and the one that it sends on."""
    seen = {}

    def keep(module, inputs, output):
        inputs[0].register_hook(lambda g: seen.__setitem__("sent", g))
        output.register_hook(lambda g: seen.__setitem__("came", g))
        seen["x"] = inputs[0].detach().clone()

    handle = model[1].register_forward_hook(keep)
    squared(model(batch), batch).backward()
    handle.remove()
    model.zero_grad()
    return seen


class TestTheIdentity:
    """Σ (f'(x) − q(x))² g², the table's error under the measured weight, is what the table does to the gradient."""

    @pytest.mark.parametrize("name", ["GELU", "SiLU", "Tanh", "Sigmoid", "Softplus", "SELU"])
    @pytest.mark.parametrize("bits", [1, 3])
    def test_holds_for_tables_of_any_origin(self, name, bits):
        model = mlp(getattr(nn, name)(), dtype=torch.float64)
        (batch,) = batches_of(1, rows=512, dtype=torch.float64)
        calibration = calibrate(model, [batch], squared, bits=bits)
        activation = parse_activation(calibration["1"].activation)
        exact = gradients(model, batch)
        for table in (calibration.table("1"), fewbit.load_table(activation.name, bits)):
            few = copy.deepcopy(model)
            few[1] = getattr(fewbit, name)(table=table)
            measured = (gradients(few, batch)["sent"] - exact["sent"]).square().sum().item()
            x, g = exact["x"].numpy(), exact["came"].numpy()
            by_elements = (((activation.derivative(x) - table(x)) * g) ** 2).sum()
            assert measured == pytest.approx(by_elements, rel=1e-9)
            by_weight = table_error(table, activation, calibration.weight("1")) * calibration["1"].squared_gradient
            assert measured == pytest.approx(by_weight, rel=0.01)
        assert calibration["1"].squared_gradient == pytest.approx((g**2).sum(), rel=1e-12)
        assert calibration["1"].elements == x.size

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_holds_for_16_bit_models_to_their_precision(self, dtype):
        model = mlp(nn.GELU(), dtype=dtype)
        (batch,) = batches_of(1, rows=512, dtype=dtype)
        calibration = calibrate(model, [batch], squared)
        exact = gradients(model, batch)
        x, g = exact["x"].double().numpy(), exact["came"].double().numpy()
        table = calibration.table("1")
        by_elements = (((parse_activation("gelu").derivative(x) - table(x)) * g) ** 2).sum()
        assert table.error * calibration["1"].squared_gradient == pytest.approx(by_elements, rel=0.02)

    def test_holds_behind_a_relu_with_its_zeros(self):
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Sigmoid(), nn.Linear(64, 1)).double()
        (batch,) = batches_of(1, rows=256, dtype=torch.float64)
        calibration = calibrate(model, [batch], squared, bits=2)
        assert calibration.names == ("1", "2")
        inner = nn.Sequential(nn.Sequential(model[0], model[1]), model[2], model[3])
        exact = gradients(inner, batch)
        assert (exact["x"] == 0).double().mean() > 0.3
        table = calibration.table("2")
        few = nn.Sequential(inner[0], fewbit.Sigmoid(table=table), inner[2])
        measured = (gradients(few, batch)["sent"] - exact["sent"]).square().sum().item()
        assert table.error * calibration["2"].squared_gradient == pytest.approx(measured, rel=0.01)

    def test_holds_with_outliers(self):
        model = mlp(nn.Softplus(), dtype=torch.float64)
        (batch,) = batches_of(1, rows=512, dtype=torch.float64)
        batch[::50] *= 1e4
        calibration = calibrate(model, [batch], squared)
        exact = gradients(model, batch)
        assert calibration.weight("1").domain[1] >= exact["x"].max() > 1e3
        few = copy.deepcopy(model)
        few[1] = fewbit.Softplus()
        measured = (gradients(few, batch)["sent"] - exact["sent"]).square().sum().item()
        row = calibration.gain("1")
        assert row.default_error * row.squared_gradient == pytest.approx(measured, rel=0.01)


class TestWhatIsCounted:
    def test_batches_add_up(self):
        model, batches = mlp(nn.GELU()), batches_of(3)
        together = calibrate(model, iter(batches), squared)
        alone = [calibrate(model, [batch], squared)["1"] for batch in batches]
        assert together.batches == 3
        assert together["1"].elements == sum(a.elements for a in alone) == 3 * 64 * 8
        np.testing.assert_allclose(together["1"].counts, sum(a.counts for a in alone))

    def test_every_use_of_a_module_counts(self):
        shared = nn.GELU()
        model, batches = mlp(shared, shared), batches_of(2)
        calibration = calibrate(model, batches, squared)
        assert calibration.names == ("1",)
        twin = mlp(nn.GELU(), nn.GELU())
        twin.load_state_dict(model.state_dict())
        apart = calibrate(twin, batches, squared)
        np.testing.assert_allclose(calibration["1"].counts, apart["1"].counts + apart["3"].counts)
        assert calibration["1"].elements == apart["1"].elements + apart["3"].elements

    def test_an_activation_in_place_is_measured_before_it_writes(self):
        model, batches = mlp(nn.SiLU(), nn.ReLU()), batches_of(2)
        twin = mlp(nn.SiLU(inplace=True), nn.ReLU(inplace=True))
        twin.load_state_dict(model.state_dict())
        same(calibrate(model, batches, squared), calibrate(twin, batches, squared))

    def test_an_output_that_is_overwritten_later_is_measured_as_it_was(self):
        class Overwriting(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 8)
                self.act = nn.GELU()

            def forward(self, x):
                return self.act(self.inner(x)).mul_(3)

        torch.manual_seed(1)
        model, batches = Overwriting(), batches_of(1)
        calibration = calibrate(model, batches, squared)
        x = model.inner(batches[0])
        g = 2 * 9 * F.gelu(x) / x.numel()
        assert calibration["act"].squared_gradient == pytest.approx(g.square().sum().item(), rel=1e-5)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_under_checkpointing_nothing_counts_twice(self, reentrant):
        class Checkpointed(nn.Module):
            def __init__(self, body, on):
                super().__init__()
                self.first, self.body, self.on = nn.Linear(8, 8), body, on

            def forward(self, x):
                x = self.first(x)
                return checkpoint(self.body, x, use_reentrant=reentrant) if self.on else self.body(x)

        body, batches = mlp(nn.GELU(), nn.Dropout(0.5), nn.Tanh()), batches_of(2)
        model = Checkpointed(body, False)
        plain = calibrate(model, batches, squared)
        model.on = True
        same(calibrate(model, batches, squared), plain)

    def test_what_no_gradient_reaches_is_told(self):
        class Partly(nn.Module):
            def __init__(self):
                super().__init__()
                self.frozen = nn.Sequential(nn.Linear(8, 8), nn.GELU()).requires_grad_(False)
                self.used = nn.Sequential(nn.Linear(8, 8), nn.GELU())
                self.unused = nn.GELU()
                self.dropped = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
                self.cut = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

            def forward(self, x):
                x = self.used(self.frozen(x))
                self.dropped(x)
                with torch.no_grad():
                    y = self.cut(x)
                return x + y

        calibration = calibrate(Partly(), batches_of(1), squared)
        assert calibration.names == ("used.1",)
        assert calibration.silent == ("frozen.1", "unused", "dropped.1", "cut.1")

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_inputs_that_are_not_finite_are_left_out_and_counted(self, bad):
        model, (batch,) = mlp(nn.GELU()), batches_of(1)
        expected = calibrate(model, [batch], lambda output, _: output.square().sum())
        spoilt = torch.cat([batch, torch.full((5, 8), bad)])
        measured = calibrate(model, [spoilt], lambda output, _: output[:64].square().sum())
        assert measured.skipped == measured["1"].skipped == 5 * 8
        assert measured["1"].elements == expected["1"].elements
        np.testing.assert_allclose(measured["1"].counts, expected["1"].counts, rtol=1e-5)

    def test_gradients_that_are_not_finite_are_left_out_and_counted(self):
        model, (batch,) = mlp(nn.GELU()), batches_of(1)
        factor = torch.ones(64, 1)
        factor[3], factor[7] = torch.nan, torch.inf
        measured = calibrate(model, [batch], lambda output, _: (output * factor).sum())
        assert measured["1"].skipped == 2 * 8
        assert np.isfinite(measured["1"].counts).all()

    def test_gradients_whose_squares_would_overflow_are_left_out(self):
        model = mlp(nn.GELU(), dtype=torch.float64)
        (batch,) = batches_of(1, dtype=torch.float64)
        factor = torch.ones(64, 1, dtype=torch.float64)
        factor[3] = 1e200
        measured = calibrate(model, [batch], lambda output, _: (output * factor).sum())
        assert measured["1"].skipped == 8
        assert np.isfinite(measured["1"].squared_gradient)

    def test_a_batch_that_is_all_nan_costs_no_other(self):
        model, (batch,) = mlp(nn.GELU()), batches_of(1)
        measured = calibrate(model, [torch.full_like(batch, torch.nan), batch], squared)
        assert measured["1"].skipped == measured["1"].elements == batch.numel()

    def test_dropout_and_mode_are_the_models_own(self):
        model, batches = mlp(nn.Sequential(nn.Dropout(0.5), nn.Tanh())), batches_of(1)
        dropped = calibrate(model, batches, squared)["1.1"]
        at_zero = dropped.counts[ruler.BINS_OF_SIGN - 1]
        assert at_zero > 0
        assert calibrate(model.eval(), batches, squared)["1.1"].counts[ruler.BINS_OF_SIGN - 1] == 0
        assert not model.training

    def test_fewbits_own_activations_are_measured_too(self):
        model, batches = mlp(nn.GELU()), batches_of(2)
        few = mlp(fewbit.GELU(bits=1))
        few.load_state_dict(model.state_dict())
        same(calibrate(few, batches, squared), calibrate(model, batches, squared))
        foreign = mlp(fewbit.Softplus(beta=0.1, table=fewbit.load_table("relu")), nn.Softplus(beta=0.1))
        assert {m.activation for m in calibrate(foreign, batches, squared)} == {"softplus(beta=0.1)"}

    def test_names_and_activations_are_the_models(self):
        model = mlp(nn.GELU("tanh"), nn.Softplus(2.0), nn.LeakyReLU(0.1), nn.PReLU())
        calibration = calibrate(model, batches_of(1), squared)
        assert [(m.name, m.activation) for m in calibration] == [
            ("1", "gelu_tanh"),
            ("3", "softplus(beta=2)"),
            ("5", "leaky_relu(negative_slope=0.1)"),
        ]
        assert calibrate(nn.Tanh(), [torch.ones(3, requires_grad=True)], squared).names == ("",)

    def test_functions_that_a_module_holds_are_measured(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=F.gelu, batch_first=True)
        twin = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=nn.GELU(), batch_first=True)
        twin.load_state_dict(layer.state_dict())
        batches = [torch.randn(4, 5, 8)]
        held = calibrate(layer, batches, squared)
        assert held.names == ("activation",)
        same(held, calibrate(twin, batches, squared))
        assert layer.activation is F.gelu

    def test_converted_models_are_measured_and_converted_again(self):
        model, batches = mlp(nn.GELU(), nn.SiLU(inplace=True), nn.PReLU()), batches_of(2)
        plain = calibrate(model, batches, squared)
        report = fewbit.convert(model, tables=plain.tables(2))
        assert [(row.name, row.bits, row.error) for row in report.replaced] == [
            (name, 2, plain.table(name, 2).error) for name in plain.names
        ]
        again = calibrate(model, batches, squared)
        assert [(m.name, m.activation) for m in again] == [(m.name, m.activation) for m in plain]
        fewbit.convert(model, tables=again.tables(pooled=True))
        assert model[1].table == again.by_activation().table("gelu")

    def test_an_input_by_keyword(self):
        class Keyword(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.act = nn.Linear(8, 8), nn.GELU()

            def forward(self, x):
                return self.act(input=self.inner(x))

        assert calibrate(Keyword(), batches_of(1), squared)["act"].elements == 64 * 8

    def test_deterministic_algorithms_are_no_obstacle(self):
        torch.use_deterministic_algorithms(True)
        try:
            calibrate(mlp(nn.GELU()), batches_of(1), squared)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_large_tensors_are_worked_on_in_parts(self, monkeypatch):
        model, batches = mlp(nn.GELU()), batches_of(2)
        expected = calibrate(model, batches, squared)
        monkeypatch.setattr(input_histogram, "_AT_ONCE", 7)
        same(calibrate(model, batches, squared), expected)
        x = torch.randn(4, 6).t()
        assert torch.equal(bins_of(x), bins_of(x.contiguous().reshape(-1)).view(6, 4))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_gpu_measures_the_same(self):
        model, batches = mlp(nn.GELU(), nn.Dropout(0.0), nn.SiLU(inplace=True)), batches_of(2)
        expected = calibrate(model, batches, squared)
        generator = torch.cuda.get_rng_state()
        measured = calibrate(model.cuda(), [batch.cuda() for batch in batches], squared)
        assert torch.equal(torch.cuda.get_rng_state(), generator)
        for a, b in zip(expected, measured, strict=True):
            assert (a.name, a.elements) == (b.name, b.elements)
            assert a.squared_gradient == pytest.approx(b.squared_gradient, rel=1e-3)

    def test_a_compiled_model_is_measured_as_the_plain_one(self):
        model, batches = mlp(nn.GELU(), nn.Tanh()), batches_of(2)
        compiled = torch.compile(model, backend="eager")
        compiled(batches[0])  # compiled before there are any hooks
        plain = calibrate(model, batches, squared)
        measured = calibrate(compiled, batches, squared)
        same(measured, plain)  # names too: they are for the model as it is before it is compiled

    def test_a_model_of_transformers_brings_its_loss(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
        tokens = torch.randint(50, (4, 16))
        batch = transformers.BatchEncoding({"input_ids": tokens, "labels": tokens})
        calibration = calibrate(model, [batch, dict(batch)])
        assert calibration.names == ("transformer.h.0.mlp.act", "transformer.h.1.mlp.act")
        assert {m.activation for m in calibration} == {"gelu_tanh"}
        assert calibration[calibration.names[0]].elements == 2 * 4 * 16 * 64
        model.gradient_checkpointing_enable()
        same(calibrate(model, [batch, dict(batch)]), calibration)
        with pytest.raises(FewbitError, match="do the batches hold labels"):
            calibrate(model, [{"input_ids": tokens}])


class TestWhatIsLeftAlone:
    def test_gradients(self):
        model, (batch,) = mlp(nn.GELU()), batches_of(1)
        squared(model(batch), batch).backward()
        model[0].bias.grad = None
        before = [p.grad for p in model.parameters()]
        values = [None if g is None else g.clone() for g in before]
        calibrate(model, [batch, batch], squared)
        for parameter, gradient, value in zip(model.parameters(), before, values, strict=True):
            assert parameter.grad is gradient
            assert gradient is None or torch.equal(gradient, value)

    def test_buffers(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))
        model[1].register_buffer("replaced", torch.zeros(3))
        model[1].register_forward_hook(lambda m, i, o: setattr(m, "replaced", torch.ones(5)))
        before = copy.deepcopy(model.state_dict())
        addresses = [buffer.data_ptr() for buffer in model.buffers()]
        calibrate(model, batches_of(2), squared)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert [buffer.data_ptr() for buffer in model.buffers()] == addresses

    def test_random_numbers(self):
        model, batches = mlp(nn.Dropout(), nn.GELU()), batches_of(2)
        torch.manual_seed(3)
        expected = torch.rand(5)
        torch.manual_seed(3)
        calibrate(model, batches, squared)
        assert torch.equal(torch.rand(5), expected)

    def test_mode_hooks_and_the_grad_mode(self):
        model = mlp(nn.GELU())
        model[1].eval()
        with torch.no_grad():
            calibrate(model, batches_of(1), squared)
            assert not torch.is_grad_enabled()
        assert [m.training for m in model] == [True, False, True]
        assert hooks_of(model) == 0

    def test_after_a_failure_too(self):
        model, (batch,) = mlp(nn.BatchNorm1d(8), nn.GELU()), batches_of(1)
        squared(model(batch), batch).backward()
        before = [p.grad for p in model.parameters()]
        state = copy.deepcopy(model.state_dict())
        generator = torch.get_rng_state()

        def fail(output, _):
            torch.rand(3)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            calibrate(model, [batch], fail)
        assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), generator)
        assert hooks_of(model) == 0

    def test_training_goes_on_as_if_nothing_had_been(self):
        def trained(between):
            torch.manual_seed(5)
            model, batches = mlp(nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3)), batches_of(4)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for batch in batches:
                squared(model(batch), batch).backward()
                between(model, batches)
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

        plain, calibrated = trained(lambda *_: None), trained(lambda m, b: calibrate(m, b, squared))
        assert all(torch.equal(plain[name], calibrated[name]) for name in plain)

    def test_memory_is_freed(self):
        model, batches = mlp(nn.GELU()), batches_of(1)
        before = bins_alive()
        calibration = calibrate(model, batches, squared)
        assert bins_alive() == before
        assert calibration["1"].counts.nbytes < 300_000  # whatever the number of batches


def bins_alive():
    gc.collect()
    return sum(type(o) is torch.Tensor and o.dtype == torch.int16 for o in gc.get_objects())


def hooks_of(model):
    parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return parameters + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


Output = collections.namedtuple("Output", ["loss", "scores"])


class TestBatchesAndLosses:
    def test_a_tuple_gives_positional_arguments_and_a_dict_keywords(self):
        class Both(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = mlp(nn.GELU())

            def forward(self, x, scale):
                return (self.body(x) * scale).square().mean()

        model, (x,) = Both(), batches_of(1)
        by_tuple = calibrate(model, [(x, 2.0)])
        same(calibrate(model, [[x, 2.0]]), by_tuple)
        same(calibrate(model, [{"scale": 2.0, "x": x}]), by_tuple)
        same(calibrate(model, [collections.UserDict(x=x, scale=2.0)]), by_tuple)

    def test_inputs_takes_out_what_the_model_is_called_with(self):
        model, (x,) = mlp(nn.GELU()), batches_of(1)
        labels = torch.randn(64, 1)
        measured = calibrate(model, [(x, labels)], lambda y, b: F.mse_loss(y, b[1]), inputs=lambda batch: batch[0])
        same(measured, calibrate(model, [x], lambda y, _: F.mse_loss(y, labels)))

    def test_the_loss_is_the_outputs(self):
        class WithLoss(nn.Module):
            def __init__(self, loss):
                super().__init__()
                self.body, self.loss = mlp(nn.GELU()), loss

            def forward(self, x):
                y = self.body(x)
                return Output(y.square().mean() if self.loss else None, y)

        torch.manual_seed(1)
        model, batches = WithLoss(True), batches_of(2)
        expected = calibrate(model.body, batches, squared)["1"].counts
        np.testing.assert_array_equal(calibrate(model, batches)["body.1"].counts, expected)
        with pytest.raises(FewbitError, match="a Output, no loss; its loss is None: do the batches hold labels"):
            calibrate(WithLoss(False), batches)

    def test_an_output_that_is_no_loss_is_refused(self):
        with pytest.raises(FewbitError, match=r"a tensor of shape \(64, 1\), no loss: give loss=, a function"):
            calibrate(mlp(nn.GELU()), batches_of(1))

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda y, _: y, r"one element, not a tensor of shape \(64, 1\)"),
            (lambda y, _: 3.0, "one element, not a float"),
            (lambda y, _: y.detach().sum(), "depends on nothing that requires a gradient"),
            (lambda y, _: (y * torch.nan).sum(), "0, NaN or infinite"),
            (lambda y, _: (y * 0).sum(), "0, NaN or infinite"),
            ("mean", "loss must be a function, not 'mean'"),
        ],
    )
    def test_a_wrong_loss_is_refused(self, loss, message):
        with pytest.raises(FewbitError, match=message):
            calibrate(mlp(nn.GELU()), batches_of(1), loss)

    @pytest.mark.parametrize(
        ("batches", "message"),
        [
            *(([], "there are no batches"), (iter(()), "there are no batches")),
            *((torch.zeros(3, 8), r"not Tensor; \[batch\] is one"), ({"x": torch.zeros(3, 8)}, "not dict")),
            *(("text", "not str"), (None, "not NoneType")),
            ([3], "a batch is a tensor, a tuple or a dict, not int; inputs="),
        ],
    )
    def test_wrong_batches_are_refused(self, batches, message):
        with pytest.raises(FewbitError, match=message):
            calibrate(mlp(nn.GELU()), batches, squared)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"bits": 9}, "bits must be"),
            ({"kind": "other"}, "unknown kind"),
            ({"inputs": 3}, "inputs must be a function"),
        ],
    )
    def test_wrong_arguments_are_refused_before_anything_runs(self, arguments, message):
        def never():
            raise AssertionError
            yield

        with pytest.raises(FewbitError, match=message):
            calibrate(mlp(nn.GELU()), never(), squared, **arguments)

    def test_a_model_without_activations_is_refused(self):
        with pytest.raises(FewbitError, match="no activation that fewbit knows"):
            calibrate(nn.Linear(8, 1), batches_of(1), squared)
        with pytest.raises(FewbitError, match=r"torch\.nn\.Module, not "):
            calibrate(F.gelu, batches_of(1), squared)

    def test_a_model_that_no_gradient_goes_through_is_refused(self):
        model = nn.Sequential(nn.GELU(), nn.Linear(8, 1))
        with pytest.raises(FewbitError, match="no gradient reached any of the 1 activations, such as 0"):
            calibrate(model, batches_of(1), squared)
        unused = nn.Linear(8, 1)
        unused.act = nn.GELU()
        with pytest.raises(FewbitError, match="no batch went through any of the 1 activations, such as act"):
            calibrate(unused, batches_of(1), squared)


def test_the_calibrated_tables_lower_what_training_sees():
    model = mlp(nn.GELU(), nn.Tanh(), width=32)
    batches = batches_of(4, width=32)
    for bits in (1, 2, 3, 4):
        for row in calibrate(model, batches, squared).report(bits):
            assert row.ratio > 1.05


def test_it_is_on_the_lazy_face():
    assert fewbit.calibrate is calibrate


@pytest.mark.deep
def test_two_processes_measure_together(tmp_path):
    one, two = (text.splitlines() for text in said_by_two("calibration", tmp_path))
    assert one == two and len(one) == 3, (one, two)
    for line in one[:2]:  # each with a half of the batches; one with all of them
        assert line.startswith(f"4 {[4 * 32 * 64] * 2} True"), line
    assert one[2] == "the processes' models have other activations: give across_processes=False"
