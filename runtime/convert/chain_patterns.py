"""Finds chains of normalization, activation and linear layer in the graph of a module's forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...tables.names import counted
from ..layers.huggingface import like
from ..layers.preact.function import NORMS
from ..layers.preact.layers import FOLDED
from ..layers.preact.linear import CONVOLUTIONS
from .find import ORIGINAL
from .report import one_line
from .swap import torch_class

LINEAR = (*CONVOLUTIONS, nn.Linear)
CHAINS = "_fewbit_chains"  # attribute of a module that holds its fused chains
RETURNED = "its module returns what"  # of a chain that ends at the end of its module

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_RELU_FUNCTIONS = {F.relu, F.relu_, torch.relu, torch.relu_}
_LEAKY_FUNCTIONS = {F.leaky_relu, F.leaky_relu_}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Functions that take the arguments of a module and, like it, are folded into the linear part.
_FOLDED_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.avg_pool3d: nn.AvgPool3d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_avg_pool3d: nn.AdaptiveAvgPool3d,
}


@dataclass(frozen=True)
class Chain:
    """One chain, by the names of its links in the module that runs them.

    Attributes:
        norm, linear: names of the batch normalization and of the convolution or Linear.
        activation: name of the ReLU; None if it is a function.
        before: poolings and flattenings folded into the linear part: a name, or a module made from a function.
        slope: negative slope of the leaky ReLU; 0 for ReLU.
    """

    norm: str
    linear: str
    activation: str | None
    before: tuple[str | nn.Module, ...]
    slope: float

    def modules(self, owner: nn.Module) -> tuple[Any, tuple[nn.Module, ...], nn.Module]:
        """Return the normalization, the folded modules, and the linear part."""
        before = (owner.get_submodule(link) if isinstance(link, str) else link for link in self.before)
        return owner.get_submodule(self.norm), tuple(before), owner.get_submodule(self.linear)

    def links(self, owner: nn.Module) -> list[nn.Module]:
        """Return the chain's modules except the activation."""
        norm, before, linear = self.modules(owner)
        return [norm, *before, linear]


def is_line(graph: fx.Graph) -> bool:
    """Return whether a graph passes one tensor from child to child."""
    before, *after = graph.nodes
    for node in after:
        if node.op not in ("call_module", "output") or node.args != (before,) or node.kwargs:
            return False
        before = node
    return True


class _Tracer(fx.Tracer):
    def __init__(self, followed: tuple[str, ...]) -> None:
        super().__init__()
        self.followed = followed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.followed


def trace_forward(owner: nn.Module, training: bool, followed: tuple[str, ...] = ()) -> fx.Graph:
    """Return the graph of `type(owner).forward` in training or evaluation mode, through the children `followed`."""
    mode = owner.training
    owner.training = training  # of this module only: children are not run, and those followed do not ask
    try:
        return _Tracer(followed).trace(owner)
    finally:
        owner.training = mode


def match(graph: fx.Graph, owner: nn.Module) -> dict[str, Chain | str]:
    """Return by normalization's name its chain, or why it has none."""
    found: dict[str, Chain | str] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(owner.get_submodule(node.target), nn.modules.batchnorm._BatchNorm):
            links = "it is called several times" if node.target in found else _links(node, owner)
            if isinstance(links, str):
                found[node.target] = links
                continue
            found[node.target], nodes = links
            for target in (str(link.target) for link in nodes if link.op == "call_module"):
                if any(map(has_hooks, owner.get_submodule(target).modules())):  # as of the activation of timm's
                    found[node.target] = f"there are hooks on {target}"
                    break
    return found


def _links(norm: fx.Node, owner: nn.Module) -> tuple[Chain, list[fx.Node]] | str:
    """Return the chain that begins at `norm` and its nodes, or the reason there is none."""
    module = owner.get_submodule(str(norm.target))
    with_activation = like(torch_class(module)) is nn.BatchNorm2d
    if torch_class(module) not in NORMS and not with_activation:
        return f"{type(module).__name__} is another normalization than torch's BatchNorm1d, 2d or 3d"
    if len(norm.args) != 1 or norm.kwargs:
        return "it is called with other arguments than one tensor"
    nodes = [norm]
    before: list[str | nn.Module] = []
    name: str | None = None
    slope = None
    if with_activation:
        own = owner.get_submodule(f"{norm.target}.act")
        between = owner.get_submodule(f"{norm.target}.drop")
        if not _is_identity(between):
            return f"it has {type(between).__name__} between normalization and activation"
        if not _is_identity(own):
            name, slope = f"{norm.target}.act", _slope_of(own)
            if slope is None:
                return f"{type(_original(own)).__name__} follows, and no ReLU"
    if name is None:
        activation = _next_that_computes(nodes, owner)
        if isinstance(activation, str):
            return activation
        slope = _slope(activation, owner)
        if slope is None:
            return f"{_called(activation, owner)} follows, and no ReLU"
        name = str(activation.target) if activation.op == "call_module" else None
    assert slope is not None
    while True:
        node = _next_that_computes(nodes, owner)
        if isinstance(node, str):
            return node
        folded = _folded(node, owner)
        if folded is None:
            break
        before.append(folded)
    linear = owner.get_submodule(str(node.target)) if node.op == "call_module" else None
    if linear is None or torch_class(linear) not in LINEAR or len(node.args) != 1 or node.kwargs:
        return f"{_called(node, owner)} follows its ReLU, and no Conv or Linear of torch.nn"
    return Chain(str(norm.target), str(node.target), name, tuple(before), slope), nodes


