"""`fewbit bench`: speed and memory of fewbit beside alternatives, measured on this machine.

Each bench file holds its measurement and its command; timing.py holds the shared timing loop, report.py the shared
output. A bench is imported when it runs, so that this module needs neither torch nor matplotlib.
"""

import click

from ...cli.lazy import LazyGroup


@click.group(
    "bench",
    cls=LazyGroup,
    package=__name__,
    lazy={
        "activation": "Time activations, forward and backward, beside torch's own modules.",
        "alternatives": "Train in every way that saves memory: kept, peak, time and error.",
        "compiled": "Train small transformers compiled, with few bits and without: memory, time and error.",
        "glu": "Measure a training step of a gated MLP: memory, and time beside eager torch.",
        "glu-bits": "Measure how a gated MLP's bits are best divided among its parts.",
        "instructions": "Count instructions and bytes an element in the CUDA kernels; needs no GPU.",
        "kernel-times": "Time every kernel on one large tensor beside a copy of it.",
        "kernels": "Compile all CUDA kernels and show their registers and spills; needs no GPU.",
        "levels": "Train a ResNet-50 exactly and at ActNN's levels: time, memory, largest batch.",
        "losses": "Train with the loss in chunks of tokens and with torch's: time, memory, gradient.",
        "outliers": "Time V-Quant beside PerGroup, and its training steps beside torch's.",
        "preact": "Time pre-activation layers and networks (BLPA) beside torch's modules.",
        "quantizers": "Time ActNN's per-group quantizer beside copies of the same memory.",
        "solve": "Time the compiler beside other solvers of the same problems.",
    },
)
def command() -> None:
    """Measure speed on this machine.

    Example: fewbit bench activation gelu silu --dtype bfloat16
    """
