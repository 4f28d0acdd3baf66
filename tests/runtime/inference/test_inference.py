"""Quantized inference: weights and activations in few bits, packed in memory and in files, fine-tuned, searched."""

import copy

import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.inference.vquant import (
    InputQuantizer,
    PackedLayer,
    TunedLayer,
    calibrate,
    load,
    pack,
    quantize,
    save,
    search,
)
from torch import nn


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()),
        nn.Linear(16 * 16, 10),
    ).eval()


def images(n=64):
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def quantized(bits=4, weights=0.01, activations=0.01):
    model = quantize(network(), bits, weights, activations)
    calibrate(model, [images()])
    return model


def distance(model):
    exact = network()(images())
    return ((model(images()) - exact).norm() / exact.norm()).item()


def layers(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


class TestQuantizing:
    def test_first_and_last_layers_too_but_the_networks_own_input_stays(self):
        tuned = {name: m for name, m in quantized().named_modules() if isinstance(m, TunedLayer)}
        assert {name: layer.input is None for name, layer in tuned.items()} == {"0": True, "3": False, "6": False}

    def test_more_bits_and_more_large_values_come_nearer(self):
        assert distance(quantized(2)) > distance(quantized(3)) > distance(quantized(4)) > distance(quantized(8))
        assert distance(quantized(3, 0, 0)) > distance(quantized(3, 0.03, 0.03))
        assert distance(quantized(4)) < 0.2
        assert distance(quantized(8, 0.01, None)) < 0.01

    def test_calibration_changes_neither_mode_nor_statistics(self):
        model = quantize(network(), 4)
        model.train()
        model[1].eval()
        before = copy.deepcopy(model[1].state_dict())
        calibrate(model, [images()])
        assert model.training
        assert not model[1].training
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model[1].state_dict().values(), strict=True))

    def test_wrong_use(self):
        with pytest.raises(FewbitError, match="no Linear"):
            quantize(nn.ReLU())
        with pytest.raises(FewbitError, match="bits"):
            quantize(network(), 9)
        with pytest.raises(FewbitError, match="ratio"):
            quantize(network(), 4, 2)
        with pytest.raises(FewbitError, match="batch"):
            calibrate(quantize(network()), [])
        with pytest.raises(FewbitError, match="finite"):
            calibrate(quantize(network()), [torch.full((1, 1, 8, 8), torch.nan)])
        with pytest.raises(FewbitError, match="quantize"):
            pack(network())
        with pytest.raises(FewbitError, match="Module"):
            quantize(3)

    def test_excluded_layers_stay(self):
        model = quantize(network(), exclude=lambda name, layer: name == "6")
        assert type(model[6]) is nn.Linear

    def test_a_layer_in_two_places_stays_one(self):
        layer = nn.Linear(4, 4)
        model = quantize(nn.Sequential(layer, nn.ReLU(), layer))
        assert model[0] is model[2]
        calibrate(model, [torch.randn(8, 4)], keep_input=False)
        pack(model)
        assert model[0] is model[2]


class TestActivations:
    def quantizer(self, bits=3, ratio=0.05, x=None):
        q = InputQuantizer(bits, ratio, torch.float32)
        q.begin()
        q(torch.randn(10_000, generator=torch.Generator().manual_seed(0)) if x is None else x)
        q.finish()
        return q

    def test_large_values_stay_and_the_rest_has_few_levels(self):
        x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        q = self.quantizer()
        y = q(x)
        large = x.abs() > q.range[2]
        assert q.share(x) == pytest.approx(0.05, abs=0.005)
        assert torch.equal(y[large], x[large])
        assert y[~large].unique().numel() == 8
        step = (q.range[1] - q.range[0]) / 7
        assert (y - x)[~large].abs().max() <= step / 2 * 1.001

    def test_without_a_ratio_nothing_leaves_the_range(self):
        q = self.quantizer(ratio=0)
        assert q(torch.tensor([1e6, -1e6])).tolist() == pytest.approx(q.range[[1, 0]].tolist())

    def test_the_range_is_float32_whatever_torch_s_defaults(self):
        """Of float16 it was infinite, and all that was quantized NaN."""
        x = 1e5 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        expected = self.quantizer(x=x).range
        torch.set_default_dtype(torch.float16)
        try:
            found = self.quantizer(x=x).range
        finally:
            torch.set_default_dtype(torch.float32)
        assert found.dtype == torch.float32 and torch.equal(found, expected)

    def test_special_values(self):
        q = self.quantizer()
        y = q(torch.tensor([torch.nan, torch.inf, -torch.inf]))
        assert y[0].isnan()
        assert y[1:].tolist() == [torch.inf, -torch.inf]

    @pytest.mark.parametrize("ratio", [0, 0.1, 1])
    def test_constant_tensors(self, ratio):
        x = torch.full((100,), 3.0)
        assert torch.allclose(self.quantizer(ratio=ratio, x=x)(x), x)

    def test_everything_may_be_large(self):
        x = torch.randn(100)
        assert torch.equal(self.quantizer(ratio=1, x=x)(x), x)

    def test_gradients_pass_straight_through(self):
        x = torch.randn(100, requires_grad=True)
        grad = torch.randn(100)
        assert torch.equal(torch.autograd.grad(self.quantizer()(x), x, grad)[0], grad)

    def test_before_calibration_everything_passes(self):
        x = torch.randn(10)
        assert InputQuantizer(2, 0.0)(x) is x


