"""`fewbit.convert(model, glu="parts")`: replaces a model's gated MLPs by `GatedMLP`s, in place and with their weights.

    Llama, Mistral, Qwen2/3, Gemma, … (127 files of transformers)   down_proj(act_fn(gate_proj(x)) * up_proj(x))
    Phi3, GLM, …                                                    gate and up by one projection, gate_up_proj

A block is recognized by the source of its `forward`, not by its class: any class with these operations on these names
matches. The projections are the same modules, so the state_dict and any LoRA layers in their place stay; act_fn stays
reachable as an attribute that is not a submodule, because nothing calls it any more.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from ..activations.modules import FewBitActivation
from ..backends.reference.glu_derivatives import DERIVATIVES
from ..layers.gated_mlp import GatedMLP
from ..layers.source_match import is_written_as
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GLUPlan, Keep, check_copy_bits, check_keep
from ..tensors.table_registry import register_table
from .find import ORIGINAL, Form, Found, form_of, modules_of, original_of
from .function_attributes import read_function
from .method import Applied, Handler, Make
from .placement import put, put_back
from .report import Left, Replaced
from .swap import restore

# The attribute that holds the activation, and a forward.
_FORWARDS = (
    (
        "act_fn",
        """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
""",
    ),
    (
        "act_fn",
        """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
    ),
    (
        "activation_fn",
        """
def forward(self, x):
    up_states = self.gate_up_proj(x)
    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * self.activation_fn(gate)
    return self.down_proj(up_states)
""",
    ),
)
_PARTS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
# Names of the children of other gated MLPs, and the models that have them.
_OTHERS = (
    ({"wi_0", "wi_1", "wo"}, "T5"),
    ({"Wi", "Wo", "act"}, "ModernBERT"),
    ({"fc1_g", "fc1_x", "fc2"}, "EVA02"),
    ({"fc1", "fc2", "act", "gate"}, "timm's GatedMlp"),
    ({"w1", "w2", "w3"}, "Llama's own code (w1, w2, w3)"),
    ({"w12", "w3"}, "xFormers (w12, w3)"),
    ({"weights_in", "weights_out"}, "DINOv2"),
    ({"input_linear", "output_linear"}, "Granite"),
    ({"dense_in", "dense_out", "dense_gate"}, "a gated MLP with dense_gate"),
)
_EXPERTS = ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "v1"})


@dataclass(frozen=True)
class GatedMLPs:
    """Replacement of gated MLPs, such as Llama's, by `fewbit.nn.GatedMLP` with these arguments.

    Attributes:
        keep: "parts", "inputs" or "exact" (tensors/glu_parts.py).
        copy_bits: of the copies of up and of act(gate), or of the gate; 0 to 8 each, or one number for both.
        input_bits: 1 to 8, of the saved copy of the block's input; None saves it as it is.

    Raises:
        FewbitError: `keep` is not "parts", "inputs" or "exact", or a number of bits is out of range.

    Example:
        fewbit.convert(model, fewbit.GatedMLPs("parts"), fewbit.ActNN("L2"))
    """

    keep: Keep = "parts"
    copy_bits: int | tuple[int, int] = DEFAULT_COPY_BITS
    input_bits: int | None = None

    def __post_init__(self) -> None:
        bits = self.input_bits
        if bits is not None and (isinstance(bits, bool) or bits not in range(1, 9)):
            raise FewbitError(f"input_bits is an integer from 1 to 8 or None, not {shown(bits)}")
        check_keep(self.keep)
        check_copy_bits(self.copy_bits)


def read_glu(glu: object) -> GatedMLPs:
    """Return the config that `glu` stands for: a `keep`, or a mapping with keep, copy_bits and input_bits.

    Raises:
        FewbitError: `glu` is neither.
    """
    given: dict[str, Any] = dict(glu) if isinstance(glu, Mapping) else {"keep": glu}
    unknown = given.keys() - {"keep", "copy_bits", "input_bits"}
    if unknown:
        raise FewbitError(f"glu takes keep, copy_bits and input_bits, not {shown(sorted(map(str, unknown))[0])}")
    return GatedMLPs(**given)


