"""One training step of a model: its forward pass, its loss and the parameters whose gradients count."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...tables import FewbitError
from ..memory.peak import gradients_aside
from ..memory.values import as_on_gpu, values_for
from ..tensors.traits import is_abstract, sum_of_squares

Loss = Callable[[Any], Tensor]
LEAST_SAMPLES = 4  # of a part of a batch


@dataclass(frozen=True)
class Step:
    """A model, the batch and the loss.

    Attributes:
        model: any module in training mode or not; a step leaves its gradients, buffers and random state as they were.
        inputs, keywords: of its forward pass.
        loss: of its output; None takes the output named `loss`, or the output itself if it is one number.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    loss: Loss | None = None

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether parameters are DTensors, of which each rank has a part."""
        return any(type(p).__name__ == "DTensor" for p in self.model.parameters())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def forward(self) -> tuple[Tensor, Any]:
        """Run the forward pass; return the loss and the model's output, which a training loop holds until the end.

        Raises:
            FewbitError: the output is no loss and there is no function to make one, or nothing requires a gradient.
        """
        output = self.output()
        loss = self.loss_of(output)
        if not loss.requires_grad:
            raise FewbitError("the loss does not require a gradient: nothing is saved, and there is nothing to plan")
        if not self.parameters:
            raise FewbitError(f"no parameter of this {type(self.model).__name__} is trained: there is nothing to plan")
        return loss, output

    def output(self) -> Any:
        """Run the model; return its output."""
        return self.model(*self.inputs, **{**without_cache(self.model), **self.keywords})

    def loss_of(self, output: Any) -> Tensor:
        """Return the loss of the model's output."""
        if self.loss is not None:
            found = self.loss(output)
        else:
            found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(found, Tensor) or found.numel() != 1 or found.is_complex():
            raise FewbitError(
                "the model's output is no loss: give loss=, a function of the output that returns one real number "
                "(on the command line, as the third of what the function returns)"
            )
        return found.reshape(())  # a view: nothing that the step itself would not take

    @property
    def samples(self) -> int:
        """Samples in the batch: the size of the first dimension of the first tensor."""
        leaves = [t for t in tree_leaves((self.inputs, self.keywords)) if isinstance(t, Tensor) and t.dim()]
        return len(leaves[0]) if leaves else 1

    def with_samples(self, count: int) -> "Step":
        """Return the step with another number of samples: the given ones, repeated, and the first of them."""
        return self._with_rows(lambda x: torch.cat([x] * -(-count // self.samples))[:count])

    def halves(self) -> tuple["Step", ...]:
        """Return the step with either half of its samples; none if there is one sample, or the loss is that of the
        whole batch alone."""
        middle = self.samples // 2
        if middle < 1:
            return ()
        first, second = self._with_rows(lambda x: x[:middle]), self._with_rows(lambda x: x[middle : 2 * middle])
        try:
            with self.apart():
                for half in (first, second):
                    half.forward()
        except Exception:  # a user's loss may do anything with an output that it is not made for
            return ()
        return first, second

    def part(self) -> "Part":
        """Return some samples of the batch; all of them, where they are few or have no loss of their own."""
        samples, count = self.samples, max(LEAST_SAMPLES, self.samples // 4)
        if samples < 2 * LEAST_SAMPLES:
            return Part(self)
        few = self._with_rows(lambda x: x[torch.arange(count, device=x.device) * samples // count])
        try:
            (whole, square), (own, square_of_few) = self._loss_and_square(), few._loss_and_square()
        except Exception:  # a user's loss may do anything with an output that it is not made for
            return Part(self)
        times = samples / count
        if not (whole > 0 and own > 0 and square > 0):
            return Part(self)
        adds = times if whole / own > times**0.5 else 1.0  # a sum over samples, or their mean
        ratio = adds**2 * square_of_few / square
        return Part(few, ratio / times, ratio)

    def _loss_and_square(self) -> tuple[float, float]:
        """Return the loss, and the squared norm of its gradient."""
        with self.apart():
            loss, _ = self.forward()
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return float(loss.detach()), sum(sum_of_squares(g) for g in found if g is not None)

    def _with_rows(self, change: Callable[[Tensor], Tensor]) -> "Step":
        """Return the step with all changed that has a row for each sample."""
        samples = self.samples

        def changed(leaf: Any) -> Any:
            return change(leaf) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples else leaf

        inputs, keywords = tree_map(changed, (self.inputs, dict(self.keywords)))
        return replace(self, inputs=inputs, keywords=keywords)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave gradients, buffers and the random state as they were at the end of this block."""
        if torch.is_inference_mode_enabled():
            raise FewbitError("a step is planned by its gradients, which torch.inference_mode() has not: leave it")
        with ExitStack() as stack:
            for mode in values_for(self.model, (self.inputs, self.keywords)):
                stack.enter_context(mode)
            if self.is_abstract:
                stack.enter_context(as_on_gpu())
            stack.enter_context(gradients_aside(self.parameters, (self.inputs, self.keywords)))
            stack.enter_context(_buffers_aside(self.model))
            devices = {t.device for t in self._tensors() if t.device.type == "cuda"}
            stack.enter_context(torch.random.fork_rng([*devices]))
            stack.enter_context(torch.enable_grad())
            yield

    @property
    def device(self) -> torch.device:
        """Of the parameters, or of the first input where there are none."""
        return next((t.device for t in self._tensors()), torch.device("cpu"))

    @property
    def is_abstract(self) -> bool:
        """Whether the model or the batch has no values."""
        return any(map(is_abstract, self._tensors()))

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from (t for t in tree_leaves((self.inputs, self.keywords)) if isinstance(t, Tensor))


@dataclass(frozen=True)
class Part:
    """Some samples of a step's batch, whose gradients tell the errors of the whole.

    Noise of different samples is independent, and in the mean over k times as many samples its square is 1 / k; what
    all samples have in common stays. Both are relative to a squared gradient, which changes with the batch too.

    Attributes:
        step: of these samples.
        noise, bias: by which squared relative errors of this step are multiplied to be those of the whole batch.
    """

    step: Step
    noise: float = 1.0
    bias: float = 1.0


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the keyword by which a model of transformers makes no cache of keys and values, which no loss depends on.

    Trainers leave the cache out, so a plan does too, and a model that is fitted. Others take no such keyword.
    """
    if getattr(getattr(model, "config", None), "use_cache", False) is not True:
        return {}
    peft_base: Any = getattr(model, "get_base_model", None)
    base = model if peft_base is None else peft_base()
    return {"use_cache": False} if "use_cache" in signature(type(base).forward).parameters else {}


def shapes_of(batch: Any) -> list[torch.Size]:
    """Return the shapes of the tensors of a batch."""
    return [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def stretched(batch: Any, shapes: Sequence[torch.Size]) -> Any:
    """Return a batch whose tensors are repeated, and cut, to these shapes; as it is if it is of another kind."""
    own = shapes_of(batch)
    if len(own) != len(shapes) or any(len(a) != len(b) or 0 in a for a, b in zip(own, shapes, strict=True)):
        return batch
    left = iter(shapes)

    def stretch(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape == (shape := next(left)):
            return leaf
        for dim, size in enumerate(shape):
            leaf = leaf.index_select(dim, torch.arange(size, device=leaf.device) % leaf.shape[dim])
        return leaf

    return tree_map(stretch, batch)


@contextmanager
def _buffers_aside(model: nn.Module) -> Iterator[None]:
    """Restore the buffers at the end, such as the running statistics of batch normalization."""
    before = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before.items():
                buffer.copy_(values)
