"""What a kernel's machine code says: its loops, the instructions of the path that runs, and the pipes that take them.

    for name, code in read_kernels(disassemble(cubin)).items(): main_path(code)

Nothing runs. Of a loop the path counts that moves most by 16-byte accesses, and of such paths the longest: what copes
with memory that is not aligned, and calls for the rare quotient beyond the usual range, stay out of the count.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ...tables import FewbitError

# Where wheels bring NVIDIA's disassembler: nvidia-cuda-cuobjdump with nvidia-cuda-nvdisasm, or triton.
_IN_PACKAGES = {"nvidia": ("cu13/bin", "cuda_cuobjdump/bin"), "triton": ("backends/nvidia/bin",)}

_PIPES = {
    "FMA": "FADD FMUL FFMA FSWZADD HADD2 HMUL2 HFMA2",
    "FMA2": "FADD2 FMUL2 FFMA2",  # of two numbers, from sm_100 on
    "heavy": "IMAD IDP IMUL",
    "XU": "MUFU F2I I2F F2F FRND POPC BREV FLO",
    "LSU": "LDS STS LDG STG LD ST LDC SHFL ATOMS ATOMG RED ATOM LDL STL MATCH",
    "control": "BRA EXIT BSSY BSYNC CALL RET WARPSYNC NOP YIELD BAR BRX JMP BREAK MEMBAR ERRBAR DEPBAR",
    "uniform": "R2UR S2UR VOTEU",
}
_PIPE_OF = {opcode: pipe for pipe, opcodes in _PIPES.items() for opcode in opcodes.split()}


@dataclass(frozen=True)
class Instruction:
    """One instruction: where it stands, the predicate before it, its name with modifiers, and where a branch goes."""

    address: int
    predicate: str
    name: str
    target: int | None

    @property
    def opcode(self) -> str:
        """The name without modifiers."""
        return self.name.split(".")[0]

    @property
    def pipe(self) -> str:
        """The pipe that executes it; what no other takes is the ALU's."""
        return _PIPE_OF.get(self.opcode) or ("uniform" if self.opcode.startswith("U") else "ALU")

    @property
    def is_wide(self) -> bool:
        """Whether it loads or stores 16 bytes of the GPU's memory."""
        return self.opcode in ("LDG", "STG") and ".128" in self.name

    @property
    def ends_block(self) -> bool:
        """Whether another than the next instruction may follow."""
        return self.opcode in ("BRA", "EXIT", "RET", "JMP", "BRX")

    @property
    def always_leaves(self) -> bool:
        """Whether the next instruction never follows."""
        return self.ends_block and not self.predicate


Code = Sequence[Instruction]


@dataclass(frozen=True)
class Round:
    """The instructions of one round of a loop, those of loops within it apart.

    Attributes:
        instructions: on the path.
        inner: those of the loops within, in the order of the code.
    """

    instructions: Code
    inner: Sequence["Round"] = ()

    @property
    def count(self) -> int:
        """Number of instructions."""
        return len(self.instructions)

    @property
    def wide(self) -> int:
        """Number of 16-byte accesses."""
        return sum(one.is_wide for one in self.instructions)

    @property
    def pipes(self) -> Mapping[str, int]:
        """Instructions of each pipe."""
        return Counter(one.pipe for one in self.instructions)


