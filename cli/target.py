"""A TARGET on the command line: `package.module:function` or `file.py:function`, user code that a command calls; or a
built-in model. A `Subject` is the model that it names.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from ..tables import FewbitError
from ..tables.names import nearest_hint

FORMS = "package.module:function or file.py:function"


def load_target(text: str) -> Callable[..., Any]:
    """Return the function that `text` names, importing its module or running its file.

    Its imports resolve as under ``python file.py`` or ``python -m package.module``: the folder of the file, or the
    current folder, is put first on ``sys.path`` and stays there, since the function may import later.

    Args:
        text: ``package.module:function`` or ``file.py:function``; the function may be dotted (``Class.method``).

    Raises:
        FewbitError: the text has another form; the file, module or function does not exist; importing the module fails;
        or the name is not that of a callable.
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place and all(part.isidentifier() for part in name.split("."))):
        raise FewbitError(f"{text!r} is not of the form {FORMS}")
    module = _run_file(Path(place)) if place.endswith(".py") else _import_module(place)
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError:
        hint = nearest_hint(name, [key for key, value in vars(module).items() if callable(value)])
        raise FewbitError(f"{place} has no {name!r}{hint}") from None
    if not callable(found):
        raise FewbitError(f"{text} is not a function but of type {type(found).__name__}")
    return found


@contextmanager
def errors_in_one_line(target: str, source: Callable[..., Any] | None) -> Iterator[None]:
    """Report an error of the user's code in one line, with the last line of user code in its traceback.

    Args:
        target: the target as the user wrote it.
        source: the function that `load_target` returned; None if the code is not the user's.
    """
    try:
        yield
    except (FewbitError, click.ClickException):
        raise
    except Exception as error:
        own = getattr(getattr(source, "__code__", None), "co_filename", None)
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise click.ClickException(f"{target} failed at {where}: {_in_words(error)}") from error


def _run_file(path: Path) -> ModuleType:
    """Run a file and return its module, under a unique name that hides no installed module."""
    if not path.is_file():
        raise FewbitError(f"there is no file {path}")
    name = f"fewbit_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FewbitError(f"{path} is no Python file: its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    _search_first(path.resolve().parent)
    sys.modules[name] = module  # dataclasses and pickle look up classes there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise FewbitError(f"{path} failed when it was run: {_in_words(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise FewbitError(f"{name!r} is not the name of a module; a TARGET is {FORMS}")
    _search_first(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise FewbitError(f"there is no module {error.name!r} here or among the installed ones") from None
        raise FewbitError(f"{name} failed when it was imported: {_in_words(error)}") from error
    except Exception as error:
        raise FewbitError(f"{name} failed when it was imported: {_in_words(error)}") from error


def _search_first(folder: Path) -> None:
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# ---- the model that it names -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        make: takes a batch size, or None for the default one; returns the model and its inputs.
        grows: whether `make` uses the batch size.
        on_meta: whether the model is on the meta device.
        source: the user's function, or None.
    """

    make: Callable[[int | None], Any]
    grows: bool
    on_meta: bool
    source: Callable[..., Any] | None = None


def built_in(name: str, size: int | None, dtype: str, attention: str) -> Subject:
    """Return a model that `fewbit memory models` lists, on the meta device."""
    import torch

    from ..runtime.plan import zoo

    if zoo.find(name) is None and name.endswith(".py"):
        raise FewbitError(f"{name!r} names no function; a TARGET is {FORMS}, or a model of `fewbit memory models`")
    model = zoo.build(name, size, attention=attention, dtype=getattr(torch, dtype))
    return Subject(lambda batch: (model, zoo.inputs(name, batch or 1, size, getattr(torch, dtype))), True, True)


def of_user(target: str, size: int | None, meta: bool) -> Subject:
    """Return the model that a function of the user's makes, which may return a loss, too.

    Args:
        target: names the function.
        size: of a sequence or an image.
        meta: whether to call it under the meta device.
    """
    import torch
    from torch import nn

    function = load_target(target)
    takes = inspect.signature(function).parameters

    def make(batch: int | None) -> Any:
        given = {"batch": batch, "sequence": size, "size": size}
        with torch.device("meta") if meta else nullcontext():
            made = function(**{name: value for name, value in given.items() if name in takes and value is not None})
        if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
            many = isinstance(made, tuple) and len(made) != 2
            what = f"{len(made)} things" if many else f"a {type(made).__name__}"
            raise FewbitError(f"{target} must return (model, inputs) or (model, inputs, loss), and returns {what}")
        return made

    return Subject(make, "batch" in takes, meta, function)


def to_train(target: str, size: int | None, dtype: str, meta: bool) -> Subject:
    """Return the model that a target names, whose `make` returns it in training mode, its inputs, and a loss or None.

    Args:
        target: a model of `fewbit memory models`, or a function of the user's.
        size: of a sequence or an image.
        dtype: of a model of `fewbit memory models`.
        meta: whether to call the function under the meta device.
    """
    is_user = ":" in target
    subject = of_user(target, size, meta) if is_user else built_in(target, size, dtype, "sdpa")

    def make(batch: int | None) -> Any:
        model, inputs, *loss = subject.make(batch)
        return model.train(), inputs, loss[0] if loss else None if is_user else _cross_entropy

    return replace(subject, make=make)


def sample_count(batch: str | None, accepted: str = "a number of samples") -> int | None:
    """Return the samples in a batch that the option asks for; None: the default."""
    if batch is None:
        return None
    if not batch.isdecimal() or int(batch) < 1:
        raise FewbitError(f"--batch is {accepted}, not {batch!r}")
    return int(batch)


def _cross_entropy(output: Any) -> Any:
    """Return a loss of a built-in model's output: the cross-entropy of its logits, as a model that is trained has."""
    from torch.nn import functional as F

    logits = output.logits if hasattr(output, "logits") else output[0]
    rows = logits.flatten(0, -2).float()
    return F.cross_entropy(rows, rows.new_zeros(len(rows), dtype=int))
