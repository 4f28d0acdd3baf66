"""Compressed layers under torch.compile: one graph of any batch size, eager's numbers and eager's bytes kept."""

import copy

import fewbit
import pytest
import torch
from fewbit import layers
from fewbit.layers import QuantizerSaver
from fewbit.quantizers import PerGroup
from fewbit.runtime.allocation.savers import SampleSaver
from fewbit.runtime.layers.callers import forget_inputs
from fewbit.runtime.layers.preact import PreActConv2d, PreActLinear
from fewbit.runtime.layers.saver import TRACES_FUNCTIONS, TRACES_SIZES
from layer_cases import CASES, EXACT, stirred
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

pytestmark = pytest.mark.skipif(not TRACES_FUNCTIONS, reason="before torch 2.9 the graph ends at each layer")

# Torch's compiler decomposes resampling by float32 coordinates, and reads a number from the count of batches.
INTERPOLATES = "bilinear"
OF_ALL_BATCHES = "momentum=None"


def layer_of(case):
    if case in CASES:
        return case.compressed(bits=4)
    return getattr(layers, case.name)(*case.arguments, **case.keywords)


def passes(call, module, x, seed=0, any_size=False):
    """Output, gradients and bytes kept for the backward pass, parameters and buffers aside."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    if any_size:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = (storage.nbytes(), t)  # holds it, so that no other has its identity
        return t

    torch.manual_seed(seed)
    with saved_tensors_hooks(pack, lambda t: t):
        y = call(x)
    y = y[0] if isinstance(y, tuple) else y
    nbytes = sum(n for n, _ in kept.values())
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return y.detach(), [x.grad, *(p.grad for p in module.parameters())], nbytes


def same(ours, expected, exact=True):
    if ours is None or expected is None:
        return ours is expected
    return torch.equal(ours, expected) if exact else torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)


def has_batches(case):
    """Whether dimension 0 of the input may have any size."""
    dims = {"1d": 3, "2d": 4, "3d": 5}.get(case.name[-2:], 2)
    return len(case.shape) >= dims or case.name == "BatchNorm1d"


def compare(model, sizes, call=lambda module: module, exact=True, nbytes=True, any_size=False):
    """Assert that the compiled model is the eager one on inputs of these sizes, with two compilations at most.

    With `any_size` the first compilation is of any size, and the only one.
    """
    twin, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed, size in enumerate(sizes):
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        y, grads, kept = passes(call(compiled), model, x, seed, any_size)
        eager_y, eager_grads, eager_kept = passes(call(twin), twin, x, seed)
        assert same(y, eager_y, exact)
        assert all(same(a, b, exact) for a, b in zip(grads, eager_grads, strict=True))
        assert kept == eager_kept or not nbytes
    assert counter.frame_count <= 2 - any_size  # the second compilation is of any size
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


LAYERS = [c for c in (*CASES, *EXACT) if OF_ALL_BATCHES not in str(c)]
FIRST = {case.name: case for case in reversed(LAYERS)}


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_every_layer_is_eagers_in_one_graph_of_any_batch(case):
    # Below 16 images convolutions of torch run other kernels.
    sizes = [(n, *case.shape[1:]) for n in (17, 20, 23)] if has_batches(case) else [case.shape] * 2
    own = case.name == "Upsample" or case.arguments == (1.0,)  # torch's decompositions keep coordinates, or a mask
    exact = INTERPOLATES not in str(case)
    # One case of a layer is compiled as torch does it, for the first size and then for any; the others at once for any.
    any_size = FIRST[case.name] is not case and has_batches(case)
    compare(layer_of(case), sizes, lambda layer: lambda x: layer(x, **case.call), exact, not own, any_size)


IN_PLACE = {
    "activation": lambda: layers.Activation(nn.ELU(inplace=True), inplace=True),
    "dropout": lambda: layers.Dropout(0.3, inplace=True),
}


@pytest.mark.deep
@pytest.mark.parametrize("make", IN_PLACE.values(), ids=IN_PLACE)
def test_layers_that_overwrite_their_input_are_eagers_in_one_graph(make):
    compare(nn.Sequential(nn.Linear(32, 32), make(), nn.Linear(32, 8)), [(n, 32) for n in (17, 20, 23)])


PREACT = {
    "convolution": (lambda: PreActConv2d(4, 6, 3, padding=1), (4, 8, 8)),
    "leaky": (lambda: PreActConv2d(4, 6, 3, stride=2, bits=2, negative_slope=0.1), (4, 8, 8)),
    "uneven": (lambda: PreActConv2d(4, 6, 4, padding="same"), (4, 8, 8)),
    "reflect": (lambda: PreActConv2d(4, 6, 3, padding=1, padding_mode="reflect"), (4, 8, 8)),
    "pooled": (lambda: PreActConv2d(4, 6, 1, pool=nn.AvgPool2d(2)), (4, 8, 8)),
    "linear": (lambda: PreActLinear(12, 6), (12,)),
    "linear, pooled": (lambda: PreActLinear(4, 6, pool=nn.AdaptiveAvgPool2d(1)), (4, 8, 8)),
    "exact": (lambda: PreActConv2d(4, 6, 3, bits=None), (4, 8, 8)),
    "evaluation": (lambda: PreActConv2d(4, 6, 3).eval(), (4, 8, 8)),
    "naive": (lambda: PreActConv2d(4, 6, 3, naive=True), (4, 8, 8)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("make, shape", PREACT.values(), ids=PREACT)
def test_preactivation_layers_are_eagers_in_one_graph_of_any_batch(make, shape):
    compare(stirred(make()), [(n, *shape) for n in (17, 20, 23)])


VALUE_AWARE = {
    "ReLU": (lambda: nn.ReLU(), (32,)),
    "in place": (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 64)), (32,)),
    "layers": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
        (32,),
    ),
    "view": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8)), (2, 8, 8)),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32, 8)),
        ),
        (2, 8, 8),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("make, shape", VALUE_AWARE.values(), ids=VALUE_AWARE)
def test_value_aware_networks_are_eagers_in_one_graph_of_any_batch(make, shape):
    model = fewbit.convert(nn.Sequential(make()), outliers=0.02, bits=3).model
    forget_inputs(model)  # compiled code knows nothing of its caller, and compresses what eager code finds held
    compare(model, [(n, *shape) for n in (17, 20, 23)])


class ChangedAfterReLU(nn.Module):
    """A ReLU whose output changes in place before the layer that would share its codes."""

    def __init__(self):
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)

    def forward(self, x):
        y = self.relu(self.first(x))
        y.sub_(1)
        return self.second(y)


@pytest.mark.deep
def test_codes_of_a_changed_tensor_are_not_shared():
    model = fewbit.convert(ChangedAfterReLU(), outliers=0.02, bits=3).model
    forget_inputs(model)
    compare(model, [(17, 32), (20, 32)])


@pytest.mark.parametrize("compiled", [0, 1])
def test_codes_do_not_pass_between_eager_and_compiled_layers(compiled):
    """A ReLU leaves its codes for the layer behind it; where only one of the two is compiled, that makes its own."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(64, 64))
    fewbit.convert(model, outliers=0.02, bits=3)
    parts = list(model)
    parts[compiled] = torch.compile(parts[compiled], backend="eager")
    x = torch.randn(32, 64, requires_grad=True)
    y = parts[1](parts[0](x))
    assert torch.equal(y, model(x))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.deep)])
