"""`fewbit.convert(model, fuse_preact=4)`: runs each chain of BN, (leaky) ReLU and Conv or Linear as one layer.

    plan = plan_of(model)           finds the chains; changes nothing
    plan.apply(bits=4)              fuses them; `unfuse(model)` undoes it

A module's own forward is traced (torch.fx) with its children as black boxes, once in training and once in evaluation
mode. A chain is fused if nothing else uses the values between its links. Then the module's `forward` is replaced, on
the instance, by the same graph with the chain as one call. Children, parameters, names and hooks are unchanged;
children are looked up by name in every call, so they may be replaced later.

Two kinds of modules are no black boxes. timm's BatchNormAct2d is the normalization and the activation in one. What only
calls its children one after another, and returns what a normalization or ReLU puts out (the ConvLayers of
`transformers`' ResNet, torchvision's Conv2dNormActivation), is traced through, because the chain goes on outside.

A trace cannot follow code that branches on the types or values of tensors: such modules are left and reported with the
reason.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...tables.names import counted
from ..layers.huggingface import like
from ..layers.preact.function import NORMS
from ..layers.preact.layers import FOLDED, PreActLayer, preactivate
from ..layers.preact.linear import CONVOLUTIONS
from .find import ORIGINAL, Found
from .report import one_line
from .swap import torch_class

LINEAR = (*CONVOLUTIONS, nn.Linear)
_CHAINS = "_fewbit_chains"  # attribute of a module that holds its fused chains
_RETURNED = "its module returns what"  # of a chain that ends at the end of its module
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
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


@dataclass(frozen=True, eq=False)
class RunChain:
    """A callable that runs one chain of a module as one layer."""

    owner: nn.Module
    chain: Chain
    bits: int | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the chain's output."""
        norm, before, linear = self.chain.modules(self.owner)
        return preactivate(x, norm, linear, before=before, negative_slope=self.chain.slope, bits=self.bits)


class FusedForward:
    """The forward of a module with fused chains. Copies and unpickled objects generate its code again.

    Hooks that are set later on what a chain runs, or on a child that it is traced through, are not called.
    """

    owner: nn.Module
    bits: dict[Chain, int | None]
    followed: tuple[str, ...] = ()

    def __init__(self, owner: nn.Module, bits: Mapping[Chain, int | None], followed: tuple[str, ...] = ()) -> None:
        self.owner, self.bits, self.followed = owner, dict(bits), followed
        self._code: dict[bool, Callable[..., Any]] = {}

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chains that are fused."""
        return tuple(self.bits)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the module."""
        training = self.owner.training
        if training not in self._code:
            graph = self.graph(training)
            code = graph.python_code("self")
            names = dict(code.globals)
            exec(code.src, names)
            self._code[training] = names["forward"]
        return self._code[training](self.owner, *arguments, **keywords)

    def graph(self, training: bool) -> fx.Graph:
        """Return the graph of the module with each chain as one call."""
        graph = _trace(self.owner, training, self.followed)
        _put_chains(graph, self.owner, self.chains)
        return graph

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_code": {}}


class _Chains:
    """Holder of the chains that the generated forward calls: attributes c0, c1, …"""

    def __init__(self, runs: Sequence[RunChain]) -> None:
        for number, run in enumerate(runs):
            setattr(self, f"c{number}", run)


@dataclass(frozen=True)
class Planned:
    """A chain that can be fused.

    Attributes:
        name: qualified name of the linear part in the model.
        was: text of the links, for the report.
        owner: the module that runs the chain.
        chain: the links.
        followed: names of the owner's children that its trace goes through.
    """

    name: str
    was: str
    owner: nn.Module
    chain: Chain
    followed: tuple[str, ...]

    def as_found(self, model: nn.Module) -> Found:
        """Return the linear part, by which `convert` selects the chain (names and classes)."""
        _, _, linear = self.chain.modules(self.owner)
        around = [m for path, m in model.named_modules() if not path or self.name.startswith(f"{path}.")]
        return Found(linear, [self.name], [], around)


