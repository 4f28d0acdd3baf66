"""`make gpu-1`: each check in a process of its own; what a first use on a GPU can break.

    for said in CHECKS["noise-in-graphs"]("cuda"): print(said)

A check yields what it knows so far, the last one counts: ``ok`` is whether all that it tried is right. On the CPU a
CUDA graph is the call itself, and where no kernel of CUDA can run the CPU's take its place: that tries the checks, and
nothing else.
"""

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....runtime import ops
from ....runtime.activations import functional as few
from ....runtime.activations import modules
from ....runtime.activations.modules import GELU
from ....runtime.backends.activation_spec import ROW_OF_MODULE
from ....runtime.backends.cuda.launching import loaded
from ....runtime.quantizers import FixedPoint, Outlier, PerGroup, Rotated
from ....runtime.saved.hooks import compress_saved_tensors
from ....runtime.self_test import checks as kernel_checks
from ....runtime.self_test import outcome
from ....tables import FewbitError
from ..timing import timed
from .block_checks import compiled, eager, losses_in_chunks, plans, reduce_overhead
from .layer_checks import layers
from .trying import Said, is_right, tried

Check = Callable[[str], Said]

FAMILIES = ("activation", "rounding", "per_group", "rotated", "fixed_point", "outlier", "glu", "preact")
_BITS = (3, 4, 2, 8, 1, 5, 6, 7)  # the most used first: a check may be broken off
_ARGUMENTS = {"Threshold": (0.1, 0.0)}  # of activations that have no defaults


def kernels(family: str, device: str) -> Said:
    """Run the self-test of a family's kernels beside plain torch, the most used bits first."""
    todo = [check for check in kernel_checks(device) if check.family == family]
    todo.sort(key=lambda check: _BITS.index(check.bits) if check.bits in _BITS else 0)
    passed, problems = 0, {}
    for check in todo:
        found = outcome(check, device, compiles=device == "cuda")
        if found.state == "failed":
            problems[f"{check.kernel} {check.dtype} {check.bits}".replace("torch.", "")] = found.problem
        passed += found.state == "ok"
        yield {"ok": not problems, "passed": passed, "of": len(todo), "problems": problems}


