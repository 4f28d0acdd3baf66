"""Whether `timm` can be imported here; `make zoo` installs it, with torchvision, in a folder of its own."""

import os

import torch


def torchvision_imports() -> None:
    """Import `torchvision`, which `timm` needs, where its compiled half cannot be loaded.

    The wheel of torchvision is built against torch for CUDA; with torch for the CPU alone its Python half refuses to be
    imported because two compiled operations are missing. Their schemas are declared here, without an implementation:
    nothing in the zoo calls them, and a call would say that there is none.
    """
    try:
        import torchvision
    except RuntimeError:
        for schema in (
            "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        ):
            torch.library.define(f"torchvision::{schema.partition('(')[0]}", schema[schema.index("(") :])
        import torchvision  # noqa: F401


def why_no_timm() -> str:
    """Return why `timm` cannot be imported, "" if it can."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        torchvision_imports()
        import timm  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""
