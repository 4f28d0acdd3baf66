"""What `fewbit bench levels` measures, on a network that is much smaller than a ResNet-50."""

import json

import pytest
import torch
from fewbit import FewbitError
from fewbit.plots.bench import levels as bench
from fewbit.plots.bench.levels import BATCH_BAR, TIME_BAR, Case, Row, Training, lines_of, measure, met
from fewbit.plots.studies.networks import NETWORKS, conv
from fewbit.runtime.plan.memory import profile
from torch import nn


def network():
    """Return a network so small that steps of it take no time."""
    layers = (*conv(3, 8, 3, 2), *conv(8, 8), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8, 10))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(NETWORKS, "ResNet-50", network)


def test_every_level_is_measured_and_reported(run, tmp_path):
    path = tmp_path / "levels.json"
    outcome = run("bench", "levels", "--batch", 2, "--image-size", 40, "--steps", 1, "-o", path)
    assert outcome.status == 0
    report = json.loads(path.read_text())
    assert [row["level"] for row in report["rows"]] == ["exact", "L1", "L2", "L3", "L4", "L5"]
    assert (report["device"], report["batch"], report["image_size"], report["steps"]) == ("cpu", 2, 40, 1)
    assert report["met"] == {}
    assert all(row["largest_batch"] is None for row in report["rows"])
    exact = report["rows"][0]
    assert (exact["ratio"], exact["kept_times"], exact["peak_times"]) == (1, 1, 1)
    assert all(row["kept_times"] == exact["kept"] / row["kept"] for row in report["rows"])
    lines = outcome.out.splitlines()
    assert lines[0] == "ResNet-50, 2 images of 40x40, cpu"
    assert [line.split()[0] for line in lines[2:8]] == ["exact", "L1", "L2", "L3", "L4", "L5"]


def test_a_row_as_text():
    rows = [row("exact", 1, 1), row("L2", TIME_BAR, BATCH_BAR)]
    head, _, _, text, *_, last = lines_of(Case(64, 224, "cuda"), rows)
    assert head == "ResNet-50, 64 images of 224x224, cuda"
    assert text.split() == ["L2", "1.0", "1.15", "0.0", "1.0x", "0.0", "1.0x", "9", "6.0x"]
    assert last == "largest batch: bar met: yes"


def test_fewer_bits_keep_less():
    exact, first, second, third = measure(Case(4, 64), 1, levels=("exact", "L1", "L2", "L3"))
    assert exact.kept > second.kept > third.kept
    assert exact.peak > second.peak
    assert first.kept > second.kept  # normalizations and what follows them stay as they are at L1


def test_kept_is_what_the_profile_of_a_trained_network_counts():
    training = Training("exact", "cpu")
    images = training.images(4, 40)
    training.step(images)
    (row,) = measure(Case(4, 40), 1, levels=("exact",))
    assert row.kept == profile(training.model, images).total


def test_networks_begin_alike_and_steps_train():
    exact, converted = Training("exact", "cpu"), Training("L2", "cpu")
    weights = [p.detach().clone() for p in exact.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, converted.model.parameters(), strict=True))
    for training in (exact, converted):
        training.step(training.images(2, 40))
        assert any(not torch.equal(a, b) for a, b in zip(weights, training.model.parameters(), strict=True))
        assert all(p.grad is None for p in training.model.parameters())


def row(level, ratio=1.0, batch_times=None):
    return Row(level, 1, 1, 1.0, 1.0, 1.0, ratio, None if batch_times is None else 9, batch_times)


class TestBars:
    large = Case(32, 224, "cuda")

    def test_are_of_l2s_time_and_the_best_largest_batch(self):
        rows = [row("exact", 1, 1), row("L1", 9, 1), row("L2", TIME_BAR, 3), row("L4", 9, BATCH_BAR)]
        assert met(self.large, rows) == {"L2 time": True, "largest batch": True}
        slow = [row("exact", 1, 1), row("L2", TIME_BAR + 0.01, BATCH_BAR - 0.01)]
        assert met(self.large, slow) == {"L2 time": False, "largest batch": False}

    def test_are_not_of_a_batch_that_was_not_tried_or_images_that_are_few(self):
        rows = [row("exact"), row("L2")]
        assert met(self.large, rows) == {"L2 time": True}
        assert met(Case(31, 224, "cuda"), rows) == met(Case(32, 224), rows) == {}


class TestLargestBatch:
    """The trial, with a training that has room for so many images."""

    class Limited:
        def __init__(self, most):
            self.most, self.forgot = most, 0

        def images(self, batch, size):
            return batch

        def step(self, batch):
            if batch > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory.\nAnd so on.")

        def forget(self):
            self.forgot += 1

    def test_is_found_within_the_tolerance_and_tells_what_stopped_it(self):
        training = self.Limited(1000)
        found = bench._with_largest_batch(row("L2"), training, Case())
        assert (1 - bench.TOLERANCE) * 1000 <= found.largest_batch <= 1000
        assert found.stopped_by == "CUDA out of memory."
        assert training.forgot > 0

    def test_of_what_is_swapped_is_bounded_by_host_memory(self, monkeypatch):
        monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 100, "SC_PAGE_SIZE": 4}.__getitem__)
        case = Case(1)  # of one byte each: 200 fit into a half of the host's memory
        found = bench._with_largest_batch(row("L4"), self.Limited(10**6), case)
        assert (1 - bench.TOLERANCE) * 200 <= found.largest_batch <= 200
        assert "host memory" in found.stopped_by
        assert bench._with_largest_batch(row("L2"), self.Limited(1000), case).largest_batch > 200

    def test_one_image_must_fit(self):
        with pytest.raises(FewbitError, match="not even one"):
            bench._with_largest_batch(row("L2"), self.Limited(0), Case())
