"""Every activation in one row; its function, module, catcher, recognition and CUDA formula follow from it.

To add an activation:

1. give the compiler its derivative, a function in `fewbit_gen/activations/smooth.py` or `piecewise.py`, and list it in
   `FAMILIES` at the end there;
2. add its row to `ROWS`;
3. write its function and its module: ``python tests/support/activation_code.py`` (a test holds them to the rows).

The rows know no torch, so that `fewbit emit` and `import fewbit` work without it: torch's functions stand here by their
dotted names, and `torch_functions.py` finds them. What torch does not have as one function is written in methods of
Tensor, here; an adaptation that needs torch itself is a function in `torch_functions.py`, named without dots.

The rows live on the floor of the backends because the lowest of their readers, the code generator, does.

A CUDA formula is that of torch's own kernel, read from aten/src/ATen/native/cuda (Activation*Kernel.cu, UnaryOps,
TensorCompare.cu): the same operations in the same order on the same type, so that the compiler contracts them alike.
`A` is the type of arithmetic, float for the types of 16 bits; `rounded` stands where torch stores a result, or a
parameter, in the tensor's own type. To a float16 or bfloat16 result the compiler's choices cannot matter but at a tie;
in float32 and float64 a formula that is contracted differently, or a newer math library than the one that torch was
built with, may differ in the last place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Parameter:
    """A number that an activation takes.

    Attributes:
        name: as the compiler, torch's function and torch's module call it.
        default: torch's; None where the caller must give it.
        doc: docstring of the module's property.
    """

    name: str
    default: float | None
    doc: str


@dataclass(frozen=True)
class ActivationRow:
    """One activation.

    Attributes:
        name: what the compiler calls it, and torch.nn.functional and fewbit.functional where `module` is not None.
        module: its class in torch.nn and in fewbit; None for a variant that another row's function and module choose.
        forward: (x, *parameters) -> y, torch's own function.
        cuda: statements that compute f(x) and return it; ``{0}`` is the first parameter.
        out: (x, *parameters, out=y), writes into a given tensor what `forward` returns; None where torch has none.
        overwrite: (x, *parameters), overwrites x; None where torch's function has no argument `inplace`.
        parameters: in torch's order.
        infinite: whether the parameters may be infinite, because they bound pieces of f.
        compares_in: where f' jumps at a parameter, the dtype to which torch rounds the parameter before it compares it
            with x: that of x itself, or that in which torch computes for x.
        exact: whether one bit holds f' exactly.
        caught: functions of torch that `few_bit` catches beside torch.nn.functional's of this name.
        caught_in_place: those that overwrite x.
        torch_repr: which arguments torch's module shows: ``name=value`` and inplace, the values alone, or nothing.
        synonym: another name of it, for docstrings.
        formula: what it computes, for docstrings, where torch does not have it; None where torch has it.
    """

    name: str
    module: str | None
    forward: "str | Callable[..., Tensor]"
    cuda: str
    out: str | None = None
    overwrite: str | None = None
    parameters: tuple[Parameter, ...] = ()
    infinite: bool = False
    compares_in: Literal["own", "arithmetic"] | None = None
    exact: bool = False
    caught: tuple[str, ...] = ()
    caught_in_place: tuple[str, ...] = ()
    torch_repr: Literal["named", "values", "nothing"] = "named"
    synonym: str | None = None
    formula: str | None = None

    @property
    def in_torch(self) -> bool:
        """Whether torch.nn and torch.nn.functional have it."""
        return self.formula is None and self.module is not None

    @property
    def defaults(self) -> tuple[tuple[str, float | None], ...]:
        """Names of the parameters, with torch's defaults; None where there is no default."""
        return tuple((parameter.name, parameter.default) for parameter in self.parameters)


def _quick_gelu(x: "Tensor") -> "Tensor":
    return x * (1.702 * x).sigmoid()  # operation by operation what `transformers` and CLIP have


def _squared_relu(x: "Tensor") -> "Tensor":
    return x.relu().square()


_ALPHA = (Parameter("alpha", 1.0, "−f far left."),)
_LAMBD = (Parameter("lambd", 0.5, "f(x) = 0 where |x| ≤ lambd."),)

