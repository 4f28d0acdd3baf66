"""Compiled plans whose codes wait in host memory, on a pretended device: a copy leaves torch's allocator, and its
source is freed."""

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.compile import host, rewrite
from fewbit.runtime.plan.compiled import know_compiled, know_hosted
from fewbit.runtime.plan.compiled_planner import CompiledPlanner
from fewbit.runtime.plan.problem import Limits, Price
from fewbit.runtime.plan.static import static_bytes
from fewbit.runtime.plan.step import Step
from functorch.compile import make_boxed_func
from plan_cases import Net, batch
from torch._inductor import compile_fx

pytest.importorskip("torch._functorch._activation_offloading.offload_ops", reason="torch offloads from 2.13 on")


def offload(x):
    return torch.from_numpy(x.numpy().copy())


def reload(x, device, size, stride):
    return torch.empty_strided(size, stride, dtype=x.dtype).copy_(x)


def wait(x, keepalive, last_use_of_storage=None):
    if keepalive.untyped_storage().resizable():
        keepalive.untyped_storage().resize_(0)
    return x


@pytest.fixture
def device(monkeypatch):
    """Graphs run op by op, with copies of a device that has memory of its own."""
    calls = {"ao.offload": offload, "ao.reload": reload, "ao.wait_tensor": wait}

    def run(graph, inputs, **_):
        for node in graph.graph.nodes:
            node.target = calls.get(str(node.target).rpartition(".")[0], node.target)
        graph.recompile()
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", run)
    monkeypatch.setattr(host, "is_on_device", lambda node: True)
    monkeypatch.setattr(rewrite, "has_kernels", lambda *_: False)


def planner(step, **limits):
    static = static_bytes(step.model, "adamw")
    return CompiledPlanner(step, Limits(**limits), Price(), static, None, False, host_memory=1 << 30)


def test_codes_wait_where_memory_is_short(device, tmp_path):
    """A plan for less than any plan on the device alone takes: it is compiled, and its peak is what the step took."""
    torch.manual_seed(0)
    step = Step(Net(layers=2), (), batch(256))
    known = know_compiled(step)
    hosted = know_hosted(step, known, 1 << 30)
    least = planner(step, time=1e6).solved(known).peak.total
    memory = (planner(step, time=1e6).solved(hosted).peak.total + least) // 2
    plan = planner(step, memory=memory).best_compiled(known, iter([[hosted]]))
    assert plan.peak.total <= memory < least
    assert plan.compile_options["host_memory"] == 1 << 30
    plan.to_json(tmp_path / "plan.json")
    again = fewbit.Plan.from_json(tmp_path / "plan.json")
    assert again == plan and "codes wait in host memory" in str(again)


def test_a_step_that_is_not_compiled_weighs_host_memory_by_itself():
    with pytest.raises(FewbitError, match="compiled=True"):
        fewbit.plan(Net(), batch(4), memory="1GB", host_memory="1GB")
