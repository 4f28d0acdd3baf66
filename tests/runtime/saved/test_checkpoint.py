"""Blocks that are computed again: forward passes, gradients, decisions and what is saved."""

import copy
import pickle
import re
from typing import Any

import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.runtime.layers.saver import Recent
from fewbit.runtime.saved.checkpoint import blocks_of
from fewbit.runtime.saved.inputs import Shared
from fewbit.tables import FewbitError
from small_modules import llama
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, activation: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation, self.dropout = activation, nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.two(self.dropout(self.activation(self.one(x))))
        return x + (y if scale is None else y * scale)


class Convolutional(nn.Module):
    """Convolution, batch normalization, ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.norm(self.conv(x)))


class Router(nn.Module):
    """Two of eight experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8, bias=False)
        self.experts = nn.Parameter(torch.randn(8, WIDTH, WIDTH) / WIDTH**0.5)
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
        self.chosen.append(chosen)
        y = torch.einsum("tw,tkwv->tkv", x, self.experts[chosen])
        return x + (weights.unsqueeze(-1) * y).sum(1)


def stack(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 4))


def gradients(model: nn.Module, *inputs: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    out = model(*inputs)
    (out if isinstance(out, Tensor) else out.loss).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    one, two = (torch.cat([g.flatten() for g in x]) for x in (found, exact))
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_forward_is_exact_and_gradients_are_those_of_rounded_inputs(bits: int | None, offload: bool) -> None:
    model, x = stack(*(Block(nn.GELU(), 0.1) for _ in range(3))), torch.randn(32, WIDTH)
    exact = gradients(model, x)
    torch.manual_seed(1)
    y = model(x)
    fewbit.checkpoint(model, bits=bits, offload=offload)
    found = gradients(model, x)
    torch.manual_seed(1)
    assert torch.equal(model(x), y)
    assert error(found, exact) <= {None: 0.0, 8: 0.02, 4: 0.3}[bits]
    assert (error(found, exact) > 0) == (bits is not None)


def test_blocks_save_their_inputs_in_codes() -> None:
    model, x = stack(*(Block(nn.GELU()) for _ in range(4))), torch.randn(256, WIDTH)
    sizes = {}
    for bits in (None, 8, 4):
        fewbit.checkpoint(model, bits=bits)
        sizes[bits] = memory.profile(model, x).total
    inputs = 256 * WIDTH * 4
    saved = {bits: size - (sizes[None] - 4 * inputs) for bits, size in sizes.items()}
    for bits in (8, 4):
        groups = 256 * (WIDTH // min(WIDTH, 256))
        assert saved[bits] == 4 * (256 * WIDTH * bits // 8 + groups * 4)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.LeakyReLU(0.1, True)])
def test_signs_of_relu_are_those_of_the_first_time(activation: nn.Module) -> None:
    model, x = stack(*(Block(copy.deepcopy(activation)) for _ in range(3))), torch.randn(64, WIDTH)
    exact = gradients(model, x)
    fewbit.checkpoint(model, bits=8)
    # Flipped signs would make it the root of the share of numbers that are near zero: .05 and more.
    assert error(gradients(model, x), exact) < 0.01


def test_running_statistics_change_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(Convolutional(), Convolutional()), nn.Flatten())
    x = torch.randn(4, 3, 8, 8)
    twin = copy.deepcopy(model)
    exact = gradients(twin, x)
    fewbit.checkpoint(model, bits=8)
    assert error(gradients(model, x), exact) < 0.05
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


def test_routers_choose_the_same_experts_again() -> None:
    router = Router()
    model, x = stack(router, Router()), torch.randn(512, WIDTH)
    fewbit.checkpoint(model, bits=2)
    gradients(model, x)
    first, second = router.chosen
    assert torch.equal(first, second)
    free = router.gate(x).softmax(-1)
    rounded = fewbit.quantizers.PerGroup(2).compress(x).decompress()
    assert not torch.equal(free.topk(2).indices, router.gate(rounded).softmax(-1).topk(2).indices)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.max(-1)[0],
        lambda x: torch.max(x, 1, keepdim=True).values[:, 0],
        lambda x: x.sort(dim=0, descending=True)[0].sum(-1),
        lambda x: torch.kthvalue(x, 3, 1).values,
        lambda x: x.gather(-1, x.argmax(-1, keepdim=True))[:, 0],
        lambda x: torch.where(x > 0, x, -x).sum(-1),
        lambda x: x.median(-1)[0],
    ],
)
def test_gradients_reach_what_was_chosen_first(choose: Any) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + choose(self.inner(x)).unsqueeze(-1)

    model, x = stack(Choosing(), Choosing()), torch.randn(64, WIDTH)
    exact = gradients(model, x)
    fewbit.checkpoint(model, bits=None)
    assert error(gradients(model, x), exact) == 0
    fewbit.checkpoint(model, bits=8)
    assert error(gradients(model, x), exact) < 0.02


