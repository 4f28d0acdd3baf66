"""A plan leaves a model as it was, whatever the model is and whatever raises; a user's own conversions stay."""

import copy
import json

import fewbit
import numpy as np
import pytest
import torch
from fewbit import FewbitError, Plan
from fewbit.runtime.plan.step import shapes_of, stretched, without_cache
from in_threads import in_threads
from plan_cases import Net, batch
from small_modules import llama
from torch import nn
from torch.overrides import _get_current_function_mode_stack


@pytest.fixture(scope="module")
def plan():
    torch.manual_seed(0)
    return fewbit.plan(Net(2), batch(), error=0.2, optimizer="sgd")


def structure(model):
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [(type(m), sorted(vars(m)), [len(vars(m)[name]) for name in hooks]) for m in model.modules()]


def mean_square(y):
    return y.square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("activation", [nn.ReLU(True), nn.LeakyReLU(0.2, True), nn.ELU(inplace=True)])
def test_activations_in_place_are_planned(activation):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), activation, nn.Conv2d(8, 8, 3))
    assert fewbit.plan(model, torch.randn(8, 3, 8, 8), loss=mean_square, error=0.3).peak.total > 0


def test_activations_that_are_functions_of_a_module_are_planned():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1)
    assert fewbit.plan(model, torch.randn(4, 16, 32), loss=mean_square, error=0.3).peak.total > 0


@pytest.mark.parametrize("how", [{"level": "L2"}, {"bits": 3}])
def test_a_users_conversion_stays_through_plan_fit_and_undo(how):
    model = Net(2)
    fewbit.convert(model, **how)
    before = structure(model)
    plan = fewbit.plan(model, batch(), error=0.2, optimizer="sgd")
    assert structure(model) == before
    fitted = fewbit.fit(model, plan=plan)
    assert {type(m) for m in model.modules()} >= {kind for kind, *_ in before}
    fitted.undo()
    assert structure(model) == before
    fewbit.fit(model, plan=plan)
    fewbit.revert(model)
    assert structure(model) == structure(Net(2))


@pytest.mark.parametrize("call", [2, 7, 12])
def test_what_a_loss_raises_leaves_nothing_behind(call):
    model, calls = Net(2), iter(range(1, 100))
    before = structure(model)

    def loss(output):
        if next(calls) == call:
            raise KeyboardInterrupt
        return output["loss"]

    with pytest.raises(KeyboardInterrupt):
        fewbit.plan(model, batch(), loss=loss, error=0.2)
    assert structure(model) == before


def test_an_interrupted_forward_pass_leaves_no_hooks_on(plan):
    model = Net(2)
    fewbit.fit(model, plan=plan)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch())
    handle.remove()
    assert _get_current_function_mode_stack() == []
    assert isinstance(nn.Linear(8, 8)(torch.randn(300, 8)).grad_fn._saved_mat1, torch.Tensor)


def test_an_older_handle_is_harmless(plan):
    model = Net(2)
    before = structure(model)
    older, newer = fewbit.fit(model, plan=plan), fewbit.fit(model, plan=plan)
    within = structure(model)
    older.undo()
    assert structure(model) == within
    newer.undo()
    assert structure(model) == before


def test_a_plan_for_a_fitted_model_leaves_it_fitted(plan):
    model = Net(2)
    fitted = fewbit.fit(model, plan=plan)
    within = structure(model)
    fewbit.plan(model, batch(), memory="1GB")
    assert structure(model) == within
    fitted.undo()
    assert structure(model) == structure(Net(2))


def test_a_copy_is_reverted_by_itself(plan):
    model = Net(2)
    fewbit.fit(model, plan=plan)
    twin = copy.deepcopy(model)
    fewbit.revert(twin)
    assert structure(twin) == structure(Net(2))
    assert structure(model) != structure(twin)


