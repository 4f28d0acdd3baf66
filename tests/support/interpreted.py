"""Runs what Inductor wrote for CUDA on the CPU, its kernels by Triton's interpreter; a program of its own.

    TRITON_INTERPRET=1 python interpreted.py CALLS.pt      torch.save of pairs of a module's text and its arguments

It writes the results to the same file. Triton decides to interpret when it is imported, so this is no function.
"""

import contextlib
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import fewbit.runtime.compile.planes  # noqa: F401  its ops
import torch
from pretended_h100 import load_kernel

# The interpreter has nothing of libdevice, and reduces by functions that it does not know element by element.
OWN = {f"libdevice.{name}": f"tl.{name}" for name in ("erf", "exp", "rsqrt", "floor")}
OWN |= {"triton_helpers.min2": "tl.min", "triton_helpers.max2": "tl.max"}
BLOCKS = {"XBLOCK": 64, "YBLOCK": 32, "R0_BLOCK": 128}


class Kernel:
    """A Triton kernel of Inductor's that starts like one of its own."""

    def __init__(self, name: str, source: str, folder: Path):
        text = source[source.index(f"def {name}(") :]
        for theirs, own in OWN.items():
            text = text.replace(theirs, own)
        self.function = load_kernel(name, text, folder)
        self.arguments = re.findall(r"(\w+)(?: : tl.constexpr)?[,)]", text.splitlines()[0].partition("(")[2])

    def run(self, *arguments, stream=None):
        """Start the kernel over all blocks."""
        del stream
        given = dict(zip(self.arguments, arguments, strict=False))
        blocks = {name: BLOCKS[name] for name in self.arguments if name in BLOCKS}
        if "r0_numel" not in given and "ynumel" not in given:
            blocks = {"XBLOCK": 4096}
        grid = [-(-given.get(f"{d}numel", 1) // blocks.get(f"{d.upper()}BLOCK", 1)) for d in "xyz"]
        self.function[tuple(grid)](*arguments, **blocks)


def load(text: str, folder: Path):
    """Return the `call` of a module that Inductor wrote."""
    from torch._inductor.async_compile import AsyncCompile

    folder.mkdir()
    compile_kernel = mock.patch.object(
        AsyncCompile, "triton", lambda _, name, source, **__: Kernel(name, source, folder)
    )
    wait = mock.patch.object(AsyncCompile, "wait", lambda *_: None)
    stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True)
    module: dict = {"__name__": "written"}
    with compile_kernel, wait, stream:
        exec(compile(text, str(folder / "module.py"), "exec"), module)
    module["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    return module["call"]


def main(path: str) -> None:
    """Make the calls that a file holds."""
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext(), create=True),
        mock.patch.object(torch.cuda, "set_device", lambda _: None),
    ):
        for number, (text, arguments) in enumerate(torch.load(path)):
            results.append(load(text, Path(folder) / str(number))(list(arguments)))
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])
