"""Damaged files of packed models: one `FewbitError` line and a model as it was, or one that computes.

A kernel that wrote past its memory would not always crash, so decompressed weights are written between guard bytes.
"""

import json
import pickle
import struct
from random import Random

import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.inference.vquant import PackedLayer, calibrate, load, pack, quantize, save
from fewbit.runtime.tensors import host_memory
from fuzzing import fuzzed
from hostile import EXTREMES, altered_bytes, altered_json, altered_tensor, randoms, surrounded
from hypothesis import given
from torch import nn

pytest.importorskip("safetensors")
_NUMBERS = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "XX")


def network():
    torch.manual_seed(0)
    shared = nn.Linear(16, 16)
    return nn.Sequential(nn.Linear(40, 16), nn.BatchNorm1d(16), nn.ReLU(), shared, nn.Tanh(), shared).eval()


def inputs():
    return torch.randn(5, 40, generator=torch.Generator().manual_seed(1))


def packed():
    model = quantize(network(), 3, 0.05, 0.05)
    calibrate(model, [inputs()])
    return pack(model)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    save(packed(), path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return path, json.loads(content[8 : 8 + length]), content[8 + length :]


def damaged(random: Random, header, payload):
    """Return the bytes of a file with something wrong."""
    kind = random.choice(["told", "told", "told", "header", "tensor", "tensor", "payload", "bytes"])
    header = json.loads(json.dumps(header))
    names = [name for name in header if name != "__metadata__"]
    if kind == "told":
        told = altered_json(random, json.loads(header["__metadata__"]["fewbit"]))
        header["__metadata__"]["fewbit"] = random.choice([json.dumps(told), json.dumps(told), "[" * 50_000, "ab", "{}"])
    elif kind == "header":
        header = altered_json(random, header)
    elif kind == "tensor":
        name, other = random.choice(names), random.choice(names)
        what = random.choice(["retype", "swap", "drop", "reshape", "cut", "numbers", "numbers"])
        entry = header[name]
        if what == "retype":
            entry["dtype"] = random.choice(_NUMBERS)
        elif what == "swap":
            header[name], header[other] = header[other], header[name]
        elif what == "drop":
            del header[name]
        elif what == "reshape":
            entry["shape"] = random.choice([[1, *entry["shape"]], [], [*entry["shape"], 1], entry["shape"][::-1]])
        elif what == "cut":
            start, end = entry["data_offsets"]
            entry["data_offsets"] = [start, start + random.randrange(end - start + 1)]
            entry["shape"] = [entry["data_offsets"][1] - start]
        else:
            start, end = entry["data_offsets"]
            filling = random.choice([bytes([random.choice([0, 1, 239, 240, 255])]) * (end - start), None])
            payload = payload[:start] + (filling or random.randbytes(end - start)) + payload[end:]
    elif kind == "payload":
        payload = altered_bytes(random, payload)
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + payload
    return altered_bytes(random, content) if kind == "bytes" else content


def guarded(monkeypatch):
    """Let what is decompressed lie between guard bytes; return the pieces of memory that are made."""
    made = []

    def reused(shape, stride, dtype):
        inside, memory = surrounded(torch.zeros(shape, dtype=dtype), 0xA5)
        made.append((memory, inside.numel() * inside.element_size()))
        return inside.as_strided(shape, stride)

    monkeypatch.setattr(host_memory, "reused", reused)
    return made


def check_guards(made):
    for memory, size in made:
        margin = (memory.numel() - size) // 2
        assert bool((memory[:margin] == 0xA5).all())
        assert bool((memory[margin + size :] == 0xA5).all())


@fuzzed
@given(random=randoms)
def test_damaged_files_are_refused_in_a_line_or_compute(file, random: Random):
    path, header, payload = file
    hostile = path.parent / "hostile.safetensors"
    hostile.write_bytes(damaged(random, header, payload))
    model = network()
    modules, numbers = list(model.modules()), {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = guarded(monkeypatch)
        try:
            y = load(model, hostile)(inputs())
        except FewbitError as error:
            assert len(str(error).splitlines()) == 1, error
            assert list(model.modules()) == modules
            assert all(torch.equal(x, numbers[name]) for name, x in model.state_dict().items())
        else:
            assert y.shape == (5, 16)
        check_guards(made)


@fuzzed
@given(random=randoms)
def test_altered_state_dicts_and_pickles(random: Random):
    model = packed()
    layer = random.choice([module for module in model.modules() if isinstance(module, PackedLayer)])
    (name, tensor) = random.choice(list(layer.tensors()))
    part = random.choice(list(tensor._buffers))
    route = random.choice(["state_dict", "assign", "buffer", "attribute"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = guarded(monkeypatch)
        try:
            if route in ("state_dict", "assign"):
                state = layer.state_dict()
                key = f"packed.{name}.{part}"
                state[key] = altered_tensor(random, state[key])
                layer.load_state_dict(state, assign=route == "assign")
            elif route == "buffer":
                tensor._buffers[part] = altered_tensor(random, tensor._buffers[part])
                layer = pickle.loads(pickle.dumps(layer))
            else:
                _alter_attribute(random, tensor)
                layer = pickle.loads(pickle.dumps(layer))
            y = layer(torch.ones(2, layer.layer.in_features))
        except FewbitError as error:
            assert len(str(error).splitlines()) == 1, error
        except (NotImplementedError, pickle.PicklingError):  # torch's, of layouts and devices that it does not pickle
            assert route == "buffer"
        else:
            assert y.shape[0] == 2
        check_guards(made)


def _alter_attribute(random, tensor):
    value = random.choice(EXTREMES)
    what = random.choice(["bits", "ratio", "value_dtype", "relu", "sample_every", "shape", "dtype", "quantizer"])
    if what in ("shape", "dtype", "quantizer"):
        setattr(tensor, what, value)
    else:
        object.__setattr__(tensor.quantizer, what, value)
