"""What torch promises of `torch.utils.checkpoint`, as a table: each case by torch's, ours, ours with codes, L2 inside
of either, and a plan that recomputes. Beside each stands the same network without one."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import fewbit
import pytest
import torch
from fewbit.runtime.plan.fitted import _Planned
from fewbit.runtime.plan.places import Places
from fewbit.runtime.plan.ways.blocks import computed_again
from fewbit.runtime.saved.recompute import Recompute
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

WIDTH = 32


class Block(nn.Module):
    """A block that does whatever a case wants with its two layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function, self.calls = function, 0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, x, *args, **kwargs)


class Net(nn.Module):
    """A layer, so that the block's input is an activation, and the block."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Block(function)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(self.first(x), *args, **kwargs)


# ---- ways ------------------------------------------------------------------------------------------------------------


def by_torch(net: Net) -> None:
    forward = partial(Block.forward, net.block)
    vars(net.block)["forward"] = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def checkpointed(net: Net, way: str) -> Iterator[None]:
    """Let the block be computed again by one of the ways."""
    if way.endswith("L2"):
        fewbit.convert(net, level="L2")
    if way.startswith("plan"):
        with Places(net, _Planned()), computed_again(net, ["block"], 8):
            yield
        return
    if way.startswith("torch"):
        by_torch(net)
    else:
        fewbit.checkpoint(net, bits=8 if "8" in way else None, blocks=["block"])
    yield


WAYS = ("torch", "exact", "8 bits", "torch, L2", "exact, L2", "8 bits, L2", "plan, 8 bits")


# ---- cases: what the block does, and what is done with the network -------------------------------------------------


def mlp(block: Block, x: Tensor) -> Tensor:
    return block.two(torch.tanh(block.one(x)))


def once(net: Net, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of one step."""
    y = net(x)
    return [y, *gradients(net, y)]


def gradients(net: Net, y: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), [*net.parameters()], allow_unused=True, **options))


def keywords(block: Block, x: Tensor, n: int, *, scale: Tensor, other: Tensor, name: str = "") -> Tensor:
    assert (n, name) == (3, "a")
    return block.two(torch.tanh(block.one(x)) * scale + other)


def with_keywords(net: Net, x: Tensor) -> list[Tensor]:
    y = net(x, 3, scale=torch.ones(WIDTH), other=net.first(x).sin(), name="a")
    return [y, *gradients(net, y)]


def collecting(block: Block, x: Tensor, into: list[Tensor], by_name: dict[str, Tensor]) -> Tensor:
    into.append(block.one(x).mean())
    by_name["x"] = x.sum()
    return block.two(into[-1] * x)


def into_containers(net: Net, x: Tensor) -> list[Tensor]:
    into, by_name = [], {}
    y = net(x, into, by_name)
    assert len(into) == 1 and [*by_name] == ["x"]
    return [y, *gradients(net, y + into[0] + by_name["x"])]


@dataclass
class Output:
    """An output of a class of its own."""

    y: Tensor
    parts: dict[str, tuple[Tensor, ...]]


def structured(block: Block, x: Tensor) -> Output:
    y = torch.tanh(block.one(x))
    return Output(block.two(y), {"parts": (y, y.sin())})


def with_structure(net: Net, x: Tensor) -> list[Tensor]:
    out = net(x)
    return [out.y, *gradients(net, out.y + sum(out.parts["parts"]))]


def without_gradient(net: Net, x: Tensor) -> list[Tensor]:
    y = net.block(x)
    return [y, *torch.autograd.grad(y.square().sum(), [*net.block.parameters()])]


def several_passes(net: Net, x: Tensor) -> list[Tensor]:
    y = net(x)
    first = gradients(net, y, retain_graph=True)
    part = torch.autograd.grad(y[0].sum(), net.block.two.weight, retain_graph=True)
    last = gradients(net, y)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    return [y, *last, *part]


