"""`torch.compile(model, backend="fewbit")`: Inductor, with few bits for what the backward pass needs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx

from ...tables import FewbitError
from ...tables.compiling import announced_if_long
from .options import CompileOptions, torch_budget
from .releases import LEAST_TORCH, is_untested, warn_of_untested

_LINE = "fewbit: torch's compiler builds a graph of the step, which takes tens of seconds the first time"
_PARTITIONER = "custom_partitioner_fn"  # of Inductor's configuration

# Inductor hands a freed buffer on to a later one of its size, and holds it in between where its estimate of the peak
# allows that. The estimate is too high (43 MB, not 38, in a ViT), and a step in few bits, whose peak lies in the
# backward pass, took up to 23 % more memory; how much more depended on the bits, so that plans could not tell.
_FREES_EARLY: Mapping[str, Any] = {"allow_buffer_reuse": False}


def inductor_options(**options: Any) -> dict[str, Any]:
    """Return options for `torch.compile(model, options=…)` with the backend "inductor".

    Args:
        options: fields of `CompileOptions`.

    Raises:
        FewbitError: an option is wrong, or this torch cannot be given a partitioner.

    Example:
        torch.compile(model, options=fewbit.inductor_options(bits=4))
    """
    chosen = CompileOptions.of(options)
    if chosen.bits is None and chosen.recompute < 1:
        raise FewbitError("recompute without bits is the backend fewbit's, and no option of Inductor's")
    return _patches(chosen)


def fewbit(
    model: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Any:
    """Compile a graph: the backend that `torch.compile(model, backend="fewbit")` finds by its entry point.

    Args:
        model: the graph that Dynamo captured.
        inputs: its inputs.
        options: fields of `CompileOptions`; those of Inductor's configuration are passed on to it.
        mode: of `torch.compile`.

    Raises:
        FewbitError: an option is wrong, or this torch cannot be given a partitioner.

    Example:
        model = torch.compile(model, backend="fewbit", options={"bits": 4})
    """
    from torch._inductor import list_mode_options

    known = _known().keys() - {_PARTITIONER}
    names = {name: name.replace("-", "_") for name in options or {}}  # as torch does: "max-autotune"
    of_inductor = {names[name]: value for name, value in (options or {}).items() if names[name] in known}
    chosen = CompileOptions.of({name: value for name, value in (options or {}).items() if names[name] not in known})
    patches = {**_patches(chosen), **(list_mode_options(mode) if mode else {}), **of_inductor}
    return compile_graph(model, inputs, chosen, patches, options)


def with_budget(budget: float) -> Callable[..., Any]:
    """Return the backend that saves all exactly, which is Inductor, with an `activation_memory_budget` of torch.

    Args:
        budget: from 0, which computes again all that can be, to 1, which is Inductor's own choice.

    Example:
        torch.compile(model, backend=with_budget(0.5))
    """
    return partial(fewbit, options={"bits": None, "recompute": budget})


def compile_graph(
    model: fx.GraphModule,
    inputs: Sequence[Any],
    options: CompileOptions,
    patches: Mapping[str, Any],
    asked: Mapping[str, Any] | None = None,
    **how: Any,
) -> Any:
    """Compile a graph with changes of Inductor's configuration, and attribute its report to the graph's parameters.

    Args:
        model: the graph that Dynamo captured.
        inputs: its inputs.
        options: those that `patches` were made of.
        patches: of Inductor's configuration.
        asked: the options as a user gave them to `torch.compile`.
        how: further arguments of Inductor's `compile_fx`.
    """
    from torch._inductor.compile_fx import compile_fx

    from .chunked_loss import in_chunks
    from .report import compiling

    model, finish = in_chunks(model)
    # With bits the partitioner computes again by the budget; without, torch's own does.
    budget = torch_budget(options.recompute) if options.bits is None else nullcontext()
    with compiling(model, inputs, options, asked), budget, announced_if_long(_LINE):
        compiled: Any = compile_fx(model, list(inputs), config_patches=dict(patches), **how)
    return compiled if finish is None else lambda *given: finish(given, compiled(*given))


def is_supported() -> bool:
    """Return whether this torch can run the backend."""
    return _PARTITIONER in _known()


def _patches(options: CompileOptions) -> dict[str, Any]:
    """Return the changes of Inductor's configuration; none if all is saved exactly."""
    if options.bits is None:
        return {}
    if not is_supported():
        raise FewbitError(f"the backend fewbit needs torch {LEAST_TORCH} or newer; this is {torch.__version__}")
    try:
        from . import direct_calls
        from .partitioner import FewbitPartitioner
    except (ImportError, AttributeError) as error:  # private names of torch (docs/torch.md) that it no longer has
        if not is_untested():
            raise
        warn_of_untested(error)
        return {}
    direct_calls.install()
    return {**_FREES_EARLY, _PARTITIONER: FewbitPartitioner(options)}


def _known() -> Mapping[str, Any]:
    """Return Inductor's configuration by name."""
    from torch._inductor import config

    return config.get_config_copy()