@cache
def find_disassembler() -> str:
    """Return the path of cuobjdump.

    Raises:
        FewbitError: it is nowhere.
    """
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    for package, places in _IN_PACKAGES.items():
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            folders += [str(Path(root) / place) for place in places]
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if found is None:
        packages = "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        raise FewbitError(f"no disassembler for CUDA (cuobjdump); pip install {packages}")
    return found


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a cubin as text; raises as `find_disassembler`."""
    program = find_disassembler()
    path = os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", "")])  # nvdisasm lies beside it
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-sass", file.name], capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
    if done.returncode:
        raise FewbitError(f"cuobjdump failed: {' '.join(done.stderr.split())[:300]}")
    return done.stdout


def read_kernels(text: str) -> dict[str, Code]:
    """Return the instructions of each kernel in the text of `disassemble`."""
    kernels: dict[str, list[Instruction]] = {}
    here: list[Instruction] = []
    for line in text.splitlines():
        if named := re.search(r"Function : (\S+)", line):
            here = kernels.setdefault(named[1], [])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", line):
            target = re.search(r"0x([0-9a-f]+)\s*$", found[4]) if found[3].startswith("BRA") else None
            at = None if target is None else int(target[1], 16)
            # A branch may have its predicate behind it, or be taken where lanes of a warp have parted.
            behind = re.match(r"\s+([!~]?U?P\w+|~?UR\w+),", found[4]) if at is not None else None
            predicate = (found[2] or (behind[1] if behind else "")).strip()
            here.append(Instruction(int(found[1], 16), predicate, found[3], at))
    return dict(kernels)


def loops(code: Code) -> list[Round]:
    """Return the paths of all loops, each after those within it."""
    found: list[Round] = []
    ranges = sorted(_ranges(code), key=lambda ends: (ends[1] - ends[0], ends[0]))
    inside: dict[tuple[int, int], list[tuple[int, int]]] = {ends: [] for ends in ranges}
    paths: dict[tuple[int, int], Round] = {}
    for i, (begin, end) in enumerate(ranges):
        within = [ends for ends in ranges[:i] if begin <= ends[0] and ends[1] <= end]
        inside[begin, end] = [ends for ends in within if not any(ends in inside[other] for other in within)]
        body = [one for one in code if begin <= one.address <= end]
        path = _path(body, within)
        paths[begin, end] = Round(path, [paths[ends] for ends in sorted(inside[begin, end])])
        found.append(paths[begin, end])
    return found


def main_path(code: Code, shortest: bool = False) -> Round:
    """Return the path of the loop that moves most by 16-byte accesses.

    Args:
        code: of a kernel.
        shortest: of loops that move alike, such as those with random numbers and without, take the shortest and not
            the longest.

    Raises:
        FewbitError: the code has no loop.
    """
    found = loops(code)
    if not found:
        raise FewbitError("a kernel without a loop")
    most = max(path.wide for path in found)
    best = sorted((path for path in found if path.wide == most), key=lambda path: path.count)
    return best[0] if shortest else best[-1]


def _ranges(code: Code) -> Iterator[tuple[int, int]]:
    """Yield the first and last address of each loop: not of code out of the way, behind the end, that comes back."""
    for one in code:
        if one.target is None or one.target >= one.address:  # a branch to itself fills the end of the code
            continue
        body = [other for other in code if one.target <= other.address < one.address]
        if not any(other.opcode in ("EXIT", "RET") and other.always_leaves for other in body):
            yield one.target, one.address


def _path(body: Code, within: Sequence[tuple[int, int]]) -> Code:
    """Return the path with most wide accesses, then most instructions, from the first of `body` to its last.

    Instructions of the loops `within` are passed without being counted, calls are gone around where there is a way.
    """
    blocks = _blocks(body)
    best: dict[int, tuple[int, int, int, list[Instruction]]] = {}
    for block in reversed(blocks):
        own = [one for one in block if not any(begin <= one.address <= end for begin, end in within)]
        last, following = block[-1], []
        if not last.always_leaves and block is not blocks[-1]:
            following.append(block[-1].address + 16)
        if last.target is not None and last.target > last.address:
            following.append(last.target)
        ways = [best[address] for address in following if address in best]
        calls = -sum(one.opcode == "CALL" for one in own)
        wide = sum(one.is_wide for one in own)
        on = max(ways, key=lambda way: way[:3]) if ways else (0, 0, 0, [])
        if not ways and block is not blocks[-1]:
            calls -= 1000  # leaves the loop
        best[block[0].address] = (on[0] + calls, on[1] + wide, on[2] + len(own), own + on[3])
    return best[body[0].address][3]


def _blocks(body: Code) -> list[list[Instruction]]:
    """Return the pieces of the code that are entered at their first instruction alone and left at their last."""
    starts = {one.target for one in body} | {body[0].address}
    blocks: list[list[Instruction]] = []
    for before, one in zip([None, *body], body, strict=False):
        if one.address in starts or (before is not None and before.ends_block):
            blocks.append([])
        blocks[-1].append(one)
    return blocks