def test_what_several_blocks_take_is_saved_once() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Block(nn.GELU()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.encoder(x)
            for layer in self.layers:
                x = layer(x, scale=scale)
            return x

    model, x = Decoder(), torch.randn(128, WIDTH)
    exact = gradients(model, x)
    fewbit.checkpoint(model, bits=8)
    assert error(gradients(model, x), exact) < 0.02
    codes = [s.bytes for s in memory.profile(model, x).saved if s.dtype == torch.uint8]
    assert len(codes) == 3  # of two blocks' inputs and of scale; the first block's input is no activation


def test_codes_of_one_stream_serve_no_block_and_no_layer_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 0
    monkeypatch.setattr("fewbit.runtime.tensors.graphs.current_stream", lambda _: current)
    shared, recent, x = Shared(), Recent(), torch.randn(8, WIDTH)
    codes = torch.zeros(4, dtype=torch.uint8)
    shared.note(x, None, [codes])
    recent.note(x, codes)
    assert shared.found(x) is not None
    assert recent.found(x) is codes
    current = 1
    assert shared.found(x) is None
    assert recent.found(x) is None


def test_a_lazily_negated_view_is_not_taken_for_what_it_is_a_view_of() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            z = torch.complex(x, self.inner(x))
            first, second = self.layers
            return first(z.imag) + second(z.conj().imag).square()

    model, x = Network(), torch.randn(128, WIDTH)
    exact = gradients(model, x)
    fewbit.checkpoint(model, bits=8)
    assert error(gradients(model, x), exact) < 0.02


def test_undoing_leaves_no_trace() -> None:
    model = stack(Block(nn.GELU()), Block(nn.ReLU()))
    before = {name: {*vars(module)} for name, module in model.named_modules()}
    done = fewbit.checkpoint(model)
    assert "2 modules save their inputs in 8 bits" in str(done)
    assert fewbit.revert(model) is model
    assert {name: {*vars(module)} for name, module in model.named_modules()} == before


def test_a_handle_of_an_earlier_call_leaves_the_later_one_to_be_reverted() -> None:
    model = stack(Block(nn.GELU()))
    before = {name: {*vars(module)} for name, module in model.named_modules()}
    earlier = fewbit.checkpoint(model, bits=8)
    fewbit.checkpoint(model, bits=4)
    within = {name: {*vars(module)} for name, module in model.named_modules()}
    earlier.undo()
    assert {name: {*vars(module)} for name, module in model.named_modules()} == within
    fewbit.revert(model)
    assert {name: {*vars(module)} for name, module in model.named_modules()} == before


def test_a_block_that_cannot_be_computed_again_leaves_the_blocks_before_it_as_they_were() -> None:
    model = nn.ModuleList([Block(nn.GELU()), Block(nn.GELU())])
    model[1].forward = lambda x: x
    with pytest.raises(FewbitError, match="has been replaced"):
        fewbit.checkpoint(model, blocks=["0", "1"])
    assert "forward" not in vars(model[0]) and "forward" in vars(model[1])


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_their_own_blocks_and_can_be_undone(twin: Any) -> None:
    model, x = stack(Block(nn.GELU()), Block(nn.GELU())), torch.randn(32, WIDTH)
    fewbit.checkpoint(model)
    other = twin(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not any(g.any() for g in gradients(other, x))
    assert any(g.any() for g in gradients(model, x))
    fewbit.revert(other)
    assert "forward" not in vars(other[1][0]) and "forward" in vars(model[1][0])


def test_converted_layers_in_blocks_keep_their_codes() -> None:
    model, x = stack(*(Block(nn.GELU()) for _ in range(2))), torch.randn(64, WIDTH)
    exact = gradients(model, x)
    fewbit.convert(model, level="L1")
    fewbit.checkpoint(model, bits=8)
    assert error(gradients(model, x), exact) < 0.3


class _Rectified(nn.Module):
    """A convolution whose input torch holds, the output of the block before."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.norm, self.function = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm(self.conv(x)))


@pytest.mark.parametrize("level", ["L1", "L2", "L3"])
@pytest.mark.parametrize("function", [F.relu, F.silu])
@pytest.mark.parametrize("asks", [False, True])
def test_converted_layers_save_alike_again_what_is_in_memory_anyway(level: str, function: Any, asks: bool) -> None:
    """What a ReLU or the caller holds is saved as it is, and when it came back from codes it was not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Rectified(function) for _ in range(3)))
    fewbit.convert(model, level=level)
    fewbit.checkpoint(model, bits=8, blocks=["0", "1", "2"])
    x = torch.randn(4, 8, 16, 16, requires_grad=asks)
    model(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_leaves_are_saved_as_they_are() -> None:
    """As embeddings that ask for gradients, the input of adapters: the graph holds them whatever is saved."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.GELU()))
    x = torch.randn(8, 16, WIDTH, requires_grad=True)
    for given in (x, x[:, 2:]):
        exact = torch.autograd.grad(model(given).square().sum(), x)
        fewbit.checkpoint(model, bits=2, blocks=["0"])
        assert all(map(torch.equal, torch.autograd.grad(model(given).square().sum(), x), exact))
        fewbit.revert(model)


def test_half_precision_and_strides() -> None:
    model = stack(Block(nn.GELU()), Block(nn.GELU())).bfloat16()
    x = torch.randn(WIDTH, 3, 32).bfloat16().transpose(0, 2)
    exact = gradients(model, x)
    fewbit.checkpoint(model)
    assert error(gradients(model, x), exact) < 0.05


class Apart(nn.Module):
    """Takes what has a layout of its own, and the dense one for rows of each length."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.is_nested else torch.sparse.mm(x, torch.ones(WIDTH, 4))


@pytest.mark.parametrize(
    "laid_out",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8])),
    ],
    ids=["coo", "csr", "jagged"],
)
def test_inputs_of_other_layouts_are_saved_as_they_are(laid_out: Any) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    block = nn.Sequential(Apart())
    gradients = []
    for _ in range(2):
        y = block(laid_out(x * 1))
        loss = sum(part.sum() for part in y.unbind()) if y.is_nested else y.sum()
        gradients.append(torch.autograd.grad(loss, x)[0])
        fewbit.checkpoint(block, bits=8, blocks=["0"])
    assert torch.equal(*gradients)