class TestFineTuning:
    def test_full_precision_weights_are_trained_and_the_error_falls(self):
        model, exact = quantized(2, 0.01, 0.01), network()
        x = images(256)
        with torch.no_grad():
            target = exact(x)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        before = [p.detach().clone() for p in model.parameters()]
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0]
        for p, old in zip(model.parameters(), before, strict=True):
            assert (p != old).float().mean() > 0.9  # by less than a level: nothing rounds the weights themselves

    def test_the_gradient_is_that_at_the_quantized_weight(self):
        model = quantize(nn.Linear(8, 4), 3, 0.1, None)
        x = torch.randn(5, 8)
        model(x).square().sum().backward()
        weight = model.codes("weight").decompress().requires_grad_()
        nn.functional.linear(x, weight, model.layer.bias).square().sum().backward()
        assert torch.allclose(model.layer.weight.grad, weight.grad)


class TestPacking:
    def test_outputs_stay_the_same(self):
        model = quantized()
        y = model(images())
        assert pack(model) is model
        assert torch.equal(model(images()), y)
        assert not layers(model, TunedLayer)

    @pytest.mark.parametrize(("bits", "ratio"), [(3, 0.01), (4, 0.0), (5, 0.03)])
    def test_memory_is_what_is_claimed(self, bits, ratio):
        n = 256 * 128
        model = pack(quantize(nn.Linear(256, 128, bias=False), bits, ratio, None))
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in model.state_dict().values()}
        expected = n // 8 * bits + -(-n // 240) + round(ratio * n) * (1 + 2) + 8  # float16 values
        assert sum(held.values()) == model.nbytes == expected
        assert not list(model.parameters())

    def test_files_take_what_memory_takes(self, tmp_path):
        pytest.importorskip("safetensors")
        model = pack(quantize(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), 4, 0.01, None))
        save(model, tmp_path / "model.safetensors")
        size = (tmp_path / "model.safetensors").stat().st_size
        held = sum(t.numel() * t.element_size() for t in model.state_dict().values())
        assert held <= size < held + 4096

    def test_what_is_loaded_computes_the_same(self, tmp_path):
        pytest.importorskip("safetensors")
        model = pack(quantized())
        save(model, tmp_path / "model.safetensors")
        other = load(network(), tmp_path / "model.safetensors")
        assert torch.equal(other(images()), model(images()))
        assert len(layers(other, PackedLayer)) == 3
        assert list(other.state_dict()) == list(model.state_dict())

    def test_shared_layers_are_stored_once(self, tmp_path):
        pytest.importorskip("safetensors")
        layer = nn.Linear(64, 64)
        model = pack(quantize(nn.Sequential(layer, layer), 4, 0.01, None))
        save(model, tmp_path / "model.safetensors")
        assert (tmp_path / "model.safetensors").stat().st_size < 2 * model[0].nbytes
        twin = nn.Linear(64, 64)
        x = torch.randn(3, 64)
        assert torch.equal(load(nn.Sequential(twin, twin), tmp_path / "model.safetensors")(x), model(x))

    def test_files_of_something_else_are_told(self, tmp_path):
        files = pytest.importorskip("safetensors.torch")
        with pytest.raises(FewbitError, match="cannot read"):
            load(network(), tmp_path / "missing.safetensors")
        (tmp_path / "text").write_text("hello")
        with pytest.raises(FewbitError, match=r"not what fewbit\.vquant\.save writes"):
            load(network(), tmp_path / "text")
        files.save_file({"a": torch.zeros(2)}, tmp_path / "other")
        with pytest.raises(FewbitError, match=r"not what fewbit\.vquant\.save writes"):
            load(network(), tmp_path / "other")
        save(pack(quantized()), tmp_path / "model")
        with pytest.raises(FewbitError, match="has a layer '0'"):
            load(nn.Linear(3, 3), tmp_path / "model")
        with pytest.raises(FewbitError, match="does not fit the model: "):
            load(nn.Sequential(*network()[:6], nn.Linear(16 * 16, 11)), tmp_path / "model")
        with pytest.raises(FewbitError, match="pack"):
            save(network(), tmp_path / "model")
        with pytest.raises(FewbitError, match="there is no folder"):
            save(pack(quantized()), tmp_path / "missing" / "model")

    def test_other_dtypes_do_not_spoil_codes(self):
        model = pack(quantize(nn.Linear(64, 64), 4, 0.01, None))
        x = torch.randn(3, 64)
        y = model(x)
        assert torch.allclose(model.half()(x.half()).float(), y, atol=0.02)


