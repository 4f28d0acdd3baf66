"""Quantized inference by V-Quant: weights and activations in 3 to 5 bits, the few large ones in 16."""

from .activations import InputQuantizer
from .layers import PackedLayer, PackedTensor, TunedLayer
from .post_training import Configuration, calibrate, pack, quantize
from .search import Candidate, SearchResult, search
from .storage import load, save

__all__ = [
    "Candidate",
    "Configuration",
    "InputQuantizer",
    "PackedLayer",
    "PackedTensor",
    "SearchResult",
    "TunedLayer",
    "calibrate",
    "load",
    "pack",
    "quantize",
    "save",
    "search",
]
