"""Lets Inductor pack codes in the Triton kernel that computes them, whatever else that kernel does.

Inductor's loops write one element each: bytes that hold several codes would be a loop of their own, over codes in
memory, and run later (six blocks of an MLP peaked at 10.9 MB where they save 6.3). So `planes.pack_block` is here a
loop over the codes that writes in a mode of its own. In the kernel it is the tile of codes, cut into blocks of 8
neighbours along the dimension that is contiguous in memory, shifted, added, and written to the block's word:

    tl.store(out_ptr + (16*x0 + tl.arange(0, R0_BLOCK // 8)[None, :]), tl.sum(…, 2), xmask)
"""

import re
from functools import cache
from typing import Any

import sympy
import torch

from ..tensors.traits import name_of
from . import planes
from .planes import BLOCK, WORDS

_MODE = "fewbit_pack_"  # and the width


def writes_triton(device: torch.device) -> bool:
    """Return whether Inductor writes Triton for a device, into which codes can be packed."""
    return device.type in ("cuda", "xpu") and _install()


@cache
def _install() -> bool:
    """Tell Inductor how to write `pack_block`; return whether this version can be told."""
    try:
        from torch._inductor import scheduler
        from torch._inductor.codegen.common import DeferredLine
        from torch._inductor.codegen.simd import SIMDScheduling
        from torch._inductor.codegen.triton import TritonKernel
        from torch._inductor.lowering import register_lowering
        from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
    except ImportError:
        return False
    kernels: Any = TritonKernel
    write = kernels.store

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        if isinstance(mode, str) and mode.startswith(_MODE):
            line = _packed_store(self, name, index, value, int(mode.removeprefix(_MODE)))
            self.stores.writeline(DeferredLine(name, line))
        else:
            write(self, name, index, value, mode)

    kernels.store = store
    for loops in (SchedulerNode, FusedSchedulerNode):
        _keep_innermost(loops)
    _keep_in_plain_loops(scheduler)
    _keep_tiles_of_blocks(SIMDScheduling)
    register_lowering(planes.pack_block, type_promotion_kind=None)(_lower)
    return True


def _keep_innermost(loops: Any) -> None:
    """Let Inductor turn loops to suit those that they are fused with, but leave neighbours innermost where it packs."""
    turn = loops.reorder_loops_by_dep_pair

    def reorder_loops_by_dep_pair(self: Any, self_dep: Any, other_dep: Any) -> bool:
        if _packs(self) and self_dep.num_vars == other_dep.num_vars:
            order = self_dep.decide_loop_order_to_match(other_dep)
            if order is not None and order[-1] != len(order) - 1:
                return False
        return turn(self, self_dep, other_dep)

    loops.reorder_loops_by_dep_pair = reorder_loops_by_dep_pair


# How Inductor fuses two reductions that are not over the same dimension, and what it makes of them.
_REDUCTIONS = ("MixOrderReduction", "NestedReduction")
_FUSED_REDUCTIONS = ("FusedMixOrderReductions", "FusedNestedReductions")


def _keep_in_plain_loops(scheduler: Any) -> None:
    """Do not fuse with a template, as of a matrix product by mode="max-autotune": its tiles are its own.

    Nor with reductions over both rows and columns (newer versions of torch), which go over rows in a loop that leaves
    `xoffset` as it is: of a mask of rows the last words of a loop came in the place of its first, the others nowhere.
    """
    own = tuple(getattr(scheduler, name) for name in _FUSED_REDUCTIONS if hasattr(scheduler, name))
    decide = scheduler.Scheduler.can_fuse

    def can_fuse(self: Any, node1: Any, node2: Any, *how: Any, **more: Any) -> bool:
        has_own_tiles = any(node.is_template() or isinstance(node, own) for node in (node1, node2))
        if has_own_tiles and (_packs(node1) or _packs(node2)):
            return False
        return decide(self, node1, node2, *how, **more)

    scheduler.Scheduler.can_fuse = can_fuse
    for name in _REDUCTIONS:
        if hasattr(scheduler, name):
            _keep_apart(getattr(scheduler, name))


def _keep_apart(reductions: Any) -> None:
    """Let no loops that pack become part of such reductions."""
    decide = reductions.can_fuse

    def can_fuse(cls: Any, node1: Any, node2: Any, *more: Any, **named: Any) -> bool:
        return decide.__func__(cls, node1, node2, *more, **named) and not (_packs(node1) or _packs(node2))

    reductions.can_fuse = classmethod(can_fuse)


def _keep_tiles_of_blocks(scheduling: Any) -> None:
    """Let each dimension of a kernel that packs have whole blocks, or make it one: of (…, 12, 64) it had 12."""
    tile = getattr(scheduling, "get_tiling_and_scores", None)
    if tile is None:  # of a torch that tiles otherwise
        return

    def get_tiling_and_scores(
        cls: Any, schedule: Any, numel: Any, reduction_numel: Any = sympy.S.One, *more: Any, **named: Any
    ) -> Any:
        from torch._inductor.virtualized import V

        chosen, scores = tile.__func__(cls, schedule, numel, reduction_numel, *more, **named)
        packing = any(_is_packing(getattr(one, "node", None)) for one in schedule)
        if packing and not all(V.graph.sizevars.statically_known_multiple_of(size, BLOCK) for size in chosen.values()):
            return cls.create_tiling([numel], [reduction_numel]), None
        return chosen, scores

    scheduling.get_tiling_and_scores = classmethod(get_tiling_and_scores)