def test_threads_share_no_pass(plan):
    model = Net(2)
    fitted = fewbit.fit(model, plan=plan)

    def train(_):
        for _ in range(3):
            model(**batch())["loss"].backward()

    in_threads(train, range(3))
    assert fitted.unknown == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["choices"][0].update(bits="4"),
        lambda d: d["choices"][0].update(nbytes=-5),
        lambda d: d["choices"][0].update(noise=float("inf")),
        lambda d: d["choices"][0].update(target="layers.77", method="recompute", bits=None),
        lambda d: d["choices"].append(d["choices"][0]),
        lambda d: d.update(choices=[None]),
        lambda d: d.update(peak={}),
        lambda d: d.update(notes="abc"),
        lambda d: d.update(limits=[]),
        lambda d: d.update(recompute=5),
        lambda d: d.pop("seconds"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused_in_one_line(plan, change):
    data = json.loads(plan.to_text())
    change(data)
    model = Net(2)
    with pytest.raises(FewbitError) as raised:
        fewbit.fit(model, plan=Plan.from_text(json.dumps(data)))
    assert "\n" not in str(raised.value)
    assert structure(model) == structure(Net(2))


def test_nesting_without_end_is_no_plan():
    with pytest.raises(FewbitError):
        Plan.from_text("[" * 100_000)


class Largest(nn.Module):
    """Asks in its backward pass where its input is its result, which makes NaN of a rounded one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.b(self.a(x).tanh().amax(1)).square().mean()


def test_what_must_not_be_rounded_is_exact_and_the_rest_is_planned():
    assert fewbit.plan(Largest(), torch.randn(8, 64, 16), error=0.2, optimizer="sgd").error < 0.2


def test_a_derivative_without_bounds_has_no_stochastic_table():
    from transformers.activations import ReLUSquaredActivation

    model = nn.Sequential(nn.Linear(16, 64), ReLUSquaredActivation(), nn.Linear(64, 16))
    plan = fewbit.plan(model, torch.randn(32, 16), loss=mean_square, error=0.2)
    assert not any(choice.method == "stochastic" for choice in plan.choices)


def test_a_gradient_that_is_not_finite_is_named():
    model = Net(1)
    model.head.weight.data.fill_(float("nan"))
    with pytest.raises(FewbitError, match="not finite"):
        fewbit.plan(model, batch(), error=0.2)


@pytest.mark.deep
def test_refresh_keeps_the_limit_and_the_largest_batch():
    model, inputs = Net(2), batch()
    least = fewbit.plan(model, inputs, error=0.3, optimizer="sgd")
    memory = (least.peak.total + least.exact_peak) // 2
    fitted = fewbit.fit(model, inputs, memory=memory, optimizer="sgd").refresh(every=2)
    model(**inputs)["loss"].backward()
    model(**{name: x[:2] for name, x in inputs.items()})["loss"].backward()
    assert fitted.plan.batch == len(inputs["x"])
    assert fitted.plan.limits["memory"] == memory


def test_a_batch_is_stretched_to_shapes_in_every_dimension():
    small, large = {"ids": torch.arange(6).view(2, 3)}, {"ids": torch.zeros(5, 4)}
    found = stretched(small, shapes_of(large))["ids"]
    assert found.tolist() == [[0, 1, 2, 0], [3, 4, 5, 3], [0, 1, 2, 0], [3, 4, 5, 3], [0, 1, 2, 0]]
    assert stretched(small, shapes_of([torch.zeros(5)])) is small


class Contrastive(nn.Module):
    """Its memory grows with the square of the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return (self.a(x) @ self.b(x).T).logsumexp(1).mean()


def test_the_largest_batch_is_bracketed_where_memory_does_not_grow_evenly():
    memory = fewbit.plan(Contrastive(), torch.randn(40, 8), memory="1GB", optimizer="sgd").peak.total
    found = fewbit.plan(Contrastive(), torch.randn(64, 8), memory=memory, optimizer="sgd", batch="max")
    assert found.batch >= 40 and found.peak.total <= memory


@pytest.mark.sample(1)
@pytest.mark.parametrize("memory", [1e9, np.int64(10**9), np.float32(1e9)])
def test_sizes_are_numbers_of_any_kind(memory):
    assert fewbit.plan(Net(1), batch(), memory=memory).limits["memory"] == 10**9


def test_caches_of_transformers_are_left_out_in_training():
    model = llama(16, 32, 1, 32, heads=2)
    ids = torch.randint(0, 32, (4, 16))
    assert without_cache(model) == {"use_cache": False}
    fewbit.fit(model, {"input_ids": ids, "labels": ids}, memory="1GB")
    assert model(ids, labels=ids).past_key_values is None
    with torch.no_grad():
        assert model(ids).past_key_values is not None
    model.config.use_cache = False
    assert without_cache(model) == {}
