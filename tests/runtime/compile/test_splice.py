"""Functions written into a graph compute what they compute by themselves."""

from functools import partial

import pytest
import torch
from fewbit.runtime.compile.cut import Choice
from fewbit.runtime.compile.roles import Role
from fewbit.runtime.compile.rotated import rotation_of
from fewbit.runtime.compile.splice import Splicer
from fewbit.runtime.compile.turning import draw_keys, quantize_turned
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def difference(x, y, *, times):
    """Tell its arguments apart."""
    return x - y, (x + y) * times


def test_functions_of_values_that_share_a_description_tell_them_apart():
    """Nodes inserted by one trace have the same fake tensors in their meta data."""
    gm = make_fx(lambda x, y: (x.neg(), y.neg()), tracing_mode="fake")(torch.empty(3, 4), torch.empty(3, 4))
    output = gm.graph.output_node()
    first, second = output.args[0]
    second.meta["val"] = first.meta["val"]
    with gm.graph.inserting_before(output):
        results = Splicer().splice(gm.graph, partial(difference, times=2), first, second)
    output.args = (results,)
    gm.recompile()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for found, expected in zip(gm(x, y), difference(-x, -y, times=2), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("there", "here"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_keys_are_drawn_beside_values_on_a_device_that_no_input_is_on(there, here):
    """A key of the GPU was none for the CPU's kernels: such a model did not compile."""
    with FakeTensorMode():
        x, y = (torch.empty(64, 128, device=device) for device in (there, here))
    graph = fx.Graph()
    given = graph.placeholder("x")
    moved = graph.call_function(torch.ops.aten._to_copy.default, (given,), {"device": y.device})
    given.meta["val"], moved.meta["val"] = x, y
    graph.output((moved,))
    rotation, splicer = rotation_of(y, 2, 128, unbiased=True, centered=False), Splicer()
    turned = {moved: Choice(Role.LINEAR, 2, None, 0, rotation=rotation)}
    keys = draw_keys(graph, turned, splicer)
    (buffer,) = quantize_turned(graph, turned, keys, splicer)[moved]
    assert keys[y.device].meta["val"].device == buffer.meta["val"].device == y.device