def test_networks_keep_eagers_bytes_and_free_the_activations(backend):
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128)),
        *(nn.Softmax(-1), nn.Linear(128, 64)),
    )
    fewbit.convert(model, level="L2", bits=4)
    forget_inputs(model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(256, 64)
    y, grads, kept = passes(compiled, model, x)
    eager_y, eager_grads, eager_kept = passes(twin, twin, x)
    assert kept <= 1.02 * eager_kept  # exact copies of 64 to 128 numbers a row would be six times as many
    torch.testing.assert_close(y, eager_y)
    if backend == "aot_eager":  # Inductor sums in another order
        assert all(map(same, grads, eager_grads))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "Softmax"])
def test_two_copies_are_rounded_apart(name):
    arguments = () if name == "Softmax" else (32,)
    layer = getattr(layers, name)(*arguments, bits=2, copies=2)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    y, grads, nbytes = passes(call, layer, x)
    eager_y, eager_grads, expected = passes(layer, layer, x)
    assert same(y, eager_y)
    assert all(map(same, grads, eager_grads))
    assert nbytes == expected


class Attends(nn.Module):
    """Projections and attention, saved in four bits."""

    def __init__(self, **options):
        super().__init__()
        self.project, self.options, self.saver = nn.Linear(32, 96), options, QuantizerSaver(PerGroup(4))

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return layers.scaled_dot_product_attention(q, k, v, self.saver, **self.options)


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": torch.linspace(-2, 2, 144).view(12, 12)},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_is_eagers_in_one_graph_of_any_batch(options):
    model, counter = Attends(**options), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (18, 20, 23):
        x = torch.randn(n, 12, 32)
        ours, expected = passes(compiled, model, x, any_size=bool(options)), passes(model, model, x)
        assert same(ours[0], expected[0])
        assert all(map(same, ours[1], expected[1]))
        assert ours[2] == expected[2]
    assert counter.frame_count <= 2


