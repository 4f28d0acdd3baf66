"""Training settings: one frozen object with all of them, so that a run can be described and repeated."""

from dataclasses import dataclass

from ...tables import FewbitError


@dataclass(frozen=True)
class Size:
    """Size of a transformer.

    Attributes:
        width: features per character; a multiple of `heads`. The MLP has four times as many.
        depth: number of blocks.
        heads: of each attention.
        context: maximum number of characters that attention sees.
    """

    width: int = 96
    depth: int = 3
    heads: int = 4
    context: int = 64


@dataclass(frozen=True)
class Settings:
    """Training settings.

    Attributes:
        steps: updates, at least 1.
        seed: seed of the weights and the batches, 0 to 2^63 − 1.
        batch: windows of text per step.
        learning_rate: the largest; it rises over the first twentieth of the steps and then falls along a cosine.
        largest_gradient: maximum norm of the gradient of all weights together; longer gradients are clipped to it.
        size: size of the model; `size.context` is the length of a window.
        validation_windows: number of windows on which the validation loss is measured.

    Raises:
        FewbitError: steps or seed is out of range.
    """

    steps: int = 700
    seed: int = 0
    batch: int = 16
    learning_rate: float = 6e-3
    largest_gradient: float = 1.0
    size: Size = Size()
    validation_windows: int = 1024

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise FewbitError(f"steps must be 1 or more, not {self.steps}")
        if not 0 <= self.seed < 2**63:
            raise FewbitError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


# By model name. GPT-2's learning rate is the best of 0.0015, 0.003 and 0.006, on a seed not used otherwise.
SETTINGS = {
    "gpt2": Settings(
        steps=300,
        learning_rate=3e-3,
        size=Size(width=128, depth=4, heads=4, context=128),
        validation_windows=512,
    ),
    "small": Settings(),
}
