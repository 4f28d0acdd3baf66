"""Lightning with the callback: conversion, plans, and that a resumed training goes on bit for bit."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import fewbit
import pytest
import torch
from fewbit.tables import FewbitError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")
from fewbit.integrations.lightning import FewbitCallback  # noqa: E402


class Module(lightning.LightningModule):
    """Three layers on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 32, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=32)


def train(folder: Path, callback: Any, epochs: int = 2, resume: Path | None = None) -> tuple[Any, Path]:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module()
    trainer.fit(module, data(), ckpt_path=None if resume is None else str(resume))
    path = folder / f"{epochs}.ckpt"
    trainer.save_checkpoint(path)
    return module, path


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


OF_FORWARD = {"inputs": lambda batch: batch[:1], "loss": lambda y, batch: F.cross_entropy(y, batch[1])}
METHODS = {"layers": {"method": {"level": "L2"}}, "a plan": {"error": 0.05, **OF_FORWARD}}


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_resumed_training_goes_on_with_what_it_learned(options: Any, tmp_path: Path) -> None:
    callback = FewbitCallback(**options)
    torch.manual_seed(1)
    _, path = train(tmp_path, callback, epochs=1)
    assert callback.preparation.report is not None or callback.preparation.fitted is not None
    again = FewbitCallback(**options)
    module, _ = train(tmp_path, again, epochs=2, resume=path)
    assert weights(module).isfinite().all()
    if callback.preparation.fitted is not None:
        assert again.preparation.fitted is not None
        assert again.preparation.fitted.plan.choices == callback.preparation.fitted.plan.choices


def test_bytes_are_measured_where_forward_and_loss_are_given(tmp_path: Path) -> None:
    callback = FewbitCallback(method={"level": "L2"}, **OF_FORWARD)
    train(tmp_path, callback, epochs=1)
    assert callback.kept is not None and 0 < callback.kept.saved <= callback.kept.peak


def test_a_plan_without_a_loss_is_refused() -> None:
    with pytest.raises(FewbitError, match="takes inputs= and loss="):
        FewbitCallback(memory="1GB")


def test_a_plan_that_is_not_used_is_told_and_no_hook_is_left(tmp_path: Path) -> None:
    class Direct(Module):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for kind in (Module, Direct):
        module, callback = kind(), FewbitCallback(memory="1GiB", **OF_FORWARD)
        trainer = lightning.Trainer(max_steps=1, callbacks=[callback], default_root_dir=tmp_path, **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(module, data())
        assert any("does not call self" in str(one.message) for one in told) == (kind is Direct)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    fitted = fewbit.fit(Module().net, torch.randn(8, 32), memory="1GiB", loss=lambda y: y.square().mean())
    pickle.loads(pickle.dumps(fitted.model))  # although a lambda is none that can be pickled
