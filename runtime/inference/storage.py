"""Packed models in files: the codes as in memory, in the safetensors format, with the quantizers as metadata.

    save(model, "model.safetensors")
    load(Net(), "model.safetensors")      an architecture; its own weights do not matter

Needs `safetensors`: pip install safetensors.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.files import atomic_write, check_writable, reason
from ..quantizers import Outlier, OutlierCompressed
from ..tensors.spec import TensorSpec
from ..tensors.traits import DTYPES, name_of
from .activations import InputQuantizer
from .layers import PARTS, PackedLayer, weights_of
from .post_training import replaced

_FORMAT = "fewbit-vquant-1"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a packed model's tensors to a safetensors file; a tensor that has several names is written once.

    Raises:
        FewbitError: the model has no packed layer, the file cannot be written, or safetensors is not installed.

    Example:
        fewbit.vquant.quantize(model, bits=4, weight_ratio=0.01)
        fewbit.vquant.calibrate(model, [x])
        fewbit.vquant.save(fewbit.vquant.pack(model), "model.safetensors")
    """
    files = _safetensors()
    layers = {name: _metadata(layer) for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}
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
    metadata = json.dumps({"format": _FORMAT, "layers": layers, "aliases": aliases})
    check_writable(path)
    with atomic_write(path) as stream:
        stream.write(files.save(tensors, metadata={"fewbit": metadata}))


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Replace, in place, layers of `model` by the packed ones in a file, and read all its other tensors from there.

    Args:
        model: the architecture before `quantize`.
        path: what `save` wrote.

    Returns:
        `model`, or the new layer if `model` is itself one; in evaluation mode.

    Raises:
        FewbitError: the file cannot be read, was not written by `save`, or does not fit the model.

    Example:
        twin = copy.deepcopy(model)
        fewbit.vquant.quantize(model, bits=4, weight_ratio=0.01)
        fewbit.vquant.calibrate(model, [x])
        fewbit.vquant.save(fewbit.vquant.pack(model), "model.safetensors")
        fewbit.vquant.load(twin, "model.safetensors")
    """
    shown_path, file = _name(path), _read(path)
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {shown(model)}")
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = file.layers.keys() - modules.keys()
    if missing:
        raise FewbitError(f"{shown_path} has a layer {shown(min(missing))} that the model has not")
    made: dict[int, nn.Module] = {}
    originals: dict[int, nn.Module] = {}
    try:
        for name, metadata in file.layers.items():
            layer = modules[name]
            if id(layer) not in made:
                made[id(layer)] = _built(layer, metadata, file.tensors, f"{name}." if name else "")
                originals[id(made[id(layer)])] = layer
        root = replaced(model, lambda _, layer: made.get(id(layer), layer))
        try:
            _check_fit(root.state_dict(), file.tensors)
        except FewbitError:
            replaced(root, lambda _, layer: originals.get(id(layer), layer))
            raise
        root.load_state_dict(file.tensors)
    except FewbitError as error:
        raise FewbitError(f"{shown_path} does not fit the model: {error}") from None
    return root.eval()


@dataclass(frozen=True, eq=False)
class _File:
    """The contents of a file of `save`: metadata of each packed layer, and the tensors by all their names."""

    layers: dict[str, Any]
    tensors: dict[str, Tensor]


def _read(path: str | os.PathLike[str]) -> _File:
    """Return the contents of the file `path`; raise `FewbitError` if `save` did not write it."""
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "pt") as file:
            metadata = json.loads((file.metadata() or {})["fewbit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        layers, aliases = metadata["layers"], metadata["aliases"]
        strings = all(isinstance(other, str) for other in aliases.values())
        if metadata["format"] != _FORMAT or not strings or aliases.keys() & tensors.keys():
            raise ValueError
        return _File(dict(layers), tensors | {name: tensors[other] for name, other in aliases.items()})
    except OSError as error:
        raise FewbitError(f"cannot read {_name(path)}: {reason(error)}") from None
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError):  # nested deep: Runtime
        raise FewbitError(f"{_name(path)} is not what fewbit.vquant.save writes") from None


def _name(path: object) -> str:
    return str(path) if isinstance(path, str | os.PathLike) and str(path).isprintable() else shown(path)


def _check_fit(own: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Raise FewbitError unless `tensors` match the state_dict `own` in names, shapes and kinds of dtype."""
    if own.keys() != tensors.keys():
        lacking, unknown = own.keys() - tensors.keys(), tensors.keys() - own.keys()
        raise FewbitError(f"it lacks {shown(min(lacking))}" if lacking else f"it has an unknown {shown(min(unknown))}")
    for name, tensor in tensors.items():
        kinds = ("floating-point" if t.is_floating_point() else name_of(t.dtype) for t in (tensor, own[name]))
        there, here = (f"{kind} {tuple(t.shape)}" for kind, t in zip(kinds, (tensor, own[name]), strict=True))
        if there != here:
            raise FewbitError(f"{shown(name)} is {here} in the model, {there} in the file")


