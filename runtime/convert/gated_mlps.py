"""`fewbit.convert(model, glu="parts")`: replaces a model's gated MLPs by `GatedMLP`s, in place and with their weights.

A block is recognized by the source of its `forward`, not by its class: any class with the operations of one in
gated_forms.py matches. The projections are the same modules under the same names, so the state_dict and any LoRA layers
in their place stay; the activation stays reachable as an attribute that is not a submodule, because nothing calls it
any more. Experts whose weights are fused stay the modules that they are and change their class (gated_forms.py).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from ..activations.gated_modules import GatedHalves
from ..activations.modules import MODULES, FewBitActivation
from ..backends.reference.glu_derivatives import DERIVATIVES
from ..layers.gated_experts import GatedExperts, form_of_experts
from ..layers.gated_mlp import GatedMLP
from ..quantizers.kinds import QuantizerKind, check_kind
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GLUPlan, Keep, check_copy_bits, check_keep
from ..tensors.levels import register_table
from .find import ORIGINAL, Form, Found, form_of, modules_of, original_of
from .gated_forms import (
    ExpertForm,
    GatedForward,
    UnitForward,
    experts_of,
    form_of_block,
    form_of_unit,
    has_fused_experts,
    is_loop,
    why_not_experts,
)
from .method import Applied, Make, Method, Task
from .recognize import read_function
from .report import Left, Replaced
from .swap import put, put_back, restore, restore_all, swap_class, torch_class

# Names of the children of gated MLPs, and the models that have them.
_PARTS = (
    ({"gate_proj", "up_proj", "down_proj"}, "Llama"),
    ({"gate_up_proj", "down_proj"}, "Phi3"),
    ({"wi_0", "wi_1", "wo"}, "T5"),
    ({"Wi", "Wo", "act"}, "ModernBERT"),
    ({"fc1_g", "fc1_x", "fc2"}, "timm's SwiGLU"),
    ({"fc1", "fc2", "act", "gate"}, "timm's GatedMlp"),
    ({"w1", "w2", "w3"}, "Llama's own code"),
    ({"w12", "w3"}, "DINOv2's own code"),
    ({"weights_in", "weights_out"}, "DINOv2"),
    ({"input_linear", "output_linear"}, "Granite"),
    ({"dense_in", "dense_out", "dense_gate"}, "a gated MLP with dense_gate"),
)


_Replacement = GatedMLP | GatedHalves


@dataclass(frozen=True)
class GatedMLPs(Method):
    """Replacement of gated MLPs, such as Llama's, by `fewbit.nn.GatedMLP` with these arguments.

    Attributes:
        keep: "parts", "inputs" or "exact" (tensors/glu_parts.py).
        copy_bits: of the copies of up and of act(gate), or of the gate; 0 to 8 each, or one number for both.
        input_bits: 1 to 8, of the saved copy of the block's input; None saves it as it is.
        quantizer: of all copies, ``groups``, or ``rotated`` (`quantizers.Rotated`), with a sixth to two fifths
            of the squared error.

    Raises:
        FewbitError: `keep` is not "parts", "inputs" or "exact", `quantizer` is not "groups" or "rotated", or a number
            of bits is out of range.

    Example:
        fewbit.convert(model, fewbit.GatedMLPs("parts"), fewbit.ActNN("L2"))
    """

    wants = "gated MLP that fewbit knows"
    asks = "glu={keep!r}"
    by = "glu"
    keep: Keep = "parts"
    copy_bits: int | tuple[int, int] = DEFAULT_COPY_BITS
    input_bits: int | None = None
    quantizer: QuantizerKind = "groups"

    def __post_init__(self) -> None:
        bits = self.input_bits
        if bits is not None and (isinstance(bits, bool) or bits not in range(1, 9)):
            raise FewbitError(f"input_bits is an integer from 1 to 8 or None, not {shown(bits)}")
        check_keep(self.keep)
        check_copy_bits(self.copy_bits)
        check_kind(self.quantizer)

    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the gated MLPs."""
        return candidates(model)

    def apply(self, task: Task) -> Applied:
        """Replace each by a `GatedMLP`; layers inside that were converted before become torch's again."""
        outcomes = {block: task.skipped.get(block) or made(block, self, task.fused, task.make) for block in task.found}
        new = {block: outcome for block, outcome in outcomes.items() if isinstance(outcome, nn.Module)}
        model = task.model
        for block, module in new.items():
            if isinstance(module, _Replacement):
                put(block, module)
                model = model if block.places else module
                for projection in module.modules():
                    restore(projection)
        left = ((block, why) for block, why in outcomes.items() if isinstance(why, str))
        return Applied(
            model,
            tuple(replaced(block, module) for block, module in new.items()),
            tuple(Left(block.name, type(block.original).__name__, why) for block, why in left),
            frozenset(id(module) for block in new for module in (block.current, new[block])),
            open=frozenset(id(part) for module in new.values() for part in _open(module)),
        )

    @classmethod
    def undo(cls, model: nn.Module) -> nn.Module:
        """Put back the original gated MLPs."""
        restore_all(model, cls.by)
        for block in candidates(model):
            _with_current_projections(block)
            model = put_back(block) or model
        return model

    @staticmethod
    def parts(model: nn.Module, again: bool) -> set[int]:
        """Return the ids of the modules inside gated MLPs and experts, which compute with them as one unit."""
        wholes = [module for module in model.modules() if isinstance(module, GatedMLP | GatedExperts)]
        claimed = {id(part) for whole in wholes for part in whole.modules() if part is not whole}
        return claimed - {id(part) for whole in wholes for part in _open(whole)}


