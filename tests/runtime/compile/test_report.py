"""Which graphs `compile_report` reports of a model that was compiled several times."""

from typing import Any

import fewbit
import pytest
import torch
from compiled import op_by_op
from fewbit.runtime.compile import report
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
