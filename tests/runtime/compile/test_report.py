"""Which graphs `compile_report` reports of a model that was compiled several times."""

import gc
from pathlib import Path
from typing import Any

import fewbit
import pytest
import torch
from compiled import op_by_op
from fewbit.runtime.compile import options, report
from fewbit.runtime.compile.options import CompileOptions
from torch import nn

X = torch.randn(256, 64)


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(graph: Any, inputs: Any, config_patches: Any, **_: Any) -> Any:
        return op_by_op(config_patches["custom_partitioner_fn"])(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", run)
    monkeypatch.setattr(report, "_RECORDS", [])


def compiled(model: nn.Module, **how: Any) -> nn.Module:
    found: Any = torch.compile(model, **{"backend": "fewbit", **how})
    found(X).sum().backward()
    return found


def test_views_of_one_value_hold_it_once() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 128), nn.Linear(64, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a(x)[:, :, None] + self.b(x)[:, None, :32]).logsumexp(1).square()

    assert fewbit.compile_report(compiled(Pairs())).nbytes >= 2 * 256 * 128 * 4


def test_what_was_compiled_again_counts_once_and_by_its_own_options() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
    by_default, in_4_bits = compiled(model), compiled(model, options={"bits": 4})
    auto, four = (fewbit.compile_report(m).nbytes for m in (by_default, in_4_bits))
    assert 0 < four < auto
    assert fewbit.compile_report(model).nbytes == auto + four
    torch.compiler.reset()
    again = compiled(model)
    assert fewbit.compile_report(again).nbytes == auto
    assert fewbit.compile_report(model).nbytes == auto + four
    few = compiled(model, backend="inductor", options=fewbit.inductor_options(bits=2, quantizer="groups"))
    assert 0 < fewbit.compile_report(few).nbytes < four


def test_names_that_change_nothing_are_said() -> None:
    """Those of no module, and of a module of which nothing is saved: the last layer's output is summed."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
    bits = {"linear": 4, "0": 2, "atention": 8}
    found = compiled(model, options={"bits": bits, "keep": ["2", "head"], "budget": "1MiB"})
    report = str(fewbit.compile_report(found))
    assert report.endswith("no role, and no module that saves anything in few bits, is '2', 'atention', 'head'")


def test_a_function_is_refused_in_one_line() -> None:
    with pytest.raises(fewbit.FewbitError, match="give the model, not <function"):
        fewbit.compile_report(torch.compile(lambda x: x.sin(), backend="fewbit"))  # pyright: ignore[reportArgumentType]


def test_graphs_that_nobody_can_ask_for_are_forgotten() -> None:
    """Without parameters a graph is found by its partitioner alone: else records pile up with each compilation."""
    for width in (64, 128, 192, 256):
        x = torch.randn(256, width, requires_grad=True)
        torch.compile(lambda x: x.sin().exp().sum(), backend="fewbit", dynamic=False)(x).backward()
        torch.compiler.reset()
        gc.collect()
    assert len(report._RECORDS) <= 1


def test_a_description_is_that_of_the_device_the_strides_and_what_autocast_casts_to() -> None:
    """By the strides values lie in groups: channels last has others, or none."""
    graph, chosen = torch.fx.symbolic_trace(nn.ReLU()), CompileOptions()
    keys = {report._key(graph, [torch.empty(2, device=device)], chosen) for device in ("cpu", "meta")}
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            keys.add(report._key(graph, [torch.empty(2)], chosen))
    x = torch.empty(2, 3, 4, 5)
    of_images = (x, x.contiguous(memory_format=torch.channels_last), x.to_sparse())
    keys.update(report._key(graph, [one], chosen) for one in of_images)
    assert len(keys) == 7


def test_a_cached_graph_is_of_the_same_sources_and_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(dict[str, Any]):
        __repr__ = object.__repr__

    places: Any = Named({"mlp:mm": 2})
    before = CompileOptions(bits=places).uuid()
    places["mlp:mm"] = 4
    assert CompileOptions(bits=places).uuid() != before
    as_it_is, read = options._sources.__wrapped__(), Path.read_bytes
    for name in ("rotation.py", "loss_over_chunks.py"):
        monkeypatch.setattr(Path, "read_bytes", lambda file, name=name: b"" if file.name == name else read(file))
        assert options._sources.__wrapped__() != as_it_is, name
