"""A device of its own in host memory, as MPS and XPU are: torch's plain operations and no float64 (other_device.cpp).

Run as a program it trains on that device in every way, and prints a line of JSON. It has to be a process of its own,
as what torch is told of a device holds until its end.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import traceback
import types
import warnings
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = Path(__file__).parents[2] / "build" / "host-kernels"
NAME = "other"


def library():
    """The device's code, built by g++ in ten seconds where it is not there already."""
    key = torch.__version__.encode() + SOURCE.read_bytes()
    path = BUILT / f"other-device-{hashlib.sha256(key).hexdigest()[:32]}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        found = [f"-I{folder}" for folder in include_paths()] + [f"-L{folder}" for folder in library_paths()]
        command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", *found, str(SOURCE), "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, "-o", str(new)], check=True, capture_output=True)
        new.replace(path)
    return path


def register():
    """Tell torch of the device `NAME`."""
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.device = lambda index: contextlib.nullcontext()
    module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    module.get_rng_state = lambda *device: torch.get_rng_state()
    module.set_rng_state = lambda state, *device: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._register_device_module(NAME, module)


def model_and_input():
    from fewbit.plots.bench.gpu.block_checks import Block

    torch.manual_seed(0)
    return torch.nn.Sequential(Block(64), Block(64)), torch.randn(4, 32, 64)


def gradient(call, model, x):
    torch.manual_seed(1)
    loss = call(x).square().mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.cpu().flatten() for p in model.parameters()])


def trained(way):
    """The losses are those of exact training on the device; the error of the gradient."""
    exact, x = model_and_input()
    loss, expected = gradient(exact.to(NAME), exact, x.to(NAME))
    model, x = model_and_input()
    around = way(model.to(NAME))
    with around if isinstance(around, torch.autograd.graph.saved_tensors_hooks) else contextlib.nullcontext():
        ours, found = gradient(model, model, x.to(NAME))
    assert ours == loss, (ours, loss)
    return ((found - expected).norm() / expected.norm()).item()


def normalized():
    """A step of BLPA's and BatchNorm's layers: the greater error of the gradient."""
    import fewbit

    errors = []
    for way in ({"fuse_preact": 4}, {"level": "L2"}):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 8)]
        model, x = torch.nn.Sequential(*layers).to(NAME), torch.randn(64, 16).to(NAME)
        _, expected = gradient(model, model, x)
        model.zero_grad()
        fewbit.convert(model, **way)
        _, found = gradient(model, model, x)
        errors.append(((found - expected).norm() / expected.norm()).item())
    return max(errors)


def states():
    """Whose random state and autocast blocks are computed again with: codes in host memory, and inputs by keyword."""
    import fewbit
    from fewbit.runtime.saved.recompute import _State

    found, again = [], _State.again

    def noted(state):
        found.append([state.device, state.devices, sorted(state.settings.autocast)])
        return again(state)

    _State.again = noted
    for call in (lambda block, x: block(x), lambda block, x: block(input=x)):
        blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(256, 256)) for _ in range(2)).to(NAME)
        fewbit.checkpoint(blocks, bits=8, offload=True, blocks=["0", "1"])
        x = torch.randn(2048, 256).to(NAME)
        for block in blocks:
            x = call(block, x)
        x.sum().backward()
    _State.again = again
    return found


def codes():
    """The quantizers whose codes or numbers are not the CPU's in plain torch, for equal seeds."""
    from fewbit.quantizers import FixedPoint, Outlier, PerGroup, Rotated
    from quantizer_cases import reference

    x, image, scale = torch.randn(16, 300), torch.randn(2, 3, 8, 8), torch.tensor([1.0, -0.5, 0.0])
    channels = {"scale": scale, "shift": scale * 0.1}
    cases = {
        PerGroup(bits=4): (x, {}, 3),
        PerGroup(bits=2, levels="fitted"): (x, {}, 3),
        Rotated(bits=2): (x, {}, 3),
        Outlier(bits=3): (x, {}, None),
        FixedPoint(4): (image, channels, None),
    }
    wrong = []
    for quantizer, (tensor, arguments, seed) in cases.items():

        def both(place, quantizer=quantizer, tensor=tensor, arguments=arguments, seed=seed):
            drawn = {} if seed is None else {"generator": torch.Generator().manual_seed(seed)}
            one = quantizer.compress(place(tensor), **{k: place(v) for k, v in arguments.items()}, **drawn)
            return one.packed.cpu(), one.decompress().cpu()

        with reference():
            here = both(lambda t: t)
        if not all(map(torch.equal, here, both(lambda t: t.to(NAME)))):
            wrong.append(type(quantizer).__name__)
    return wrong


def outcome(call):
    """What a call returns, or its error with the places that it passed."""
    try:
        return call()
    except Exception as error:
        passed = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__}: {str(error).splitlines()[0]} at {passed[-3:]}"


def main():
    from fewbit.plots.bench.gpu.block_checks import EAGER

    register()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = {"codes": outcome(codes), "normalized": outcome(normalized), "states": outcome(states)}
        errors = {name: outcome(lambda way=way: trained(way)) for name, way in EAGER.items()}
    said = [str(one.message) for one in warned if "fewbit" in str(one.message)]
    print(json.dumps({**found, "errors": errors, "warnings": said}))


if __name__ == "__main__":
    main()
    # Not by the interpreter's own end, when autograd's thread of this device may run: C++ called `terminate` once.
    sys.stdout.flush()
    os._exit(0)