@pytest.mark.deep
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_is_eagers_in_one_graph(need_weights, dropout):
    model = layers.MultiheadAttention(32, 4, batch_first=True, dropout=dropout)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (18, 20, 23):
        x = torch.randn(n, 12, 32)
        ours = passes(lambda x: compiled(x, x, x, need_weights=need_weights), model, x, any_size=dropout > 0)
        expected = passes(lambda x: model(x, x, x, need_weights=need_weights), model, x)
        assert same(ours[0], expected[0])
        assert ours[2] <= expected[2]
        # Without dropout the compiler merges the copies of the weights that softmax and product save.
        if not need_weights or dropout:
            assert all(map(same, ours[1], expected[1]))
    assert counter.frame_count <= 2


class Branches(nn.Module):
    """Layers that share an input, a normalization, and a convolution behind them."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.norm = nn.Linear(32, 64), nn.Linear(32, 64), nn.LayerNorm(64)
        self.act, self.convolution = nn.GELU(), nn.Conv1d(4, 8, 3)
        self.batch_norm, self.head = nn.BatchNorm1d(8), nn.Linear(14, 8)

    def forward(self, x):
        x = x.sin()
        y = self.norm(self.act(self.query(x) * self.key(x)))
        return self.head(self.batch_norm(self.convolution(y.view(len(y), 4, 16)))).softmax(-1)


def bits_allocated(model):
    """Bits, magnitude of the gradients and sharing of each layer with mixed precision."""
    found = [layer.saver for layer in model.modules() if hasattr(layer, "saver")]
    savers = [s for s in (getattr(saver, "saver", saver) for saver in found) if isinstance(s, SampleSaver)]
    return [(saver.average, float(saver.magnitude), len(saver.batches), saver.host is None) for saver in savers]


@pytest.mark.deep
@pytest.mark.skipif(not TRACES_SIZES, reason="before torch 2.11 the graph ends at each layer")
@pytest.mark.parametrize("level", ["L3", "L4"])
def test_mixed_precision_is_eagers_in_one_graph_of_any_batch(level):
    model = fewbit.convert(Branches(), level=level, bits=2.5).model
    forget_inputs(model)
    twin, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step, n in enumerate((17, 20, 23, 20)):
        x = torch.randn(n, 32)
        y, grads, _ = passes(compiled, model, x, step)
        eager_y, eager_grads, _ = passes(twin, twin, x, step)
        assert same(y, eager_y)
        assert all(map(same, grads, eager_grads))
        assert bits_allocated(model) == bits_allocated(twin)
    assert len({average for average, *_ in bits_allocated(model)}) > 1  # they were allocated among layers
    assert not all(alone for *_, alone in bits_allocated(model))  # two layers share the codes of their input
    assert counter.frame_count <= 3  # the model's hook is one, which begins an iteration


@pytest.mark.deep
@pytest.mark.skipif(not TRACES_SIZES, reason="before torch 2.11 the graph ends at each layer")
def test_mixed_precision_compiled_by_inductor_learns_and_allocates():
    model = fewbit.convert(Branches(), level="L3", bits=2.5).model
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(20, 32)).square().sum().backward()
    assert all(magnitude > 0 and batches < 2 for _, magnitude, batches, _ in bits_allocated(model))
    assert len({average for average, *_ in bits_allocated(model)}) > 1