@dataclass(frozen=True)
class FusionPlan:
    """The chains of a model, and the normalizations outside any chain: (name, text of the module, reason)."""

    planned: tuple[Planned, ...]
    left: tuple[tuple[str, str, str], ...]

    def apply(self, bits: int | None, wanted: Callable[[Planned], bool] = lambda _: True) -> list[Planned]:
        """Fuse the chains that are `wanted`, and return them; what is fused already stays so."""
        owners: dict[nn.Module, list[Planned]] = {}
        for each in self.planned:
            if wanted(each):
                owners.setdefault(each.owner, []).append(each)
        for owner, chosen in owners.items():
            before = vars(owner).get("forward")
            fused = before.bits if isinstance(before, FusedForward) else {}
            again = {each.chain.linear for each in chosen}
            earlier = {chain: few for chain, few in fused.items() if chain.linear not in again}
            of_chains = {**earlier, **{each.chain: bits for each in chosen}}
            vars(owner)[_CHAINS] = _Chains([RunChain(owner, chain, few) for chain, few in of_chains.items()])
            vars(owner)["forward"] = FusedForward(owner, of_chains, chosen[0].followed)
        return [each for chosen in owners.values() for each in chosen]


def unfuse(model: nn.Module) -> None:
    """Restore the original forward of every module of `model`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FusedForward):
            del vars(module)["forward"], vars(module)[_CHAINS]


def owners_of_chains(model: nn.Module) -> list[str]:
    """Return the names of the modules of `model` that run fused chains."""
    return [name for name, m in model.named_modules() if isinstance(vars(m).get("forward"), FusedForward)]


def swallowed(model: nn.Module) -> set[int]:
    """Return the ids of the modules in fused chains of `model`.

    A ReLU counts only if it runs nowhere else: outside the chain it can still be replaced by a few-bit one.
    """
    links, inside, outside = set[int](), set[int](), set[int]()
    for owner in model.modules():
        forward = vars(owner).get("forward")
        if isinstance(forward, FusedForward):
            names = {chain.activation for chain in forward.chains}
            inside |= {id(owner.get_submodule(name)) for name in names if name}
            links |= {id(module) for chain in forward.chains for module in chain.links(owner)}
            calls = {str(node.target) for node in forward.graph(owner.training).nodes if node.op == "call_module"}
            outside |= {id(owner.get_submodule(name)) for name in calls if not name.startswith(_CHAINS)}
    return links | (inside - outside)


def plan_of(model: nn.Module) -> FusionPlan:
    """Return the chains of `model` that can be fused, and the batch normalizations that are left, with reasons."""
    planned: list[Planned] = []
    left: list[tuple[str, str, str]] = []
    seen = set[nn.Module]()
    for path, owner in model.named_modules():
        norms = {name: norm for name, norm in _norms_of(owner) if norm not in seen}
        if isinstance(owner, PreActLayer):  # already fused
            seen |= set(norms.values())
            continue
        followed = _followed_of(owner)
        inside = {name: norm for child in followed for name, norm in _norms_of(owner.get_submodule(child), f"{child}.")}
        inner = {name: norm for name, norm in inside.items() if norm not in seen}
        if not (norms or inner) or type(owner).forward is nn.Module.forward:
            continue
        prefix = f"{path}." if path else ""
        found = _chains_of(owner, followed)
        if isinstance(found, dict):  # what this trace does not reach is left to the module that calls it
            norms |= {name: norm for name, norm in inner.items() if name in found}
        seen |= set(norms.values())
        reasons = found if isinstance(found, dict) else dict.fromkeys(norms, found)
        for name, norm in norms.items():
            outcome = reasons.get(name, "its module does not call it by itself")
            if isinstance(outcome, Chain):
                was = _text(outcome, owner)
                planned.append(Planned(prefix + outcome.linear, was, owner, outcome, followed))
            else:
                left.append((prefix + name, one_line(norm), outcome))
    return FusionPlan(tuple(planned), tuple(left))


# ---- finding chains --------------------------------------------------------------------------------------------------


def _norms_of(owner: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the batch normalizations among the children of `owner` and in its ModuleLists and ModuleDicts."""
    for name, child in owner.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            yield prefix + name, child
        elif isinstance(child, _CONTAINERS):
            yield from _norms_of(child, f"{prefix}{name}.")


def _followed_of(owner: nn.Module) -> tuple[str, ...]:
    """Return the names of the children of `owner` that its trace goes through."""
    if not _takes_one_tensor(type(owner)):
        return ()
    return tuple(name for name, child in owner.named_children() if _is_followed(child))


def _takes_one_tensor(cls: type[nn.Module]) -> bool:
    """Return whether the forward of a class has one argument: no other can decide which way it takes."""
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) == 2 and all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)


