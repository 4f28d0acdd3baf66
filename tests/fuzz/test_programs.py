"""Random differentiable programs: their gradients by codes are near the exact ones, finite, and never cost more bytes.

A program that fails is printed by its seed and shrunk to the steps that it takes.
"""

import math
import os

import fewbit
import pytest
import torch
from compiled import exactly, few_bits
from fewbit.quantizers import PerGroup
from random_programs import Program, shrunk

EXAMPLES = 300 if "FEWBIT_FUZZ_EXAMPLES" in os.environ else 2
MOST = {"auto": 0.3, 4: 0.9}


def gradient(program, run):
    """The gradient of a program's parameters in one vector; `run` makes of its module what is called."""
    module = program.module()
    loss = run(module)(program.input())
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def fault(true, near, most):
    """What is wrong with a loss and a gradient beside the exact ones, "" if nothing is."""
    (true_loss, exact), (loss, found) = true, near
    if not torch.equal(true_loss, loss) and bool(true_loss.isfinite()):
        return f"another loss: {loss} and not {true_loss}"
    if not exact.isfinite().all() or exact.norm() == 0:
        return ""
    error = float((found - exact).norm() / exact.norm())
    return "" if error <= most else f"gradient error {error:.3g}"


def compiled_fault(program, bits):
    torch.compiler.reset()
    true = gradient(program, exactly)
    torch.compiler.reset()
    options = {"smallest": 0, "bits": bits, "tables": False}
    reports = []
    near = gradient(program, lambda module: few_bits(module, reports=reports, **options))
    more = [r for r in reports if r.nbytes > r.exact_graph_bytes]
    return fault(true, near, MOST[bits]) or (f"keeps more: {more[0].nbytes}" if more else "")


def hooks_fault(program):
    def under_hooks(module):
        def run(x):
            with fewbit.compress_saved_tensors(PerGroup(8)):
                return module(x)

        return run

    return fault(gradient(program, lambda module: module), gradient(program, under_hooks), 0.3)


def checkpoint_fault(program):
    def checkpointed(module):
        fewbit.checkpoint(module, bits=8, blocks=["body"])
        return module

    return fault(gradient(program, lambda module: module), gradient(program, checkpointed), 0.3)


WAYS = {
    "compile": lambda program: compiled_fault(program, "auto"),
    "compile, 4 bits": lambda program: compiled_fault(program, 4),
    "hooks": hooks_fault,
    "checkpoint": checkpoint_fault,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_gradients_of_random_programs(way, seed):
    find = WAYS[way]
    program = Program.draw(seed, delicate="compile" in way)
    if found := find(program):
        kind = found.split(":")[0].split(" error")[0]
        least = shrunk(program, lambda p: find(p).startswith(kind))
        pytest.fail(f"{found}; {find(least)} of {least}")


def test_programs_are_of_20_to_40_steps_and_have_gradients():
    sizes = [len(Program.draw(seed).steps) for seed in range(300)]
    assert min(sizes) == 20 and max(sizes) == 40
    loss, found = gradient(Program.draw(0), lambda module: module)
    assert math.isfinite(loss) and found.norm() > 0


def test_shrinking_leaves_the_step_that_fails():
    program = Program.draw(1)
    name = program.steps[7].name
    least = shrunk(program, lambda p: any(step.name == name for step in p.steps))
    assert [step.name for step in least.steps] == [name]
