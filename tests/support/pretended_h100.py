"""The Triton that Inductor writes for an H100, had without one: graphs are traced on the CPU and lowered for "cuda".

with pretended_h100():
    forward, backward = triton_code(model, inputs, backend="fewbit", bits=4)
forward.kernels["triton_per_fused_gelu_2"].source
"""

import ast
import contextlib
import copy
import importlib.util
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import _extract_tensor_metadata

DEVICE = torch.device("cuda:0")


class Properties:
    """Properties of an H100 that Inductor and Triton read."""

    name, uuid, gcnArchName = "NVIDIA H100 80GB HBM3", "x", ""
    major, minor, warp_size, multi_processor_count, is_integrated = 9, 0, 32, 132, 0
    total_memory, L2_cache_size = 80 * 2**30, 50 * 2**20
    regs_per_multiprocessor, max_threads_per_multi_processor, max_threads_per_block = 65536, 2048, 1024
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448
    shared_memory_per_multiprocessor = 233472
    clock_rate, memory_clock_rate, memory_bus_width = 1980000, 2619000, 5120


class _Nothing:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class _Driver:
    utils = None

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_device_capability(self, *_):
        return 9, 0


class _Done(BaseException):
    """Ends a compilation when its code is written."""


@dataclass(frozen=True)
class Code:
    """What Inductor wrote for one graph, and a call of the graph on the CPU, by torch's interpreter of graphs."""

    text: str
    is_backward: bool
    arguments: list
    results: list

    @property
    def allocated(self) -> dict[str, tuple[int, str]]:
        """Elements and dtype of each buffer that the graph allocates on the device."""
        found = re.findall(r"(\w+) = empty_strided_cuda\((\([^)]*\)), \([^)]*\), torch\.(\w+)\)", self.text)
        return {name: (math.prod(ast.literal_eval(size)), dtype) for name, size, dtype in found}

    @property
    def returned(self) -> list[str]:
        """Names of what the graph returns."""
        return re.findall(r"\w+", re.findall(r"^        return \((.*)\)", self.text, re.MULTILINE)[-1])

    @property
    def launches(self) -> list[str]:
        """Names of the Triton kernels, as often as they are started."""
        return re.findall(r"(triton_\w+)\.run\(", self.text)

    @property
    def kernels(self) -> dict[str, str]:
        """Source of each Triton kernel, from its def."""
        found = re.finditer(r"^def (triton_\w+)\(.*?(?=^''', device_str)", self.text, re.MULTILINE | re.DOTALL)
        return {match[1]: match[0] for match in found}

    @property
    def dtypes(self) -> dict[str, dict[str, str]]:
        """Triton's types of the arguments of each kernel: "*bf16", "i32" …"""
        types = {}
        for found in re.finditer(r"^def (triton_\w+)\(", self.text, re.MULTILINE):
            before = self.text[: found.start()].rpartition("'signature': {")[2]
            types[found[1]] = dict(re.findall(r"'(\w+)': '([*\w]+)'", before.partition("}")[0]))
        return types


@contextlib.contextmanager
def pretended_h100() -> Iterator[None]:
    """Let torch take this machine for one with an H100, as far as the compiler looks."""
    import torch._dynamo.device_interface as interfaces
    import torch._functorch.config as functorch_config
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as of_triton
    import triton
    from torch._inductor.graph import GraphLowering

    cuda, interface = torch.cuda, interfaces.CudaInterface
    interfaces.register_interface_for_device("cuda", interface)
    interfaces.register_interface_for_device("cuda:0", interface)
    values = {
        (cuda, "is_available"): lambda: _ON[0],
        (cuda, "device_count"): lambda: int(_ON[0]),
        (cuda, "current_device"): lambda: 0,
        (cuda, "get_device_properties"): lambda *_: Properties(),
        (cuda, "get_device_capability"): lambda *_: (9, 0),
        (cuda, "get_device_name"): lambda *_: Properties.name,
        (cuda, "is_initialized"): lambda: False,
        (cuda, "is_bf16_supported"): lambda *_, **__: True,
        (cuda, "_lazy_init"): lambda: None,
        (cuda, "synchronize"): lambda *_: None,
        (cuda, "get_rng_state"): lambda *_: torch.zeros(16, dtype=torch.uint8),
        (cuda, "set_rng_state"): lambda *_: None,
        (cuda, "device"): _Nothing,
        (torch.version, "cuda"): "13.0",
        (interface.Worker, "get_device_properties"): staticmethod(lambda *_: Properties()),
        (interface.Worker, "current_device"): staticmethod(lambda: 0),
        (interface, "device"): _Nothing,
        (interface, "device_count"): lambda: int(_ON[0]),
        (interface, "current_device"): staticmethod(lambda: 0),
        (interface, "get_device_properties"): staticmethod(lambda *_: Properties()),
        (interface, "synchronize"): staticmethod(lambda *_: None),
        (interface, "get_raw_stream"): staticmethod(lambda *_: 0),
        (interface, "is_available"): staticmethod(lambda: _ON[0]),
        (interface, "get_compute_capability"): staticmethod(lambda *_: 90),
        (interface, "is_bf16_supported"): staticmethod(lambda *_, **__: True),
        (of_triton, "has_triton"): lambda *_: True,
        (of_triton, "has_triton_package"): lambda *_: True,
        (of_triton, "triton_hash_with_backend"): lambda *_: "x",
        (scheduler, "has_triton"): lambda *_: True,
        (GraphLowering, "compile_to_module"): _write,
        (triton.runtime.driver, "_active"): _Driver(),
        (fake_tensor, "init_gpu_context"): lambda *_: None,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        for (where, name), value in values.items():
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
            stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True))
        yield


