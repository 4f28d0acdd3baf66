"""Devices without kernels of ours, such as Apple's and Intel's: plain torch does all, and says so once; ROCm's too.

A device of its own is made by g++ (support/other_device.cpp): torch's operations and no float64.
"""

import json
import subprocess
import sys
from pathlib import Path

import other_device
import pytest
import torch
from fewbit.plots.bench.gpu.block_checks import EAGER
from fewbit.runtime import machine
from fewbit.runtime.backends.cuda import launching
from host_kernels import needs_gxx


@pytest.fixture(scope="module")
def said():
    """What the program of other_device.py finds."""
    command = [sys.executable, str(Path(other_device.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_gxx
class TestPlainTorch:
    @pytest.mark.deep
    def test_codes_and_numbers_are_the_cpus(self, said):
        assert said["codes"] == []

    def test_every_way_trains_with_the_devices_own_forward_pass(self, said):
        assert said["errors"].keys() == EAGER.keys()
        wrong = {name: error for name, error in said["errors"].items() if isinstance(error, str) or error > 1}
        assert wrong == {}

    def test_layers_of_normalizations_train(self, said):
        assert said["normalized"] < 0.2

    def test_blocks_are_computed_again_in_the_devices_state(self, said):
        assert said["states"] == [["other", [0], ["cpu", "other"]]] * 4

    def test_it_is_said_in_one_line_and_once(self, said):
        assert said["warnings"] == [
            "fewbit runs on other in plain torch, slowly: its kernels are for the CPU and for NVIDIA's GPUs"
        ]


class TestROCm:
    """Its tensors are torch's "cuda"."""

    def test_no_kernel_is_tried(self, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "7.1")
        monkeypatch.setattr(launching, "has_compiler", lambda: pytest.fail("looked for NVRTC"))
        why = "its kernels are for NVIDIA's GPUs, and this torch is built for ROCm 7.1"
        assert launching._obstacle(0) == why

    def test_the_doctor_says_so(self, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "7.1")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
        found = machine._cuda()
        assert not found.works
        assert found.note == "AMD Instinct MI300X runs plain torch: kernels are for NVIDIA's GPUs, not ROCm's"


@pytest.mark.parametrize(("device", "said"), [("mps", "; all that runs on mps"), ("cuda", ""), (None, "")])
def test_the_doctor_names_an_accelerator_without_kernels(monkeypatch, device, said):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(device))
    assert machine._other_accelerator() == said
