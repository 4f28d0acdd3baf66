"""Layers and blocks in few bits: `fewbit.nn`."""

from .gated_mlp import GatedMLP

__all__ = ["GatedMLP"]