def test_autocast_and_empty_batches() -> None:
    model = stack(Block(nn.GELU()), Block(nn.GELU()))
    fewbit.checkpoint(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, torch.randn(16, WIDTH))
    assert all(g.isfinite().all() for g in found)
    assert not any(g.any() for g in gradients(model, torch.zeros(0, WIDTH)))


def test_numbers_that_are_not_finite_stay_in_their_samples() -> None:
    model, x = stack(Block(nn.GELU()), Block(nn.GELU())), torch.randn(8, WIDTH)
    x[3, 5] = torch.inf
    fewbit.checkpoint(model)
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    rest = [i for i in range(8) if i != 3]
    assert x.grad[rest].isfinite().all()


def test_without_gradients_nothing_is_saved() -> None:
    model = stack(Block(nn.GELU()))
    fewbit.checkpoint(model)
    with torch.no_grad():
        assert not model(torch.randn(4, WIDTH)).requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 9}, "bits is an integer from 1 to 8"),
        ({"bits": True}, "bits is an integer"),
        ({"blocks": "1.0"}, "blocks is a list of names"),
        ({"blocks": ["1.7"]}, "no module named '1.7'"),
        ({"blocks": ["1", "1.0"]}, "1.0 is within another"),
    ],
)
def test_errors_of_use_are_one_line(arguments: Any, message: str) -> None:
    with pytest.raises(FewbitError, match=re.escape(message)) as raised:
        fewbit.checkpoint(stack(Block(nn.GELU())), **arguments)
    assert "\n" not in str(raised.value)


def test_models_without_blocks_are_named() -> None:
    with pytest.raises(FewbitError, match="Linear has no lists of blocks"):
        fewbit.checkpoint(nn.Linear(2, 2))
    with pytest.raises(FewbitError, match=r"must be a torch\.nn\.Module"):
        fewbit.checkpoint(F.gelu)  # pyright: ignore[reportArgumentType]


def test_stages_are_divided_into_their_blocks() -> None:
    stages = nn.Sequential(*(nn.Sequential(Convolutional(), Convolutional()) for _ in range(2)))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), stages)
    assert fewbit.checkpoint(model).blocks == ("1.0.0", "1.0.1", "1.1.0", "1.1.1")
    assert "1" in blocks_of(model)


def test_few_samples_before_batch_normalization_are_saved_as_they_are() -> None:
    """A channel of 4 numbers has a small deviation by chance, and an error of all 8 bits is one of its gradient."""
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(8)]
    model, few, many = nn.Sequential(*blocks), torch.randn(4, 32, 1, 1), torch.randn(4, 32, 16, 16)
    exact = gradients(model, few)
    fewbit.checkpoint(model, bits=4)
    assert error(gradients(model, few), exact) == 0
    kept = memory.profile(model, many).total
    model.eval()  # by running statistics nothing is divided by what is rounded
    assert memory.profile(model, many).total == kept < many.nbytes * 8 / 4
    assert memory.profile(model, few).total < few.nbytes * 8 / 2