@dataclass(frozen=True)
class ByGates:
    """`GatedMLPs` applied to a model.

    Attributes:
        model: the model to convert.
        options: the config.
        fused: as for `convert`.
    """

    model: nn.Module
    options: GatedMLPs
    fused: bool
    compresses_layers = False
    activations = None

    @classmethod
    def of(cls, config: GatedMLPs, model: nn.Module, fused: bool) -> "ByGates":
        """Return the method for `config`."""
        return cls(model, config, fused)

    @property
    def asked(self) -> str:
        """The config as the report calls it."""
        return f"glu={self.options.keep!r}"

    @property
    def wants(self) -> str:
        """The kinds of modules that it converts, for the report."""
        return "gated MLP that fewbit knows"

    def candidates(self) -> list[Found]:
        """Return the gated MLPs."""
        return candidates(self.model)

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Replace each by a `GatedMLP`; layers inside that were converted before become torch's again."""
        outcomes = {block: skipped.get(block) or made(block, self.options, self.fused, make) for block in found}
        new = {block: outcome for block, outcome in outcomes.items() if isinstance(outcome, GatedMLP)}
        model = self.model
        for block, module in new.items():
            put(block, module)
            model = model if block.places else module
            for projection in module.modules():
                restore(projection)
        return Applied(
            model,
            tuple(replaced(block, module) for block, module in new.items()),
            tuple(left(block, why) for block, why in outcomes.items() if isinstance(why, str)),
            frozenset(id(module) for block in new for module in (block.current, new[block])),
            open=frozenset(id(part) for module in new.values() for part in _open(module)),
        )


def ungate(model: nn.Module) -> nn.Module:
    """Put back the original gated MLPs; return `model`, or the original if `model` is itself a replacement."""
    for block in candidates(model):
        _with_current_projections(block)
        model = put_back(block) or model
    return model


def _with_current_projections(block: Found) -> Any:
    """Return the original block, with the projections that its replacement has now: peft puts adapters around them."""
    original: Any = block.original
    if isinstance(block.current, GatedMLP):
        current = block.current._modules
        original._modules.update({name: current[name] for name in original._modules.keys() & current.keys()})
    return original


def candidates(model: nn.Module) -> list[Found]:
    """Return the gated MLPs of `model`, in the order of modules, including those with an unsupported forward."""
    return modules_of(model, _has_projections)


def _has_projections(module: nn.Module) -> bool:
    original = original_of(module) if isinstance(module, GatedMLP) else module
    return isinstance(original, nn.Module) and (
        any(parts <= original._modules.keys() for parts in _PARTS) or not_supported(original) is not None
    )


def not_supported(module: nn.Module) -> str | None:
    """Return the reason to leave a gated MLP whose kind is not in `_FORWARDS`; None for any other module."""
    weights = {name for name, weight in module._parameters.items() if weight is not None and weight.dim() == 3}
    if any(parts <= weights for parts in _EXPERTS):
        return "the weights of its experts are fused, and fused expert weights are not supported yet"
    for parts, whose in _OTHERS:
        if parts <= module._modules.keys() and _is_gated(module):
            return f"gated MLPs as those of {whose} are not supported yet"
    return None


def _is_gated(module: nn.Module) -> bool:
    """Return whether the linear layers of `module` are gate, up and down, or gate and up in one, and down."""
    sizes = [(m.in_features, m.out_features) for m in module.children() if isinstance(m, nn.Linear)]
    if not sizes:  # of another class, as Granite's
        return True
    (_, first), (last, _) = sizes[0], sizes[-1]
    return len(sizes) > 2 or first == 2 * last


