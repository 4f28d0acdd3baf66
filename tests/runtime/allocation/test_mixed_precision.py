"""Bits that a training shares out: budgets kept, gradients unbiased and less noisy, checkpoints, odd models."""

import copy
import gc

import fewbit
import pytest
import torch
from fewbit import FewbitError, memory
from fewbit.runtime import layers, ops
from fewbit.runtime.allocation import MixedPrecision
from fewbit.runtime.allocation.savers import SampleSaver
from fewbit.runtime.layers import QuantizerSaver
from fewbit.runtime.layers.callers import forget_inputs
from fewbit.runtime.layers.saver import TRACES_SIZES
from fewbit.runtime.quantizers import PerGroup, Rotated
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F


def network(seed=0):
    """Convolutions at very different scales, normalized and not; no activation holds the next layer's input."""
    torch.manual_seed(seed)
    return nn.Sequential(
        layers.Conv2d(3, 16, 3, padding=1, bits=2),
        layers.BatchNorm2d(16, bits=2),
        fewbit.ReLU(),
        layers.Conv2d(16, 32, 3, stride=2, padding=1, bits=2),
        layers.BatchNorm2d(32, bits=2),
        fewbit.ReLU(),
        nn.Flatten(),
        layers.Linear(32 * 16, 10, bits=2),
    )


def batch(N=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-2, 3, (N, 1, 1, 1), generator=g).float())
    return torch.randn(N, 3, 8, 8, generator=g) * scale, torch.randint(0, 10, (N,), generator=g)


def step(model, x, y):
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def kept(model, x):
    """What each saver compressed in a forward pass."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, layers.CompressedLayer):
            for method in ("compress", "compress_rows"):
                inner = getattr(layer.saver, method)

                def compress(x, inner=inner, name=name):
                    found[name] = inner(x)
                    return found[name]

                setattr(layer.saver, method, compress)
    try:
        model(x)
    finally:
        for _, layer in model.named_modules():
            if isinstance(layer, layers.CompressedLayer):
                del layer.saver.compress, layer.saver.compress_rows
    return found


@pytest.mark.parametrize("bits", [1.25, 1.5, 1.75, 2, 4])
def test_the_budget_is_kept_and_spent(bits):
    model = network()
    precision = MixedPrecision(model, bits)
    x, y = batch()
    for _ in range(4):
        step(model, x, y)
    compressed = kept(model, x)
    elements = {name: c.form.numel for name, c in compressed.items()}
    spent = sum(int(c.bits.sum()) * elements[name] // len(c.bits) for name, c in compressed.items())
    assert len(compressed) == 5
    assert 0.97 * bits <= spent / sum(elements.values()) <= bits
    assert len(set(precision.bits.values())) > 1


def test_the_first_iteration_gives_all_layers_alike():
    model = network()
    MixedPrecision(model, 3.0)
    for c in kept(model, batch()[0]).values():
        assert c.bits.float().mean() == 3
        assert len(c.bits.unique()) > 1  # but not all samples


def test_normalizations_have_two_bits_where_the_average_allows_it():
    """At 1 bit, the errors of the gradients that they pass on multiply in deep networks."""
    model = network()
    precision = MixedPrecision(model, 2.0)
    x, y = batch()
    for _ in range(4):
        step(model, x, y)
    found = kept(model, x)
    assert all(int(found[name].bits.min()) >= 2 for name in ("1", "4"))
    assert min(precision.bits.values()) < 2


def test_samples_of_larger_range_get_more_bits():
    model = layers.Linear(256, 4)
    MixedPrecision(model, 3.0)
    c = model.saver.compress(torch.randn(8, 256) * torch.exp2(torch.arange(8.0))[:, None])
    assert (c.bits.int().diff() >= 0).all()
    assert c.bits[0] < c.bits[-1]


def test_gradients_are_unbiased_and_less_noisy_than_with_fixed_bits():
    x, y = batch(32)
    exact = network()
    model = copy.deepcopy(exact).eval()  # statistics fixed: each gradient linear in what is compressed
    for layer in exact.modules():
        if isinstance(layer, layers.CompressedLayer):
            layer.saver = layers.ExactSaver()
    step(exact.eval(), x, y)
    truth = torch.cat([p.grad.flatten() for p in exact.parameters()])

    def draws(count):
        for _ in range(count):
            step(model, x, y)
            yield torch.cat([p.grad.flatten() for p in model.parameters()])

    fixed = torch.stack(list(draws(60)))
    MixedPrecision(model, 2.0)
    for _ in range(3):
        step(model, x, y)
    mixed = torch.stack(list(draws(60)))
    for found in (fixed, mixed):
        expected = found.var(0).sum() / len(found)  # of the mean's squared error, if there is no bias
        assert (found.mean(0) - truth).square().sum() < 1.3 * expected
    assert mixed.var(0).sum() < 0.8 * fixed.var(0).sum()


class Beside(nn.Module):
    """Two layers of one input, the gradient of the second a hundred times the first's, and one more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (layers.Linear(64, 64, bits=2) for _ in range(3))
        self.apart = False

    def forward(self, x):
        return self.last(self.first(x) + 100 * self.second(x.clone() if self.apart else x))