def read_glu(glu: object) -> GatedMLPs:
    """Return the config that `glu` stands for: a `keep`, or a mapping of attributes of `GatedMLPs`.

    Raises:
        FewbitError: `glu` is neither.
    """
    given: dict[str, Any] = dict(glu) if isinstance(glu, Mapping) else {"keep": glu}
    unknown = given.keys() - {"keep", "copy_bits", "input_bits", "quantizer"}
    if unknown:
        name = shown(sorted(map(str, unknown))[0])
        raise FewbitError(f"glu takes keep, copy_bits, input_bits and quantizer, not {name}")
    return GatedMLPs(**given)


def _with_current_projections(block: Found) -> Any:
    """Return the original block, with the projections that its replacement has now: peft puts adapters around them."""
    original: Any = block.original
    if isinstance(block.current, GatedMLP):
        current = block.current._modules
        original._modules.update({name: current[name] for name in original._modules.keys() & current.keys()})
    return original


def candidates(model: nn.Module) -> list[Found]:
    """Return the gated MLPs of `model`, in the order of modules, including those with an unsupported forward."""

    def wanted(module: nn.Module) -> bool:
        original = original_of(module) if isinstance(module, _Replacement) else module
        return isinstance(original, nn.Module) and (
            form_of_unit(original) is not None
            or has_fused_experts(original)
            or form_of_block(original) is not None
            or not_supported(original) is not None
        )

    return modules_of(model, wanted)


def not_supported(module: nn.Module) -> str | None:
    """Return the reason to leave a gated MLP that is written in no known way; None for any other module."""
    if has_fused_experts(module):
        return why_not_experts(module, torch_class(module))
    whose = next((whose for parts, whose in _PARTS if parts <= module._modules.keys()), None)
    # Its linear layers are gate, up and down, or gate and up in one, and down; or of another class, as Granite's.
    sizes = [(m.in_features, m.out_features) for m in module.children() if isinstance(m, nn.Linear)]
    is_gated = not sizes or len(sizes) > 2 or sizes[0][1] == 2 * sizes[-1][0]
    return f"it has the modules of {whose}, but its forward is none that fewbit knows" if whose and is_gated else None


def made(block: Found, options: GatedMLPs, fused: bool, make: Make) -> GatedMLP | GatedHalves | GatedExperts | str:
    """Return the replacement of a block, or experts in their new class, or the reason to leave it.

    Args:
        block: one of `candidates`.
        options: the config.
        fused: as for `convert`.
        make: makes the few-bit form of the block's activation, which determines its table.
    """
    original = _with_current_projections(block)
    if has_fused_experts(original):
        cls = torch_class(original)
        written = None if why_not_experts(original, cls) else experts_of(cls)
    else:
        written = form_of_block(original) or form_of_unit(original)
    if written is None:
        return not_supported(original) or "its forward is none that fewbit knows"
    if isinstance(written, GatedForward) and not written.fits(original):
        return "it gates another dimension than the last"
    activation = _activation(original, written.activation, block.names, fused, make)
    if isinstance(activation, str):
        return activation
    if options.keep != "parts" and activation._function not in DERIVATIVES:
        return f"keep={options.keep!r} does not know the derivative of {activation.activation}"
    plan = GLUPlan(
        activation._function,
        activation._parameters_of_function,
        register_table(activation.table),
        activation.table.bits,
        *check_copy_bits(options.copy_bits),
        options.keep,
        activation.rounding == "stochastic",
        options.quantizer == "rotated",
    )
    if isinstance(written, ExpertForm):  # the experts themselves, in their new class
        cls, gate = torch_class(original), written.gate
        if written.limit is not None:
            gate = gate._replace(limit=float(getattr(original, written.limit)))
        swap_class(original, form_of_experts(cls), "glu")
        original.set_plan(plan, gate, is_loop(cls))
        return original
    return _in_place_of(original, written, plan, options.input_bits)