def _packs(loops: Any) -> bool:
    """Return whether one of the loops fused so far packs codes."""
    return any(_is_packing(loop.node) for loop in loops.get_nodes())


def _is_packing(loop: Any) -> bool:
    return str(getattr(getattr(loop, "data", None), "scatter_mode", None)).startswith(_MODE)


def _lower(codes: Any, width: int) -> Any:
    """Return Inductor's node of `pack_block`: a loop over the codes, whose store gets the place of a code."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    *outer, size = codes.get_size()
    strides = ir.FlexibleLayout.contiguous_strides([*outer, size])
    device, dtype, words = codes.get_device(), WORDS[width], [*outer, size // BLOCK]

    def place(at: Any) -> list[Any]:
        return [0] * len(outer) + [sum(i * s for i, s in zip(at, strides, strict=True))]

    scatter = ir.Scatter(
        device=device,
        dtype=dtype,
        inner_fn=codes.make_loader(),
        ranges=[*outer, size],
        output_indexer=place,  # pyright: ignore[reportArgumentType]
        scatter_mode=f"{_MODE}{width}",  # pyright: ignore[reportArgumentType]
    )
    layout = ir.FixedLayout(device, dtype, words, ir.FlexibleLayout.contiguous_strides(words))
    buffer = ir.ComputedBuffer(name=None, layout=layout, data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    return ir.TensorBox.create(buffer)


def _packed_store(kernel: Any, name: str, index: Any, value: Any, width: int) -> str:
    """Return the line that packs `value`, a tile of codes whose places in memory are `index`, and writes its words."""
    indexing = kernel.indexing(index, dense_indexing=True)
    places, nodes = indexing.index, kernel.range_tree_nodes
    # The variable that counts neighbours in memory, and the kernel's dimension of it.
    counting = (v for v in places.free_symbols & nodes.keys() if nodes[v].divisor == 1 and places.coeff(v) == 1)
    variable = next(counting, None)
    if variable is None:
        raise NotImplementedError(f"codes at {places} are not contiguous in a dimension of the kernel")
    tree = nodes[variable].root
    shape, dimension, prefix = kernel.dense_size_list(), tree.tensor_dim, tree.prefix
    block, before, after = shape[dimension], shape[:dimension], shape[dimension + 1 :]
    kernel.tma_min_block_sizes = {**getattr(kernel, "tma_min_block_sizes", {}), block: BLOCK}

    blocks = [*before, f"{block} // {BLOCK}", str(BLOCK), *after]
    codes = f"tl.reshape(tl.broadcast_to({value}, {_listed(shape)}), {_listed(blocks)})"
    shifts = f"({width} * tl.arange(0, {BLOCK})){_listed(['None'] * (dimension + 1) + [':'] + ['None'] * len(after))}"
    words = f"tl.sum({codes} << {shifts}, {dimension + 1}).to(tl.{name_of(WORDS[width])})"

    lanes = f"({prefix}offset // {BLOCK} + tl.arange(0, {block} // {BLOCK}))"
    lanes += _listed(["None"] * dimension + [":"] + ["None"] * len(after))
    place = _place_of_words(kernel, places, variable, tree, lanes)
    masks = {str(mask) for mask in indexing.mask_vars}
    if f"{prefix}mask" in masks:
        masks = masks - {f"{prefix}mask"} | {f"({lanes} < {prefix}numel // {BLOCK})"}
    mask = " & ".join(sorted(masks)) or "None"
    return f"tl.store({kernel.args.output(name)} + ({place}), {words}, {mask})"


def _listed(texts: list[str]) -> str:
    return f"[{', '.join(texts)}]"


def _place_of_words(kernel: Any, index: Any, variable: Any, tree: Any, lanes: str) -> str:
    """Return the places of words, by the places of codes and the numbers of blocks in the kernel's dimension."""
    mine = index.free_symbols & set(tree.var_list)
    others = (index - variable) / BLOCK
    if mine == {variable}:
        return f"{kernel.index_to_str(others)} + {lanes}"
    # Several variables of the graph make up the dimension: each has here its value at the first code of a block.
    root = sympy.Symbol(f"{tree.prefix}index", integer=True, nonnegative=True)
    first = sympy.Symbol("lanes", integer=True, nonnegative=True)
    values = {v: kernel.range_tree_nodes[v].expr for v in mine}
    values = {v: e.xreplace({s: first for s in e.free_symbols if s.name == root.name}) for v, e in values.items()}
    place = f"{kernel.index_to_str(others.xreplace(values))} + ({kernel.index_to_str(values[variable])}) // {BLOCK}"
    return re.sub(r"\blanes\b", f"({BLOCK} * {lanes})", place)