# ---- models of transformers ------------------------------------------------------------------------------------------


def loss_gradients(model: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("enabled", [False, True])
def test_blocks_of_transformers_are_computed_again(enabled: bool) -> None:
    model, ids = llama(layers=3, words=128, num_key_value_heads=2).train(), torch.randint(0, 128, (2, 32))
    exact = loss_gradients(model, ids)
    if enabled:
        model.gradient_checkpointing_enable()
    before = memory.profile(model, input_ids=ids, labels=ids).total
    done = fewbit.checkpoint(model)
    after = memory.profile(model, input_ids=ids, labels=ids).total
    assert after < before * (0.95 if enabled else 0.5)
    assert done.blocks == tuple(f"model.layers.{i}" for i in range(3))
    assert error(loss_gradients(model, ids), exact) < 0.02
    done.undo()
    assert model.model.layers[0].gradient_checkpointing == enabled
    assert error(loss_gradients(model, ids), exact) == 0


def test_attention_of_t5_is_not_told_that_its_block_is_computed_again() -> None:
    """Told so, it asks for a gradient of its zeros in place of a mask, and torch takes a kernel of other sums."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 128}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    ).train()
    ids, labels = torch.randint(3, 128, (4, 32)), torch.randint(3, 128, (4, 16))
    exact = model(input_ids=ids, labels=labels).logits
    model.gradient_checkpointing_enable()
    done = fewbit.checkpoint(model)
    assert torch.equal(model(input_ids=ids, labels=labels).logits, exact)
    assert done.blocks == tuple(f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2))


def test_experts_of_mixtral_are_those_of_the_first_time() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 128}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    model, ids = transformers.MixtralForCausalLM(config).train(), torch.randint(0, 128, (4, 64))
    exact = loss_gradients(model, ids)
    fewbit.checkpoint(model, bits=4)
    chosen: list[Tensor] = []
    topk = torch.topk

    def spying(*args: Any, **kwargs: Any) -> Any:
        result = topk(*args, **kwargs)
        chosen.append(result[1])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", spying)
        found = loss_gradients(model, ids)
    assert len(chosen) == 6  # three layers, twice; the second time in reverse order
    assert all(torch.equal(one, two) for one, two in zip(chosen[:3], chosen[:2:-1], strict=True))
    assert error(found, exact) < 0.2


@pytest.mark.deep
@pytest.mark.parametrize(("bits", "most"), [(8, 18.5), (4, 10.0)])
def test_the_checkpoints_of_a_long_context_fit(bits: int, most: float) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3Config"):
        pytest.skip("this release of transformers has no Qwen3")
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    with torch.device("meta"):
        model = transformers.Qwen3Model(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, 1 << 17, dtype=torch.int64)
    saved = {}
    for choice in (None, bits):
        fewbit.checkpoint(model, bits=choice)
        saved[choice] = memory.profile(model, input_ids=ids)
    layers = 36 * (1 << 17) * 4096 * 2
    rest = saved[None].total - layers
    assert saved[bits].total - rest <= most * 2**30


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: torch.amax(x, (0,)),
        lambda x: torch.aminmax(x, dim=-1).max,
        lambda x: torch.linalg.vector_norm(x, torch.inf, (0,)),
        lambda x: torch.masked.amin(x, 0, mask=x > 0),
    ],
    ids=["amax", "aminmax", "norm", "masked"],
)
def test_a_number_is_reduced_over_the_dimension_that_it_has_not(reduce):
    class Reduces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return reduce(x * 2)

    model, x = nn.ModuleDict({"block": Reduces()}), torch.tensor(3.0, requires_grad=True)
    fewbit.checkpoint(model, bits=8, blocks=["block"])
    model["block"](x).backward()
    assert x.grad == 2


@pytest.mark.parametrize("bits", [None, 8])
def test_an_argument_that_is_given_twice_is_one_object_again(bits):
    """As self-attention's query, key and value are, also where hooks around the checkpoint hand out copies."""
    seen: list[bool] = []

    class Attends(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            seen.append(query is key)
            return query.sin() * key

    model = nn.ModuleDict({"block": Attends()})
    fewbit.checkpoint(model, bits=bits, blocks=["block"])
    x = torch.randn(8, 16, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        y = model["block"](x, x)
    y.sum().backward()
    assert seen == [True, True]
