"""Value-aware quantization (V-Quant): few large values are kept exactly, the many small ones in few bits.

Training       `fewbit.convert(model, outliers=0.02, bits=3)` or `value_aware`: layers that save by V-Quant, forward
               exact; `ActivationAnnealing` changes bits and ratio by the epoch.
Inference      `quantize`, `calibrate`, `pack`: weights and activations in 3 to 5 bits; `search` finds the smallest
               configuration; `save` and `load` a packed model.

The quantizer itself is `fewbit.quantizers.Outlier`.
"""

from ..allocation.annealing import ActivationAnnealing
from ..convert.vquant import ValueAware, torch_again, value_aware
from ..layers.outlier_saver import OutlierSaver
from ..layers.value_aware_relu import ValueAwareReLU
from .activations import InputQuantizer
from .layers import PackedLayer, PackedTensor, TunedLayer
from .post_training import Configuration, calibrate, pack, quantize
from .search import Candidate, SearchResult, search
from .storage import load, save

__all__ = [
    "ActivationAnnealing",
    "Candidate",
    "Configuration",
    "InputQuantizer",
    "OutlierSaver",
    "PackedLayer",
    "PackedTensor",
    "SearchResult",
    "TunedLayer",
    "ValueAware",
    "ValueAwareReLU",
    "calibrate",
    "load",
    "pack",
    "quantize",
    "save",
    "search",
    "torch_again",
    "value_aware",
]
