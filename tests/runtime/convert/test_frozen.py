"""What no gradient needs is not kept, nor what torch holds anyway: nothing keeps more than torch does."""

import copy
import itertools

import fewbit
import pytest
import torch
import torch.utils.checkpoint
from fewbit import memory
from small_modules import Gated
from torch import nn

WAYS = {"L2": {"level": "L2"}, "L3": {"level": "L3"}, "3 bits and large values": {"outliers": 0.02}}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
IMAGE, ROWS = (4, 8, 12, 12), (4, 12, 32)


class Attention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(32, 4, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


CASES = {
    "Linear": (lambda: nn.Linear(32, 16), ROWS),
    "Conv1d": (lambda: nn.Conv1d(12, 4, 3), ROWS),
    "Conv2d": (lambda: nn.Conv2d(8, 4, 3), IMAGE),
    "Conv2d same": (lambda: nn.Conv2d(8, 4, 4, padding="same"), IMAGE),
    "Conv2d reflect": (lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
    "Conv2d replicate": (lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="replicate"), IMAGE),
    "Conv2d circular": (lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular"), IMAGE),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 3), (4, 2, 6, 6, 6)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(8, 4, 3), IMAGE),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), IMAGE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(32), ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(4, 8), IMAGE),
    "RMSNorm": (lambda: nn.RMSNorm(32), ROWS),
    "attention": (lambda: Attention(False), ROWS),
    "attention with weights": (lambda: Attention(True), ROWS),
}
KEEP_NOTHING = ("Linear", "Conv")  # where the weight is frozen: the gradient of the input takes the weight alone


def kept(model, x):
    return memory.profile(model, x).total


def frozen(model, wanted, training):
    """`model` with gradients for the parameters whose name is `wanted` alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted(name))
    return model.train(training)


FROZEN = {
    "all": lambda name: False,
    "but biases": lambda name: name.endswith("bias"),
    "none": lambda name: True,
    "but the first": lambda name: name.startswith("0."),
}


def gradients_of(model, x, *, seed=0):
    torch.manual_seed(seed)
    inputs = [t for t in (x, *model.parameters()) if t.requires_grad]
    y = model(x)
    return torch.autograd.grad(y, inputs, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))


@pytest.mark.sample(20)
@ways
@pytest.mark.parametrize("x_wanted", [True, False])
@pytest.mark.parametrize("freezing", ["all", "but biases", "none"])
@pytest.mark.parametrize(("make", "shape"), CASES.values(), ids=CASES)
def test_a_layer_keeps_no_more_than_torchs_and_nothing_for_a_frozen_weight(make, shape, freezing, x_wanted, way):
    if freezing == "all" and not x_wanted:
        pytest.skip("there is no gradient")
    for training in (True, False):
        torch.manual_seed(0)
        exact = frozen(make(), FROZEN[freezing], training)
        x = torch.randn(shape, requires_grad=x_wanted)
        ours = fewbit.convert(copy.deepcopy(exact), **way).model
        assert kept(ours, x) <= kept(exact, x)
        if freezing != "none" and type(exact).__name__.startswith(KEEP_NOTHING):
            assert kept(ours, x) == 0
            for a, b in zip(gradients_of(ours, x), gradients_of(exact, x), strict=True):
                torch.testing.assert_close(a, b)  # what takes no activation is exact


@pytest.mark.parametrize("freezing", ["but biases", "none"])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_that_is_not_by_zeros_keeps_nothing_of_its_own(mode, freezing):
    x = torch.randn(IMAGE, requires_grad=True)
    zeros, other = (nn.Conv2d(8, 4, 3, padding=(1, 2), padding_mode=padding) for padding in ("zeros", mode))
    for one in (zeros, other):
        frozen(one, FROZEN[freezing], True)
        fewbit.convert(one, level="L2")
    padded = 14 * 16 / (12 * 12)
    assert kept(other, x) <= kept(zeros, x) * padded
    exact = nn.Conv2d(8, 4, 3, padding=(1, 2), padding_mode=mode)
    exact.load_state_dict(other.state_dict())
    torch.testing.assert_close(gradients_of(other, x)[0], gradients_of(exact, x)[0])


# ---- chains ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("x_wanted", [True, False])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), IMAGE),
        (lambda: nn.Sequential(nn.BatchNorm1d(32), nn.LeakyReLU(0.1), nn.Linear(32, 16)), (48, 32)),
    ],
    ids=["Conv2d", "Linear"],
)
def test_a_fused_chain_keeps_what_its_gradients_need(make, shape, x_wanted, training):
    names = [name for name, _ in make().named_parameters()]
    for chosen in itertools.product((False, True), repeat=len(names)):
        wanted = {name for name, choice in zip(names, chosen, strict=True) if choice}
        if not wanted and not x_wanted:
            continue
        torch.manual_seed(0)
        exact = frozen(make(), wanted.__contains__, training)
        x = torch.randn(shape, requires_grad=x_wanted)
        ours = copy.deepcopy(exact)
        fewbit.convert(ours, fuse_preact=8)
        assert torch.equal(ours(x), exact(x))
        bytes_kept = kept(ours, x)
        assert bytes_kept <= kept(exact, x)
        codes = bytes_kept // x.numel() * 8 + bytes_kept % x.numel() * 8 // x.numel()
        if "0.weight" in wanted or "2.weight" in wanted or (x_wanted and training):
            assert codes == 8
        else:
            assert codes == (1 if "0.bias" in wanted or x_wanted else 0)
            if codes == 0:
                assert bytes_kept == 0
            for a, b in zip(gradients_of(ours, x), gradients_of(exact, x), strict=True):
                torch.testing.assert_close(a, b)  # the sign is all that they need, and it is exact


# ---- gated MLPs ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("glu", ["parts", "inputs", "exact", {"input_bits": 4}], ids=str)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_gated_mlp_keeps_no_more_than_torchs(glu, hooked):
    names = [name for name, _ in Gated(32, 64).named_parameters()]
    for x_wanted, *chosen in itertools.product((False, True), repeat=len(names) + 1):
        if not x_wanted and not any(chosen):
            continue
        wanted = {name for name, choice in zip(names, chosen, strict=True) if choice}
        torch.manual_seed(0)
        exact = frozen(Gated(32, 64), wanted.__contains__, True)
        x = torch.randn(ROWS, requires_grad=x_wanted)
        expected = gradients_of(exact, x)
        ours = copy.deepcopy(exact)
        if hooked:  # then the projections are called as modules
            ours.down_proj.register_forward_hook(lambda *_: None)
        ours = fewbit.convert(ours, glu=glu).model
        assert kept(ours, x) <= kept(exact, x)
        if glu == "exact":
            for a, b in zip(gradients_of(ours, x), expected, strict=True):
                torch.testing.assert_close(a, b)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen layer and two small matrices that learn, as `peft` wraps a Linear."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})

    def forward(self, x):
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + self.lora_B["default"](low) * 2.0


class Mixer(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(64), activation()
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return x + self.out_proj(self.act(self.q_proj(y) * torch.sigmoid(self.k_proj(y))))


def fine_tuned(activation):
    """Blocks of which nothing learns but LoRA's matrices in some places."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Mixer(activation), Mixer(activation), nn.Linear(64, 8))
    model.requires_grad_(False)
    for block in (model[1], model[2]):
        block.q_proj, block.out_proj = LoRA(block.q_proj), LoRA(block.out_proj)
    return model


@pytest.mark.sample(3)
@ways
@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_on_layers_keeps_less_and_nothing_in_frozen_ones(activation, dtype, way):
    exact = fine_tuned(activation).to(dtype)
    model = copy.deepcopy(exact)
    x = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    state, trained = list(model.state_dict()), [name for name, p in model.named_parameters() if p.requires_grad]
    report = fewbit.convert(model, **way)
    assert list(model.state_dict()) == state
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    assert torch.equal(model(x), exact(x))
    assert {"1.q_proj.base_layer", "1.q_proj.lora_A.default", "1.k_proj"} <= {row.name for row in report.replaced}
    by_module = memory.profile(model, x).by_module()
    assert not {"0", "3", *(n for n in by_module if n.endswith(("base_layer", "k_proj")))} & set(by_module)
    assert kept(model, x) < kept(exact, x)
    fewbit.convert(model, 8, **way)
    for ours, theirs in zip(gradients_of(model, x), gradients_of(exact, x), strict=True):
        assert (ours - theirs).norm() < 0.1 * theirs.norm()  # the step of 8 bits is 1/255 of a group's range
    fewbit.revert(model)
    assert kept(model, x) == kept(exact, x)


def test_lora_in_gated_mlps_beside_a_level():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(32), Gated(32, 64)
            self.mlp.requires_grad_(False)
            self.mlp.up_proj, self.mlp.down_proj = LoRA(self.mlp.up_proj), LoRA(self.mlp.down_proj)

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(32, 32).requires_grad_(False), Block(), Block(), nn.Linear(32, 4))
    x = torch.randn(8, 16, 32)

    def bytes_of(**arguments):
        model = copy.deepcopy(exact)
        fewbit.convert(model, 4, **arguments)
        assert torch.equal(model(x), exact(x))
        assert all(g.isfinite().all() for g in gradients_of(model, x))
        return kept(model, x)

    together, gated, level = bytes_of(glu="parts", level="L2"), bytes_of(glu="parts"), bytes_of(level="L2")
    assert together < min(gated, level) and max(gated, level) < kept(exact, x)


# ---- what autograd holds anyway --------------------------------------------------------------------------------------

KEPT_BY_TORCH = {
    "relu": torch.relu,
    "relu_": lambda x: nn.functional.relu(x, inplace=True),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: torch.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "exp": torch.exp,
}


class Called(nn.Module):
    """Layers after functions that code calls by name, which convert does not see."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.third, self.function = nn.Linear(8 * 36, 8), [function]

    def forward(self, x):
        x = self.function[0](self.first(2 * x))  # not what the caller holds
        return self.third(self.function[0](self.second(x)).flatten(1))


@pytest.mark.parametrize("function", KEPT_BY_TORCH.values(), ids=KEPT_BY_TORCH)
@pytest.mark.parametrize("way", [{"level": "L1"}, {"level": "L2"}, {"outliers": 0.02}], ids=str)
def test_what_a_function_of_torch_keeps_is_not_copied(function, way):
    exact = Called(function)
    model = copy.deepcopy(exact)
    x = torch.randn(4, 3, 10, 10)
    fewbit.convert(model, **way)
    for _ in range(2):
        ours = dict(zip(dict(model.named_parameters()), gradients_of(model, x), strict=True))
    theirs = dict(zip(dict(exact.named_parameters()), gradients_of(exact, x), strict=True))
    assert kept(model, x) < kept(exact, x)
    torch.testing.assert_close(ours["second.weight"], theirs["second.weight"])
    assert not torch.equal(ours["first.weight"], theirs["first.weight"])  # the image is kept in few bits
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), model.third.bias)[0], torch.full((8,), 4.0))
