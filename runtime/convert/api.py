"""`fewbit.convert(model, bits=3)` replaces a model's activations by few-bit ones; `fewbit.revert(model)` undoes it.

    report = fewbit.convert(model, bits=3, exclude="head.*")
    print(report)                      what was replaced, and what was left and why
    fewbit.revert(model)

Outputs stay the same bit for bit, and so do the state_dict, the names of modules, hooks and the mode. A replacement
holds the module it replaced, so copies and pickles of a converted model can be reverted too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...tables import FewbitError, Table
from ...tables.names import counted
from ..activations.following import Adaptation, FollowingTable, adaptation_of
from ..activations.modules import GELU, FewBitActivation
from ..activations.overrides import TableOrPath, key_for_activation, key_for_module, names_activation, read_tables
from ..activations.table_lookup import DEFAULT_BITS, Rounding
from ..backends.forwards import CALLABLE
from ..layers.activation import Activation as RoundedActivation
from ..layers.offload import SwappingSaver
from ..layers.saver import Saver
from ..saved.checkpoint import undo_checkpoint
from ..tensors.checks import check_integer
from .adapters import follow_adapters, forget_adapters
from .filters import Selectors, inventory, unwanted
from .find import FITTED, ORIGINAL, Activation, Form, Found, activations, form_of
from .measure import measure
from .method import Activations
from .neighbours import Neighbours
from .pipeline import choose_methods, configs_of, nothing_to_do, undo_methods
from .placement import put, put_back
from .report import Left, Replaced, Report, one_line, report_of
from .transaction import all_or_nothing

__all__ = ["Report", "convert", "revert"]


def convert(
    model: nn.Module,
    *methods: Any,
    bits: float | None = None,
    include: Selectors | None = None,
    exclude: Selectors = (),
    tables: Mapping[str, TableOrPath] | None = None,
    fused: bool = False,
    outliers: float | None = None,
    level: str | None = None,
    fuse_preact: int | None = None,
    glu: str | Mapping[str, Any] | None = None,
    attention: int | None = None,
    rounding: Rounding | None = None,
    adapt: int | None = None,
    inputs: Any = None,
) -> Report:
    """Replace a model's activations, in place, by few-bit ones with the same outputs.

    It finds the modules of torch.nn and those that `transformers` and `timm` define, and torch's functions that a
    module holds in an attribute, as `nn.TransformerEncoderLayer` holds F.relu. (For functions that code calls by name
    see `fewbit.few_bit`.) A module used in several places is replaced by one new module in all of them. Activations
    converted before are converted anew, with these bits; few-bit modules of your own are left.

    An activation is left if few bits would only add memory, unless `include` or `tables` names it: another op saves its
    input or output anyway, as the Linear, convolution or normalization after a ReLU saves the ReLU's output. Without
    `inputs` this is decided by the structure and the source of the modules (neighbours.py).

    Args:
        model: any module, on any device. If it is itself an activation, it has no parent to hold the new module: take
            that from `report.model`.
        *methods: configs, which run in this order, each on the modules that the earlier ones left: `GatedMLPs`, `BLPA`,
            and `ActNN` or `VQuant`; `Activations` applies to the remaining activations. The keywords glu, fuse_preact,
            level, outliers and bits are sugar for them. A number alone is `bits`.
        bits: 1 to 8 for each element, 3 if None; fewer are used where fewer represent the derivative exactly. With a
            `level` its meaning is that given there.
        include: the activations to replace; all if None. One or several of: a name as in `named_modules()`, of the
            activation or of a module around it; a pattern such as ``encoder.*.act``; a class, of the activation or of a
            module around it; a function (name, module) -> bool.
        exclude: the activations not to replace; same forms.
        tables: table, or its file, by name or pattern of a module, or else by activation (``gelu``,
            ``softplus(beta=2)``); used as they are, whatever `bits`. ``calibration.tables()`` is one such mapping.
        fused: replace a formula of several torch calls, such as the `gelu_new` of GPT-2, by torch's single function of
            the same mathematics. It is far faster, and outputs change in their last bits.
        outliers: a ratio such as 0.02: quantized back-propagation by V-Quant (vquant.py). Linear and convolutions save
            their input in `bits` bits, this ratio of largest values exactly, and share one copy with the ReLU before,
            whose gradient stays exact.
        level: "L0" to "L5": layers as ActNN compresses them (actnn.py), with activations from "L2" on. `bits` then
            applies to the layers: 4 if None at L1 and L2; from L3 on an average, 2 if None, not necessarily an integer.
        fuse_preact: 1 to 8, such as 4: run chains of batch normalization, (leaky) ReLU and Conv or Linear as one layer
            that saves this many bits for each element, by BLPA (blpa.py). `bits` applies to all other activations;
            `include` and `exclude` also select the convolutions and Linears of the chains.
        glu: ``parts``, ``inputs`` or ``exact``: replace gated MLPs such as Llama's and T5's (gated_forms.py) by
            `fewbit.nn.GatedMLP`, which saves its inner tensors in few bits (tensors/glu_parts.py), and let experts with
            fused weights (expert_forms.py) save theirs so; or a mapping with its keep, copy_bits and input_bits, the
            last not for experts.
        attention: 1 to 8, such as 6: modules that call `scaled_dot_product_attention` save query, key and value in so
            many bits and nothing else, and compute it once more in the backward pass (attention.py).
        rounding: of derivatives of activations: ``deterministic``, the default, with the least error; or
            ``stochastic``, the default of a `level`, without bias. A table that is given has the rounding of its kind.
        adapt: steps, such as 200, after which tables of activations are solved anew each time for the inputs that
            arrive in training, and exchanged (activations/following.py); `fewbit.adaptation_state` is for checkpoints.
            Exact tables, those of callables and `tables` stay.
        inputs: a batch, as a tensor, a tuple of arguments or a mapping of keywords: copies of the model run on it a few
            times, and the report gives the bytes that each row saves. Rows that save nothing are left, unless `include`
            is given.

    `glu`, `fuse_preact`, `attention` and one of `level` and `outliers` combine, in this order: each takes the modules
    that the earlier ones left. So ``glu="parts", level="L2"`` replaces gated MLPs as a whole, and all other layers by
    the level.

    Returns:
        The report; `print` shows it as a table.

    Raises:
        FewbitError: the model is compiled or scripted; a name, class or key of a table matches no activation; or
            another argument is wrong. The model is then unchanged, as it is where Ctrl-C breaks the call off.

    Example:
        report = fewbit.convert(model, bits=3, exclude="transformer.h.0.*")
        print(report)
    """
    _check_model(model)
    if adapt is not None:
        check_integer("adapt", adapt, 2)
    configs = configs_of(methods, bits, level, outliers, fuse_preact, glu, rounding, attention)
    options = Options(tuple(configs), include, exclude, tables, fused, bits is not None or bool(methods), adapt)
    if inputs is None:
        with all_or_nothing(model):
            report = _convert(model, options)
            _follow(report, options)
        return report

    def measured(twin: nn.Module, without: Sequence[str]) -> Report:
        return _convert(twin, options, leave=dict.fromkeys(without, ""), by_structure=False)

    found = measure(model, inputs, measured, revert, leave=include is None)
    with all_or_nothing(model):
        report = _convert(model, options, leave=found.only_adds, by_structure=False)
        _follow(report, options)
    rows = tuple(found.with_saved(row) for row in report.replaced)
    return replace(report, replaced=rows, notes=(*report.notes, found.note))


def _follow(report: Report, options: "Options") -> None:
    """Let the layers that peft puts into the model later be converted, too, as the last call of `convert` asked."""
    forget_adapters(report.model)
    if report.replaced and any(not isinstance(config, Activations) for config in options.configs):
        follow_adapters(report.model, partial(_convert, options=options))


@dataclass(frozen=True)
class Options:
    """The arguments of `convert` that select the modules and their replacements.

    Attributes:
        configs: one for each method, in the order in which they run.
        include, exclude, tables, fused: as for `convert`.
        asked: whether the user requested few-bit activations, so that the report notes if there are none.
        adapt: as for `convert`.
    """

    configs: tuple[Any, ...]
    include: Selectors | None
    exclude: Selectors
    tables: Mapping[str, TableOrPath] | None
    fused: bool
    asked: bool
    adapt: int | None


def _convert(
    model: nn.Module, options: Options, *, leave: Mapping[str, str] = MappingProxyType({}), by_structure: bool = True
) -> Report:
    """Convert `model` in place.

    Args:
        model, options: as for `convert`.
        leave: reasons, by name, for further modules to leave.
        by_structure: leave activations that only add memory according to neighbours.py.
    """
    include, fused = options.include, options.fused
    methods = choose_methods(model, options.configs, fused)
    given = read_tables(options.tables)
    found = activations(model)
    forms = {activation: form_of(activation.original, fused) for activation in found}
    everything = [*found, *methods.candidates]
    skipped = unwanted(everything, include, options.exclude)
    skipped |= {each: leave[each.name] for each in everything if each.name in leave}
    _check_keys(given, forms)

    bits, rounding = methods.activations.bits, methods.activations.rounding

    def make(activation: Found, form: Form) -> FewBitActivation | str:
        new = _made(activation, form, bits or DEFAULT_BITS, given)
        if methods.activations.keep == "output" and type(new) is GELU:
            inverted = GELU(new.approximate, keep="output")
            vars(inverted)[ORIGINAL] = activation.original
            return inverted
        return new

    made: dict[Found, FewBitActivation | RoundedActivation] = {}
    for activation in found if bits else []:
        form = forms[activation]
        if isinstance(form, Form) and activation not in skipped:
            new = make(activation, form)
            if isinstance(new, str):
                forms[activation] = new
            else:
                made[activation] = new

    def make_part(activation: Found, form: Form) -> FewBitActivation | str:
        """Return the form of an activation whose table a gated MLP takes."""
        new = make(activation, form)
        if rounding == "stochastic" and not isinstance(new, str) and _is_biased(activation, new, given):
            at_random = _at_random(activation, form, new, None)
            new = at_random if isinstance(at_random, FewBitActivation) else new  # SquaredReLU has no such table
        return new

    applied = methods.apply(skipped, make_part)  # the model is unchanged up to here
    found = [activation for activation in found if bits and not applied.takes(activation)]
    made = {activation: new for activation, new in made.items() if activation in found}
    if by_structure and include is None:
        known = {activation: forms[activation] for activation in made if not key_for_module(given, activation.names)}
        for activation, why in _only_adding(model, known, unknown_too=not methods.compresses_layers).items():
            del made[activation]
            skipped[activation] = why
    notes = list(applied.notes)
    biased = [a for a, new in made.items() if _is_biased(a, new, given)] if rounding == "stochastic" else []
    for activation in biased:
        new = _at_random(activation, forms[activation], made[activation], applied.derivatives)
        if isinstance(new, str):
            forms[activation] = new
            del made[activation]
        else:
            made[activation] = new
    if any(activation in made for activation in biased):
        notes.append(_ROUNDED)
    root = applied.model
    _stop_adapting(root)
    for activation, new in made.items():
        put(activation, new)
        root = root if activation.places else new
    if options.adapt is not None:
        notes.append(_adapt(root, options.adapt, {a.name: new for a, new in made.items() if _follows(a, new, given)}))
    replaced = [_replaced(activation, new) for activation, new in made.items()]
    left = [_left(activation, forms[activation], skipped) for activation in found if activation not in made]
    if options.asked and not methods.chosen and not replaced:
        notes.append(nothing_to_do(f"bits={bits}", "activation that few bits can stand for", bool(left)))
    return report_of(root, [*replaced, *applied.replaced], [*left, *applied.left], notes)


def _only_adding(model: nn.Module, forms: Mapping[Found, Any], unknown_too: bool) -> dict[Found, str]:
    """Return the activations whose few-bit form would only add memory, with reasons.

    Args:
        model: with its layers already converted.
        forms: few-bit forms by activation.
        unknown_too: whether to include the undecided ones: where layers save what torch's save, most of them only add
            memory.
    """
    neighbours = Neighbours(model, forms)
    outcomes = {activation: neighbours.outcome(activation, form.function) for activation, form in forms.items()}
    wanted = ("adds", "unknown") if unknown_too else ("adds",)
    why = {"adds": "", "unknown": "; unknown without inputs="}
    return {a: outcome.why + why[outcome.kind] for a, outcome in outcomes.items() if outcome.kind in wanted}


def revert(model: nn.Module) -> nn.Module:
    """Put back, in place, the modules that `convert` replaced, with the hooks that their replacements have now.

    A model that trains by a plan, of `fewbit.fit`, or with `fewbit.checkpoint`, is put back too.

    Args:
        model: a converted model, a copy or a pickle of one; any other is left unchanged.

    Returns:
        `model`, or the original if `model` is itself a converted activation.

    Raises:
        FewbitError: the model is compiled or scripted, or a converted layer has been parametrized or sharded since. The
            model is then unchanged.

    Example:
        fewbit.convert(model, bits=3)
        fewbit.revert(model)
    """
    _check_model(model)
    undo_checkpoint(model)
    fitted = vars(model).get(FITTED)
    if fitted is not None:
        return fitted.undo()
    with all_or_nothing(model):
        return undo_conversion(model)


def undo_conversion(model: nn.Module) -> nn.Module:
    """Put back the modules that `convert` replaced, and leave a plan's hooks; see `revert`."""
    _stop_adapting(model)
    forget_adapters(model)
    model = undo_methods(model)
    for activation in activations(model):
        model = put_back(activation) or model
    return model


