"""Layers and blocks in few bits: `fewbit.nn`."""

from .glu.block import GatedMLP

__all__ = ["GatedMLP"]