def _next_that_computes(nodes: list[fx.Node], owner: nn.Module) -> fx.Node | str:
    """Append to `nodes` their next one and any nn.Identity before it; return it, or the reason there is none."""
    while True:
        node = _next(nodes[-1], owner)
        if isinstance(node, str):
            return node
        nodes.append(node)
        if node.op != "call_module" or not _is_identity(owner.get_submodule(str(node.target))):
            return node


def _is_identity(module: nn.Module) -> bool:
    return type(module) is nn.Identity


def _next(node: fx.Node, owner: nn.Module) -> fx.Node | str:
    """Return the only user of `node`, or the reason there is not exactly one."""
    users = list(node.users)
    if len(users) != 1:
        times = counted(len(users), "time") if users else "nowhere"
        return f"what {_called(node, owner)} puts out is used {times}, and not once"
    if users[0].op == "output":
        return f"{RETURNED} {_called(node, owner)} puts out"
    if not users[0].args or users[0].args[0] is not node:
        return f"{_called(users[0], owner)} takes more than what {_called(node, owner)} puts out"
    return users[0]


def _slope(node: fx.Node, owner: nn.Module) -> float | None:
    """Return the negative slope of a (leaky) ReLU, or None if `node` is not one."""
    if node.op == "call_module":
        return _slope_of(owner.get_submodule(str(node.target)))
    if node.op == "call_method":
        return 0.0 if node.target in ("relu", "relu_") else None
    if node.target in _RELU_FUNCTIONS:
        return 0.0
    if node.target in _LEAKY_FUNCTIONS:
        slope: Any = dict(zip(("x", "slope"), node.args, strict=False)).get("slope", 0.01)
        slope = node.kwargs.get("negative_slope", slope)
        return float(slope) if not isinstance(slope, fx.Node) and slope >= 0 else None
    return None


def _slope_of(module: nn.Module) -> float | None:
    """Return the negative slope of nn.ReLU or nn.LeakyReLU, or None for any other module."""
    module = _original(module)
    if type(module) is nn.ReLU:
        return 0.0
    return module.negative_slope if type(module) is nn.LeakyReLU and module.negative_slope >= 0 else None


def _original(module: nn.Module) -> nn.Module:
    """Return the original of a few-bit replacement, or the module."""
    return vars(module).get(ORIGINAL, module)


def _folded(node: fx.Node, owner: nn.Module) -> str | nn.Module | None:
    """Return the name of an average pooling or nn.Flatten, or a module that does what a function does; or None."""
    if node.op == "call_module":
        return str(node.target) if torch_class(owner.get_submodule(str(node.target))) in FOLDED else None
    rest, keywords = node.args[1:], node.kwargs
    if any(isinstance(value, fx.Node) for value in (*rest, *keywords.values())):
        return None
    flatten = node.target == "flatten" if node.op == "call_method" else node.target is torch.flatten
    if flatten and (rest or "start_dim" in keywords):
        return _Same(nn.Flatten(*rest, **keywords))  # pyright: ignore[reportArgumentType]
    make = _FOLDED_FUNCTIONS.get(node.target)
    return _Same(make(*rest, **keywords)) if make else None


class _Same(nn.Module):
    """A module without parameters that compares by `repr`: equal text, equal function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks see the module's inputs or outputs."""
    return any(getattr(module, name) for name in _HOOKS)


def _called(node: fx.Node, owner: nn.Module) -> str:
    if node.op == "call_module":
        return type(owner.get_submodule(str(node.target))).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def chain_text(chain: Chain, owner: nn.Module) -> str:
    """Return a chain as a report names it."""
    norm, before, linear = chain.modules(owner)
    relu = f"LeakyReLU({chain.slope:g})" if chain.slope else "ReLU"
    folded = (type(m.module if isinstance(m, _Same) else m).__name__ for m in before)
    return " → ".join((type(norm).__name__, relu, *folded, one_line(linear)))


def put_chains(graph: fx.Graph, owner: nn.Module, chains: Sequence[Chain]) -> None:
    """Replace each chain in `graph` by one call."""
    numbers = {chain: number for number, chain in enumerate(chains)}
    for norm in [node for node in graph.nodes if node.op == "call_module"]:
        if not isinstance(owner.get_submodule(str(norm.target)), nn.modules.batchnorm._BatchNorm):
            continue
        links = _links(norm, owner)
        if isinstance(links, str) or links[0] not in numbers:
            continue
        chain, nodes = links
        with graph.inserting_after(nodes[-1]):
            call = graph.create_node("call_module", f"{CHAINS}.c{numbers[chain]}", (norm.args[0],))
        nodes[-1].replace_all_uses_with(call)
        for node in reversed(nodes):
            graph.erase_node(node)
