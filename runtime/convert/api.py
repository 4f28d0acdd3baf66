"""`fewbit.convert(model, bits=3)` replaces a model's activations by few-bit ones; `fewbit.revert(model)` undoes it.

    report = fewbit.convert(model, bits=3, exclude="head.*")
    print(report)                      what was replaced, and what was left and why
    fewbit.revert(model)

Outputs stay the same bit for bit, and so do the state_dict, the names of modules, hooks and the mode. A replacement
holds the module it replaced, so copies and pickles of a converted model can be reverted too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...tables import FewbitError
from ...tables.names import counted
from ..activations.arguments import Rounding, TableOrPath
from ..activations.following import Adaptation, FollowingTable, adaptation_of
from ..activations.modules import FewBitActivation
from ..saved.checkpoint import undo_checkpoint
from .adapters import follow_adapters, forget_adapters
from .few_bit_forms import FewBitForms
from .find import FITTED, Selectors, activations, unwanted
from .method import Method
from .neighbours import Neighbours
from .options import Options, choose_methods, nothing_to_do, undo_methods
from .report import Report, exact_calls, exact_storages, measure, report_of
from .swap import all_or_nothing, put, put_back

__all__ = ["Report", "convert", "revert"]

_ROUNDED = "derivatives of activations that no few levels represent exactly are rounded at random, without bias"


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
    loss: str | None = None,
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
        *methods: configs, which run in this order, each on the modules that the earlier ones left: `ChunkedLoss`,
            `GatedMLPs`, `BLPA`, and `ActNN` or `VQuant`; `Activations` applies to the remaining activations. The
            keywords loss, glu, fuse_preact, level, outliers and bits are sugar for them. A number alone is `bits`.
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
            fused weights (gated_forms.py) save theirs so; or a mapping with its keep, copy_bits, quantizer and
            input_bits, the last not for experts.
        attention: 1 to 8, such as 6: modules that call `scaled_dot_product_attention` save query, key and value in so
            many bits and nothing else, and compute it once more in the backward pass (attention.py).
        loss: ``chunked``: the head of a language model and the cross-entropy of its logits are computed over chunks of
            tokens, exactly, and no logits are saved (chunked_loss.py). Alone, it leaves all activations as they are.
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
    options = Options(
        methods=methods,
        bits=bits,
        include=include,
        exclude=exclude,
        tables=tables,
        fused=fused,
        outliers=outliers,
        level=level,
        fuse_preact=fuse_preact,
        glu=glu,
        attention=attention,
        loss=loss,
        rounding=rounding,
        adapt=adapt,
    )
    if inputs is None:
        with all_or_nothing(model):
            report = _convert(model, options)
            _follow(report, options)
        return replace(report, exact=tuple(exact_calls(report.model)))

    def measured(twin: nn.Module, without: Sequence[str]) -> Report:
        return _convert(twin, options, leave=dict.fromkeys(without, ""), by_structure=False)

    found = measure(model, inputs, measured, revert, leave=include is None)
    with all_or_nothing(model):
        report = _convert(model, options, leave=found.only_adds, by_structure=False)
        _follow(report, options)
    rows = tuple(replace(row, saved=found.saved.get(row.name)) for row in report.replaced)
    exact = exact_storages(found.profile, [row.name for row in (*rows, *report.left)])
    return replace(report, replaced=rows, notes=(*report.notes, found.note), exact=tuple(exact))


def convert_beside(model: nn.Module, *methods: Any, include: Sequence[str] | None = None) -> Report:
    """Convert as `convert` does, beside what the user has converted: tables that follow the training go on, and layers
    that peft puts into the model later are none of this."""
    return _convert(model, Options(methods=methods, include=include), adapting=True)


def _follow(report: Report, options: Options) -> None:
    """Let the layers that peft puts into the model later be converted, too, as the last call of `convert` asked."""
    forget_adapters(report.model)
    if report.replaced and any(isinstance(config, Method) for config in options.configs):
        follow_adapters(report.model, partial(_convert, options=options))


def _convert(
    model: nn.Module,
    options: Options,
    *,
    leave: Mapping[str, str] = MappingProxyType({}),
    by_structure: bool = True,
    adapting: bool = False,
) -> Report:
    """Convert `model` in place: find, choose, drop what is useless, swap, report.

    Args:
        model, options: as for `convert`.
        leave: reasons, by name, for further modules to leave.
        by_structure: leave activations that only add memory according to neighbours.py.
        adapting: let tables that follow the training go on following it.
    """
    # Find what may be replaced. The model does not change before `methods.apply`.
    methods = choose_methods(model, options.configs, options.fused)
    found = activations(model)
    few = FewBitForms.of(found, methods.activations, options)
    everything = [*found, *methods.candidates]
    skipped = unwanted(everything, options.include, options.exclude)
    skipped |= {each: leave[each.name] for each in everything if each.name in leave}
    # Choose: methods take what they can, activations are what is left.
    few.choose(skipped)
    applied = methods.apply(skipped, few.make_part)
    found = [each for each in found if methods.activations.bits and not applied.takes(each)]
    few.keep_only(found)
    # Drop what would only add memory.
    if by_structure and options.include is None:
        forms = few.by_activation()
        neighbours = Neighbours(model, forms)
        outcomes = {activation: neighbours.outcome(activation, form.function) for activation, form in forms.items()}
        # The undecided too where layers save what torch's save: most of them only add memory.
        why = {"adds": ""} if methods.compresses_layers else {"adds": "", "unknown": "; unknown without inputs="}
        useless = {a: outcome.why + why[outcome.kind] for a, outcome in outcomes.items() if outcome.kind in why}
        skipped |= useless
        few.keep_only([each for each in found if each not in useless])
    # Swap.
    notes = list(applied.notes)
    if few.round_at_random(applied.derivatives):
        notes.append(_ROUNDED)
    root = applied.model
    if not adapting:
        _stop_adapting(root)
    for activation, new in few.new.items():
        put(activation, new)
        root = root if activation.places else new
    if options.adapt is not None:
        notes.append(_adapt(root, options.adapt, few.following()))
    # Report.
    left = few.left(found, skipped)
    if (options.bits is not None or options.methods) and not methods.chosen and not few.new:
        wants = "activation that few bits can stand for"
        notes.append(nothing_to_do(f"bits={methods.activations.bits}", wants, bool(left)))
    return report_of(root, [*few.replaced(), *applied.replaced], [*left, *applied.left], notes)


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
        fitted.undo()
    with all_or_nothing(model):
        _stop_adapting(model)
        forget_adapters(model)
        model = undo_methods(model)
        for activation in activations(model):
            model = put_back(activation) or model
        return model


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