def doctor(device: str) -> Said:
    """Run `fewbit doctor --json`; say which backends work and which kernels failed."""
    command = [sys.executable, "-m", "fewbit.cli.main", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    failed = [kernel for kernel in said["kernels"] if kernel["state"] == "failed"]
    yield {"ok": done.returncode == 0, "backends": said["backends"], "failed": failed}


def threads(device: str) -> Said:
    """Launch first in autograd's own thread, and in Python's, which no call of CUDA's runtime has touched."""
    x = torch.randn(4096, device=device, requires_grad=True)
    gradient = torch.ones(4096, device=device)
    torch.empty_like(x)  # a cached block: nothing is allocated in the thread
    found: dict[str, Any] = {}
    yield tried(found, "backward in autograd's thread", lambda: torch.autograd.grad(GELU(bits=3)(x), x, gradient))
    for name, call in _calls(device).items():
        yield tried(found, f"{name} in a new thread", lambda call=call: _in_thread(call))


def _calls(device: str) -> dict[str, Callable[[], Any]]:
    """Return one call of each family of kernels, on numbers that are there before it."""
    x = torch.randn(64, 1024, device=device)
    image, ones = torch.randn(4, 8, 16, 16, device=device), torch.ones(8, device=device)
    calls = {
        "activation": lambda: few.gelu(x, bits=3),
        "table at random": lambda: few.gelu(x, bits=3, rounding="stochastic"),
        "gated": lambda: few.swiglu(x, x, bits=3),
        "fixed point": lambda: FixedPoint(4).compress(image, scale=ones, shift=ones * 0).decompress(),
    }
    for quantizer in (PerGroup(bits=4), Rotated(bits=2), Outlier(bits=3)):
        calls[type(quantizer).__name__] = lambda quantizer=quantizer: quantizer.compress(x).decompress()
    return calls


def _in_thread(call: Callable[[], Any]) -> Any:
    """Return what a call returns in a new thread; raise what it raises there."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = found[0]
    if error is not None:
        raise error
    return result


def noise_in_graphs(device: str) -> Said:
    """Replay captured stochastic rounding: fresh noise in each replay, and the same for equal seeds."""
    x = torch.randn(64, 4096, device=device)
    calls = {
        "PerGroup": lambda: PerGroup(bits=2).compress(x).packed,
        "Rotated": lambda: Rotated(bits=2).compress(x).decompress(),
        "table at random": lambda: _gradient(lambda y: few.gelu(y, bits=2, rounding="stochastic"), x),
        "gated": lambda: _gradient(lambda y: few.swiglu(y, y.flip(0), bits=2, copy_bits=2), x),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        yield tried(found, name, lambda call=call: _noise(call, device))


def _noise(call: Callable[[], Tensor], device: str) -> dict[str, bool]:
    """Return whether two replays differ, whether a seed gives the same again, and whether other seeds differ."""
    replay = _graph(call, device)

    def replayed(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return replay().clone()

    first, next_, again, other = replayed(1), replay().clone(), replayed(1), replayed(2)
    return {
        "fresh": not torch.equal(first, next_),
        "seeded": torch.equal(first, again),
        "other seeds": not torch.equal(first, other),
    }


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _graph(call: Callable[[], Tensor], device: str) -> Callable[[], Tensor]:
    """Return a replay of a captured call, which was called before to compile it; on the CPU the call."""
    if device != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return result

    return replay


def first_use_in_a_graph(device: str) -> Said:
    """Capture a kernel that was never used: it works, or is refused in one line, and the device is well after it."""
    x = torch.randn(64, 4096, device=device)
    said = "captured"
    if device == "cuda":
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                PerGroup(bits=2).compress(x)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    after = PerGroup(bits=2).compress(x).decompress()
    one_line = said == "captured" or (said.startswith("FewbitError") and "\n" not in said)
    yield {"ok": one_line and bool(after.isfinite().all()), "said": said[:300]}


def two_streams(device: str) -> Said:
    """Save a tensor on two streams, and write over what the first frees while the other has yet to read its codes."""
    x = 2 * torch.randn(64, 4096, device=device, requires_grad=True)
    side = torch.cuda.Stream() if device == "cuda" else None

    def step() -> dict[str, Any]:
        with compress_saved_tensors(PerGroup(bits=8)):
            first = torch.ones_like(x, requires_grad=True) * x
            _wait(device)
            with torch.cuda.stream(side):
                factor = torch.ones_like(x, requires_grad=True)
                second = factor * x
        del first
        with torch.cuda.stream(side):
            if device == "cuda":
                torch.cuda._sleep(2 * 10**8)  # pyright: ignore[reportPrivateUsage]  # a tenth of a second
            (gradient,) = torch.autograd.grad(second, factor, torch.ones_like(x))
        del second
        held = [torch.full((64, 4096), 255, dtype=torch.uint8, device=device) for _ in range(64)]
        _wait(device)
        error = float((gradient - x).norm().detach() / x.norm().detach())
        return {"error": round(error, 4), "near": 0 < error < 0.02, "written": len(held)}

    yield tried({}, "hooks", step)


def misaligned(device: str) -> Said:
    """Decode codes that begin at an odd address."""
    x, image = torch.randn(16, 1024, device=device), torch.randn(4, 8, 16, 16, device=device)
    ones = torch.ones(8, device=device)
    compressed = {
        "PerGroup": PerGroup(bits=4).compress(x),
        "Rotated": Rotated(bits=2).compress(x),
        "Outlier": Outlier(bits=3).compress(x),
        "FixedPoint": FixedPoint(4).compress(image, scale=ones, shift=ones * 0),
    }
    found: dict[str, Any] = {}
    for name, one in compressed.items():

        def decode(one: Any = one) -> dict[str, bool]:
            there = replace(one, packed=_at_odd_address(one.packed))
            return {"same": torch.equal(there.decompress(), one.decompress())}

        yield tried(found, name, decode)


def _at_odd_address(codes: Tensor) -> Tensor:
    room = torch.empty(codes.numel() + 1, dtype=codes.dtype, device=codes.device)
    return room[1:].view(codes.shape).copy_(codes)


def formulas(device: str) -> Said:
    """Count the inputs, of all 65,536 in each 16-bit type, whose f(x) is not torch's to the bit."""
    every = torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16)
    found: dict[str, int] = {}
    for dtype in (torch.bfloat16, torch.float16):
        x = every.view(dtype)
        x = x[x.isfinite()].clone()
        for name in ROW_OF_MODULE:
            if not hasattr(nn, name):
                continue
            arguments = _ARGUMENTS.get(name, ())
            ours = getattr(modules, name)(*arguments, bits=3)(x.clone().requires_grad_()).detach()
            theirs = getattr(nn, name)(*arguments)(x)
            differ = int(((ours != theirs) & ~(ours.isnan() & theirs.isnan())).sum())
            if differ:
                found[f"{name} {dtype}".replace("torch.", "")] = differ
            yield {"ok": not found, "inputs that differ": found}