def _activation(block: nn.Module, which: Any, names: list[str], fused: bool, make: Make) -> FewBitActivation | str:
    """Return the few-bit form of the activation of a block, or the reason there is none.

    Args:
        block: the original.
        which: the attribute that holds it, or a function of torch; None: QuickGELU.
        names: of the block.
        fused: as for `convert`.
        make: makes few-bit forms.
    """
    attribute = which if isinstance(which, str) else getattr(which, "__name__", "QuickGELU")
    names = [f"{name}.{attribute}".removeprefix(".") for name in names]
    if which is None:
        quick: Any = MODULES["QuickGELU"]
        return make(Found(quick(), names), Form("quick_gelu", quick, quick().forward))
    act = getattr(block, which) if isinstance(which, str) else which
    act = original_of(act) or act
    if not isinstance(act, nn.Module) and read_function(act) is None:
        return "fewbit does not know its activation"
    form = form_of(act, fused)
    return make(Found(act, names), form) if isinstance(form, Form) else form


def _in_place_of(
    original: nn.Module, written: GatedForward | UnitForward, plan: GLUPlan, input_bits: int | None
) -> Any:
    """Return the replacement of a block, with its projections if it has some, and its plain attributes."""
    if isinstance(written, UnitForward):
        new: Any = GatedHalves(plan, written.gate_last)
    else:
        new = GatedMLP.__new__(GatedMLP)
        nn.Module.__init__(new)
    vars(new).update({name: value for name, value in vars(original).items() if name not in vars(new)})
    for name, module in original._modules.items():  # nothing calls the activation any more
        is_called = isinstance(written, GatedForward) and name != written.activation
        (new._modules if is_called else vars(new))[name] = module
    if isinstance(written, GatedForward):
        new.layout = written.layout
        new.set_plan(plan, input_bits)
    vars(new)[ORIGINAL] = original
    return new


def replaced(block: Found, new: Any) -> Replaced:
    """Return the row of the report; the error is the table's, NaN for `inputs` and `exact`, which use no table."""
    element = next((p.element_size() * 8 for p in new.parameters()), 32)
    bits = 2 * element if new.plan.keep == "exact" else new.plan.bits
    if isinstance(new, GatedExperts) and new.form.limit is not None:
        bits += 2  # where gate and up were cut
    error = new.table.error if new.plan.keep == "parts" else math.nan
    was = torch_class(new) if isinstance(new, GatedExperts) else type(block.original)
    now = "GatedExperts" if isinstance(new, GatedExperts) else type(new).__name__
    return Replaced(block.name, was.__name__, f"{now}({new.extra_repr()})", bits, error)


def _open(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside a gated MLP that save for themselves: those of adapters such as LoRA's, normalizations.

    What takes the block's product h rebuilds it from the block's parts, unless dropout makes another tensor of it.
    """
    if isinstance(block, GatedHalves):
        return
    if not isinstance(block, GatedMLP):  # experts: all but the activation
        activation = block._modules.get("act_fn")
        yield from (part for part in block.modules() if part not in (block, activation))
        return
    layout = block.layout
    between = [block._modules[name] for name in layout.between]
    saving = [module for module in between if not isinstance(module, nn.Dropout | nn.Identity)]
    for module in (*saving, *(block._modules[name] for name in layout.after)):
        if module is not None:
            yield from module.modules()
    for name in (*layout.first, layout.down):
        projection = block._modules.get(name)
        if projection is None or not (projection._modules or (saving and name == layout.down)):
            continue
        drops = any(isinstance(m, nn.Dropout) and m.p for m in projection.modules())
        if name != layout.down or drops or saving:
            yield from projection.modules()