# ---- replacing -------------------------------------------------------------------------------------------------------


def _made(activation: Found, form: Form, bits: int, tables: Mapping[str, Table]) -> FewBitActivation | str:
    """Return the few-bit module, or the reason there is none for the activation's parameters."""
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


_ROUNDED = "derivatives of activations that no few levels represent exactly are rounded at random, without bias"


def _follows(activation: Found, new: Any, tables: Mapping[str, Table]) -> bool:
    """Return whether the table of `new` can follow the training: inexact, of a named function, and not the user's."""
    return _is_biased(activation, new, tables) and not new.activation.startswith(CALLABLE)


def _adapt(model: nn.Module, every: int, activations: Mapping[str, Any]) -> str:
    """Let the tables of `activations` follow the training; return the note for the report."""
    for new in activations.values():
        new.following = FollowingTable(new.activation, new.table)
    if activations:
        Adaptation(model, {name: new.following for name, new in activations.items()}, every)
        return f"adapt={every}: {counted(len(activations), 'table')} will follow the training"
    return nothing_to_do(f"adapt={every}", "activation whose table could follow the training", False)


def _stop_adapting(model: nn.Module) -> None:
    """Let the tables of `model` stay what they are, also where peft has wrapped it since."""
    for inner in model.modules():
        adaptation = adaptation_of(inner)
        if adaptation is not None:
            adaptation.remove()
            for module in inner.modules():
                if isinstance(module, FewBitActivation):
                    module.stop_following()