def without_compiler(device: str) -> Said:
    """Use an activation where no kernel can be compiled: plain torch serves, with a warning."""

    def cannot(*_: Any) -> Any:
        raise FewbitError("NVRTC cannot compile for this GPU")

    x = torch.randn(4096, device=device, requires_grad=True)
    with (
        mock.patch("fewbit.runtime.backends.cuda.codegen.compiler.compile_source", cannot),
        mock.patch.dict(os.environ, {"FEWBIT_CACHE": "build/without-compiler"}),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        found: dict[str, Any] = {}
        yield tried(found, "activation", lambda: _gradient(GELU(bits=3), x))
        yield tried(found, "PerGroup", lambda: PerGroup(bits=4).compress(x.detach()).decompress())
        found["warnings"] = [str(one.message)[:200] for one in warned]
    yield {"ok": is_right(found), **found}


def overhead(device: str) -> Said:
    """Time a call on 1,000 elements from Python, in microseconds: the cost of a launch."""
    x = torch.randn(1000, device=device)
    leaf = x.clone().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "torch's gelu": lambda: F.gelu(x),
        "gelu, 3 bits": lambda: few.gelu(x, bits=3),
        "gelu, 3 bits, both passes": lambda: _gradient(lambda y: few.gelu(y, bits=3), x),
        "torch's gelu, both passes": lambda: _gradient(F.gelu, x),
        "PerGroup, 4 bits": lambda: PerGroup(bits=4).compress(x),
        "gelu, 3 bits, forward": lambda: few.gelu(leaf, bits=3),
        "seeds": lambda: ops.draw_seeds(x, 1),
    }
    if device == "cuda":
        empty = loaded('extern "C" __global__ void empty() {}\n', "empty", x.get_device())
        calls["an empty kernel"] = lambda: empty.launch(1)
    found = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        _wait(device)
        found[name] = round(min(timed(lambda call=call: [call() for _ in range(200)])[0] for _ in range(5)) * 5e3, 2)
        _wait(device)
        yield {"microseconds": found}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def sizes(device: str) -> Said:
    """Call every family on sizes about the edges of tiles: what compute-sanitizer looks at."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1, 511, 512, 4097):
            for name, call in _calls_of_size(n, dtype, device).items():
                yield tried(found, f"{name}, {n}, {dtype}", call)


def _calls_of_size(n: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Any]]:
    """Return a call of each family, both passes, on `n` elements that begin at an odd one."""
    x = torch.randn(n + 1, device=device).to(dtype)[1:]
    rows, image = torch.randn(3, n, device=device).to(dtype), torch.randn(2, 3, n, device=device).to(dtype)
    ones = torch.ones(3, device=device)
    fixed = FixedPoint(3)
    return {
        "activation": lambda: _gradient(lambda y: few.gelu(y, bits=3), x),
        "at random": lambda: _gradient(lambda y: few.gelu(y, bits=3, rounding="stochastic"), x),
        "gated": lambda: _gradient(lambda y: few.swiglu(y, y, bits=3), rows),
        "PerGroup": lambda: PerGroup(bits=4).compress(rows).decompress(),
        "fitted": lambda: PerGroup(bits=2, levels="fitted").compress(rows).decompress(),
        "Rotated": lambda: Rotated(bits=2).compress(rows).decompress(),
        "Outlier": lambda: Outlier(bits=3).compress(rows).decompress(),
        "FixedPoint": lambda: fixed.compress(image, scale=ones, shift=ones * 0).decompress(),
    }


def large(device: str) -> Said:
    """Call every family once on 2^26 elements, after a small call that compiles: what ncu counts."""
    found: dict[str, Any] = {}
    for n in (2**12, 2**26 if device == "cuda" else 2**13):
        for name, call in _calls_of_size(n // 3, torch.bfloat16, device).items():
            yield tried(found, name, call)


CHECKS: Mapping[str, Check] = {
    **{f"kernels {family}": partial(kernels, family) for family in FAMILIES},
    "doctor": doctor,
    "threads": threads,
    "noise in graphs": noise_in_graphs,
    "first use in a graph": first_use_in_a_graph,
    "two streams": two_streams,
    "reduce-overhead": reduce_overhead,
    "misaligned": misaligned,
    "compiled": compiled,
    "eager": eager,
    "layers": layers,
    "plans": plans,
    "losses in chunks": losses_in_chunks,
    "formulas": formulas,
    "without compiler": without_compiler,
    "overhead": overhead,
    "sizes": sizes,
    "large": large,
}
