"""Saves a probability above one half as what it lacks of 1.

    q, place = apart(p)               1 − p in the place of a probability above 1/2, of which a row has one at most
    p = together(q, place)

The gradient of a cross-entropy is p less 1 at the target. Of a classifier that is sure it is small, and the step of
codes between 0 and 1 is not: gradients were wrong by .3 of their norm at a loss of .004, and by 2.2 at .00002. Codes of
q have the step of the largest doubt in their group, and zeros stay zeros. The places take one byte a row of up to 255.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, fx

from .splice import Splicer, before_first_use, placeholder
from .sums import complete_sums


def set_apart(
    forward: fx.Graph, backward: fx.Graph, dimensions: Mapping[fx.Node, int], splicer: Splicer
) -> dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]]:
    """Read saved probabilities p from q and places; return by p both, of the forward graph, and what reads q.

    Args:
        forward: in which both are computed.
        backward: has a placeholder of the same name for each saved value.
        dimensions: of saved probabilities, those over which they sum to 1.
        splicer: of the compilation.
    """
    placeholders = {node.name: node for node in backward.find_nodes(op="placeholder")}
    found: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = {}
    for p, dimension in dimensions.items():
        with forward.inserting_before(p.next):
            q, place = splicer.splice(forward, partial(apart, dimension=dimension), p)
        read, order = placeholders[p.name], {node: at for at, node in enumerate(backward.nodes)}
        with backward.inserting_before(read):
            parts = [placeholder(backward, part) for part in (q, place)]
        found[p] = q, place, parts[0]
        with backward.inserting_before(before_first_use(read, order)):
            (value,) = splicer.splice(backward, partial(together, dimension=dimension), *parts)
        read.replace_all_uses_with(value)
        backward.erase_node(read)
        complete_sums(backward, p, value, splicer)
    return found


def apart(p: Tensor, *, dimension: int) -> tuple[Tensor, Tensor]:
    """Return q, and in each row the place of what is 1 − p in it, from 1; 0 if there is none."""
    is_large = p > 0.5
    place = torch.where(is_large, _places(p, dimension), 0).sum(dimension, keepdim=True)
    return torch.where(is_large, 1 - p, p), place.to(type_of_places(p.shape[dimension]))


def type_of_places(size: int) -> torch.dtype:
    """Return the dtype of places in rows of so many elements."""
    return torch.uint8 if size < 2**8 else torch.int16 if size < 2**15 else torch.int32


def together(q: Tensor, place: Tensor, *, dimension: int) -> Tensor:
    """Return p of `apart`."""
    return torch.where(_places(q, dimension) == place, 1 - q, q)


def _places(p: Tensor, dimension: int) -> Tensor:
    """Return the places along a dimension, in float32, which counts rows of up to 16 million exactly."""
    shape = [1] * p.dim()
    shape[dimension] = -1
    return torch.arange(1, p.shape[dimension] + 1, dtype=torch.float32, device=p.device).view(shape)
