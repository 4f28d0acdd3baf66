"""Packed models in files: the codes as they lie in memory, in the safetensors format, with what they mean beside.

    save(model, "model.safetensors")
    load(Net(), "model.safetensors")      an architecture, its own weights whatever they are

Needs `safetensors`: pip install 'fewbit[safetensors]'.
"""

import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from ....tables import FewbitError
from ....tables.files import atomic_write, check_writable, reason
from ...quantizers import Outlier, OutlierCompressed
from ...quantizers.common import Form, name_of
from .activations import InputQuantizer
from .layers import PARTS, PackedLayer, PackedTensor
from .post_training import replaced

_FORMAT = "fewbit-vquant-1"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a packed model's tensors to a safetensors file; a tensor that has several names is written once.

    Raises:
        FewbitError: the model has no packed layer, the file cannot be written, or safetensors is not installed.
    """
    files = _safetensors()
    layers = {name: _told(layer) for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}
    if not layers:
        raise FewbitError("the model has no packed layer: call pack(model) first")
    tensors: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key in first and tensor.numel():
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.contiguous()
    told = json.dumps({"format": _FORMAT, "layers": layers, "aliases": aliases})
    check_writable(path)
    with atomic_write(path) as stream:
        stream.write(files.save(tensors, metadata={"fewbit": told}))


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Replace, in place, layers of `model` by the packed ones in a file, and read all its other tensors from there.

    Args:
        model: the architecture before `quantize`.
        path: what `save` wrote.

    Returns:
        `model`, or the new layer if `model` is itself one; in evaluation mode.

    Raises:
        FewbitError: the file cannot be read, is of something else, or does not fit the model.
    """
    from safetensors import SafetensorError, safe_open

    _safetensors()
    shown = os.fspath(path)
    try:
        with safe_open(shown, "pt") as file:
            told = json.loads((file.metadata() or {})["fewbit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        layers, aliases = dict(told["layers"]), dict(told["aliases"])
    except OSError as error:
        raise FewbitError(f"cannot read {shown}: {reason(error)}") from None
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise FewbitError(f"{shown} is not what fewbit.vquant.save writes") from None
    tensors |= {name: tensors[other] for name, other in aliases.items()}
    made: dict[int, nn.Module] = {}

    def new(name: str, layer: nn.Module) -> nn.Module:
        if name in layers and id(layer) not in made:
            made[id(layer)] = _built(layer, layers[name], tensors, f"{name}." if name else "")
        return made.get(id(layer), layer)

    try:
        missing = set(layers) - {name for name, _ in model.named_modules(remove_duplicate=False)}
        if missing:
            raise FewbitError(f"{shown} has a layer {min(missing)!r} that the model has not")
        root = replaced(model, new)
        root.load_state_dict(tensors)
    except (KeyError, RuntimeError) as error:
        line = " ".join(str(error).split())
        raise FewbitError(f"{shown} does not fit the model: {line}") from None
    return root.eval()


def _told(layer: PackedLayer) -> dict[str, Any]:
    """Return what a packed layer is, but for its tensors."""
    q = layer.input
    return {
        "weights": {name: _weight(packed) for name, packed in layer.tensors()},
        "input": None if q is None else {"bits": q.bits, "ratio": q.ratio, "dtype": name_of(q.value_dtype)},
    }


def _weight(packed: PackedTensor) -> dict[str, Any]:
    q = packed.quantizer
    values = None if q.value_dtype is None else name_of(q.value_dtype)
    return {
        "shape": list(packed.shape),
        "dtype": name_of(packed.dtype),
        "quantizer": {"bits": q.bits, "ratio": q.ratio, "value_dtype": values},
    }


def _built(layer: nn.Module, told: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> PackedLayer:
    """Return the packed form of `layer` that `_told` told of."""
    packed = {}
    for name, weight in told["weights"].items():
        values = weight["quantizer"]["value_dtype"]
        quantizer = Outlier(**{**weight["quantizer"], "value_dtype": values and getattr(torch, values)})
        shape = torch.Size(weight["shape"])
        if getattr(layer, name).shape != shape:
            raise RuntimeError(f"{prefix}{name} is {tuple(getattr(layer, name).shape)}, in the file {tuple(shape)}")
        strides = torch.empty(shape, device="meta").stride()
        form = Form(shape, strides, getattr(torch, weight["dtype"]), torch.device("cpu"))
        packed[name] = OutlierCompressed(quantizer, form, *(tensors[f"{prefix}packed.{name}.{p}"] for p in PARTS))
    q = told["input"]
    input = None if q is None else InputQuantizer(q["bits"], q["ratio"], getattr(torch, q["dtype"]))
    return PackedLayer(layer, packed, input)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise FewbitError("packed models in files need safetensors: pip install 'fewbit[safetensors]'") from error
    return safetensors.torch
