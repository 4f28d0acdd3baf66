"""`fewbit.convert(model, bits=3)` makes few-bit activations of a model's activations; `fewbit.revert(model)` undoes it.

    report = fewbit.convert(model, bits=3, exclude="head.*")
    print(report)                      what was replaced, and what was left and why
    fewbit.revert(model)

Outputs stay the same bit for bit, and so do the state_dict, the names of modules, hooks and the mode. A replacement
keeps what it stands for, so copies and pickles of a converted model can be reverted too.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..tables import FewbitError, Table
from ..tables.errors import shown
from ..tables.table import check_bits
from .choice import TableOrPath, key_for_activation, key_for_module, names_activation, read_tables
from .conversion import Left, Replaced, Report
from .glu import conversion as glu_pass
from .modules import FewBitActivation
from .preact.fuse import plan_of, swallowed, unfuse
from .resolve import DEFAULT_BITS
from .search import ORIGINAL, Activation, Form, Found, activations, form_of, original_of
from .vquant.conversion import candidates as value_aware_candidates
from .vquant.conversion import torch_again, value_aware

__all__ = ["Report", "convert", "revert"]

Selector = str | type[nn.Module] | Callable[[str, Any], bool]
Selectors = Selector | Iterable[Selector]

# What others have registered on a module, and the flag that goes with it.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


def convert(
    model: nn.Module,
    bits: float | None = None,
    *,
    include: Selectors | None = None,
    exclude: Selectors = (),
    tables: Mapping[str, TableOrPath] | None = None,
    fused: bool = False,
    outliers: float | None = None,
    level: str | None = None,
    fuse_preact: int | None = None,
    glu: str | Mapping[str, Any] | None = None,
) -> Report:
    """Replace a model's activations, in place, by few-bit ones with the same outputs.

    Found are the modules of torch.nn and those that `transformers` and `timm` define, and torch's functions where a
    module holds one in an attribute, as `nn.TransformerEncoderLayer` holds F.relu. (Functions that code calls by name
    are no modules: see `fewbit.few_bit`.) A module that stands in several places is replaced by one in all of them.
    What has been converted before is converted anew, with these bits; few-bit modules of your own are left.

    Args:
        model: any module, on any device. If it is itself an activation there is nothing to put the new one into: take
            it from `report.model`.
        bits: 1 to 8 for each element, 3 if None; fewer are used where fewer hold the derivative exactly. What it means
            with a `level` is said there.
        include: which activations; all if None. One or several of: a name as in `named_modules()`, of the activation or
            of a module around it; a pattern such as ``encoder.*.act``; a class, of the activation or of a module around
            it; a function (name, module) -> bool.
        exclude: which of them not; the same.
        tables: table, or its file, by name or pattern of a module, or else by activation (``gelu``,
            ``softplus(beta=2)``); used as they are, whatever `bits`. ``calibration.tables()`` is one such mapping.
        fused: what a module computes by a formula of several torch calls, such as the `gelu_new` of GPT-2, becomes
            torch's one function of the same mathematics. It is faster by far, and outputs change in their last bits.
        outliers: a ratio such as 0.02: quantised back-propagation by V-Quant (vquant/conversion.py). Linear and
            convolutions save their input in `bits` bits, that part of largest values exactly, and share one copy with
            the ReLU before, whose gradient stays exact.
        level: "L0" to "L5": layers as ActNN compresses them (levels.py), with activations from "L2" on. `bits` is then
            of the layers, 4 at L1 and L2; from L3 on an average, 2 if None, which need not be whole. Not with
            `outliers`.
        fuse_preact: 1 to 8, such as 4: chains of batch normalisation, (leaky) ReLU and Conv or Linear run as one layer
            that keeps so many bits for each element, by BLPA (preact/fuse.py). `bits` is of all other activations;
            `include` and `exclude` choose the convolutions and matrices too. Not with `outliers` or `level`.
        glu: ``parts``, ``inputs`` or ``exact``: gated MLPs as those of Llama become `fewbit.nn.GatedMLP`, of which the
            tensors inside are kept in few bits (glu/plan.py); or a mapping with its keep, copy_bits and input_bits.
            Not with `outliers`, `level` or `fuse_preact`.

    Returns:
        The report; `print` shows it as a table.

    Raises:
        FewbitError: the model is compiled or scripted, a name, class or key of a table matches no activation, or
            another argument is wrong. The model is then as it was.
    """
    _check_model(model)
    if fuse_preact is not None:
        check_bits(fuse_preact)
        if outliers is not None or level is not None:
            raise FewbitError("fuse_preact goes with neither outliers nor level: each wants the layers for itself")
    if glu is not None and (outliers, level, fuse_preact) != (None, None, None):
        raise FewbitError("glu goes with none of outliers, level and fuse_preact: each wants the layers for itself")
    if level is not None:
        from .levels import convert_to_level

        options = {"include": include, "exclude": exclude, "tables": tables, "fused": fused}
        return convert_to_level(model, level, bits, outliers=outliers, **options)
    bits = check_bits(DEFAULT_BITS if bits is None else bits)
    given = read_tables(tables)
    found = activations(model)
    forms = {activation: form_of(activation.original, fused) for activation in found}
    layers = value_aware_candidates(model) if outliers is not None else []
    plan = plan_of(model) if fuse_preact is not None else None
    chains = {chain: chain.as_found(model) for chain in plan.planned} if plan else {}
    gating = glu_pass.read_options(glu) if glu is not None else None
    blocks = glu_pass.candidates(model) if gating else []
    skipped = select_skipped([*found, *layers, *chains.values(), *blocks], include, exclude)
    _check_keys(given, forms)
    whole = bits
    gated = {
        block: skipped[block]
        if block in skipped or gating is None
        else glu_pass.make(block, gating, fused, lambda found, form: _made(found, form, whole, given))
        for block in blocks
    }
    inside = {id(block.current) for block, new in gated.items() if not isinstance(new, str)}
    found = [activation for activation in found if not any(id(module) in inside for module in activation.around)]
    fused_chains = plan.apply(fuse_preact, lambda chain: chains[chain] not in skipped) if plan and fuse_preact else []
    ours = {id(layer.current) for layer in layers} | swallowed(model)
    found = [activation for activation in found if id(activation.current) not in ours]
    made: dict[Found, FewBitActivation] = {}
    for activation in found:
        form = forms[activation]
        if isinstance(form, Form) and activation not in skipped:
            new = _made(activation, form, bits, given)
            if isinstance(new, str):
                forms[activation] = new
            else:
                made[activation] = new
    aware = value_aware(model, bits, outliers, wanted=_wanted_by(layers, skipped)) if outliers is not None else None
    for activation, new in made.items():
        _put(activation, new)
    root = next((new for activation, new in made.items() if not activation.places), aware.model if aware else model)
    for block, new in gated.items():
        if not isinstance(new, str):
            _put(block, new)
            root = root if block.places else new
    replaced = [_replaced(activation, new) for activation, new in made.items()]
    left = [_left(activation, forms[activation], skipped) for activation in found if activation not in made]
    if plan and fuse_preact:
        replaced += [Replaced(c.name, c.was, "fused", fuse_preact, math.nan) for c in fused_chains]
        left += [Left(c.name, c.was, skipped[found]) for c, found in chains.items() if found in skipped]
        left += [Left(*row) for row in plan.left]
    for block, new in gated.items():
        if isinstance(new, str):
            left.append(glu_pass.left(block, new))
        else:
            replaced.append(glu_pass.replaced(block, new))
    if aware:
        replaced += aware.replaced
        left += [*(Left(a.name, _text(a.original), skipped[a]) for a in layers if a in skipped), *aware.left]
    return Report(root, tuple(replaced), tuple(left))


def revert(model: nn.Module) -> nn.Module:
    """Put back, in place, what `convert` replaced: the very modules, with the hooks that their replacements have now.

    Args:
        model: a converted model, a copy or a pickle of one; any other is left as it is.

    Returns:
        `model`, or the original if `model` is itself a converted activation.

    Raises:
        FewbitError: the model is compiled or scripted.
    """
    from .levels import revert_layers

    _check_model(model)
    revert_layers(model)
    unfuse(model)
    model = torch_again(model)
    for find in (glu_pass.candidates, activations):  # what is inside of a block comes to light when that is put back
        for activation in find(model):
            original = original_of(activation.current)
            if original is None:
                continue
            if isinstance(original, nn.Module):
                _hand_over(activation.current, original)
                if not activation.places:
                    return original if find is activations else revert(original)
            for parent, attribute in activation.places:
                _set(parent, attribute, original)
    return model


# ---- replacing -------------------------------------------------------------------------------------------------------


def _made(activation: Found, form: Form, bits: int, tables: Mapping[str, Table]) -> FewBitActivation | str:
    """Return the few-bit form, or why there is none with the numbers that the activation has."""
    key = key_for_module(tables, activation.names) or key_for_activation(tables, form.activation)
    if key is not None:
        new = form.make(table=tables[key])
    else:
        try:
            new = form.make(bits=bits)
        except FewbitError as error:
            return str(error)
    vars(new)[ORIGINAL] = activation.original
    return new


def _put(activation: Found, new: nn.Module) -> None:
    if isinstance(activation.current, nn.Module):
        _hand_over(activation.current, new)
    for parent, attribute in activation.places:
        _set(parent, attribute, new)


def _hand_over(old: Any, new: nn.Module) -> None:
    """Give `new` the mode and the hooks of `old`: the same dictionaries, so that handles go on removing from them."""
    new.training = old.training
    for name in _HOOKS:
        vars(new)[name] = vars(old)[name]


def _set(parent: nn.Module, attribute: str, value: Activation) -> None:
    if attribute in parent._modules and isinstance(value, nn.Module):
        parent._modules[attribute] = value  # in its place: the order of a Sequential is that of its modules
    else:
        # What was no submodule becomes none: a TransformerDecoderLayer takes F.relu when it is copied with one.
        vars(parent)[attribute] = value


# ---- which ones ------------------------------------------------------------------------------------------------------


def select_skipped(found: list[Found], include: Selectors | None, exclude: Selectors) -> dict[Found, str]:
    """Return the activations that the user does not want, with why."""
    excluded = _selected("exclude", exclude, found)
    skipped = {activation: "it is excluded" for activation in found if activation in excluded}
    if include is not None:
        included = _selected("include", include, found)
        skipped |= {activation: "it is not included" for activation in found if activation not in included}
    return skipped


def _wanted_by(layers: list[Found], skipped: Mapping[Found, str]) -> Callable[[str, nn.Module], bool]:
    unwanted = {id(layer.original) for layer in layers if layer in skipped}
    return lambda name, module: id(module) not in unwanted


def _selected(argument: str, selectors: Selectors, found: list[Found]) -> set[Found]:
    listed = [selectors] if isinstance(selectors, str | type) or callable(selectors) else _listed(argument, selectors)
    selected: set[Found] = set()
    for selector in listed:
        matches = {activation for activation in found if _matches(argument, selector, activation)}
        if not matches and isinstance(selector, str | type):
            what = f"is called {selector!r}" if isinstance(selector, str) else f"is or is in a {selector.__name__}"
            raise FewbitError(f"{argument}: no activation {what}; {_inventory(found)}")
        selected |= matches
    return selected


def _listed(argument: str, selectors: Any) -> list[Selector]:
    if isinstance(selectors, Iterable):
        return list(selectors)
    raise FewbitError(f"{argument} takes names, patterns, classes or a function, not {shown(selectors)}")


def _matches(argument: str, selector: Any, activation: Found) -> bool:
    if isinstance(selector, str):
        return any(
            name == selector or name.startswith(f"{selector}.") or fnmatchcase(name, selector)
            for name in activation.names
        )
    if isinstance(selector, type):
        return isinstance(activation.original, selector) or any(isinstance(m, selector) for m in activation.around)
    if callable(selector):
        return any(selector(name, activation.original) for name in activation.names)
    raise FewbitError(f"{argument} takes names, patterns, classes or a function, not {shown(selector)}")


def _inventory(found: list[Found]) -> str:
    if not found:
        return "the model has none that fewbit knows"
    names = [repr(activation.name) for activation in found]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names[:3])}{more}"


def _check_keys(tables: Mapping[str, Table], forms: Mapping[Found, Form | str]) -> None:
    for key in tables:
        by_name = any(key_for_module({key: tables[key]}, activation.names) for activation in forms)
        if not by_name and not any(isinstance(f, Form) and names_activation(key, f.activation) for f in forms.values()):
            raise FewbitError(f"tables: no module or activation is called {key!r}; {_inventory(list(forms))}")


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise FewbitError("the model is TorchScript, which cannot be changed: convert it before torch.jit")
    for name, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule"  # what torch.compile makes; model.compile() sets the other
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            which = f"its module {name!r}" if name else "the model"
            raise FewbitError(f"{which} is compiled: convert and revert a model before torch.compile")


# ---- the report ------------------------------------------------------------------------------------------------------


def _replaced(activation: Found, new: FewBitActivation) -> Replaced:
    return Replaced(activation.name, _text(activation.original), _text(new), new.bits, new.table.error)


def _left(activation: Found, form: Form | str, skipped: Mapping[Found, str]) -> Left:
    if isinstance(form, str):
        return Left(activation.name, _text(activation.original), form)
    still = ""
    if isinstance(activation.current, FewBitActivation):
        still = f"; it stays at {activation.current.bits} bits"
    return Left(activation.name, _text(activation.original), skipped[activation] + still)


def _text(activation: Activation) -> str:
    """Return a module on one line, a function as its name."""
    if isinstance(activation, nn.Module):
        return " ".join(repr(activation).split())
    return getattr(activation, "__name__", None) or " ".join(repr(activation).split())
