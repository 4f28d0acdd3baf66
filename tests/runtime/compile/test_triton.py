"""What the backend writes for CUDA, had without a device: one pass over each value, its machine code and its numbers.

Two blocks of a transformer's MLP: the input of the second is rounded at random to 5 bits, those of GELU to nearest to
6, so that planes of 4, 2 and 1 bits are there.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fewbit.runtime.compile.planes import unpack_block
from pretended_h100 import machine_code, pretended_h100, triton_code
from torch import nn

pytest.importorskip("triton")
pytestmark = pytest.mark.deep

BLOCKS, TOKENS, WIDTH, HIDDEN = 2, 64, 256, 512
SUPPORT = Path(__file__).parents[2] / "support"


class Block(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def written():
    """Code of the forward pass without few bits, and of a step with them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    x = torch.randn(4, TOKENS // 4, WIDTH, requires_grad=True)
    with pretended_h100():
        with torch.no_grad():
            (plain,) = triton_code(model, (x,), "inductor")
        return plain, *triton_code(model, (x,), "fewbit")


@pytest.mark.deep
def test_rotated_codes_are_calls_of_the_kernels():
    """And no ops: Python on the way to them is what a GPU waited for."""
    model, x = Block(), torch.randn(4, TOKENS // 4, WIDTH, requires_grad=True)
    with pretended_h100():
        graphs = triton_code(model, (x,), "fewbit", bits=2)
    for graph, function in zip(graphs, ("quantize_buffers", "dequantize_buffers"), strict=True):
        assert f"fewbit.runtime.backends.cuda.rotated import {function} as" in graph.text
        assert not re.search(r"= torch\.ops\.fewbit\.rotated", graph.text)


@pytest.mark.deep
@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="a loop over (64, 512) is not fused with a reduction over (64, 4, 128) before: one more for each GELU",
)
def test_at_most_a_kernel_a_block_is_added(written):
    plain, forward, _ = written
    assert len(forward.launches) <= len(plain.launches) + BLOCKS


def test_codes_are_written_once_and_packed(written):
    """All integers that the forward pass writes are words that it saves; the first block's input is saved as it is."""
    _, forward, _ = written
    sizes = {"uint8": 1, "int16": 2, "int32": 4}
    words = {name: n * sizes[dtype] for name, (n, dtype) in forward.allocated.items() if dtype in sizes}
    assert words.keys() <= set(forward.returned)
    ideal = TOKENS * (BLOCKS * HIDDEN * 6 + (BLOCKS - 1) * WIDTH * 5) // 8
    assert ideal <= sum(words.values()) <= 1.05 * ideal


def test_sizes_may_vary(written):
    """Then the kernel of each GELU is two: Inductor does not fuse its loop with the reduction over groups."""
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    x = torch.randn(4, TOKENS // 4, WIDTH, requires_grad=True)
    for dimension in (0, 1):
        torch._dynamo.mark_dynamic(x, dimension)
    with pretended_h100():
        graphs = triton_code(model, (x,), "fewbit")
    more = [len(g.launches) - len(of_fixed.launches) for g, of_fixed in zip(graphs, written[1:], strict=True)]
    assert more[0] <= BLOCKS and more[1] <= 0
    assert re.search(r"\bs\d+ = ", graphs[0].text)  # a size that varies


class Masked(nn.Module):
    """A mask of (64, 12) a row, of a value that comes transposed."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 12 * 64)
        self.register_buffer("down", torch.randn(12, 8))

    def forward(self, x):
        h = self.up(x).view(-1, 12, 64).mT.contiguous()
        return (h.where(h.abs() > 0.3, 0.0) @ self.down).relu()


def test_words_are_written_where_a_dimension_of_the_kernel_would_cut_them(tmp_path):
    """Inductor would have a dimension of the 12: one and a half words of the mask, which Triton refuses."""
    with pretended_h100():
        forward, _ = triton_code(Masked(), (torch.randn(2048, WIDTH, requires_grad=True),), "fewbit")
    (name,) = (name for name, text in forward.kernels.items() if "tl.reshape(tl.broadcast" in text)
    machine_code(forward, name, 90, tmp_path)


class Summed(nn.Module):
    """Sums of rows, of which a mask is saved, and sums of columns: Inductor has both in one loop over rows."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(2048, 4))

    def forward(self, x):
        h = x * self.scale
        rows = h.sum(2)
        return (torch.where(rows > 0, rows, 3 * rows) @ self.weight).sum() + h.sum((0, 1)).square().sum()


@pytest.mark.deep
def test_no_words_are_written_in_a_loop_over_rows():
    """There each loop wrote all its words in the place of its first, and the mask that came back was another."""
    with pretended_h100():
        forward, _ = triton_code(Summed(), (torch.randn(32, 2048, WIDTH, requires_grad=True),), "fewbit")
    packing = [text for text in forward.kernels.values() if "tl.reshape(tl.broadcast" in text]
    assert packing and not any("split_size" in text for text in packing)


@pytest.mark.sample(1)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_machine_code_cuts_bits_without_floors(written, capability, tmp_path):
    """Nor does it use memory of its own, as for registers that are too few. Kernels of 4 + 1 and of 4 + 2 bits."""
    for code in written[1:]:
        few = [name for name, types in code.dtypes.items() if {"*u8", "*i16"} & {*types.values()}]
        for name in few[-2:]:
            sass = machine_code(code, name, capability, tmp_path)
            assert "STG" in sass and not re.search(r"\b(FRND|LDL|STL)\b", sass), name


def test_kernels_compute_what_torch_does(written, tmp_path):
    """In Triton's interpreter, beside the same graphs in plain torch; noise is another, and fresh in each call."""
    _, forward, backward = written
    calls = [(code.text, [x.detach() for x in code.arguments]) for code in (forward, forward, backward)]
    torch.save(calls, tmp_path / "calls.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    subprocess.run([sys.executable, SUPPORT / "interpreted.py", tmp_path / "calls.pt"], env=environment, check=True)
    first, second, gradients = torch.load(tmp_path / "calls.pt")
    at_random = 0
    for i, (y, again, expected) in enumerate(zip(first, second, forward.results, strict=True)):
        if expected.dtype == torch.uint8:  # the fifth bits; the four before are the plane before
            ours, others, theirs = (
                _codes_of_5_bits(parts[i - 1], parts[i]) for parts in (first, second, forward.results)
            )
            assert (ours - theirs).abs().max() == 1 and not torch.equal(ours, others)
            assert abs(float((ours - theirs).float().mean())) < 5 / ours.numel() ** 0.5
            at_random += 1
        elif expected.is_floating_point():
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        elif i + 1 == len(first) or forward.results[i + 1].dtype != torch.uint8:
            assert torch.equal(y, expected) and torch.equal(again, expected)
    assert at_random == BLOCKS - 1
    for gradient, expected in zip(gradients, backward.results, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


def _codes_of_5_bits(four, one):
    return (unpack_block(four, 4) | unpack_block(one, 1) << 4).flatten()


@pytest.mark.deep
def test_nothing_splits_a_cuda_graph():
    """Under mode="reduce-overhead": seeds are drawn on the device too, and each pass is one graph."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH))
    graphs = {"triton.cudagraphs": True, "graph_partition": True}
    with pretended_h100():
        forward, backward = triton_code(model, (torch.randn(TOKENS, WIDTH, requires_grad=True),), "fewbit", graphs)
    for code in (forward, backward):
        assert set(re.findall(r"def (partition_\d+)\(", code.text)) == {"partition_0"}
    (partition,) = re.findall(r"def partition_0\(.*?(?=\n\S|\n    def )", forward.text, re.DOTALL)
    assert "torch.ops.fewbit.draw_seeds" in partition
