"""Configs of methods: the keywords of `convert` are sugar for them."""

import fewbit
import pytest
import torch
from fewbit import BLPA, Activations, ActNN, Attention, ChunkedLoss, FewbitError, GatedMLPs, VQuant
from small_modules import Gated
from torch import nn


def model():
    torch.manual_seed(0)
    chain = [nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), *chain, Gated(64, 96, bias=False), nn.Linear(64, 8))


SUGAR = {
    "bits": ((Activations(2),), {"bits": 2}),
    "a number": ((2,), {"bits": 2}),
    "nothing": ((), {"bits": 3}),
    "level": ((ActNN("L3", bits=2.5),), {"level": "L3", "bits": 2.5}),
    "level without activations": ((ActNN("L1"),), {"level": "L1"}),
    "outliers": ((VQuant(bits=4, ratio=0.05),), {"outliers": 0.05, "bits": 4}),
    "fuse_preact": ((BLPA(bits=4),), {"fuse_preact": 4}),
    "fuse_preact, bits": ((BLPA(bits=4), Activations(2)), {"fuse_preact": 4, "bits": 2}),
    "glu": ((GatedMLPs("inputs"),), {"glu": "inputs"}),
    "glu, rotated": ((GatedMLPs(copy_bits=3, quantizer="rotated"),), {"glu": {"copy_bits": 3, "quantizer": "rotated"}}),
    "all": ((GatedMLPs("parts"), BLPA(4), ActNN("L2")), {"glu": "parts", "fuse_preact": 4, "level": "L2"}),
}


@pytest.mark.parametrize("configs, keywords", SUGAR.values(), ids=SUGAR)
def test_a_keyword_is_sugar_for_its_config(configs, keywords):
    ours, theirs = model(), model()
    by_config, by_keyword = fewbit.convert(ours, *configs), fewbit.convert(theirs, **keywords)
    assert by_config.replaced == by_keyword.replaced
    assert by_config.left == by_keyword.left
    assert repr(ours) == repr(theirs)


def test_configs_run_in_the_order_in_which_they_are_given():
    """Each takes what those before it have left: a level first leaves no chain whose layer is free."""
    first, later = model(), model()
    assert any(row.now == "fused" for row in fewbit.convert(first, BLPA(4), ActNN("L2")).replaced)
    assert not any(row.now == "fused" for row in fewbit.convert(later, ActNN("L2"), BLPA(4)).replaced)


def test_activations_may_be_left():
    m = model()
    report = fewbit.convert(m, BLPA(4), Activations(None))
    assert [row.now for row in report.replaced] == ["fused"]
    assert type(m[1]) is nn.GELU


@pytest.mark.parametrize(
    "arguments, keywords, message",
    [
        ((ActNN("L2"), VQuant()), {}, "exclude each other: both want every layer"),
        ((ActNN("L2"), ActNN("L3")), {}, "ActNN is given twice"),
        ((ActNN("L2"),), {"bits": 3}, r"give methods, as ActNN\(level='L2', .*\), or bits=, not both"),
        ((BLPA(4),), {"glu": "parts"}, "or glu=, not both"),
        ((3,), {"bits": 3}, "bits is given twice"),
        (
            (3, BLPA(4)),
            {},
            "a method is one of ChunkedLoss, GatedMLPs, BLPA, Attention, ActNN, Normalizations, VQuant, .*, not 3",
        ),
        (("L2",), {}, "bits must be a whole number from 1 to 8"),
        ((ActNN,), {}, "bits must be a whole number from 1 to 8"),
        # Beside a method that is right, and comes first.
        ((), {"glu": "parts", "level": "L9"}, "level is one of L0"),
        ((), {"glu": "parts", "outliers": "2%"}, "ratio is a number"),
        ((), {"glu": "parts", "fuse_preact": 9}, "bits must be a whole number"),
        ((), {"fuse_preact": 4, "level": "L2", "bits": 1.5}, "whole number"),
        ((), {"glu": "parts", "level": "L2", "exclude": "nothing"}, "nothing"),
        ((), {"outliers": 0.02, "exclude": "conv"}, "conv"),
        ((), {"level": "L2", "outliers": 0.02, "glu": "parts"}, "^level and outliers exclude each other: both want ev"),
        ((), {"glu": {"keep": "parts", "bits": 3}}, "glu takes keep, copy_bits, input_bits and quantizer, not 'bits'"),
        ((), {"loss": "tiled"}, "loss is 'chunked', not 'tiled'"),
        ((ChunkedLoss("haed"),), {}, "heads names 'haed', and the model has no module of that name"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_model_left(arguments, keywords, message):
    m = model()
    before = repr(m)
    with pytest.raises(FewbitError, match=message) as caught:
        fewbit.convert(m, *arguments, **keywords)
    assert "\n" not in str(caught.value) and repr(m) == before


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ActNN("L6"), "level is one of L0, L1, L2, L3, L4, L5"),
        (lambda: ActNN("L2", bits=2.5), "bits is a whole number from 1 to 8 at this level"),
        (lambda: ActNN(2), "level is one of L0"),
        *((lambda bits=bits: ActNN("L3", bits=bits), "from 1 to 8") for bits in (0.5, 9, "2")),
        *((lambda bits=bits: BLPA(bits=bits), "bits must be a whole number from 1 to 8") for bits in (0, 9, "4")),
        *((lambda bits=bits: Attention(bits), "bits") for bits in (0, 9, 2.5, "6")),
        (lambda: VQuant(ratio=2), "ratio is a number from 0 to 1, not 2"),
        (lambda: VQuant(bits=9), "bits"),
        (lambda: ChunkedLoss(3), "heads are names of modules"),
        (lambda: ChunkedLoss(chunk_size=0), "chunk_size is an integer not below 1"),
        (lambda: GatedMLPs("all"), "keep is one of"),
        (lambda: GatedMLPs(copy_bits=11), "copy_bits is an integer"),
        (lambda: GatedMLPs(quantizer="turned"), "quantizer is 'groups' or 'rotated', not 'turned'"),
        (lambda: GatedMLPs(input_bits=0), "input_bits is an integer from 1 to 8 or None"),
        (lambda: Activations(0), "bits must be a whole number from 1 to 8"),
    ],
)
def test_a_config_checks_its_fields(make, message):
    with pytest.raises(FewbitError, match=message):
        make()


def test_memory_is_compared_for_configs_too():
    x = torch.randn(32, 64)
    ours = fewbit.memory.compare(model(), x, methods=(GatedMLPs(), ActNN("L2")))
    theirs = fewbit.memory.compare(model(), x, glu="parts", level="L2")
    assert ours.after.total == theirs.after.total < ours.before.total
    assert (
        "ActNN(level='L2', bits=None, rounding='stochastic', group_levels='fitted', quantizer='groups')"
        in ours.summary()
    )