def _is_biased(activation: Found, new: Any, tables: Mapping[str, Table]) -> bool:
    """Return whether `new` has an inexact table that the user did not give."""
    if not isinstance(new, FewBitActivation) or new.table.error == 0 or _keeps_output(new):
        return False
    return not (key_for_module(tables, activation.names) or key_for_activation(tables, new.activation))


def _keeps_output(new: object) -> bool:
    """Return whether an activation saves its output and no codes."""
    return isinstance(new, GELU) and new.keep == "output"


def _at_random(
    activation: Found, form: Any, biased: Any, saver: Saver | None
) -> FewBitActivation | RoundedActivation | str:
    """Return the form of an activation whose derivative is rounded at random, or the reason there is none.

    Args:
        activation, form: the activation; its `Form`.
        biased: its deterministic few-bit module, whose bits it takes.
        saver: compresses the derivative where there is no table; if it swaps, codes go to host memory too.
    """
    try:
        new: Any = form.make(bits=biased.bits, rounding="stochastic")
        new.swapper = saver.swapper if isinstance(saver, SwappingSaver) else None
    except FewbitError as error:
        if saver is None:
            return str(error)
        new = RoundedActivation(form.function, saver=saver, inplace=biased.inplace)
    vars(new)[ORIGINAL] = activation.original
    return new


