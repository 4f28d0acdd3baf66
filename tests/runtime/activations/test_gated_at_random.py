"""Gated units whose code of act'(gate) is rounded at random: no bias, as many bytes, in every place that makes them."""

import copy
import pickle

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.functional import swiglu
from fewbit.runtime.activations.gated_modules import SwiGLU
from fewbit.runtime.layers.gated_mlp import GatedMLP
from glu_cases import UNITS, grads, kept_bytes, pair, relative, same
from small_modules import Gated
from torch import nn

DRAWS = 200


def mean_gradient(function, inputs, **options):
    """The mean gradients over draws of all that is random."""
    found = [grads(function(*inputs, **options), inputs) for _ in range(DRAWS)]
    return [torch.stack(parts).double().mean(0) for parts in zip(*found, strict=True)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", UNITS)
def test_gradients_are_torch_s_on_average(name):
    ours, act = UNITS[name]
    inputs = pair((16, 64))
    exact = grads(act(inputs[0]) * inputs[1], inputs)
    for bits in (1, 2, 3):
        means = mean_gradient(ours, inputs, bits=bits, copy_bits=8, rounding="stochastic")
        one = grads(ours(*inputs, bits=bits, copy_bits=8, rounding="stochastic"), inputs)
        for mean, drawn, wanted in zip(means, one, exact, strict=True):
            assert relative(mean, wanted) < 2 * relative(drawn, wanted) / DRAWS**0.5 + 1e-4
    biased = mean_gradient(ours, inputs, bits=1, copy_bits=8)[0]
    assert name == "reglu" or relative(biased, exact[0]) > 0.1  # what the measure sees without


def test_forward_and_bytes_are_as_ever():
    gate, up = pair((37, 128))
    expected, y = kept_bytes(lambda a, b: swiglu(a, b, bits=2), gate, up)
    found, ours = kept_bytes(lambda a, b: swiglu(a, b, bits=2, rounding="stochastic"), gate, up)
    assert found == expected and same(ours, y)


def test_on_each_backend_the_codes_are_those_of_plain_torch(backend):
    gate, up = (backend.put(x.detach()).requires_grad_() for x in pair((9, 100)))
    torch.manual_seed(3)
    ours = grads(swiglu(gate, up, bits=2, rounding="stochastic"), (gate, up))
    plain = pair((9, 100))
    torch.manual_seed(3)
    theirs = grads(swiglu(*plain, bits=2, rounding="stochastic"), plain)
    assert all(same(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


def test_compiled_as_eager():
    gate, up = pair((8, 64))

    def step(gate, up):
        return swiglu(gate, up, bits=2, rounding="stochastic")

    torch.manual_seed(1)
    expected = grads(step(gate, up), (gate, up))
    torch.manual_seed(1)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert all(same(a, b) for a, b in zip(grads(compiled(gate, up), (gate, up)), expected, strict=True))


@pytest.mark.parametrize("make", [SwiGLU, lambda **options: GatedMLP(16, 32, **options)])
def test_modules_say_so_and_are_copied(make):
    module = make(bits=2, rounding="stochastic")
    assert "rounding='stochastic'" in repr(module) and "rounding" not in repr(make(bits=2))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.plan == module.plan and other.table.kind == "stochastic"


def test_a_hostile_pickle_is_refused():
    module = SwiGLU(bits=2, rounding="stochastic")
    module.plan = module.plan._replace(at_random=False)
    with pytest.raises(FewbitError, match=r"^at_random tells whether the table is rounded at random, not False$"):
        pickle.loads(pickle.dumps(module))


def test_a_table_has_the_rounding_of_its_kind():
    table = fewbit.load_table("silu", bits=2, kind="stochastic")
    assert SwiGLU(table=table).plan.at_random
    with pytest.raises(FewbitError, match=r"^[^\n]*stochastic[^\n]*$"):
        SwiGLU(table=table, rounding="deterministic")


@pytest.mark.parametrize(
    ("options", "at_random"),
    [({}, False), ({"rounding": "stochastic"}, True), ({"level": "L2"}, True), ({"level": "L0"}, True)],
)
def test_conversion_rounds_as_activations_are(options, at_random):
    model = nn.Sequential(nn.Linear(16, 16), Gated(16, 32))
    fewbit.convert(model, glu="parts", **options)
    assert isinstance(model[1], GatedMLP) and model[1].plan.at_random == at_random


def test_a_given_table_stays():
    table = fewbit.load_table("silu", bits=3)
    model = nn.Sequential(nn.Linear(16, 16), Gated(16, 32))
    fewbit.convert(model, glu="parts", rounding="stochastic", tables={"silu": table})
    assert not model[1].plan.at_random
