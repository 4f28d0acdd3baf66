import pytest
from fewbit.tables import KINDS, FewbitError, load_table, shipped
from fewbit.tables.shipped import WEIGHTS, shipped_activations, shipped_tables
from fewbit.tables.table import table_from_dict

# Activations whose derivative takes few values: one exact table a kind and weight, and its bits in kind `interval`.
EXACT = {
    **dict.fromkeys(("relu", "leaky_relu"), 1),
    **dict.fromkeys(("relu6", "hardtanh", "hardsigmoid", "hardshrink", "softshrink"), 2),
}


def test_all_of_torch_and_what_models_use_beyond_are_shipped():
    torchs = ["relu6", "celu", "gelu_tanh", "mish", "softsign", "logsigmoid", "tanhshrink", "hardswish"]
    beyond = ["quick_gelu", "squared_relu", "erf", "arctan", "sin", "gaussian"]
    assert {"relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", *torchs, *beyond} <= set(
        shipped_activations()
    )


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", shipped_activations())
def test_every_activation_has_a_table_of_every_kind_at_every_width(activation, kind, weight):
    if kind == "stochastic" and activation == "squared_relu":
        assert not any(table.kind == kind for table in shipped_tables(activation))  # its derivative has no bounds
        return
    for bits in range(EXACT.get(activation, 1) if kind == "interval" else 1, 9):
        table = load_table(activation, bits=bits, kind=kind, weight=weight)
        assert (table.activation, table.kind, table.weight) == (activation, kind, weight)
        assert table.bits == bits or table.error == 0
        assert (table.error == 0) == (activation in EXACT)
        proven = 5e-3 if kind == "stochastic" and bits > 4 else 1e-6  # fewbit_gen/build.py says why
        assert 0 <= table.error - table.lower_bound <= proven * table.error


def test_defaults_are_3_bits_shared():
    assert load_table("gelu") == load_table("gelu", bits=3, kind="shared", weight="uniform:-10,10")


def test_spellings_are_understood():
    assert load_table("Swish", bits=2) is load_table("SiLU", bits=2)


@pytest.mark.parametrize("weight", ["uniform:-10.0,10", "Uniform: -1e1, +10.00", " uniform:-10,10 "])
def test_a_weight_is_known_however_its_numbers_are_written(weight):
    assert load_table("gelu", weight=weight) is load_table("gelu")


@pytest.mark.parametrize("bits", range(1, 9))
def test_relu_has_its_exact_table_whatever_the_bits(bits):
    table = load_table("relu", bits=bits)
    assert (table.bits, table.error) == (1, 0.0)


def test_no_table_is_shipped_twice():
    for activation in shipped_activations():
        keys = [(table.key, table.weight) for table in shipped_tables(activation)]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "gelou"}, r"no shipped table for 'gelou'; nearest: gelu"),
        ({"activation": "xyzzy"}, r"no shipped table for 'xyzzy'; shipped: .*gelu, .*tanh"),
        ({"activation": "x" * 10_000}, r"no shipped table for 'x{50,80}….*gelu"),
        ({"activation": "gelu", "bits": 8, "weight": "normal:0,2"}, r"gelu at 8 bits, .*fewbit\.solve makes any"),
        ({"activation": "gelu", "weight": "laplace:0,1"}, r"\(shipped: .*shared uniform:-10,10 in 1, 2, 3, .*8 bits"),
        ({"activation": "gelu", "weight": "laplace:0,1", "bits": 1}, "no shipped table for gelu at 1 bit, shared"),
        ({"activation": "gelu", "weight": None}, r"by the text of its weight, such as uniform:-10,10"),
        ({"activation": "gelu", "bits": 0}, "bits must be a whole number from 1 to 8, not 0"),
        ({"activation": "gelu", "bits": 9}, "bits must be a whole number from 1 to 8, not 9"),
        ({"activation": "gelu", "bits": True}, "bits must be a whole number from 1 to 8, not True"),
        ({"activation": "gelu", "bits": 3.0}, r"bits must be a whole number from 1 to 8, not 3\.0"),
        ({"activation": "gelu", "bits": 10**5000}, "bits must be a whole number from 1 to 8, not a huge int"),
        ({"activation": "gelu", "kind": "best"}, "unknown kind 'best': use interval or shared"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_is_not_shipped_is_told_in_one_line(arguments, message):
    with pytest.raises(FewbitError, match=message) as caught:
        load_table(**arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_one_table_is_built_of_those_in_its_file(monkeypatch):
    """The fields of 48 tables were checked for the one of `fewbit.GELU()`."""
    built = []
    monkeypatch.setattr(
        shipped, "table_from_dict", lambda entry, source: (built.append(entry), table_from_dict(entry))[1]
    )
    shipped.forget_tables()
    assert load_table("gelu", 3, "interval", weight="normal:0,1").levels.size == 8
    assert load_table("relu", 8).bits == 1
    assert len(built) == 2
    shipped.forget_tables()
