"""Gradient checkpointing whose checkpoints are saved in few bits.

    fewbit.checkpoint(model, bits=8)                   each block saves its input in 8 bits, and is computed again
    fewbit.checkpoint(model, bits=4, offload=True)     the codes wait in host memory
    fewbit.revert(model)

    forward      y = block(x), exactly;  x → codes
    backward     codes → x̂;  block(x̂) once more, for what its backward pass needs

The second time a block draws the same random numbers (torch does that) and takes the same decisions: what it derives
from floating-point numbers as integers or truth values, such as the experts that a router chooses, comes from the first
time. A token whose two best experts are nearly equal would otherwise be sent to another one by the rounding of x̂. The
signs of ReLU are decisions too, of one bit an element: where they flip, a whole gradient comes or goes (a ResNet's
error at 8 bits is .19 without them).

The blocks are those that `gradient_checkpointing_enable()` of transformers computes again; in other models the members
of lists and sequences of modules.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from ..layers.offload import Swapper, SwappingSaver
from ..layers.saver import ExactSaver, QuantizerSaver, Saver
from ..quantizers.kinds import QuantizerKind, check_kind, quantizer_of
from .recompute import Recompute

CHECKPOINTED = "_fewbit_checkpointed"  # attribute of a model that `checkpoint` changed
_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"  # of transformers' modules


def checkpoint(
    model: nn.Module,
    *,
    bits: int | None = 8,
    offload: bool = False,
    blocks: Sequence[str] | None = None,
    quantizer: QuantizerKind = "groups",
) -> "Checkpointed":
    """Let the blocks of a model save their inputs in few bits, and compute the rest again in the backward pass.

    Forward passes stay the same; gradients are those of each block at its rounded input. What several blocks take as
    input, such as an encoder's output, is saved once. Decisions of a block, such as the signs of ReLU, take a bit or a
    byte each, which `fewbit.memory.profile` does not see and `peak_of_step` does. Inputs through which no gradient
    flows (masks, positions, a batch of images) are held exactly, as they are held elsewhere anyway. A number that is
    not finite makes the numbers of its group NaN in the backward pass.

    A model of transformers needs no `gradient_checkpointing_enable()`; if that is called later, call `checkpoint`
    again, for it takes its place. Layers of `fewbit.convert` inside of a block keep what they keep in the second
    forward pass. In a compiled function blocks save their inputs exactly: the compiler has ways of its own
    (`torch.compile(model, backend="fewbit")`).

    Args:
        model: changed in place.
        bits: of an element of a block's input, from 1 to 8, with 4 bytes for each group of 256; None saves it exactly.
        offload: save the codes in host memory and fetch them ahead of the backward pass (on a GPU).
        blocks: names of modules; by default those that transformers computes again, or the outermost members of lists
            and sequences of modules, but for those without submodules.
        quantizer: ``groups``, or ``rotated`` (`quantizers.Rotated`) for few bits, with 2 bytes for each group of 128.

    Returns:
        What was done; `undo()` or `fewbit.revert(model)` puts the model back.

    Raises:
        FewbitError: an argument is wrong, a block does not exist, or the model has no blocks.

    Example:
        fewbit.checkpoint(model, bits=8)
    """
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if bits is not None:
        check_integer("bits", bits, 1, 8)
    check_kind(quantizer)
    undo_checkpoint(model)
    saver: Saver = ExactSaver() if bits is None else QuantizerSaver(quantizer_of(quantizer, bits))
    recompute = Recompute(SwappingSaver(saver, Swapper()) if offload else saver)
    done = vars(model)[CHECKPOINTED] = Checkpointed(model, bits, offload)
    try:
        if blocks is None and any(_FLAG in dir(module) for module in model.modules()):
            done.enable(recompute)
        else:
            done.replace(_chosen(model, blocks), recompute)
    except BaseException:  # such as a second block whose forward has been replaced, or an interrupt
        done.undo()
        raise
    return done


def undo_checkpoint(model: nn.Module) -> None:
    """Undo an earlier `checkpoint` of the model, if there is one."""
    done = vars(model).get(CHECKPOINTED)
    if done is not None:
        done.undo()


def compute_once(model: nn.Module) -> bool:
    """Turn off the checkpointing that transformers' `gradient_checkpointing_enable()` turned on; return whether it was.

    Args:
        model: of transformers, changed in place.
    """
    modules = [module for module in model.modules() if getattr(module, _FLAG, False) is True]
    for module in modules:
        setattr(module, _FLAG, False)
    return bool(modules)


@dataclass(eq=False)
class Checkpointed:
    """A model whose blocks are computed again. Made by `fewbit.checkpoint`.

    Attributes:
        model: the model.
        bits, offload: as for `checkpoint`.
        blocks: names of the blocks.
    """

    model: nn.Module
    bits: int | None
    offload: bool
    blocks: tuple[str, ...] = ()
    _before: list[tuple[nn.Module, str, Any]] = field(default_factory=list, repr=False)

    def enable(self, recompute: Recompute) -> None:
        """Let transformers' own checkpointing call `recompute`.

        What a layer of it holds is told that nothing is computed again: the attention of T5, mT5, UDOP and others asks
        for a gradient of its mask of zeros then, and torch takes another kernel, whose sums differ by 1e-5.
        """
        layer: Any = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", ())
        layers = [name for name, module in self.model.named_modules() if isinstance(module, layer)]
        names = []
        for name, module in self.model.named_modules():
            if _FLAG in dir(module):
                is_part = not isinstance(module, layer) and any(_within(name, other) for other in layers)
                self._set(module, _FUNCTION, recompute)
                self._set(module, _FLAG, not is_part)
                names += [] if is_part else [name]
        # Models have the flag as well as their layers; in releases that have no class of layers it is the models'.
        self.blocks = tuple(name for name in names if not any(_within(other, name) for other in names)) or (*names,)

    def replace(self, blocks: Sequence[str], recompute: Recompute) -> None:
        """Let the blocks of these names be computed again."""
        for name in blocks:
            block = self.model.get_submodule(name)
            self._set(block, "forward", recomputed_forward(block, recompute))
        self.blocks = (*blocks,)

    def undo(self) -> nn.Module:
        """Return the model as it was before; as it is, if it was checkpointed anew since, or has been put back."""
        while self._before:
            module, name, value = self._before[-1]
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
            self._before.pop()  # after it was put back, for an interrupt between the two
        if vars(self.model).get(CHECKPOINTED) is self:
            del vars(self.model)[CHECKPOINTED]
        return self.model

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        self._before.append((module, name, vars(module).get(name, _ABSENT)))
        vars(module)[name] = value

    def __str__(self) -> str:
        form = "exactly" if self.bits is None else f"in {self.bits} bits"
        where = " in host memory" if self.offload else ""
        names = ", ".join(self.blocks[:3]) + (", …" if len(self.blocks) > 3 else "")
        return f"{len(self.blocks)} modules save their inputs {form}{where} and are computed again: {names}"


class _Absent:
    """Stands for an attribute that a module does not have of its own; equal to itself in copies."""

    def __reduce__(self) -> str:
        return "_ABSENT"


_ABSENT = _Absent()


# ---- blocks ----------------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of the blocks that may be recomputed: what lists and sequences of modules hold, but leaves."""
    found, modules = [], dict(model.named_modules())
    for name, module in modules.items():
        parent = modules[name.rpartition(".")[0]] if name else None
        if isinstance(parent, nn.ModuleList | nn.Sequential) and any(True for _ in module.children()):
            found.append(name)
    return found