class TestRotatedCodes:
    def test_have_whole_bits_a_layer_by_what_their_noise_does_to_the_gradient(self):
        """Of three layers, one with a gradient a hundred times as large as another's; equal bits err twice as much."""
        model, x = Beside(), torch.randn(64, 64)
        model.apart = True

        def gradients(saver):
            for layer in model.children():
                layer.saver = saver
            return draws(2)

        def draws(count):
            found = []
            for _ in range(count):
                model.zero_grad()
                model(x).square().mean().backward()
                found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            return torch.stack(found)

        truth, fixed = gradients(layers.ExactSaver())[0], gradients(QuantizerSaver(Rotated(3)))
        precision = MixedPrecision(model, 3.0, quantizer="rotated")
        found = kept(model, x)
        assert {c.quantizer.bits for c in found.values()} == {3}
        mixed = draws(8)[2:]
        bits = {name: c.quantizer.bits for name, c in kept(model, x).items()}
        assert bits == precision.bits
        assert bits["first"] < bits["second"]
        assert sum(bits.values()) == 9
        assert (mixed - truth).square().sum(1).mean() < 0.5 * (fixed - truth).square().sum(1).mean()

    def test_have_the_floor_of_the_average_before_a_gradient_is_known(self):
        model = network()
        MixedPrecision(model, 2.5, quantizer="rotated")
        assert {c.quantizer.bits for c in kept(model, batch()[0]).values()} == {2}

    def test_end_a_compiled_graph_at_each_layer(self):
        model, x = nn.Sequential(layers.Linear(64, 64), layers.Linear(64, 64)), torch.randn(64, 64)
        precision = MixedPrecision(model, 3.0, quantizer="rotated")
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            compiled(x * 2).square().mean().backward()
        assert precision.iterations == 2
        assert all(saver.magnitude is not None for saver in precision.savers.values())

    def test_have_groups_of_the_sizes_of_the_quantizer(self):
        with pytest.raises(FewbitError, match="group_size is one of 64, 128, 256"):
            MixedPrecision(network(), quantizer="rotated", group_size=100)


