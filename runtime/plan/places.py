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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..layers.saver import Saver
from ..quantizers import Compressed, Quantizer
from ..saved.hooks import compress_by

OF_OUTPUT = "-output"  # between the name of an attention that is computed again and the number of its output


def without_numbers(name: str) -> str:
    """Return a name of a module with a star in place of each number of a layer: `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=[.:])|^\d+(?=[.:])|(?<=\.)\d+$|^\d+$", "*", name)


def within(module: str, other: str) -> bool:
    """Return whether a module is another, or a part of it, by their names."""
    return module == other or module.startswith(f"{other}.")


class Policy(Protocol):
    """Decides how tensors are saved, by place."""

    def choose(self, place: str, x: Tensor, function: str) -> Quantizer:
        """Return the quantizer of `x`, which the torch function of this name saves at `place`."""
        ...

    def saves_output(self, module: str) -> bool:
        """Return whether `module` saves its output, unlike when the plan was made; another one saves it then too."""
        ...

    def share(self, compressed: Compressed, module: str) -> None:
        """Note that `module` saves again what `compressed` was made of."""
        ...

    def keep(self, x: Tensor, module: str, in_bits: bool) -> None:
        """Note that `module` saves `x` exactly, by the rules of `compress_saved_tensors`: as it is, or in bits."""
        ...

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        """Return what saves query, key and value if the attention of this name is computed again, else None."""
        ...

    def attended(self, attention: str, output: Tensor) -> None:
        """Note what the attention returns."""
        ...

    def enter(self, module: str, given: list[Tensor]) -> None:
        """Note that the forward pass of `module` begins, with the tensors `given`."""
        ...

    def leave(self, module: str, returned: object) -> None:
        """Note that the forward pass of `module` ends, and what it returns."""
        ...


class Places:
    """Hooks of a model that ask a policy about each tensor saved in its forward pass, as long as gradients are on.

    A context manager: the hooks are removed at its end. Compiled calls run without them.

    Attributes:
        policy: that is asked.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.policy = policy
        self._running: list[str] = []
        self._attention = ""  # that is running
        self._output: tuple[StorageWeakRef, str] | None = None  # of the last attention, and its name
        self._counts: Counter[str] = Counter()
        self._context: Any = None
        self._outputs: list[StorageWeakRef] = []  # of modules that save their output, until another one saves it
        self._model = model
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
        for name, module in self._model.named_modules():
            if module is not self._model:
                self._of_modules.append(module.register_forward_pre_hook(_Entering(self, name), with_kwargs=True))
                self._of_modules.append(module.register_forward_hook(_Leaving(self, name), always_call=True))

    def _unhook_modules(self) -> None:
        for handle in self._of_modules:
            handle.remove()
        self._of_modules.clear()

    # ---- of the model's forward pass ---------------------------------------------------------------------------------

    def _begin(self, *_: object) -> None:
        if self._is_lifted or self._context is not None:
            return
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._running, self._context = [""], compress_by(self)
        self._attention = ""
        self._counts.clear()
        self._outputs.clear()
        self._context.__enter__()
        self.policy.enter("", [])

    def _end(self, *_: object) -> None:
        if self._context is None or self._running != [""]:
            return
        self.policy.leave("", None)
        context, self._context = self._context, None
        self._running, self._output = [], None
        context.__exit__(None, None, None)

    def entered(self, name: str, given: object) -> None:
        """Note that a module begins."""
        if self._context is not None:
            self._running.append(name)
            self.policy.enter(name, [t for t in tree_leaves(given) if isinstance(t, Tensor)])

    def left(self, name: str, returned: object) -> None:
        """Note that a module ends."""
        if self._context is not None and self._running[-1] == name:
            self._running.pop()
            self.policy.leave(name, returned)

    # ---- of the saved tensors: a `Chooser` ---------------------------------------------------------------------------

    def choose(self, x: Tensor, function: str) -> Quantizer:
        """Return the policy's quantizer for `x`."""
        if self._attention:
            of, separator = self._attention, "-"
        elif self._output is not None and x.untyped_storage()._cdata == self._output[0].cdata:
            of, separator = self._output[1], OF_OUTPUT  # of one that is computed again: its own would have been shared
        else:
            of, separator = self._running[-1], ":"
        if separator == ":" and self.policy.saves_output(of):
            self._outputs.append(StorageWeakRef(x.untyped_storage()))
        place = f"{of}{separator}{self._counts[of]}"
        self._counts[of] += 1
        return self.policy.choose(place, x, function)

    def share(self, compressed: Compressed, x: Tensor) -> None:
        """Pass it on to the policy."""
        module, storage = self._running[-1], x.untyped_storage()._cdata
        found = next((i for i, output in enumerate(self._outputs) if output.cdata == storage), None)
        if found is not None:  # this module saved it first when the plan was made
            self._outputs.pop(found)
            self._counts[module] += 1
        self.policy.share(compressed, module)

    def keep(self, x: Tensor, in_bits: bool = False) -> None:
        """Pass it on to the policy."""
        self.policy.keep(x, self._running[-1], in_bits)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        """Return the policy's saver."""
        name = f"{self._running[-1]}:attention"
        self._attention = f"{name}{self._counts[name]}"
        self._counts[name] += 1
        return self.policy.attend(self._attention, query, key, value)

    def attended(self, output: Tensor) -> None:
        """Pass it on to the policy."""
        self.policy.attended(self._attention, output)
        self._output = StorageWeakRef(output.untyped_storage()), self._attention
        self._attention = ""


@dataclass(frozen=True)
class _Entering:
    """The hook before a module; an object, so that copies of the model have their own."""

    places: Places
    name: str

    def __call__(self, _: nn.Module, *given: object) -> None:
        self.places.entered(self.name, given)


@dataclass(frozen=True)
class _Leaving:
    """The hook after a module."""

    places: Places
    name: str

    def __call__(self, _: nn.Module, given: object, returned: object) -> None:
        self.places.left(self.name, returned)
