"""`fewbit.convert(model, fuse_preact=4)`: runs each chain of BN, (leaky) ReLU and Conv or Linear as one layer.

    plan = plan_of(model)           finds the chains (chain_patterns.py); changes nothing
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

from torch import Tensor, fx, nn

from ..layers.preact.layers import PreActLayer, preactivate
from .chain_patterns import (
    CHAINS,
    CONTAINERS,
    RETURNED,
    Chain,
    chain_text,
    has_hooks,
    is_line,
    match,
    put_chains,
    trace_forward,
)
from .find import Found
from .report import one_line


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
        graph = trace_forward(self.owner, training, self.followed)
        put_chains(graph, self.owner, self.chains)
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
            vars(owner)[CHAINS] = _Chains([RunChain(owner, chain, few) for chain, few in of_chains.items()])
            vars(owner)["forward"] = FusedForward(owner, of_chains, chosen[0].followed)
        return [each for chosen in owners.values() for each in chosen]


def unfuse(model: nn.Module) -> None:
    """Restore the original forward of every module of `model`."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FusedForward):
            del vars(module)["forward"], vars(module)[CHAINS]


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
            outside |= {id(owner.get_submodule(name)) for name in calls if not name.startswith(CHAINS)}
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
                was = chain_text(outcome, owner)
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
        elif isinstance(child, CONTAINERS):
            yield from _norms_of(child, f"{prefix}{name}.")


def _followed_of(owner: nn.Module) -> tuple[str, ...]:
    """Return the names of the children of `owner` that its trace goes through."""
    try:
        parameters = list(inspect.signature(type(owner).forward).parameters.values())
    except (TypeError, ValueError):
        return ()
    if len(parameters) != 2 or any(
        p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty for p in parameters
    ):
        return ()  # another argument than one tensor may decide which way it takes
    return tuple(name for name, child in owner.named_children() if _is_followed(child))


def _is_followed(module: nn.Module) -> bool:
    """Return whether `module` calls its children one after another, and a chain that begins in it goes on outside."""
    if not any(True for _ in _norms_of(module)) or isinstance(module, (*CONTAINERS, PreActLayer)):
        return False
    if "forward" in vars(module) or has_hooks(module) or _checks_types(type(module)):
        return False
    try:
        graphs = [trace_forward(module, training) for training in (True, False)]
    except Exception:  # as in _chains_of
        return False
    calls = [[node.target for node in graph.nodes if node.op == "call_module"] for graph in graphs]
    if calls[0] != calls[1] or not all(map(is_line, graphs)):
        return False
    return any(isinstance(end, str) and end.startswith(RETURNED) for end in match(graphs[0], module).values())


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
            modes.append(match(trace_forward(owner, training, followed), owner))
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