class TestLayersOfOneInput:
    def test_share_bits_that_answer_for_the_gradients_of_both(self):
        model, x = Beside(), torch.randn(16, 64)
        precision = MixedPrecision(model, 3)
        for _ in range(3):
            model(x).square().mean().backward()
        first, second, _ = precision.savers.values()
        assert second.host is first and first.guests == [second] and not second.batches
        assert precision.bits["first"] == precision.bits["second"] == first.average
        (batch,) = first.batches
        expected = batch.variance.sum() * (first.magnitude + second.magnitude)
        assert float(batch.sensitivity().sum()) == pytest.approx(float(expected), rel=1e-6)
        assert float(second.magnitude) > 1000 * float(first.magnitude)

    def test_keep_one_copy(self):
        model, x = Beside(), torch.randn(16, 64)
        MixedPrecision(model, 3)
        together = memory.profile(model, x).total
        model.apart = True
        assert memory.profile(model, x).total > together + 16 * 64 * 3 / 8

    def test_part_when_their_inputs_do(self):
        model, x = Beside(), torch.randn(16, 64)
        precision = MixedPrecision(model, 3)
        model(x).square().mean().backward()
        model.apart = True
        model(x).square().mean().backward()
        first, second, _ = precision.savers.values()
        assert second.host is None and not first.guests and second.batches
        model.apart = False
        model(x).square().mean().backward()
        assert second.host is first

    def test_are_copied_together_and_released_apart(self):
        model, x = Beside(), torch.randn(16, 64)
        precision = MixedPrecision(model, 3)
        model(x).square().mean().backward()
        again = copy.deepcopy(model)
        assert again.second.saver.host is again.first.saver is not model.first.saver
        again(x).square().mean().backward()
        precision.release(model.first)
        assert precision.savers["second"].host is None
        model(x).square().mean().backward()

    def test_learn_from_stale_gradients_of_both(self):
        model, x = Beside(), torch.randn(16, 64)
        precision = MixedPrecision(model, 3, gradients="stale")
        for _ in range(3):
            precision.samples(range(16))
            model(x).square().mean().backward()
        first, second, _ = precision.savers.values()
        (batch,) = first.batches
        assert batch.stale is not None and batch.stale.min() > second.stale.min() * 0.99


def test_a_layer_that_is_not_used_takes_nothing():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = network()
            self.unused = layers.Linear(1000, 1000)

        def forward(self, x):
            return self.used(x)

    model = Partly()
    precision = MixedPrecision(model, 2.0)
    x, y = batch()
    for _ in range(3):
        step(model, x, y)
    bits = precision.bits
    assert bits.pop("unused") == 2.0
    assert len(set(bits.values())) > 1


def test_every_so_many_iterations():
    model = network()
    precision = MixedPrecision(model, 2.0, every=3)
    x, y = batch()
    history = []
    for _ in range(7):
        step(model, x, y)
        history.append(tuple(precision.bits.values()))
    assert history[0] == history[1] == history[2] != history[3]
    assert history[3] == history[4] == history[5]


def test_within_layers_alone():
    model = network()
    precision = MixedPrecision(model, 1.5, across_layers=False)
    x, y = batch()
    for _ in range(3):
        step(model, x, y)
    assert set(precision.bits.values()) == {1.5}


def test_stale_gradients_are_those_of_the_same_samples():
    model = layers.Linear(256, 4)
    precision = MixedPrecision(model, 2.0, gradients="stale", momentum=0.0)
    x = torch.randn(4, 256).expand(4, 256).contiguous()
    x[:] = x[0]  # all alike: only gradients tell them apart
    large = torch.tensor([1.0, 1.0, 100.0, 1.0])
    with torch.device("meta"):  # whatever the default device
        precision.samples([10, 11, 12, 13])
    (model(x) * large[:, None]).sum().backward()
    precision.samples([13, 12, 11, 10])
    c = model.saver.compress(x)
    assert c.bits.argmax() == 1
    precision.samples([20, 21, 22, 23])  # never seen: by the average, so all alike
    assert model.saver.compress(x).bits.tolist() == [2, 2, 2, 2]


def test_gradients_that_are_not_finite_teach_nothing():
    model = layers.Linear(256, 4)
    precision = MixedPrecision(model, 2.0)
    x = torch.randn(8, 256)
    for value in (float("inf"), 1.0, float("nan")):
        model(x).backward(torch.full((8, 4), value))
    assert float(precision.savers[""].magnitude) == pytest.approx(4.0)
    x[0, 0] = torch.nan
    (model(x) * 1.0).sum().backward()
    assert set(precision.bits.values()) == {2.0}