def made(block: Found, options: GatedMLPs, fused: bool, make: Make) -> GatedMLP | str:
    """Return the replacement of a block, or the reason there is none.

    Args:
        block: one of `candidates`.
        options: the config.
        fused: as for `convert`.
        make: makes the few-bit form of the block's activation, which determines its table.
    """
    original = _with_current_projections(block)
    if why := not_supported(original):
        return why
    attribute = _activation_attribute(type(original))
    if attribute is None or "forward" in vars(original):
        return "its forward is none that fewbit knows"
    act = getattr(original, attribute)
    act = original_of(act) or act
    if not isinstance(act, nn.Module) and read_function(act) is None:
        return "fewbit does not know its activation"
    form = form_of(act, fused)
    names = [f"{name}.{attribute}".removeprefix(".") for name in block.names]
    activation = make(Found(act, names), form) if isinstance(form, Form) else form
    if isinstance(activation, str):
        return activation
    if options.keep != "parts" and activation._function not in DERIVATIVES:
        return f"keep={options.keep!r} does not know the derivative of {activation.activation}"
    return _adopted(original, attribute, activation, options)


def _adopted(original: nn.Module, attribute: str, act: FewBitActivation, options: GatedMLPs) -> GatedMLP:
    """Return a block with the projections and the plain attributes of `original`."""
    new = GatedMLP.__new__(GatedMLP)
    nn.Module.__init__(new)
    own = {name: value for name, value in vars(original).items() if name not in vars(new)}
    vars(new).update(own)
    for name, module in original._modules.items():
        if name == attribute:
            vars(new)[name] = module
        else:
            new._modules[name] = module
    plan = GLUPlan(
        act._function,
        act._parameters_of_function,
        register_table(act.table),
        act.table.bits,
        *check_copy_bits(options.copy_bits),
        options.keep,
        act.rounding == "stochastic",
    )
    new.set_plan(plan, options.input_bits)
    vars(new)[ORIGINAL] = original
    return new


def replaced(block: Found, new: GatedMLP) -> Replaced:
    """Return the row of the report; the error is the table's, NaN for `inputs` and `exact`, which use no table."""
    element = next(new.parameters()).element_size() * 8
    bits = 2 * element if new.plan.keep == "exact" else new.plan.bits
    error = new.table.error if new.plan.keep == "parts" else math.nan
    return Replaced(block.name, type(block.original).__name__, f"GatedMLP({new.extra_repr()})", bits, error)


def left(block: Found, why: str) -> Left:
    """Return the row of the report."""
    return Left(block.name, type(block.original).__name__, why)


def _activation_attribute(cls: type[nn.Module]) -> str | None:
    """Return the attribute that holds the activation of such a block; None if its forward is not in `_FORWARDS`."""
    return next((name for name, known in _FORWARDS if is_written_as(cls, known)), None)


def parts(model: nn.Module, again: bool) -> set[int]:
    """Return the ids of the modules inside gated MLPs, which compute with them as one unit."""
    wholes = [module for module in model.modules() if isinstance(module, GatedMLP)]
    claimed = {id(part) for whole in wholes for part in whole.modules() if part is not whole}
    return claimed - {id(part) for whole in wholes for part in _open(whole)}


def _open(block: GatedMLP) -> Iterator[nn.Module]:
    """Yield the modules inside a gated MLP that save for themselves: those of adapters such as LoRA's.

    What takes the block's product h rebuilds it from the block's parts, unless dropout makes another tensor of it.
    """
    for name in ("gate_up_proj", "gate_proj", "up_proj", "down_proj"):
        projection = block._modules.get(name)
        if projection is None or not projection._modules:
            continue
        drops = any(isinstance(m, nn.Dropout) and m.p for m in projection.modules())
        if name != "down_proj" or drops:
            yield from projection.modules()


HANDLER = Handler(GatedMLPs, ByGates.of, ungate, parts)