def outermost_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks that `checkpoint` computes again by default where a model has no choice of its
    own: of which none is within another."""
    return list(_outermost(model, blocks_of(model)))


def _chosen(model: nn.Module, blocks: Sequence[str] | None) -> list[str]:
    """Return the names of the blocks, of which none is within another."""
    if blocks is None:
        found = outermost_blocks(model)
        if not found:
            raise FewbitError(f"{type(model).__name__} has no lists of blocks: give blocks=, names of its modules")
        return found
    if isinstance(blocks, str) or not blocks or not all(isinstance(name, str) for name in blocks):
        raise FewbitError(f"blocks is a list of names of modules, not {shown(blocks)}")
    names = {name for name, _ in model.named_modules()} - {""}
    for name in blocks:
        if name not in names:
            raise FewbitError(f"the model has no module named {shown(name)}")
        if any(_within(name, other) for other in blocks):
            raise FewbitError(f"the block {name} is within another of the blocks")
    return [*blocks]


def _outermost(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the blocks within no other; in place of a stage, which has no parameters but those of its blocks, these."""
    for name in (one for one in blocks if not any(_within(one, other) for other in blocks)):
        inner = [other for other in blocks if _within(other, name)]
        owned = {id(p) for other in inner for p in model.get_submodule(other).parameters()}
        if all(id(p) in owned for p in model.get_submodule(name).parameters()) and owned:
            yield from _outermost(model, inner)
        else:
            yield name


def _within(name: str, other: str) -> bool:
    """Return whether a module is within another, by their names."""
    return name != other and (not other or name.startswith(f"{other}."))


def recomputed_forward(block: nn.Module, recompute: Recompute) -> Callable[..., Any]:
    """Return a forward pass of `block` that is computed again in the backward pass.

    Raises:
        FewbitError: the block's forward has been replaced already.
    """
    if "forward" in vars(block):
        raise FewbitError(f"the forward of {type(block).__name__} has been replaced, so it cannot be recomputed")
    return partial(_forward, block, recompute)


def _forward(block: nn.Module, recompute: Recompute, *args: Any, **kwargs: Any) -> Any:
    return recompute(partial(type(block).forward, block), *args, **kwargs)