def penalized(net: Net, x: Tensor) -> list[Tensor]:
    y = net(x.requires_grad_())
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return [y, *gradients(net, slope)]


class Twice(torch.autograd.Function):
    """Unpacks what it saves twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (ctx.saved_tensors[0] + ctx.saved_tensors[0]) * grads[0]


def unpacking_twice(block: Block, x: Tensor) -> Tensor:
    return block.two(Twice.apply(block.one(x)))  # pyright: ignore[reportArgumentType]


def dropping(block: Block, x: Tensor) -> Tensor:
    return block.two(F.dropout(block.one(x), 0.5) * torch.rand_like(x))


def with_random_state(net: Net, x: Tensor) -> list[Tensor]:
    return [*once(net, x), torch.rand(3)]


def with_autocast(net: Net, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    return [y, *gradients(net, y.float())]


def nested(block: Block, x: Tensor) -> Tensor:
    inner: Any = checkpoint(lambda t: torch.sin(block.one(t)).relu() * t, x, use_reentrant=False)
    return block.two(inner)


def selective(block: Block, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    inner: Any = checkpoint(
        lambda t: torch.sin(F.linear(t, block.one.weight)), x, use_reentrant=False, context_fn=contexts
    )
    return block.two(inner)


def inside_of_torchs(net: Net, x: Tensor) -> list[Tensor]:
    y: Any = checkpoint(lambda t: net(t.sin()).cos(), x, use_reentrant=False)
    return [y, *gradients(net, y)]


def backward_within(block: Block, x: Tensor) -> Tensor:
    y = block.one(x)
    (slope,) = torch.autograd.grad(y.sin().sum(), y, retain_graph=True)
    return block.two(y.cos() * slope.detach())


def transposed(block: Block, x: Tensor) -> Tensor:
    return block.two(torch.tanh(block.one(x.transpose(0, 1).view(-1, WIDTH))))


def of_a_transpose(net: Net, x: Tensor) -> list[Tensor]:
    y = net.block(net.first(torch.stack([x, x, x])).transpose(0, 1))
    return [y, *gradients(net, y)]


def of_the_first_tokens(net: Net, x: Tensor) -> list[Tensor]:
    y = net.block(net.first(torch.stack([x] * 16, 1))[:, :2])  # such as LED's encoder hands on, 32 of 512
    return [y, *gradients(net, y)]


def in_place(block: Block, x: Tensor) -> Tensor:
    return block.two(block.one(x).mul_(2).sin_())


def changing_its_input(block: Block, x: Tensor) -> Tensor:
    F.silu(x, inplace=True)  # a function that decides nothing, and is called directly otherwise
    torch._foreach_mul_([x], 2.0)
    x[0] += 1
    return block.two(block.one(x).sin())


def partial_outputs(net: Net, x: Tensor) -> list[Tensor]:
    out = net(x)
    return [out.y, *gradients(net, out.parts["parts"][0])]


CASES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {  # of a block and a step; and the ways that cannot do it
    "one step": (mlp, once, ()),
    "keywords and numbers": (keywords, with_keywords, ()),
    "containers": (collecting, into_containers, ()),
    "outputs in structures": (structured, with_structure, ()),
    "one of several outputs": (structured, partial_outputs, ()),
    "no input with gradient": (mlp, without_gradient, ()),
    "several backward passes": (mlp, several_passes, ()),
    "second derivative": (mlp, penalized, ("L2",)),  # compressed layers have none
    "unpacking twice": (unpacking_twice, once, ("torch",)),  # refuses that
    "random numbers": (dropping, with_random_state, ()),
    "autocast": (mlp, with_autocast, ()),
    "nested": (nested, once, ()),
    "context_fn": (selective, once, ()),
    "inside of torch's": (mlp, inside_of_torchs, ()),
    "backward pass within": (backward_within, once, ("L2", "8")),  # in the forward pass, from what is rounded
    "strides": (transposed, of_a_transpose, ()),
    "wide gaps": (mlp, of_the_first_tokens, ()),
    "in place": (in_place, once, ()),
    "in place on its input": (changing_its_input, several_passes, ("torch", "plan")),  # torch raises an error
}


@pytest.mark.sample(29)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_promises_of_torchs_checkpoint(case: str, way: str) -> None:
    function, step, without = CASES[case]
    if any(part in way for part in without):
        pytest.skip("not promised")
    torch.manual_seed(0)
    net, x = Net(function), torch.randn(4, WIDTH)
    twin = copy.deepcopy(net)
    torch.manual_seed(1)
    exact = step(twin, x.clone())
    with checkpointed(net, way):
        torch.manual_seed(1)
        found = step(net, x.clone())
    assert torch.equal(found[0], exact[0])
    # A checkpoint of torch's within a block decides anew, from rounded numbers.
    most = 0.5 if "L2" in way else 0.0 if "8" not in way else 0.3 if case == "nested" else 0.05
    for mine, theirs in zip(found[1:], exact[1:], strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert (mine - theirs).norm() <= most * theirs.norm()


# ---- what a step leaves behind ---------------------------------------------------------------------------------------

PLAIN = ("torch", "exact", "8 bits", "plan, 8 bits")


@pytest.mark.parametrize("way", PLAIN)
def test_it_ends_as_soon_as_all_is_there(way: str) -> None:
    def function(block: Block, x: Tensor) -> Tensor:
        y = torch.tanh(block.one(x))
        block.calls += 1
        return y + 1

    for stops in (True, False):
        net = Net(function)
        with checkpointed(net, way), set_checkpoint_early_stop(stops):
            net(torch.randn(4, WIDTH)).sum().backward()
        assert net.block.calls == (1 if stops else 2)


@pytest.mark.parametrize("way", PLAIN)
def test_hooks_of_modules_are_called_both_times(way: str) -> None:
    net, seen = Net(mlp), []
    net.block.one.register_forward_hook(lambda *_: seen.append("one"))
    net.block.register_forward_pre_hook(lambda *_: seen.append("block"))
    with checkpointed(net, way):
        net(torch.randn(4, WIDTH)).sum().backward()
    assert seen == ["block", "one", "one"]  # the block's own hooks are outside of what is computed again


@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("fails_at", [1, 2])
def test_exceptions_pass_and_leave_nothing(way: str, fails_at: int) -> None:
    def function(block: Block, x: Tensor) -> Tensor:
        block.calls += 1
        y = torch.relu(block.one(x))
        if block.calls == fails_at:
            raise KeyError("in the block")
        return block.two(y)

    net, x = Net(function), torch.randn(4, WIDTH)
    with checkpointed(net, way):
        with pytest.raises(KeyError, match="in the block"):
            net(x).sum().backward()
        state = torch.get_rng_state()
        net.zero_grad()
        net(x).sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
    y = torch.relu(x)  # no mode is left, that would record
    assert y._version == 0 and all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("bits", [None, 8])
def test_the_second_time_leaves_containers_and_objects_as_the_first_left_them(bits: int | None) -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys, self.is_updated = [torch.zeros(2, WIDTH)], {0: False}

    def function(block: Block, x: Tensor, into: list[Tensor], cache: Cache) -> Tensor:
        into.append(x.mean())
        if not cache.is_updated[0]:  # as the cross attention of a decoder, which would take another way again
            cache.keys[0] = torch.cat([cache.keys[0], block.one(x)])
            cache.is_updated[0] = True
        return block.two(cache.keys[0].sin())

    net = Net(function)
    fewbit.checkpoint(net, bits=bits, blocks=["block"])
    into, cache = [], Cache()
    net(torch.randn(4, WIDTH), into, cache).sum().backward()
    assert len(into) == 1 and cache.is_updated[0] and cache.keys[0].shape == (6, WIDTH)


def test_a_block_may_begin_in_place_or_change_what_it_is_lent() -> None:
    def function(block: Block, x: Tensor, *, count: Tensor) -> Tensor:
        count.add_(1)
        return block.two(block.one(x.mul_(3)) / count)

    net, x = Net(function), torch.randn(4, WIDTH)
    exact = gradients(net, net(x, count=torch.zeros(())))
    fewbit.checkpoint(net, bits=8, blocks=["block"])
    count = torch.zeros(())
    found = gradients(net, net(x, count=count))
    assert count == 1
    assert all((a - b).norm() < 0.05 * b.norm() for a, b in zip(found, exact, strict=True))


def test_a_call_is_gone_with_its_graph() -> None:
    class Tag:
        def __call__(self) -> None: ...

    net, tag = Net(lambda block, x, tag: block.two(block.one(x).relu())), Tag()
    fewbit.checkpoint(net, bits=8, blocks=["block"])
    gone = weakref.ref(tag)
    gc.disable()  # codes that wait for a collection raise the peak
    try:
        net(torch.randn(4, WIDTH), tag).sum().backward()
        del tag
        assert gone() is None
    finally:
        gc.enable()


def test_a_block_that_saves_other_tensors_again_is_named() -> None:
    def function(block: Block, x: Tensor) -> Tensor:
        block.calls += 1
        return block.two(block.one(x) if block.calls == 1 else x)

    net = Net(function)
    fewbit.checkpoint(net, bits=None, blocks=["block"])
    with pytest.raises(RuntimeError, match="Block saved other tensors when it was computed again") as raised:
        net(torch.randn(4, WIDTH)).sum().backward()
    assert "\n" not in str(raised.value)


# ---- decisions -------------------------------------------------------------------------------------------------------

DECIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "relu by keyword": lambda h: torch.relu(input=h),
    "relu_": lambda h: (h * 1).relu_(),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.2),
    "relu6": F.relu6,
    "hardtanh_": lambda h: F.hardtanh_(h * 1, -0.5, 0.5),
    "threshold": lambda h: F.threshold(h, 0.1, -1.0),
    "clamp": lambda h: h.clamp(-0.3, max=0.4),
    "clamp_": lambda h: (h * 1).clamp_(min=0.1),
    "clamp by a tensor": lambda h: torch.clamp(h, min=h.detach().mean()),
    "abs": torch.abs,
    "norm": lambda h: h.norm(1, -1, keepdim=True) * h,
    "greatest magnitude": lambda h: h / h.norm(float("inf"), -1, keepdim=True),
    "softshrink": F.softshrink,
    "hardswish": F.hardswish,
    "prelu": lambda h: F.prelu(h, torch.tensor(0.1)),
    "rrelu": lambda h: F.rrelu(h, training=True) + F.dropout(h),  # and the random numbers after it
    "maximum": lambda h: torch.maximum(h, -h),
    "max by axis": lambda h: h + torch.max(h, axis=-1, keepdim=True)[0],  # pyright: ignore
    "amax": lambda h: h - torch.amax(input=h, dim=(0, 1), keepdim=True),
    "max of all": lambda h: h * h.max(),
    "median of all": lambda h: h - h.median(),
    "aminmax": lambda h: h * h.aminmax(dim=-1, keepdim=True).max,
    "sort": lambda h: h.sort(-1, descending=True)[0],
    "msort": torch.msort,
    "topk": lambda h: h.scatter(-1, torch.topk(input=h, k=4, dim=-1).indices, 0.0),
    "kthvalue": lambda h: h - h.kthvalue(3, -1, True).values,
    "quantile": lambda h: h - h.quantile(0.3, -1, keepdim=True),
    "cummax": lambda h: h.cummax(-1).values,
    "argmax": lambda h: h * F.one_hot(h.argmax(-1), WIDTH),
    "bucketize": lambda h: h * torch.bucketize(h, torch.linspace(-1, 1, 5)),
    "integers that are changed in place": lambda h: h * (4 * h.detach()).long().add_(3),
    "unique": lambda h: h * torch.unique(h.detach().round()).numel(),
    "max_pool1d": lambda h: F.max_pool1d(h, 2).repeat_interleave(2, -1),
    "adaptive_max_pool2d": lambda h: h * F.adaptive_max_pool2d(h[None], 4)[0].repeat(h.shape[0] // 4, WIDTH // 4),
    "a detached mask": lambda h: h * (h.detach() > 0),
    "where": lambda h: torch.where(torch.gt(input=h, other=0.0), h, -h),
    "a comparison in place": lambda h: h * (h * 1).detach().gt_(0.0),
    "round": lambda h: h * (4 * h).round().detach(),
    "a number of Python": lambda h: h * 2 if h[0, 0].item() > 0 else h,
    "h[h > 0]": lambda h: h * h[h > 0].sum(),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "grid_sample": lambda h: (
        h
        * F.grid_sample(h[None, None].detach(), h.unflatten(-1, (-1, 2))[None], align_corners=False)[0, 0].repeat(1, 2)
    ),
    "rrelu_": lambda h: F.rrelu_(h * 1, training=True),
    "logit": lambda h: torch.logit(h.sigmoid(), eps=0.3),
    "smallest magnitude": lambda h: torch.linalg.vector_norm(h, -float("inf"), -1)[:, None] * h.sign(),
    "remainder": lambda h: h * torch.remainder(h.detach(), 2.0),
    "fmod_": lambda h: h * (h * 1).detach().fmod_(1.5),
    "fake_quantize": lambda h: h * torch.fake_quantize_per_tensor_affine(h.detach(), 0.5, 0, -20, 20),
    "frexp": lambda h: h * torch.frexp(h.detach()).mantissa,
    "atan2": lambda h: h * torch.atan2(h, -h.abs() - 1).detach(),
    "angle": lambda h: h * torch.angle(torch.complex(h.detach() - 3, h.detach())),
    "copysign": lambda h: h * torch.copysign(torch.ones(()), h),
    "scatter_reduce": lambda h: h.new_ones(1, WIDTH).scatter_reduce(0, torch.zeros(64, WIDTH).long(), h, "amax"),
    "scatter_reduce of itself": lambda h: h.scatter_reduce(1, torch.zeros(64, WIDTH).long(), h, "amin"),
    "index_reduce_": lambda h: (h * 0.1).index_reduce_(0, torch.arange(64) // 8, h, "amin"),
    "segment_reduce": lambda h: torch.segment_reduce(h, "max", lengths=torch.full((8,), 8)).repeat(8, 1),
    "cdist": lambda h: torch.cdist(h, h.flip(0), p=float("inf"))[:, :WIDTH],
    "a gamma": lambda h: torch._standard_gamma(h.exp()),
    "a composite": lambda h: h * F.triplet_margin_loss(h, h.roll(1, 0), h.roll(2, 0), reduction="none")[:, None],
}


@pytest.mark.parametrize("name", DECIDING)
def test_decisions_are_those_of_the_first_time(name: str) -> None:
    x, weight = torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    results = []
    for recompute in (None, Recompute(fewbit.layers.QuantizerSaver(fewbit.quantizers.PerGroup(8)))):
        leaf = x.clone().requires_grad_()
        function = lambda t: DECIDING[name](t * 1.5)  # noqa: E731
        torch.manual_seed(1)
        y = function(leaf * 1) if recompute is None else recompute(function, leaf * 1)
        (y * weight).sum().backward()
        results.append((y, leaf.grad, torch.rand(3)))
    (y, exact, random), (found_y, found, found_random) = results
    assert torch.equal(y, found_y) and torch.equal(random, found_random)
    assert exact is not None and found is not None
    # Without the decisions it is .08 (relu6) to .41 (quantile); the rest comes of factors that are rounded.
    assert (found - exact).norm() < 0.02 * exact.norm()
