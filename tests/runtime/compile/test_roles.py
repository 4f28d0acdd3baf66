"""Roles of values, read from the joint graphs that AOTAutograd traces."""

import operator

import pytest
import torch
from compiled import few_bits, roles_in
from fewbit.runtime.compile.roles import Role
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten
CURVES = {"gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "cube": lambda x: x**3}


class TestClassify:
    def test_inputs_of_products_are_linear_and_their_results_too(self):
        found = roles_in(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8))
        assert found[aten.addmm] == {Role.LINEAR}

    @pytest.mark.parametrize("function", CURVES.values(), ids=CURVES)
    def test_what_goes_through_a_curve_is_nonlinear(self, function):
        found = roles_in(lambda x: function(x.sin()).sin(), torch.randn(4, 8, requires_grad=True))
        assert Role.NONLINEAR in found[aten.sin]

    def test_the_input_of_relu_s_comparison_is_linear_and_its_result_a_bit(self):
        layers = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
        found = roles_in(nn.Sequential(*layers), torch.randn(4, 8))
        assert found[aten.relu] == {Role.LINEAR} and found[aten.le] == {Role.BOOLEAN}

    def test_under_an_exponential_are_scores_and_not_probabilities(self):
        layer = nn.Linear(8, 8)
        found = roles_in(lambda x: torch.softmax(layer(x), -1) @ x.T, torch.randn(4, 8))
        assert found[aten.addmm] == found[aten.sub] == {Role.EXPONENT}
        assert found[aten.div] == {Role.PROBABILITIES}

    @pytest.mark.parametrize(("place", "role"), [(0, Role.SCORES), (1, Role.SCORES), (2, Role.ATTENTION)])
    def test_queries_and_keys_give_the_scores_again_while_values_and_output_do_not(self, place, role):
        def attend(*inputs):
            q, k, v = (x.neg() if i == place else x for i, x in enumerate(inputs))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        found = roles_in(attend, *(torch.randn(2, 2, 16, 64, requires_grad=True) for _ in range(3)))
        assert found[aten.neg] == {role}
        assert found[operator.getitem] == {Role.ATTENTION, Role.STATISTIC}  # the output and the log-sum-exp

    def test_values_that_come_from_a_curve_of_what_would_be_saved_are_nonlinear(self):
        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, torch.tanh(v.neg()), is_causal=True)

        found = roles_in(attend, *(torch.randn(2, 2, 16, 64, requires_grad=True) for _ in range(3)))
        assert found[aten.neg] == {Role.NONLINEAR}

    def test_statistics_and_what_is_made_of_them(self):
        found = roles_in(nn.LayerNorm(64), torch.randn(16, 64, requires_grad=True))
        assert found[aten.rsqrt] == {Role.STATISTIC}

    def test_masks_have_no_floating_ancestor(self):
        def masked(x, lengths):
            mask = torch.where(torch.arange(8) < lengths[:, None], 0.0, float("-inf"))
            return (x.sin() + mask).exp()

        found = roles_in(masked, torch.randn(4, 8, requires_grad=True), torch.tensor([1, 2, 3, 4]))
        assert Role.MASK in found[aten.where]

    def test_integers_and_truth_values(self):
        def chosen(x):
            values, _ = x.sin().max(-1)
            return values * (x.sum(-1) > 0)

        found = roles_in(chosen, torch.randn(4, 8, requires_grad=True))
        assert Role.BOOLEAN in found[aten.gt]


class Field(nn.Module):
    """A field that a network learns at coordinates that it holds, or is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("coordinates", torch.randn(256, 8))
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, target, coordinates=None):
        found = self.layers(self.coordinates if coordinates is None else coordinates)
        return F.mse_loss(found, target)


def test_data_in_a_buffer_are_data_where_no_product_reads_an_input():
    """They counted as weights, so that all that came of them was saved exactly."""
    model, target, reports = Field(), torch.randn(256, 1), []
    for coordinates in ((), (model.coordinates.clone(),)):
        few_bits(model, reports=reports)(target, *coordinates).backward()
    assert reports[0].nbytes == reports[1].nbytes < 0.3 * reports[0].exact_graph_bytes