@pytest.mark.parametrize("quantizer", ["groups", "rotated"])
def test_a_checkpoint_brings_it_back(quantizer):
    x, y = batch()
    model = network()
    precision = MixedPrecision(model, 1.75, quantizer=quantizer)
    for _ in range(3):
        step(model, x, y)
    other = network()
    restored = MixedPrecision(other, 1.75, quantizer=quantizer)
    restored.load_state_dict(precision.state_dict())
    assert restored.bits == precision.bits
    assert restored.iterations == precision.iterations
    with pytest.raises(FewbitError, match=r"^the state is of other layers: , 0, 1, 3, 4$"):
        MixedPrecision(layers.Linear(2, 2), 2.0).load_state_dict(precision.state_dict())


def test_a_copy_of_the_model_learns_by_itself():
    model = network()
    precision = MixedPrecision(model, 2.0)
    other = copy.deepcopy(model)
    x, y = batch()
    for _ in range(2):
        step(other, x, y)
    assert set(precision.bits.values()) == {2.0}
    assert other[0].saver.average != 2.0 or other[3].saver.average != 2.0


def test_evaluation_changes_nothing_and_remove_restores():
    model = network()
    savers = [m.saver for m in model.modules() if isinstance(m, layers.CompressedLayer)]
    precision = MixedPrecision(model, 2.0)
    x, y = batch()
    step(model, x, y)
    with torch.no_grad():
        model(x)
    assert precision.iterations == 0  # the next training pass still finds what the last one left
    step(model, x[:5], y[:5])
    assert precision.iterations == 1
    precision.remove()
    assert [m.saver for m in model.modules() if isinstance(m, layers.CompressedLayer)] == savers
    assert all(isinstance(saver, QuantizerSaver) and saver.quantizer == PerGroup(2) for saver in savers)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"bits": 0.99}, {"bits": 8.5}, {"bits": "2"}, {"bits": float("nan")}, {"gradients": "last"}),
        *({"momentum": 1.0}, {"every": 0}, {"group_size": 0}),
    ],
)
def test_arguments_are_checked(arguments):
    with pytest.raises(FewbitError, match=r"^[^\n]+ not [^\n]+$"):
        MixedPrecision(network(), **arguments)


def test_kinds_whose_sensitivities_do_not_compare_keep_the_average():
    first, norm, last = layers.Linear(64, 64, bits=2), layers.LayerNorm(64, bits=2), layers.Linear(64, 1, bits=2)
    model = nn.Sequential(first, norm, fewbit.ReLU(), last)
    precision = MixedPrecision(model, 2.5)
    for seed in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
    model(x)
    assert precision.bits["1"] == 2.5
    assert precision.bits["0"] != precision.bits["3"]
    assert (precision.bits["0"] + precision.bits["3"]) / 2 == pytest.approx(2.5, abs=0.05)


def test_a_model_without_compressed_layers_is_refused():
    with pytest.raises(FewbitError, match="no compressed layer"):
        MixedPrecision(nn.Linear(2, 2))


@pytest.mark.parametrize("indices", [[-1, 2], [[1, 2]], [0.5, 1.0], 3])
def test_samples_are_checked(indices):
    with pytest.raises(FewbitError, match=r"^samples are integers"):
        MixedPrecision(network()).samples(indices)


def in_graphs(model, x, steps=3, **how):
    """The model's gradients and allocation after steps, compiled and eager; the same random numbers in each."""
    forget_inputs(model)  # compiled code does not know its caller
    found = []
    for net in (model, copy.deepcopy(model)):
        call = torch.compile(net, backend="aot_eager", **how) if net is model else net
        for seed in range(steps):
            torch.manual_seed(seed)
            net.zero_grad()
            call(x).square().sum().backward()
        savers = [m.saver for m in net.modules() if isinstance(getattr(m, "saver", None), SampleSaver)]
        allocated = [(s.average, float(s.magnitude), len(s.batches), s.precision.iterations) for s in savers]
        found.append((allocated, [p.grad for p in net.parameters()]))
    return found


