"""Float8 training: its operands are saved once, in their 8 bits, and plans know what they cost."""

import fewbit
import pytest
import torch
from fewbit import FewbitError, Plan
from plan_cases import Gated, batch, fixed, gradient, planned_by
from step_peak import measured_peak
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F


@pytest.fixture
def float8():
    """A model and a batch in bfloat16, whose MLPs multiply in float8, as torchao emulates it."""
    torchao = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model, inputs = Gated().bfloat16(), batch(16)
    inputs["x"] = inputs["x"].bfloat16()
    config = torchao.Float8LinearConfig(emulate=True)
    return torchao.convert_to_float8_training(
        model, module_filter_fn=lambda _, name: "mlp" in name, config=config
    ), inputs


def test_the_operand_in_place_of_the_input(float8):
    """Half the bytes of a bfloat16, the same gradient bit for bit, no more memory than predicted; by its file too."""
    model, inputs = float8
    exact = gradient(model, inputs)
    plan, count = planned_by(model, inputs, lambda option: option.method == "float8")
    own = [choice for choice in plan.choices if choice.method == "float8"]
    assert count == len(own) == 4, "gate and up share theirs"
    assert all(choice.nbytes == choice.exact_bytes // 2 + 4 for choice in own) and plan.error == 0
    fitted = fewbit.fit(model, plan=Plan.from_text(plan.to_text()))
    assert torch.equal(gradient(model, inputs), exact)
    assert 0.9 * plan.peak.total <= measured_peak(model, inputs) + fixed(plan) <= plan.peak.total
    fitted.undo()
    wrong = next(choice.target for choice in plan.choices if "act_fn" in choice.target)
    with pytest.raises(FewbitError, match="no layer of torchao's"):
        fewbit.fit(model, plan=plan.with_choice(wrong, "float8"))


def test_a_tensor_that_others_save_too_stays(float8):
    """The first layer's input is that of a plain layer beside it; the operand would be a second copy."""
    model, inputs = float8

    class Beside(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.other = inner, nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x):
            return self.inner(x) + self.other(x)

    for layer in model.layers:
        layer.mlp = Beside(layer.mlp)
    plan, _ = planned_by(model, inputs, lambda option: option.method == "float8")
    assert [c.target for c in plan.choices if c.method == "float8"] == [
        f"layers.{i}.mlp.inner.down_proj:0" for i in range(2)
    ]


class SavesFloat8(Function):
    """Linear, as the layers of TransformerEngine: it saves its operands in float8, their bytes as uint8."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.scale = x.detach().abs().amax() / 448
        codes = (x / ctx.scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(codes.view(torch.uint8), weight)
        return F.linear(codes.to(x.dtype) * ctx.scale, weight)

    @staticmethod
    def backward(ctx, grad):
        codes, weight = ctx.saved_tensors
        x = codes.view(torch.float8_e4m3fn).to(grad.dtype) * ctx.scale
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Engine(nn.Linear):
    def forward(self, x):
        return SavesFloat8.apply(x, self.weight)


def test_what_a_layer_saves_in_float8_itself_is_not_saved_again():
    """No choice names it, its bytes are in the plan's peak, and hooks leave the gradient of it as it is."""
    model, inputs = Gated(), batch(16)
    for layer in model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Engine(*reversed(getattr(layer.mlp, name).weight.shape), bias=False))
    plan, _ = planned_by(model, inputs, lambda option: False)
    assert not any("_proj" in choice.target for choice in plan.choices)
    fewbit.fit(model, plan=plan)
    assert 0.98 * plan.peak.total <= measured_peak(model, inputs) + fixed(plan) <= plan.peak.total
    fewbit.revert(model)
    exact = gradient(model, inputs)
    fewbit.fit(model, plan=plan.with_choice("head:0", "groups", 4))
    assert 0 < (gradient(model, inputs) - exact).norm() < 0.1 * exact.norm()
