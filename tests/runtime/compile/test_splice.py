"""Functions written into a graph compute what they compute by themselves."""

from functools import partial

import torch
from fewbit.runtime.compile.splice import Splicer
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