_ON = [False]
_TEXTS: list[str] = []


def _write(graph):
    code = graph.codegen()[0]
    _TEXTS.append(getattr(code, "value", code))
    raise _Done


def triton_code(model, inputs, backend, inductor=None, **options) -> list[Code]:
    """Return what Inductor writes for the forward and the backward graph of a model on CPU inputs, as if on an H100."""
    from fewbit.runtime.compile import codes, rewrite
    from fewbit.runtime.compile.backend import _patches, compile_graph
    from fewbit.runtime.compile.options import CompileOptions
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    written: list[Code] = []
    torch._dynamo.reset()

    def inner(graph, examples, **how):
        on_cuda = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        kept = ("is_backward", "static_input_idxs", "cudagraphs", "graph_id", "boxed_forward_device_index")
        try:
            _ON[0] = True
            mode, inputs_there = _moved(on_cuda, examples)
            with (
                tracing(TracingContext(mode)),
                inductor_config.patch({"fx_graph_cache": False, "compile_threads": 1, **(inductor or {})}),
                contextlib.suppress(_Done),
            ):
                compile_fx.compile_fx_inner(on_cuda, inputs_there, **{k: v for k, v in how.items() if k in kept})
        finally:
            _ON[0] = False
        code = Code(_TEXTS.pop(), bool(how.get("is_backward")), [], [])
        written.append(code)

        def run(arguments):
            code.arguments[:] = arguments
            code.results[:] = graph(*arguments)
            arguments.clear()
            return tuple(code.results)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    def compiler(graph, examples):
        if backend == "fewbit":
            chosen = CompileOptions.of(options)
            return compile_graph(graph, examples, chosen, _patches(chosen), inner_compile=inner)
        return compile_fx.compile_fx(graph, examples, inner_compile=inner)

    with (
        mock.patch.object(codes, "writes_triton", _as_on_cuda),
        mock.patch.object(rewrite, "has_kernels", lambda *_: False),
        inductor_config.patch({"fx_graph_cache": False}),
    ):
        y = torch.compile(model, backend=compiler)(*inputs)
        if y.requires_grad:
            y.float().square().sum().backward()
    torch._dynamo.reset()
    return written


def machine_code(code: Code, name: str, capability: int, folder: Path) -> str:
    """Return a kernel's SASS for sm_80 and so on, for tiles of 1,024 elements in four warps."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.disasm import get_sass

    function = load_kernel(name, code.kernels[name], folder)
    inner = int((re.findall(r"R0_BLOCK: tl.constexpr = (\d+)", code.kernels[name]) or [1])[0])
    types = code.dtypes[name]
    blocks = {a: 128 if a == "R0_BLOCK" else max(1, 1024 // inner) for a, t in types.items() if t == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(function.arg_names) if types[a] != "constexpr"}
    source = ASTSource(function, {a: types[a] for a in function.arg_names}, blocks, aligned)
    target = GPUTarget("cuda", capability, 32)
    return get_sass(triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 1}).asm["cubin"])


def load_kernel(name: str, source: str, folder: Path):
    """Return a kernel of Triton, from its text, which Triton reads from a file."""
    head = ["import triton", "import triton.language as tl", "from torch._inductor.runtime import triton_helpers"]
    head += ["from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math", "@triton.jit", ""]
    path = folder / f"{name}.py"
    path.write_text("\n".join(head) + source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _as_on_cuda(_device):
    from fewbit.runtime.compile.triton_store import writes_triton

    return writes_triton(DEVICE)


def _moved(graph: fx.GraphModule, examples):
    """Put a graph that was traced on the CPU on the device, and return its mode and inputs there."""
    traced_by = detect_fake_mode(examples)  # whose symbols sizes that vary are
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=traced_by.shape_env if traced_by else None)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": DEVICE}
            node.args = tuple(DEVICE if isinstance(a, torch.device) else a for a in node.args)

    class Interpreter(fx.Interpreter):
        def run_node(self, n):
            result = n.meta["val"] = super().run_node(n)
            if isinstance(result, torch.Tensor):
                n.meta["tensor_meta"] = _extract_tensor_metadata(result)
            return result

    with mode, torch.no_grad():
        inputs = [_there(x) for x, _ in zip(examples, graph.graph.find_nodes(op="placeholder"), strict=True)]
        Interpreter(graph).run(*inputs)
    return mode, inputs


def _there(x):
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