@pytest.mark.skipif(not TRACES_SIZES, reason="before torch 2.11 the graph ends at each layer")
class TestInCompiledGraphs:
    """What savers learn there they learn by ops, which find them by a handle."""

    @staticmethod
    def saver_of(model):
        precision = MixedPrecision(model, bits=2.5)
        (saver, *_) = precision.savers.values()
        return precision, saver

    @staticmethod
    def same(model, x, **how):
        (ours, gradients), (eagers, expected) = in_graphs(model, x, **how)
        assert ours == eagers
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b)

    def test_opcheck(self):
        precision, saver = self.saver_of(network())
        _, host = self.saver_of(network())
        x, gradient = torch.randn(6, 3, 8, 8), torch.randn(6, 16, 8, 8)
        bits = torch.arange(1, 7, dtype=torch.uint8)
        for op, arguments in (
            (ops.begin_iteration, (precision.iteration, precision.handle)),
            (ops.allocate_bits, (x, precision.iteration, saver.handle, 64)),
            (ops.share_bits, (x, bits, saver.handle, host.handle)),
            (ops.observe, (gradient, None, bits, saver.handle)),
            (ops.to_host, (x,)),
            (ops.to_device_of, (x, gradient)),
        ):
            torch.library.opcheck(op, arguments)

    def test_a_copy_learns_for_itself(self):
        model = network()
        _, saver = self.saver_of(model)
        twin = copy.deepcopy(saver)
        bits = torch.full((6,), 2, dtype=torch.uint8)
        ops.allocate_bits(torch.randn(6, 3, 8, 8), twin.precision.iteration, twin.handle, 64)
        ops.observe(torch.randn(6, 16, 8, 8), None, bits, twin.handle)
        assert twin.magnitude is not None and saver.magnitude is None

    def test_an_empty_batch_has_bits_for_no_sample(self):
        precision, saver = self.saver_of(network())
        bits, room = ops.allocate_bits(torch.empty(0, 8), precision.iteration, saver.handle, 64)
        assert bits.shape == (0,) and room.tolist() == [0]

    def test_a_saver_that_is_gone_allocates_nothing_and_learns_nothing(self):
        gone, bits = torch.tensor([10**9]), torch.ones(2, dtype=torch.uint8)
        with pytest.raises(FewbitError, match="compile it again"):
            ops.allocate_bits(torch.randn(2, 8), torch.zeros(1, dtype=torch.int64), gone, 64)
        assert torch.equal(ops.observe(torch.randn(2, 8), None, bits, gone), bits)

    def test_a_model_converted_back_after_its_forward_pass_has_its_gradient(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        fewbit.convert(model, level="L3", bits=2.5)
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(16, 64)).sum()
        fewbit.revert(model)
        gc.collect()
        y.backward()
        assert model[2].weight.grad.norm() > 0

    def test_more_blocks_compiled_one_by_one_than_a_function_may_have_graphs(self):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(10)))
        fewbit.convert(model, level="L3", bits=2.5)
        forget_inputs(model)
        for block in model:
            block.compile(backend="eager", fullgraph=True)
        model(torch.randn(16, 64)).sum().backward()
        assert all(block[0].weight.grad is not None for block in model)

    @pytest.mark.deep
    def test_blocks_compiled_one_by_one_are_eagers(self):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3)))
        fewbit.convert(model, level="L3", bits=2.5)
        forget_inputs(model)
        twin = copy.deepcopy(model)
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
        for seed in range(3):
            x = torch.randn(17, 64)
            for net in (model, twin):
                torch.manual_seed(seed)
                net.zero_grad()
                net(x).square().sum().backward()
            for ours, eagers in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, eagers.grad)

    @pytest.mark.deep
    def test_a_first_layer_that_is_called_again_and_again(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.out, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

            def forward(self, x):
                for _ in range(3):
                    x = self.cell(x).cos()
                return self.head(self.out(x).sin())

        self.same(fewbit.convert(Tied(), level="L3", bits=2.5).model, torch.randn(17, 64), fullgraph=True)

    def test_parts_that_are_not_compiled(self):
        class Trunk(nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

            @torch.compiler.disable
            def apart(self, x):
                return self.trunk(x)

            def forward(self, x):
                return self.apart(x * 2) + 1

        self.same(fewbit.convert(Trunk(), level="L3", bits=2.5).model, torch.randn(17, 64))

    @pytest.mark.deep
    def test_layers_of_different_kinds_on_one_input_have_codes_of_their_own(self):
        class Kinds(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.convolution = nn.Linear(64, 64), nn.Conv1d(4, 4, 3, padding=1)

            def forward(self, x):
                x = x.sin()
                return (self.linear(x) + self.convolution(x)).sin()

        model = fewbit.convert(Kinds(), level="L3", bits=2.5).model
        (allocated, gradients), _ = in_graphs(model, torch.randn(17, 4, 64), fullgraph=True)
        assert [count for _, _, count, _ in allocated] == [1, 1]
        assert all(gradient.isfinite().all() for gradient in gradients)

    @pytest.mark.deep
    @pytest.mark.parametrize("level", ["L3", "L4"])
    def test_frozen_attention_to_a_memory(self, level):
        class Attends(nn.Module):
            def __init__(self):
                super().__init__()
                self.query = nn.Linear(32, 32)
                self.attention = nn.MultiheadAttention(32, 4, batch_first=True).requires_grad_(False)

            def forward(self, x):
                return self.attention(self.query(x), x, x)[0]

        model = fewbit.convert(Attends(), level=level, bits=2.5).model
        forget_inputs(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(torch.randn(4, 16, 32)).square().sum().backward()
        assert model.query.weight.grad.norm() > 0

    def test_samples_of_few_elements_stay_exact(self):
        model = fewbit.convert(nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 8)), level="L3", bits=2.5).model
        plain = copy.deepcopy(model)
        fewbit.revert(plain)
        forget_inputs(model)
        x = torch.randn(16, 2)
        for call in (torch.compile(model, backend="aot_eager", fullgraph=True), plain):
            call(x).sum().backward()
        assert torch.equal(model[0].weight.grad, plain[0].weight.grad)

    @pytest.mark.deep
    def test_codes_in_host_memory_return_in_the_backward_pass(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
        fewbit.convert(model, level="L4", bits=2.5)
        forget_inputs(model)
        moved = {}

        def counting(name):
            def compiler(graph, _):
                moved[name] = {node.target for node in graph.graph.nodes} & {ops.to_host, ops.to_device_of}
                return make_boxed_func(graph)

            return compiler

        divide = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"), partition_fn=divide)
        model._forward_pre_hooks.clear()  # the precision's has a graph of its own
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(32, 64)).square().sum().backward()
        assert moved == {"forward": {ops.to_host}, "backward": {ops.to_device_of}}

    @pytest.mark.deep
    def test_a_saver_that_no_compiler_traces_ends_the_graph(self):
        class Counting:
            def __init__(self):
                self.seen = {}

            def compress(self, x):
                self.seen[len(self.seen)] = float(x.detach().abs().max())  # a number of values
                return PerGroup(4).compress(x)

            def observe(self, gradient, rstd=None):
                self.seen[len(self.seen)] = float(gradient.abs().max())

        model = nn.Sequential(nn.Linear(64, 64), layers.Linear(64, 64, saver=Counting()), nn.Linear(64, 8))
        compiled = torch.compile(model, backend="aot_eager")
        compiled(torch.randn(16, 64)).sum().backward()
        assert len(model[1].saver.seen) == 2 and model[1].weight.grad is not None
