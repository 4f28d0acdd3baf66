"""Damage of known kinds for fuzz tests: values at the edge of their types, JSON and tensors altered at random."""

import copy
import math
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

# A seed a draw: what Hypothesis draws itself, number by number, takes ten times as long.
randoms = st.integers(0, 2**32).map(Random)

EXTREMES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 8, 9, 16, 240, 255, 256, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -0.0, 1e308, 1e-320, math.nan, math.inf, True, False, None),
    *("", " ", "ab", "weight", "__class__", "float32", "int8", "bfloat16", "float64", "ä\u2028", "x" * 5000, "\x00"),
    *([], {}, [[]], [0], [-1], ["ab"], [2**40, 2**40], {"a": 1}),
)


def altered_json(random: Random, value: Any) -> Any:
    """Return a copy of a JSON value with one part of it replaced, dropped, repeated or swapped with another."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return random.choice(EXTREMES)
    holder, key = random.choice(places)
    kind = random.choice(["replace", "replace", "drop", "repeat", "swap", "rename", "nest", "nudge"])
    if kind == "drop":
        del holder[key]
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == "swap":
        other, there = random.choice(places)
        holder[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(holder[key])
    elif kind == "rename" and isinstance(holder, dict):
        holder[str(random.choice(EXTREMES))] = holder.pop(key)
    elif kind == "nest":
        for _ in range(random.choice([1, 10, 400])):
            holder[key] = [holder[key]]
    elif kind == "nudge" and type(holder[key]) in (int, float):
        holder[key] += random.choice([-1, 1, 8, 240, 0.5])
    else:
        holder[key] = random.choice(EXTREMES)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return what holds each part of a JSON value, at any depth, and under which key."""
    found: list[tuple[Any, Any]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += [(value, key), *_places(value[key])]
    return found


def altered_bytes(random: Random, content: bytes) -> bytes:
    """Return `content` with bytes changed, cut off, taken out or put in."""
    kind = random.choice(["flip", "flip", "cut", "take", "put"])
    at = random.randrange(len(content) + 1)
    if kind == "cut":
        return content[:at]
    if kind == "take":
        return content[:at] + content[at + random.choice([1, 8, 100]) :]
    if kind == "put":
        return content[:at] + random.randbytes(random.choice([1, 8, 100])) + content[at:]
    changed = bytearray(content)
    for _ in range(random.choice([1, 1, 3, 30])):
        changed[random.randrange(len(changed))] = random.choice([0, 1, 127, 128, 255, random.randrange(256)])
    return bytes(changed)


_DTYPES = (*(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool), *(torch.float16, torch.bfloat16))
_DTYPES = (*_DTYPES, torch.float32, torch.float64, torch.complex64)


def altered_tensor(random: Random, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `x` but for one thing: its size, dtype, layout, device or numbers."""
    kind = random.choice(
        ["cut", "longer", "empty", "retype", "view", "gaps", "repeats", "dimension", "scalar", "device", "sparse"]
        + ["numbers"] * 4
    )
    if x.layout != torch.strided or x.is_meta:  # altered before
        return x
    flat = x.reshape(-1)
    if kind == "cut":
        return flat[: random.randrange(flat.numel() + 1)].clone()
    if kind == "longer":
        return torch.cat([flat, flat.new_zeros(random.choice([1, 8, 500]))])
    if kind == "empty":
        return x.new_empty(random.choice([(0,), (0, 3), (*x.shape[:-1], 0)]))
    if kind == "retype":
        return x.to(random.choice(_DTYPES))
    if kind == "view":
        return flat.clone().view(torch.uint8) if flat.numel() else x
    if kind == "gaps":
        return torch.stack([x, x], -1)[..., 0]
    if kind == "repeats":
        return x[..., :1].expand(x.shape) if x.dim() and x.numel() else x
    if kind == "dimension":
        return x.unsqueeze(random.choice([0, -1]))
    if kind == "scalar":
        return x.new_zeros(())
    if kind == "device":
        return x.to("meta")
    if kind == "sparse":
        return x.to_sparse() if x.dim() else x
    return random_numbers(random, x)


def random_numbers(random: Random, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape and dtype of `x` with any bits."""
    size = x.numel() * x.element_size()
    same = random.choice([None, 0, 255, 127, 240])
    content = random.randbytes(size) if same is None else bytes([same]) * size
    if x.dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    return torch.frombuffer(bytearray(content), dtype=x.dtype).view(x.shape) if size else x.clone()


def surrounded(x: torch.Tensor, filling: int, margin: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of `x` in the middle of a larger piece of memory, and that memory: uint8, `filling` around it."""
    size = x.numel() * x.element_size()
    memory = torch.full((size + 2 * margin,), filling, dtype=torch.uint8)
    inside = memory[margin : margin + size].view(x.dtype).view(x.shape)
    inside.copy_(x)
    return inside, memory
