"""A stand-in for cuda.core and the driver: it records what each launch is given and what it finds in its thread."""

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import torch
from fewbit.runtime.backends.cuda import (
    activation,
    fixed_point,
    following,
    glu,
    keys,
    launching,
    outlier,
    per_group,
    rotated,
    rounding,
)

# Bytes that the address of a C type is a multiple of: groups of codes are loaded by up to 16 at once, all else is read
# by numbers, or by more of them where the kernel finds the address fit.
_ALIGNED = {"u8": 16, "u16": 2, "half": 2, "bfloat16": 2, "float": 4, "u32": 4, "int": 4, "double": 8, "void": 8}
_ALIGNED |= {"i64": 8, "u64": 8}


class Kernel(tuple):
    """What is loaded, (source, name): five blocks of it fit on a multiprocessor."""

    occupancy = SimpleNamespace(max_active_blocks_per_multiprocessor=lambda threads, shared: 1280 // threads)

    @property
    def parameters(self):
        """The C types of its parameters, such as `const u8*`."""
        source, name = self
        bounds = r"(?:__launch_bounds__\([^\n]*\)\s*)?"
        (declared,) = re.findall(rf'extern "C" __global__ void {bounds}{name}\(([^)]*)\)', source)
        return [re.sub(r"\w+$", "", one.strip()).strip() for one in declared.split(",")]


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        context: the device whose context the calling thread had, or None.
        capturing: whether a graph was being captured.
    """

    kernel: Kernel
    blocks: int
    arguments: tuple
    stream: str
    context: int
    capturing: bool

    def misplaced(self):
        """Types of pointers that are at no address for them."""
        return [
            kind
            for kind, value in zip(self.kernel.parameters, self.arguments, strict=True)
            if kind.endswith("*") and value % _ALIGNED[kind.removeprefix("const ").removesuffix("*").split("::")[-1]]
        ]


@dataclass(frozen=True)
class Stream:
    """One of torch's streams, by its handle; what it waits for and what is recorded on it goes to `log`."""

    handle: int
    log: list = field(compare=False)

    def wait_event(self, event):
        self.log.append((self.handle, "waits for", event.handle))


class Event:
    """In place of torch.cuda.Event.

    Attributes:
        handle: that of the stream on which it was recorded last.
    """

    handle = None

    def record(self, stream):
        self.handle = stream.handle
        stream.log.append((stream.handle, "records"))


class Driver:
    """In place of cuda.core.

    Attributes:
        device: torch's current device.
        capturing: whether a graph is being captured.
        streams: the handle of each device's current stream.
        launches, loads, log: recorded, `log` what torch's streams wait for.
    """

    Stream = SimpleNamespace(from_handle=lambda handle: f"stream {handle}")
    LaunchConfig = staticmethod(lambda grid, block: (grid, block))

    def __init__(self):
        self.device, self.capturing, self.launches, self.loads, self.log = 0, False, [], [], []
        self.streams = {-1: 0, 0: 0, 1: 77}
        self._thread = threading.local()
        self.ObjectCode = SimpleNamespace(from_cubin=self._load, from_ptx=self._load)

    def _load(self, source):
        assert not self.capturing
        self.loads.append(source)
        return SimpleNamespace(get_kernel=lambda name: Kernel((source, name)))

    def launch(self, stream, config, kernel, *arguments):
        context = getattr(self._thread, "device", None)
        self.launches.append(Launch(kernel, config[0], arguments, stream, context, self.capturing))

    def Device(self, index):
        return SimpleNamespace(set_current=lambda: setattr(self._thread, "device", index))


def in_place_of_the_driver(monkeypatch):
    """The stand-in, while `monkeypatch` lasts: two H100, of which tensors of the CPU are on the first."""
    driver = Driver()

    @contextmanager
    def device(index):
        before, driver.device = driver.device, index
        yield
        driver.device = before

    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    streams = driver.streams
    monkeypatch.setattr(launching, "core", lambda: driver)
    monkeypatch.setattr(launching, "_thread", launching._Thread())
    monkeypatch.setattr(launching, "machine_code", lambda source, arch: ("cubin", source))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.device)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(streams[device], driver.log))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: driver.device, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", {-1: SimpleNamespace(initial_seed=lambda: 2**63 + 5)})
    monkeypatch.setattr(keys, "_streams", {})
    for name in ("_config", "_stream"):
        monkeypatch.setattr(launching, name, cache(getattr(launching, name).__wrapped__))
    available = cache(launching.available.__wrapped__)
    for module in (activation, fixed_point, following, glu, keys, launching, per_group, rotated, rounding, outlier):
        if hasattr(module, "available"):
            monkeypatch.setattr(module, "available", available)
        if hasattr(module, "_kernel"):
            monkeypatch.setattr(module, "_kernel", cache(module._kernel.__wrapped__))
    monkeypatch.setattr(outlier, "_most_blocks", lambda device: 132 * 4)
    return driver
