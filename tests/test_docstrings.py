"""What `help()` prints of the public names: arguments, errors, and examples, which run."""

import copy
import importlib
import inspect
import pydoc
import textwrap
from itertools import chain

import fewbit
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

from document_models import cnn, gpt2, mlp  # noqa: E402
from fewbit import functional  # noqa: E402
from fewbit.runtime.backends.activation_spec import ROW_OF_MODULE  # noqa: E402
from torch import nn  # noqa: E402

SUBMODULES = {name: importlib.import_module(f"fewbit{home}") for name, home in fewbit._SUBMODULES.items()}
INTEGRATIONS = {
    "integrations.transformers": ("FewbitCallback",),
    "integrations.attention": ("register_attention",),
    "integrations.lightning": ("FewbitCallback",),
}
FACE = {name: getattr(fewbit, name) for name in fewbit.__all__ if name not in {*SUBMODULES, "__version__"}}
INSIDE = {f"{name}.{public}": getattr(home, public) for name, home in SUBMODULES.items() for public in home.__all__}
# Results, which calls return, and the mixin of layers.
WITHOUT = {name for name, value in INSIDE.items() if inspect.isclass(value) and not name.startswith("layers.")}
WITHOUT |= {"layers.CompressedLayer", "layers.Saver", "memory.BITS"}
LAYERS = {name: value for name, value in INSIDE.items() if name.startswith("layers.") and inspect.isclass(value)}


def methods(name, value):
    """The public methods and properties that a class defines itself."""
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if not method.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                yield f"{name}.{method}", function


def examples():
    """The code below `Example:` in the docstring of each public name, its methods, and the integrations."""
    for module, names in INTEGRATIONS.items():
        home = importlib.import_module(f"fewbit.{module}")
        yield from ((f"{module}.{name}", home, getattr(home, name)) for name in names)
    for name, value in chain(FACE.items(), INSIDE.items()):
        yield from ((each, inspect.getmodule(value), item) for each, item in [(name, value), *methods(name, value)])


def example(value):
    """The code of one docstring, or None."""
    _, found, code = (getattr(value, "__doc__", None) or "").partition("Example:\n")
    return textwrap.dedent(inspect.cleandoc("x\n" + code)[2:]) if found else None


EXAMPLES = {name: example(value) for name, _, value in examples() if example(value)}


# Examples whose model is a language model.
OF_TEXT = ("ids", "memory=", "fewbit.checkpoint(", "transformer.h")


def names(code):
    """What examples are about."""
    model, x = mlp()
    batch = x
    ids = None
    if any(word in code for word in OF_TEXT):
        model, ids = gpt2()
        batch = {"input_ids": ids, "labels": ids}
    gate, up = torch.randn(2, 16, 128)
    about = {"fewbit": fewbit, "torch": torch, "F": nn.functional, "copy": copy, "PerGroup": fewbit.quantizers.PerGroup}
    about |= {"model": model, "x": x, "batch": batch, "ids": ids, "images": cnn()[1], "gate": gate, "up": up}
    return about | {"table": fewbit.load_table("gelu", 2, "stochastic")}


def of_integrations(home):
    """What the examples of a module of integrations are about."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments("out", report_to=[], use_cpu=True)
    return {
        **{name: getattr(home, name) for name in ("FewbitCallback", "register_attention") if hasattr(home, name)},
        "Trainer": Trainer,
        "args": args,
        "data": [{"labels": 0}],
    }


@pytest.mark.sample(43)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_printed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    about = names(EXAMPLES[name])
    if name.startswith("integrations."):
        about |= of_integrations(importlib.import_module(f"fewbit.{name.rpartition('.')[0]}"))
    exec(compile(EXAMPLES[name], f"<example of {name}>", "exec"), about)


@pytest.mark.parametrize("name", FACE)
def test_every_public_name_has_an_example_and_its_errors(name):
    assert name in EXAMPLES
    text = FACE[name].__doc__
    assert "Raises:" in text or name in (
        *("FewbitError", "few_bit", "MixedPrecision", "Normalizations", "Plan", "PreActConv2d", "PreActConv3d"),
    )


@pytest.mark.parametrize("name", sorted({*INSIDE} - WITHOUT))
def test_every_public_function_of_a_submodule_has_an_example(name):
    assert name in EXAMPLES


@pytest.mark.parametrize("name", [*ROW_OF_MODULE, *(f"functional.{name}" for name in functional.__all__)])
def test_every_activation_has_its_shapes_and_dtypes(name):
    text = " ".join({**FACE, **INSIDE}[name].__doc__.split())
    assert "float64, float32, float16 or bfloat16, " in text
    assert "of any shape and layout" in text or "of one shape" in text
    assert "Args: " in text and "Raises: " in text


@pytest.mark.parametrize("name", [name for name, value in LAYERS.items() if hasattr(nn, value.__name__)])
def test_every_layer_has_its_shapes_dtypes_arguments_and_errors(name):
    text = " ".join(LAYERS[name].__doc__.split())
    for part in (
        f"`torch.nn.{LAYERS[name].__name__}`",
        "float16, bfloat16, float32 or float64",
        "Args: ",
        "Example: ",
    ):
        assert part in text
    assert "(N, " in text or "(L, N, E)" in text or "Any shape" in text
    assert "Raises: " in text or not issubclass(LAYERS[name], fewbit.layers.CompressedLayer)


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_submodule_is_documented_as_its_home_is(name):
    module = getattr(fewbit, name)
    assert module.__doc__ == inspect.cleandoc(SUBMODULES[name].__doc__)
    assert SUBMODULES[name].__doc__.splitlines()[0] in pydoc.render_doc(module)
