"""Saves the weights of convolutions in their own memory.

Inductor lays out channels last what a convolution reads, from the graph's inputs on, and what it hands on to the
backward pass is then its copy of the weights; torch alone does so too. Such copies were half of what a compiled
FocalNet kept, and with them a TextNet kept 1.8 times as much as its eager step. Pictures are left to torch: their
copies are small beside what a step saves, and cuDNN and oneDNN choose the kernels of a backward pass by the layout of
what they are given.
"""

from collections.abc import Collection

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .cut import results_and_saved
from .nodes import aten, packet, value_of
from .splice import operations


def save_in_own_memory(forward: fx.Graph, outputs: int, weights: Collection[str]) -> None:
    """Let convolutions read saved weights through a view, of which Inductor makes its copy.

    An input that `as_strided` reads is left as it lies (`torch._inductor.graph`).

    Args:
        forward: returns the `outputs` results of the pass, then what is saved.
        outputs: number of results.
        weights: names of the graph's inputs that live on anyway.
    """
    _, saved = results_and_saved(forward, outputs)
    convolved: set[fx.Node] = set()
    for node in reversed(forward.nodes):
        if packet(node) is aten.convolution or any(user in convolved for user in node.users):
            convolved.add(node)
    for node in saved:
        if node in convolved and node.name in weights and _is_laid_out_otherwise(value_of(node)):
            size, stride = tuple(value_of(node).shape), value_of(node).stride()
            with forward.inserting_before(operations(forward)):
                view = forward.call_function(aten.as_strided.default, (node, size, stride))
            view.meta["val"] = value_of(node).as_strided(size, stride)
            node.replace_all_uses_with(view, lambda user, view=view: user is not view and user.op != "output")


def _is_laid_out_otherwise(weight: torch.Tensor) -> bool:
    """Return whether Inductor would make a copy: of four dimensions, and not channels last."""
    is_plain = weight.dim() == 4 and not is_traceable_wrapper_subclass(weight)
    return is_plain and not weight.is_contiguous(memory_format=torch.channels_last)
