"""The options of the compile backend, checked when they are given."""

import hashlib
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from ...tables.sizes import parse_size
from .roles import ROUNDED, Role

Bits = int | None
MOST_ROTATED = 3  # bits; queries and keys beside them have one more
# With 4 bits for queries and keys a Llama ended .38 above exact training (plots/results/compiled.md): an error there
# goes through an exponential. 8 cost 1 % of the bytes. What enters linearly errs without bias, and wants fewer than
# what goes through a curve first. So GPT-2 and Llama train as exact runs do, in .13 of the bytes.
AUTO: Mapping[Role, int] = {
    Role.LINEAR: 5,
    Role.FACTOR: 4,
    Role.PROBABILITIES: 8,
    Role.ATTENTION: 5,
    Role.NONLINEAR: 6,
    Role.SCORES: 8,
}


@dataclass(frozen=True)
class CompileOptions:
    """What `torch.compile(model, backend="fewbit", options={…})` accepts.

    Attributes:
        bits: of what is saved. "auto", the default, gives each role its own (`AUTO`, roles.py); 1 to 8 is for all that
            can be rounded, but queries and keys have twice as many, up to 8, or where codes are rotated one more; None
            saves all exactly; a mapping gives
            bits, or None, to roles ("linear", "factor", "nonlinear", "attention", "scores", "probabilities") and to
            modules by pattern ("model.layers.*.mlp"), "auto" to the rest. Those of a place, as a plan names it (a
            module and the name of a value in its graph, "model.layers.0.mlp:mm_4"), change what that value takes, and
            not which values are saved.
        rounding: "stochastic" rounds at random what enters the gradient linearly, and so without bias, and the rest to
            nearest; "nearest" rounds all so.
        quantizer: "groups" has codes between the minimum and the maximum of a group; "rotated" those of groups that are
            turned at random (rotated.py), but for probabilities; "auto", the default, is rotated up to 3 bits, where
            groups err three to twenty times as much, and groups from 4 bits on, which take less time.
        group: most elements that share a minimum and a scale.
        tables: whether factors F(x) of gradients that are needed for nothing else, such as an activation's derivative
            before frozen weights, are saved as codes of the compiler's table for F (factors.py).
        keep: patterns of modules whose values are saved exactly.
        smallest: tensors of fewer elements are saved exactly.
        budget: most bytes that one graph may save, without inputs, as "64MiB" or a number; where the bits above take
            more, all are lowered evenly, a bit at a time and to 1 at least, until it is met.
        recompute_attention: whether the backward pass computes attention's output and log-sum-exp again from rounded
            queries, keys and values, so that probabilities sum to one (attention.py), at the price of another forward
            pass of attention; None, the default, where queries or keys have fewer than 8 bits, or are no projections.
        recompute: torch's `activation_memory_budget`, from 0 to 1: below 1 some of what was saved is computed again.
        host_memory: most bytes of one graph's codes that wait in host memory, as "8GiB" or a number (host.py); by
            default none. It needs torch 2.13 and is not measured on a GPU yet; on the CPU there is nothing to move.

    Raises:
        FewbitError: an option is not one of the values above.
    """

    bits: "Literal['auto'] | int | Mapping[str, Bits] | None" = "auto"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    quantizer: Literal["auto", "groups", "rotated"] = "auto"
    group: int = 128
    tables: bool = True
    keep: tuple[str, ...] = ()
    smallest: int = 4096
    budget: int | str | None = None
    recompute: float = 1.0
    recompute_attention: bool | None = None
    host_memory: int | str | None = None
    places: Mapping[str, Bits] = field(init=False, repr=False, default_factory=dict)
    _rules: tuple[tuple[str, Bits], ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if isinstance(self.bits, Mapping):
            for name, bits in self.bits.items():
                if not isinstance(name, str):
                    raise FewbitError(f"bits by role or pattern have names, and {shown(name)} is none")
                check_bits(f"bits of {shown(name)}", bits)
            object.__setattr__(self, "places", {name: bits for name, bits in self.bits.items() if ":" in name})
            rules = tuple((name, bits) for name, bits in self.bits.items() if ":" not in name)
            object.__setattr__(self, "_rules", rules)
        elif self.bits != "auto":
            if isinstance(self.bits, str):
                raise FewbitError(
                    f"bits is 'auto', an integer from 1 to 8, a mapping by role or None, not {shown(self.bits)}"
                )
            check_bits("bits", self.bits)
        if self.rounding not in ("stochastic", "nearest"):
            raise FewbitError(f"rounding is 'stochastic' or 'nearest', not {shown(self.rounding)}")
        if self.quantizer not in ("auto", "groups", "rotated"):
            raise FewbitError(f"quantizer is 'auto', 'groups' or 'rotated', not {shown(self.quantizer)}")
        check_integer("group", self.group, 32)
        check_integer("smallest", self.smallest, 0)
        if not isinstance(self.tables, bool):
            raise FewbitError(f"tables is True or False, not {shown(self.tables)}")
        is_several = isinstance(self.keep, Collection) and not isinstance(self.keep, str | Mapping)
        if not is_several or not all(isinstance(pattern, str) for pattern in self.keep):
            raise FewbitError(f"keep is a sequence of patterns of module names, not {shown(self.keep)}")
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.budget is not None:
            if isinstance(self.budget, str):
                object.__setattr__(self, "budget", parse_size(self.budget))
            check_integer("budget", self.budget, 0)
            if self.bits is None:
                raise FewbitError("budget is for what codes take, and with bits=None there are none: see recompute")
        if not isinstance(self.recompute_attention, bool | None):
            raise FewbitError(f"recompute_attention is True, False or None, not {shown(self.recompute_attention)}")
        if self.host_memory is not None:
            object.__setattr__(self, "host_memory", parse_size(self.host_memory))
        if (
            isinstance(self.recompute, bool)
            or not isinstance(self.recompute, int | float)
            or not 0 <= self.recompute <= 1
        ):
            raise FewbitError(f"recompute is a number from 0 to 1, not {shown(self.recompute)}")

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> "CompileOptions":
        """Return the options of a mapping by name.

        Raises:
            FewbitError: a name is no option.
        """
        accepted = [f.name for f in fields(cls) if f.init]
        for name in options or {}:
            if name not in accepted:
                raise FewbitError(f"{shown(name)} is no option of the backend fewbit: {', '.join(accepted)}")
        return cls(**(options or {}))

    def bits_for(self, role: Role, modules: tuple[str, ...]) -> Bits:
        """Return the bits of a value of `role` in a module of the names `modules`, outermost first; None is exact."""
        if role not in ROUNDED or any(fnmatchcase(name, pattern) for pattern in self.keep for name in modules):
            return None
        if self.bits is None or isinstance(self.bits, int):
            if self.bits is None or role is not Role.SCORES:
                return self.bits
            return min(self.bits + 1 if self.rotates(Role.LINEAR, self.bits) else 2 * self.bits, 8)
        for pattern, bits in self._rules:
            if any(fnmatchcase(name, pattern) for name in modules):
                return bits
        return next((bits for name, bits in self._rules if name == role.value), AUTO[role])

    def unmatched(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the patterns of `keep` and `bits` that match no module of these names, and are no role with bits."""
        roles = {role.value for role in ROUNDED}
        patterns = (*self.keep, *(name for name, _ in self._rules if name not in roles))
        return tuple(p for p in dict.fromkeys(patterns) if not any(fnmatchcase(name, p) for name in modules))

    def rotates(self, role: Role, bits: int) -> bool:
        """Return whether the codes of a value are rotated: of none that may be almost all zeros."""
        most = {"auto": MOST_ROTATED + (role is Role.SCORES), "groups": 0, "rotated": 8}[self.quantizer]
        return role in ROUNDED and role is not Role.PROBABILITIES and bits <= most

    def recomputes_attention(self, modules: tuple[str, ...], is_projection: bool) -> bool:
        """Return whether attention is computed again whose queries or keys are of modules of these names.

        Args:
            modules: outermost first.
            is_projection: whether these are linear in results of matrix products.
        """
        bits, asked = self.bits_for(Role.SCORES, modules), self.recompute_attention
        return bits is not None and (bits < 8 or not is_projection if asked is None else asked)

    def uuid(self) -> str:
        """Return what tells compilations with other options, another fewbit or another torch apart in a cache."""
        of_names = self._rules, dict(self.places)  # a mapping may have any repr
        return hashlib.sha256(f"{_sources()}{torch.__version__}{self!r}{of_names!r}".encode()).hexdigest()


def torch_budget(budget: float) -> AbstractContextManager[None]:
    """Return a context in which torch divides graphs by a budget, or by the lower one of its own configuration."""
    from torch._functorch import config

    return config.patch(activation_memory_budget=min(budget, config.activation_memory_budget))


def check_bits(name: str, bits: object) -> None:
    """Raise FewbitError unless `bits` is an integer from 1 to 8 or None."""
    if bits is not None:
        check_integer(name, bits, 1, 8)


@cache
def _sources() -> str:
    """Return a digest of the source that decides what the compiled graphs compute, and of what they call."""
    digest = hashlib.sha256()
    runtime = Path(__file__).parents[1]
    # Of tensors/ graphs have signs, edges, planes and random bits; of layers/ the operator of losses in chunks, whose
    # strides a cached graph asserts.
    patterns = ("compile/*.py", "tensors/*.py", "backends/*/per_group.py", "backends/*/rotated.py", "ops/*.py")
    patterns += ("layers/loss*.py",)
    for file in sorted(file for pattern in patterns for file in runtime.glob(pattern)):
        digest.update(file.read_bytes())
    return digest.hexdigest()