def _metadata(layer: PackedLayer) -> dict[str, Any]:
    """Return the metadata of a packed layer, which `_built` reads."""
    weights, q = dict[str, Any](), layer.input
    for name, packed in layer.tensors():
        own = packed.quantizer
        values = None if own.value_dtype is None else name_of(own.value_dtype)
        quantizer = {"bits": own.bits, "ratio": own.ratio, "value_dtype": values}
        weights[name] = {"shape": list(packed.shape), "dtype": name_of(packed.dtype), "quantizer": quantizer}
    input = None if q is None else {"bits": q.bits, "ratio": q.ratio, "dtype": name_of(q.value_dtype)}
    return {"weights": weights, "input": input}


def _built(layer: nn.Module, metadata: Any, tensors: dict[str, Tensor], prefix: str) -> PackedLayer:
    """Return the packed form of `layer` from its metadata; raise `FewbitError` if they do not match."""
    weights, input = _fields(prefix, metadata, "weights", "input")
    names = weights_of(layer)
    if not isinstance(weights, dict) or not names or weights.keys() != set(names):
        accepted = ", ".join(names) or "none"
        raise FewbitError(f"the packed weights of {shown(prefix)} are {accepted}, in the file {shown(weights)}")
    packed = {name: _codes(getattr(layer, name), weights[name], tensors, f"{prefix}packed.{name}.") for name in names}
    if input is None:
        return PackedLayer(layer, packed, None)
    bits, ratio, dtype = _fields(f"{prefix}input", input, "bits", "ratio", "dtype")
    return PackedLayer(layer, packed, InputQuantizer(bits, ratio, _dtype(dtype)))


def _codes(weight: Tensor, metadata: Any, tensors: dict[str, Tensor], prefix: str) -> OutlierCompressed:
    """Return the codes of a layer's `weight` from its metadata."""
    shape, dtype, quantizer = _fields(prefix, metadata, "shape", "dtype", "quantizer")
    bits, ratio, values = _fields(f"{prefix}quantizer", quantizer, "bits", "ratio", "value_dtype")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape) or tuple(shape) != weight.shape:
        raise FewbitError(f"{prefix[:-1]} is {tuple(weight.shape)}, in the file {shown(shape)}")
    made = Outlier(bits, ratio, value_dtype=None if values is None else _dtype(values))
    parts = {part: tensors.get(prefix + part) for part in PARTS}
    missing = [prefix + part for part, tensor in parts.items() if tensor is None]
    if missing:
        raise FewbitError(f"it lacks {shown(missing[0])}")
    form = TensorSpec(
        weight.shape, torch.empty(weight.shape, device="meta").stride(), _dtype(dtype), torch.device("cpu")
    )
    codes = OutlierCompressed(made, form, **parts)  # pyright: ignore[reportArgumentType]
    try:
        codes.check_contents()
    except FewbitError as error:
        raise FewbitError(f"{prefix[:-1]}: {error}") from None
    if codes.offsets.numel() != made.count(form.numel):
        raise FewbitError(f"{prefix[:-1]} has {codes.offsets.numel()} outliers, not those of a ratio of {ratio}")
    return codes


def _fields(name: str, metadata: Any, *names: str) -> list[Any]:
    """Return the values of the metadata; raise `FewbitError` unless it is a dictionary of exactly these names."""
    if not isinstance(metadata, dict) or metadata.keys() != set(names):
        raise FewbitError(f"the description of {shown(name)} holds {', '.join(names)}, in the file {shown(metadata)}")
    return [metadata[name] for name in names]


def _dtype(name: Any) -> torch.dtype:
    """Return the floating-point dtype of that name; raise `FewbitError` if the name is not in `DTYPES`."""
    known = {name_of(dtype): dtype for dtype in DTYPES}
    if not isinstance(name, str) or name not in known:
        raise FewbitError(f"a dtype is one of {', '.join(known)}, not {shown(name)}")
    return known[name]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise FewbitError("packed models in files need safetensors: pip install safetensors") from error
    return safetensors.torch