def _is_followed(module: nn.Module) -> bool:
    """Return whether `module` calls its children one after another, and a chain that begins in it goes on outside."""
    if not any(True for _ in _norms_of(module)) or isinstance(module, (*_CONTAINERS, PreActLayer)):
        return False
    if "forward" in vars(module) or _has_hooks(module) or _checks_types(type(module)):
        return False
    try:
        graphs = [_trace(module, training) for training in (True, False)]
    except Exception:  # as in _chains_of
        return False
    calls = [[node.target for node in graph.nodes if node.op == "call_module"] for graph in graphs]
    if calls[0] != calls[1] or not all(map(_is_line, graphs)):
        return False
    return any(isinstance(end, str) and end.startswith(_RETURNED) for end in _match(graphs[0], module).values())


def _is_line(graph: fx.Graph) -> bool:
    """Return whether a graph passes one tensor from child to child."""
    before, *after = graph.nodes
    for node in after:
        if node.op not in ("call_module", "output") or node.args != (before,) or node.kwargs:
            return False
        before = node
    return True


def _chains_of(owner: nn.Module, followed: tuple[str, ...]) -> dict[str, Chain | str] | str:
    """Return, for each normalization that `owner` or a child of those followed calls, its chain or why it has none.

    A single string is returned, the reason, if `owner` cannot be traced.
    """
    if "forward" in vars(owner) and not isinstance(vars(owner)["forward"], FusedForward):
        return "its module's forward was replaced on the instance"
    if _checks_types(type(owner)):
        return "its module's code asks for types, which a trace cannot follow"
    modes = []
    for training in (True, False):
        try:
            modes.append(_match(_trace(owner, training, followed), owner))
        except Exception as error:  # user code may do anything with an fx.Proxy
            return f"its module cannot be traced: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    training, evaluation = modes
    different = "it is followed by something else in evaluation mode"
    return {name: each if each == evaluation.get(name) else different for name, each in training.items()}


def _checks_types(cls: type) -> bool:
    own = [c for c in cls.__mro__ if c not in (nn.Module, nn.Sequential, object)]
    functions = [f for c in own for name, f in vars(c).items() if callable(f) and name != "__init__"]
    return any({"isinstance", "type"} & set(getattr(f, "__code__", _no_code).co_names) for f in functions)


_no_code = (lambda: None).__code__


class _Tracer(fx.Tracer):
    def __init__(self, followed: tuple[str, ...]) -> None:
        super().__init__()
        self.followed = followed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.followed


def _trace(owner: nn.Module, training: bool, followed: tuple[str, ...] = ()) -> fx.Graph:
    """Return the graph of `type(owner).forward` in training or evaluation mode, through the children `followed`."""
    mode = owner.training
    owner.training = training  # of this module only: children are not run, and those followed do not ask
    try:
        return _Tracer(followed).trace(owner)
    finally:
        owner.training = mode


def _match(graph: fx.Graph, owner: nn.Module) -> dict[str, Chain | str]:
    found: dict[str, Chain | str] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(owner.get_submodule(node.target), nn.modules.batchnorm._BatchNorm):
            several = "it is called several times"
            found[node.target] = several if node.target in found else _chain_from(node, owner)
    return found


def _chain_from(node: fx.Node, owner: nn.Module) -> Chain | str:
    links = _links(node, owner)
    if isinstance(links, str):
        return links
    chain, nodes = links
    for node in nodes:
        module = owner.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module is not None and any(map(_has_hooks, module.modules())):  # with the activation of timm's normalization
            return f"there are hooks on {node.target}"
    return chain


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
        return f"{_RETURNED} {_called(node, owner)} puts out"
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


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


def _called(node: fx.Node, owner: nn.Module) -> str:
    if node.op == "call_module":
        return type(owner.get_submodule(str(node.target))).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _text(chain: Chain, owner: nn.Module) -> str:
    norm, before, linear = chain.modules(owner)
    relu = f"LeakyReLU({chain.slope:g})" if chain.slope else "ReLU"
    folded = (type(m.module if isinstance(m, _Same) else m).__name__ for m in before)
    return " → ".join((type(norm).__name__, relu, *folded, one_line(linear)))


def _put_chains(graph: fx.Graph, owner: nn.Module, chains: Sequence[Chain]) -> None:
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
            call = graph.create_node("call_module", f"{_CHAINS}.c{numbers[chain]}", (norm.args[0],))
        nodes[-1].replace_all_uses_with(call)
        for node in reversed(nodes):
            graph.erase_node(node)