ROWS = (
    ActivationRow(
        name="relu",
        module="ReLU",
        forward="torch.relu",
        out="relu_out",
        overwrite="torch.relu_",
        exact=True,
        caught=("torch.relu", "torch.Tensor.relu"),
        caught_in_place=("torch.nn.functional.relu_", "torch.relu_", "torch.Tensor.relu_"),
        cuda="return x < 0 ? A(0) : x;",
    ),
    ActivationRow(
        name="relu6",
        module="ReLU6",
        forward="torch.nn.functional.relu6",
        out="relu6_out",
        overwrite="torch.ops.aten.relu6_.default",
        exact=True,
        cuda="return x < 0 ? A(0) : x > 6 ? A(6) : x;",
    ),
    ActivationRow(
        name="leaky_relu",
        module="LeakyReLU",
        forward="torch.nn.functional.leaky_relu",
        out="torch.ops.aten.leaky_relu.out",
        overwrite="torch.ops.aten.leaky_relu_.default",
        parameters=(Parameter("negative_slope", 0.01, "f' where x ≤ 0."),),
        exact=True,
        caught_in_place=("torch.nn.functional.leaky_relu_",),
        cuda="return x > 0 ? x : x * A({0});",
    ),
    ActivationRow(
        name="elu",
        module="ELU",
        forward="torch.nn.functional.elu",
        out="torch.ops.aten.elu.out",
        overwrite="torch.ops.aten.elu_.default",
        parameters=_ALPHA,
        caught_in_place=("torch.nn.functional.elu_",),
        cuda="return x > 0 ? x : expm1(x) * A({0});",
    ),
    ActivationRow(
        name="celu",
        module="CELU",
        forward="torch.celu",
        out="celu_out",
        overwrite="torch.celu_",
        parameters=_ALPHA,
        caught=("torch.celu",),
        caught_in_place=("torch.nn.functional.celu_", "torch.celu_"),
        cuda="return x > 0 ? x : expm1(x * A(1.0 / {0})) * A({0});",
    ),
    ActivationRow(
        name="selu",
        module="SELU",
        forward="torch.selu",
        out="selu_out",
        overwrite="torch.selu_",
        caught=("torch.selu",),
        caught_in_place=("torch.nn.functional.selu_", "torch.selu_"),
        cuda="""\
const A alpha = A(1.6732632423543772848170429916717), scale = A(1.0507009873554804934193349852946);
return x > 0 ? x * scale : expm1(x) * (alpha * scale);""",
    ),
    ActivationRow(
        name="gelu",
        module="GELU",
        forward="torch.nn.functional.gelu",
        out="torch.ops.aten.gelu.out",
        cuda="return x * A(0.5) * (A(1) + erf(x * A(0.70710678118654752440)));",
    ),
    ActivationRow(
        name="gelu_tanh",
        module=None,  # gelu(approximate="tanh")
        forward="gelu_tanh",
        out="gelu_tanh_out",
        cuda="""\
const A inner = A(0.79788456080286535588) * (x + A(0.044715) * (x * x * x));
return A(0.5) * x * (A(1) + tanh(inner));""",
    ),
    ActivationRow(
        name="silu",
        module="SiLU",
        forward="torch.nn.functional.silu",
        out="torch.ops.aten.silu.out",
        overwrite="torch.ops.aten.silu_.default",
        synonym="Swish",
        cuda="return x / (A(1) + exp(-x));",
    ),
    ActivationRow(
        name="mish",
        module="Mish",
        forward="torch.nn.functional.mish",
        out="torch.ops.aten.mish.out",
        overwrite="torch.ops.aten.mish_.default",
        cuda="return x * tanh(log1p(exp(x)));",
    ),
    ActivationRow(
        name="softplus",
        module="Softplus",
        forward="torch.nn.functional.softplus",
        out="torch.ops.aten.softplus.out",
        parameters=(
            Parameter("beta", 1.0, "How sharply it bends."),
            Parameter("threshold", 20.0, "Where beta·x is above it, f(x) = x."),
        ),
        cuda="return x * A({0}) > A({1}) ? x : log1p(exp(x * A({0}))) / A({0});",
    ),
    ActivationRow(
        name="softsign",
        module="Softsign",
        forward="torch.nn.functional.softsign",
        cuda="return x / rounded<T>(fabs(x) + A(1));",
    ),
    # torch.sigmoid_ and torch.tanh_ are left to torch: they keep the output alone, which has taken the input's place.
    ActivationRow(
        name="sigmoid",
        module="Sigmoid",
        forward="torch.sigmoid",
        out="torch.ops.aten.sigmoid.out",
        caught=("torch.sigmoid", "torch.Tensor.sigmoid", "torch.special.expit"),
        cuda="return A(1) / (A(1) + exp(-x));",
    ),
    ActivationRow(
        name="logsigmoid",
        module="LogSigmoid",
        forward="logsigmoid",
        cuda="return (x < 0 ? x : A(0)) - log1p(exp(-fabs(x)));",
    ),
    ActivationRow(
        name="tanh",
        module="Tanh",
        forward="torch.tanh",
        out="torch.ops.aten.tanh.out",
        caught=("torch.tanh", "torch.Tensor.tanh"),
        cuda="return tanh(x);",
    ),
    ActivationRow(
        name="tanhshrink",
        module="Tanhshrink",
        forward="torch.nn.functional.tanhshrink",
        cuda="return x - rounded<T>(tanh(x));",
    ),
    ActivationRow(
        name="hardtanh",
        module="Hardtanh",
        forward="torch.nn.functional.hardtanh",
        out="torch.ops.aten.hardtanh.out",
        overwrite="torch.ops.aten.hardtanh_.default",
        parameters=(
            Parameter("min_val", -1.0, "The least value of f."),
            Parameter("max_val", 1.0, "The greatest value of f."),
        ),
        infinite=True,
        compares_in="arithmetic",
        exact=True,
        caught_in_place=("torch.nn.functional.hardtanh_",),
        cuda="""\
const A low = x < A({0}) ? A({0}) : x;
return A({1}) < low ? A({1}) : low;""",
    ),
    ActivationRow(
        name="hardsigmoid",
        module="Hardsigmoid",
        forward="torch.nn.functional.hardsigmoid",
        out="torch.ops.aten.hardsigmoid.out",
        overwrite="torch.ops.aten.hardsigmoid_.default",
        exact=True,
        torch_repr="nothing",
        cuda="""\
const A low = x + A(3) < 0 ? A(0) : x + A(3);
return (low > 6 ? A(6) : low) * A(1.0f / 6.0f);""",
    ),
    ActivationRow(
        name="hardswish",
        module="Hardswish",
        forward="torch.nn.functional.hardswish",
        out="torch.ops.aten.hardswish.out",
        overwrite="torch.ops.aten.hardswish_.default",
        torch_repr="nothing",
        cuda="""\
const A low = x + A(3) < 0 ? A(0) : x + A(3);
return x * (low > 6 ? A(6) : low) * A(1.0f / 6.0f);""",
    ),
    ActivationRow(
        name="hardshrink",
        module="Hardshrink",
        forward="torch.nn.functional.hardshrink",
        out="torch.ops.aten.hardshrink.out",
        parameters=_LAMBD,
        infinite=True,
        compares_in="own",
        exact=True,
        caught=("torch.hardshrink", "torch.Tensor.hardshrink"),
        torch_repr="values",
        cuda="""\
const A lambd = rounded<T>(A({0}));
return x >= -lambd && x <= lambd ? A(0) : x;""",
    ),
    ActivationRow(
        name="softshrink",
        module="Softshrink",
        forward="torch.nn.functional.softshrink",
        out="torch.ops.aten.softshrink.out",
        parameters=_LAMBD,
        compares_in="own",
        exact=True,
        torch_repr="values",
        cuda="""\
const A lambd = rounded<T>(A({0}));
return x > lambd ? x - lambd : x < -lambd ? x + lambd : x != x ? x : A(0);""",
    ),
    ActivationRow(
        name="threshold",
        module="Threshold",
        forward="torch.nn.functional.threshold",
        out="torch.ops.aten.threshold.out",
        overwrite="torch.ops.aten.threshold_.default",
        parameters=(
            Parameter("threshold", None, "f(x) = x above it."),
            Parameter("value", None, "f(x) elsewhere."),
        ),
        infinite=True,
        compares_in="arithmetic",
        exact=True,
        caught=("torch.threshold",),
        caught_in_place=("torch.threshold_",),
        cuda="return x <= rounded<T>(A({0})) ? A({1}) : x;",
    ),
    # Beyond torch.nn:
    ActivationRow(
        name="quick_gelu",
        module="QuickGELU",
        forward=_quick_gelu,
        formula="x·σ(1.702x), the GELU of CLIP, as `transformers` computes it",
        cuda="""\
const A sigmoid = A(1) / (A(1) + exp(-rounded<T>(x * A(1.702))));
return x * rounded<T>(sigmoid);""",
    ),
    ActivationRow(
        name="squared_relu",
        module="SquaredReLU",
        forward=_squared_relu,
        formula="relu(x)² (Primer), as `transformers` computes it",
        cuda="""\
const A relu = x < 0 ? A(0) : x;
return relu * relu;""",
    ),
)

# Class in torch.nn and in fewbit -> the row: every row but the variants.
ROW_OF_MODULE = {row.module: row for row in ROWS if row.module is not None}