# ---- checks of arguments ---------------------------------------------------------------------------------------------


def _check_keys(tables: Mapping[str, Table], forms: Mapping[Found, Form | str]) -> None:
    for key in tables:
        by_name = any(key_for_module({key: tables[key]}, activation.names) for activation in forms)
        if not by_name and not any(isinstance(f, Form) and names_activation(key, f.activation) for f in forms.values()):
            raise FewbitError(f"tables: no module or activation is called {key!r}; {inventory(list(forms))}")


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise FewbitError("the model is TorchScript, which cannot be changed: convert it before torch.jit")
    for name, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule"  # by torch.compile; model.compile() sets the other
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            which = f"its module {name!r}" if name else "the model"
            raise FewbitError(f"{which} is compiled: convert and revert a model before torch.compile")


# ---- the report ------------------------------------------------------------------------------------------------------


def _replaced(activation: Found, new: FewBitActivation | RoundedActivation) -> Replaced:
    was, bits = _text(activation.original), _bits_of(new)
    if isinstance(new, RoundedActivation):
        return Replaced(activation.name, was, f"layers.{_text(new)}", bits, math.nan)
    error = 0.0 if _keeps_output(new) else new.table.error
    return Replaced(activation.name, was, _text(new), bits, error)


def _bits_of(activation: FewBitActivation | RoundedActivation) -> int:
    """Return the bits saved for each element."""
    if isinstance(activation, FewBitActivation):
        return activation.bits
    saver: Any = getattr(activation.saver, "saver", activation.saver)  # swapped or not
    return saver.quantizer.bits


def _left(activation: Found, form: Form | str, skipped: Mapping[Found, str]) -> Left:
    if isinstance(form, str):
        return Left(activation.name, _text(activation.original), form)
    still = ""
    if isinstance(activation.current, FewBitActivation | RoundedActivation):
        still = f"; it stays at {_bits_of(activation.current)} bits"
    return Left(activation.name, _text(activation.original), skipped[activation] + still)


def _text(activation: Activation) -> str:
    """Return the repr of a module on one line, or the name of a function."""
    name = None if isinstance(activation, nn.Module) else getattr(activation, "__name__", None)
    return name or one_line(activation)
