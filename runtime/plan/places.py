"""Names the saved tensors of a model by place, the same in every step: the module that saves it, and a number.

    model.layers.0.mlp.act_fn:0                 the first tensor that this module saves in a forward pass
    model.layers.0.self_attn:attention0-1       the second that its first scaled_dot_product_attention saves

Tensors of attention have names of their own because a plan may have attention computed again: then it saves others, and
all that the module saves besides keeps its name.

A plan is made in one step and carried out in others, so both must call a tensor by one name. `Places` surrounds the
forward pass of a model with the hooks of `compress_saved_tensors` and passes each saved tensor, with its place, to a
policy: one that measures (trace.py, gradient_error.py) or one that carries out a plan (fitted.py).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..layers.saver import Saver
from ..quantizers import Compressed, PerGroup, Quantizer
from ..saved.hooks import compress_by
from ..saved.store import Chooser

OF_OUTPUT = "-output"  # between the name of an attention that is computed again and the number of its output


def without_numbers(name: str) -> str:
    """Return a name of a module with a star in place of each number of a layer: `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=[.:])|^\d+(?=[.:])|(?<=\.)\d+$|^\d+$", "*", name)


def within(module: str, other: str) -> bool:
    """Return whether a module is another, or a part of it, by their names."""
    return module == other or module.startswith(f"{other}.")


@dataclass(frozen=True)
class ByCall:
    """A quantizer that saves a tensor as a call says, which is given a quantizer of groups besides.

    Attributes:
        call: returns what is saved of a tensor.
        quantizer: of groups, within the rows that the tensor has.
    """

    call: Callable[[Tensor, PerGroup], Compressed]
    quantizer: PerGroup

    def within(self, features: int) -> "ByCall":
        """Return the same for a tensor of rows of so many elements."""
        return ByCall(self.call, self.quantizer.within(features))

    def compress(self, x: Tensor) -> Compressed:
        """Return what is saved of `x`."""
        return self.call(x, self.quantizer)


class Policy:
    """Decides how tensors are saved, by place, and is told the rest, which one that only saves leaves as it is."""

    def choose(self, place: str, x: Tensor, function: str) -> Quantizer:
        """Return the quantizer of `x`, which the torch function of this name saves at `place`."""
        raise NotImplementedError

    def saves_output(self, module: str) -> bool:
        """Return whether `module` saves its output, unlike when the plan was made; another one saves it then too."""
        return False

    def share(self, compressed: Compressed, module: str) -> None:
        """Note that `module` saves again what `compressed` was made of."""

    def keep(self, x: Tensor, module: str, in_bits: bool) -> None:
        """Note that `module` saves `x` exactly, by the rules of `compress_saved_tensors`: as it is, or in bits."""

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        """Return what saves query, key and value if the attention of this name is computed again, else None."""
        return None

    def attended(self, attention: str, output: Tensor) -> None:
        """Note what the attention returns."""

    def enter(self, module: str, given: list[Tensor]) -> None:
        """Note that the forward pass of `module` begins, with the tensors `given`."""

    def leave(self, module: str, returned: object) -> None:
        """Note that the forward pass of `module` ends, and what it returns."""


class Places:
    """Hooks of a model that ask a policy about each tensor saved in its forward pass, as long as gradients are on.

    A context manager: the hooks are removed at its end. Compiled calls run without them. Each thread has a pass of its
    own, so that replicas of a model may run at once.

    Attributes:
        model: the model.
        policy: that is asked.
        keywords: of each forward pass that it is asked in, unless it is called with others.
    """

    def __init__(self, model: nn.Module, policy: Policy, keywords: Mapping[str, Any] | None = None) -> None:
        self.policy, self.keywords = policy, keywords or {}
        self._passes: dict[int, _Pass] = {}  # by thread
        self.model = model
        self._of_modules: list[Any] = []  # handles of hooks
        self._of_model: list[Any] = []
        self._is_lifted = False
        self._hook_modules()
        self._of_model.append(model.register_forward_pre_hook(self._begin, prepend=True))
        self._of_model.append(model.register_forward_hook(self._end, always_call=True))

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        self._unhook_modules()
        for handle in self._of_model:
            handle.remove()
        self._of_model.clear()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let forward passes that begin within this block run without hooks, and modules be without them: chains of
        modules that are run as one layer are sought among modules that have none."""
        if self._is_lifted:
            yield
            return
        self._unhook_modules()
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False
            self._hook_modules()

    def _hook_modules(self) -> None:
        for name, module in self.model.named_modules():
            if module is not self.model:
                self._of_modules.append(module.register_forward_pre_hook(_Entering(self, name), with_kwargs=True))
                self._of_modules.append(module.register_forward_hook(_Leaving(self, name), always_call=True))
        _Guard.put(self, self.model)

    def _unhook_modules(self) -> None:
        for handle in self._of_modules:
            handle.remove()
        self._of_modules.clear()
        _Guard.take(self.model)

    def _begin(self, model: nn.Module, _: object) -> None:
        if self._is_lifted or self.running is not None:
            return
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._passes[get_ident()] = _Pass(self.policy, model)

    def _end(self, *_: object) -> None:
        running = self.running
        if running is not None and running.modules == [""]:
            self.end()

    def end(self) -> None:
        """End the pass of this thread, if there is one."""
        running = self._passes.pop(get_ident(), None)
        if running is not None:
            running.end()

    @property
    def running(self) -> "_Pass | None":
        """The pass of this thread."""
        return self._passes.get(get_ident())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_passes": {}}


class _Pass(Chooser):
    """One forward pass, in one thread: the `Chooser` of what it saves.

    Attributes:
        model: that runs: the one with the hooks, or a replica of it.
        modules: names of those that are running, the innermost last.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.model, self.modules = model, [""]
        self._policy = policy
        self._attention = ""  # that is running
        self._output: tuple[StorageWeakRef, str] | None = None  # of the last attention, and its name
        self._counts: Counter[str] = Counter()
        self._outputs: list[StorageWeakRef] = []  # of modules that save their output, until another one saves it
        self._context = compress_by(self)
        self._context.__enter__()
        policy.enter("", [])

    def end(self) -> None:
        """Save no more by the policy."""
        try:
            self._policy.leave("", None)
        finally:
            self._context.__exit__(None, None, None)

    def entered(self, name: str, given: object) -> None:
        """Note that a module begins."""
        self.modules.append(name)
        self._policy.enter(name, [t for t in tree_leaves(given) if isinstance(t, Tensor)])

    def left(self, name: str, returned: object) -> None:
        """Note that a module ends."""
        if self.modules[-1] == name:
            self.modules.pop()
            self._policy.leave(name, returned)

    def choose(self, x: Tensor, function: str) -> Quantizer:
        """Return the policy's quantizer for `x`."""
        if self._attention:
            of, separator = self._attention, "-"
        elif self._output is not None and x.untyped_storage()._cdata == self._output[0].cdata:
            of, separator = self._output[1], OF_OUTPUT  # of one that is computed again: its own would have been shared
        else:
            of, separator = self.modules[-1], ":"
        if separator == ":" and self._policy.saves_output(of):
            self._outputs.append(StorageWeakRef(x.untyped_storage()))
        place = f"{of}{separator}{self._counts[of]}"
        self._counts[of] += 1
        return self._policy.choose(place, x, function)

    def share(self, compressed: Compressed, x: Tensor) -> None:
        """Pass it on to the policy."""
        module, storage = self.modules[-1], x.untyped_storage()._cdata
        found = next((i for i, output in enumerate(self._outputs) if output.cdata == storage), None)
        if found is not None:  # this module saved it first when the plan was made
            self._outputs.pop(found)
            self._counts[module] += 1
        self._policy.share(compressed, module)

    def keep(self, x: Tensor, in_bits: bool = False) -> None:
        """Pass it on to the policy."""
        self._policy.keep(x, self.modules[-1], in_bits)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        """Return the policy's saver."""
        name = f"{self.modules[-1]}:attention"
        self._attention = f"{name}{self._counts[name]}"
        self._counts[name] += 1
        return self._policy.attend(self._attention, query, key, value)

    def attended(self, output: Tensor) -> None:
        """Pass it on to the policy."""
        self._policy.attended(self._attention, output)
        self._output = StorageWeakRef(output.untyped_storage()), self._attention
        self._attention = ""


@dataclass(frozen=True)
class _Guard:
    """The forward of a hooked model: ends the pass where no hook is called, as after KeyboardInterrupt.

    Attributes:
        places: of the model.
        before: the model's own forward, where it had one; None for that of its class.
    """

    places: Places
    before: Any

    @classmethod
    def put(cls, places: Places, model: nn.Module) -> None:
        """Surround the forward of a model."""
        vars(model)["forward"] = cls(places, vars(model).get("forward"))

    @classmethod
    def take(cls, model: nn.Module) -> None:
        """Take the guard off, unless something else has surrounded it since."""
        guard = vars(model).get("forward")
        if isinstance(guard, cls):
            del vars(model)["forward"]
            if guard.before is not None:
                vars(model)["forward"] = guard.before

    @property
    def __wrapped__(self) -> Any:
        """The forward that is called, whose signature trainers read."""
        running = self.places.running
        model = self.places.model if running is None else running.model
        return MethodType(type(model).forward, model) if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            model = self.places.model
            return type(model).forward(model, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)
        given = kwargs if self.places.running is None else {**self.places.keywords, **kwargs}
        try:
            return self.__wrapped__(*args, **given)
        except BaseException:  # of which torch calls hooks for `Exception` alone
            self.places.end()
            raise


@dataclass(frozen=True)
class _Entering:
    """The hook before a module; an object, so that copies of the model have their own."""

    places: Places
    name: str

    def __call__(self, _: nn.Module, *given: object) -> None:
        running = self.places.running
        if running is not None:
            running.entered(self.name, given)


@dataclass(frozen=True)
class _Leaving:
    """The hook after a module."""

    places: Places
    name: str

    def __call__(self, _: nn.Module, given: object, returned: object) -> None:
        running = self.places.running
        if running is not None:
            running.left(self.name, returned)