class TestLSTM:
    @pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"proj_size": 8}, {"batch_first": True}])
    def test_weights_of_all_layers_and_directions(self, options):
        lstm = nn.LSTM(16, 32, 2, **options)
        x = torch.randn(5, 3, 16)
        y, _ = lstm(x)
        model = quantize(copy.deepcopy(lstm), 6, 0.03, None)
        assert all(not name.startswith("bias") for name in model.names)
        tuned, (h, c) = model(x)
        assert (tuned - y).norm() < 0.1 * y.norm()
        tuned.sum().backward()
        assert all(p.grad is not None for p in model.layer.parameters())
        packed = pack(model)
        assert torch.equal(packed(x)[0], tuned)
        assert torch.equal(packed(x, (h, c))[0], packed(x, (h, c))[0])
        assert packed.nbytes < 0.3 * sum(4 * getattr(lstm, name).numel() for name in model.names)

    def test_embeddings_and_the_whole_model(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.lstm, self.output = nn.Embedding(50, 16), nn.LSTM(16, 16), nn.Linear(16, 50)

            def forward(self, x):
                return self.output(self.lstm(self.embedding(x))[0])

        torch.manual_seed(0)
        model, words = Model(), torch.randint(0, 50, (7, 2))
        exact = model(words)
        packed = pack(quantize(model, 8, 0.01, None))
        assert len(layers(packed, PackedLayer)) == 3
        assert (packed(words) - exact).norm() < 0.02 * exact.norm()


class TestSearch:
    def test_the_smallest_that_is_enough(self):
        model = network()
        exact = model(images())

        def nearness(candidate):
            return -float((candidate(images()) - exact).detach().norm() / exact.norm())

        options = {"bits": (2, 3, 4, 6), "weight_ratios": (0, 0.03), "activation_ratios": (0, 0.03)}
        result = search(model, nearness, [images()], accuracy=-0.2, **options)
        assert len(result.rows) == 16
        assert [row.size for row in result.rows] == sorted(row.size for row in result.rows)
        enough = [row for row in result.rows if row.accuracy >= -0.2]
        assert result.best is enough[0]
        assert "smallest that is enough" in str(result)
        assert len(str(result).splitlines()) == 17
        quick = search(model, nearness, [images()], accuracy=-0.2, exhaustive=False, **options)
        assert quick.best.configuration == result.best.configuration
        assert quick.rows[-1].accuracy is None
        assert torch.equal(model(images()), exact)
        assert search(model, nearness, [images()], accuracy=1, bits=(2,)).best is None

    def test_fine_tuning_is_called_before_it_is_measured(self):
        seen = []
        search(
            *(network(), lambda m: seen.append("measured") or 0.0, [images()]),
            accuracy=1,
            bits=(3,),
            weight_ratios=(0,),
            activation_ratios=(0,),
            fine_tune=lambda m: seen.append("tuned"),
        )
        assert seen == ["tuned", "measured"]

    def test_nothing_to_try(self):
        with pytest.raises(FewbitError):
            search(network(), lambda m: 1.0, [images()], accuracy=1, bits=())
