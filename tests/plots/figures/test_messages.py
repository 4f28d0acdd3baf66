"""The message above a figure is said by its numbers."""

import dataclasses

import fewbit
import pytest
from fewbit.plots import plot_error
from fewbit.plots.figures import blpa, vquant
from fewbit.plots.figures.hooks_training import plot_differences
from fewbit.plots.figures.memory import Kept, plot_memory
from fewbit.plots.figures.training import Seeds, seeds_message


def seeds(name, *losses):
    return Seeds(name, [[3.0, 2.0]] * len(losses), losses)


@pytest.mark.parametrize(
    ("few", "said"),
    [
        ((1.0, 4.5), "Validation loss: none above exact's beyond chance"),
        ((2.0, 4.001), "Validation loss: above exact's beyond chance: few"),
        ((1.001, 3.0), "Validation loss: none above exact's beyond chance; equal within ±0.02: few"),
    ],
)
def test_seeds_are_compared_with_the_first_in_pairs(few, said):
    assert seeds_message([seeds("exact", 1.0, 3.0), seeds("few", *few)]) == said
    assert seeds_message([seeds("exact", 1.0), seeds("few", 9.0)]) == "Validation loss: nothing to compare"


def test_differences_name_what_is_above_after_correction_and_what_is_equal():
    # Alone either of the first two would count, p = .032 and .045; of three, neither.
    found = {"L2": [0.1, 0.105, 0.15, 0.04, 0.01], "L3": [0.1, 0.2, 0.3, 0.0, 0.16], "hooks": [0.0, 0.001]}
    assert plot_differences(found).get_suptitle() == (
        "Validation loss: none above exact's beyond chance; equal within ±0.02: hooks"
    )
    assert "beyond chance: L2;" in plot_differences({**found, "L2": [0.1, 0.105, 0.11]}).get_suptitle()


def test_the_memory_of_a_gated_mlp_leaves_out_what_computes_all_again():
    methods = [Kept("eager", 4.0, 0.4), Kept("checkpointed", 0.0, 0.4), Kept("fewbit, inputs", 0.5, 0.4)]
    said = "Beside the input fewbit, inputs keeps 0.50 tensors, eager 4.00"
    assert plot_memory(methods, "sizes").get_suptitle() == said
    assert plot_memory(methods[:2], "sizes").get_suptitle() == "eager keeps 4.00 tensors beside the input"


def test_each_bit_divides_the_error():
    found = [fewbit.load_table("gelu", bits) for bits in (1, 2, 3)]
    tables = [dataclasses.replace(t, error=1 / 4**t.bits, lower_bound=None) for t in found]
    assert plot_error(tables).get_suptitle() == "A bit divides the error by 4.0"
    assert plot_error(tables[:1]).get_suptitle() == "The error of tables"
    steeper = [dataclasses.replace(t, activation="steep", error=t.error / 2 ** (t.bits - 1)) for t in tables]
    assert plot_error([*tables, *steeper]).get_suptitle() == "A bit divides the error by 4.0 to 8.0"
    uneven = [dataclasses.replace(t, error=e) for t, e in zip(tables, (1.0, 0.5, 1 / 16), strict=True)]
    assert plot_error(uneven).get_suptitle() == "A bit divides the error by 4.0 on average, single bits by 2.0 to 8.0"


def test_errors_of_gradients_are_the_largest_share_of_any_layer():
    layer = {"layer": 1, "sgd": 1.0, "errors": {"8": 0.01, "4": 0.02}}
    worse = {"layer": 2, "sgd": 0.1, "errors": {"8": 0.002, "4": 0.009}}
    title = blpa.plot_gradient_noise(
        {"images": "digits", "start": [layer, worse], "end": [layer, layer]}
    ).get_suptitle()
    assert title == "Errors of gradients: in no layer above 2 % (8 bits) and 9 % (4 bits) of the noise between batches"


def test_memory_is_compared_at_the_greatest_depth():
    rows = [
        {"layers": layers, "bits": bits, "saved": layers * (bits or 32), "peak": layers * 2 * (bits or 16)}
        for bits in (None, 8, 4)
        for layers in (12, 24)
    ]
    batches = [{"depth": 164, "width": 16, "exact": 2, "few": 10, "paper_exact": 2, "paper_few": 8}]
    title = blpa.plot_memory({"rows": rows, "batches": batches}).get_suptitle()
    assert title == "24 layers in 4 bits save 8.0 times less, and peak 4.0 times lower"


def accuracy_row(method, bits, ratio, accuracy):
    return {"method": method, "bits": bits, "ratio": ratio, "accuracy": accuracy, "accuracies": [accuracy]}


def test_the_worst_setting_without_large_values_is_beside_the_fewest_that_help_it():
    exact = accuracy_row("exact", None, 0.0, 0.98)
    found = [
        ("V-Quant", 1, 0.0, 0.8),
        ("V-Quant", 1, 0.05, 0.97),
        ("V-Quant", 1, 0.01, 0.95),
        ("RV-Quant", 2, 0.0, 0.9),
    ]
    rows = [exact, *(accuracy_row(*each) for each in found)]
    title = vquant.plot_accuracy({"rows": rows}).get_suptitle()
    assert title == "V-Quant, 1 bit: 80.0 % alone, 95.0 % with 1 % of large values; exact 98.0 %"
    better = [exact, accuracy_row("V-Quant", 1, 0.0, 0.99), accuracy_row("RV-Quant", 2, 0.0, 0.99)]
    assert vquant.plot_accuracy({"rows": better}).get_suptitle().startswith("No setting without large values is below")


def test_perplexities_are_the_worst_of_all_models():
    rows = [
        {"model": model, "hidden": 8, "bits": bits, "ratio": ratio, "perplexity": value}
        for model, values in (("a", (100, 110, 101)), ("b", (50, 52, 50.25)))
        for bits, value in zip((None, 2, 3), values, strict=True)
        for ratio in (0.01, 0.03)
    ]
    assert vquant.plot_lstm({"rows": rows}).get_suptitle() == (
        "Perplexity above float32's, at most: 10.0 % in 2 bits, 1.0 % in 3 bits"
    )


def test_schedules_are_compared_in_points():
    row = {"phases": [[3, 2], [None, 0]], "losses": [[1.0, 0.5]]}
    rows = [{**row, "accuracy": accuracy} for accuracy in (0.9, 0.8, 0.7, 0.75)]
    title = vquant.plot_annealing({"rows": rows}).get_suptitle()
    assert title == "Few bits late rather than early: +10.0, -5.0 points of accuracy"
