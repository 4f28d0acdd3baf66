"""Plans as a user makes them: what is predicted is what is measured, and a fitted model trains."""

import copy
import pickle
from itertools import pairwise

import fewbit
import pytest
import torch
from fewbit import FewbitError, Plan
from fewbit.runtime.memory.allocator import allocations
from fewbit.runtime.plan.step import Step
from fewbit.runtime.plan.trace import trace
from plan_cases import Attending, Convs, Gated, Net, batch, errs_as_predicted, fixed, gradient, images
from processes import FSDP, said_by_two
from step_peak import measured_peak
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

CASES = [
    *((Net, batch), (lambda: Net(dropout=0.1), batch), (Convs, images), (Attending, batch)),
    *((lambda: Attending(shares_output=False), batch), (Gated, batch)),
]


PARTS = ("parameters", "gradients", "optimizer", "saved", "workspace")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("make", "data"), CASES)
@pytest.mark.parametrize("part", [0.05, 0.6])
def test_a_plan_is_within_its_budget_and_takes_and_errs_as_predicted(make, data, part):
    model, inputs = make(), data()
    least = fewbit.plan(model, inputs, error=0.5)
    budget = int(least.peak.total + part * (least.exact_peak - least.peak.total))
    plan = fewbit.plan(model, inputs, memory=budget)
    exact = gradient(model, inputs)
    fitted = fewbit.fit(model, plan=plan)
    measured = measured_peak(model, inputs) + fixed(plan)
    assert plan.peak.total <= budget
    assert 0.95 * plan.peak.total <= measured <= plan.peak.total * 1.0001 + 64
    assert all(getattr(each.peak, name) >= 0 for each in (least, plan) for name in PARTS)
    assert fitted.unknown == ()
    if not any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):  # which drops others with each seed
        assert part > 0.05 or plan.error > 1e-3
        assert errs_as_predicted(plan, model, inputs, exact)


class TestThePeak:
    @pytest.mark.deep
    def test_is_planned_under_a_profiler_of_the_users_which_goes_on(self):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            plan = fewbit.plan(Net(), batch(), memory="1GB")
            torch.ones(3).frac()
        assert plan.peak.total == plan.exact_peak
        assert any(event.key == "aten::frac" for event in recorded.key_averages())

    @pytest.mark.deep
    @pytest.mark.parametrize(("make", "data"), CASES)
    def test_of_an_exact_step_is_what_the_allocator_gives(self, make, data):
        model, inputs = make(), data()
        plan = fewbit.plan(model, inputs, memory="1GB")
        fewbit.fit(model, plan=plan)
        assert plan.peak.total - 5120 <= measured_peak(model, inputs) + fixed(plan) <= plan.peak.total

    @pytest.mark.deep
    @pytest.mark.parametrize(("make", "data"), CASES)
    def test_is_as_predicted_where_blocks_are_recomputed(self, make, data):
        model, inputs = make(), data(32)
        plan = fewbit.plan(model, inputs, error=1e-6)
        assert any(choice.method in ("recompute", "tiled") for choice in plan.choices)
        fewbit.fit(model, plan=plan)
        assert 0.95 < (measured_peak(model, inputs) + fixed(plan)) / plan.peak.total <= 1.0001

    @pytest.mark.deep
    @pytest.mark.parametrize(("make", "data"), [(Net, batch), (Attending, batch), (Gated, batch)])
    def test_is_as_predicted_where_outputs_are_saved_in_place_of_inputs(self, make, data):
        model, inputs = make(), data(32)
        exact = gradient(model, inputs)
        plan = fewbit.plan(model, inputs, error=1e-5, recompute=False)
        chosen = {choice.target for choice in plan.choices if choice.method == "output"}
        assert any(name.endswith("norm") for name in chosen)
        assert make is not Net or any(name.endswith("act") for name in chosen)
        fitted = fewbit.fit(model, plan=plan)
        assert fitted.unknown == ()
        assert 0.95 < (measured_peak(model, inputs) + fixed(plan)) / plan.peak.total <= 1.0001
        assert (gradient(model, inputs) - exact).norm() <= 1e-5 * exact.norm()

    @pytest.mark.deep
    def test_names_what_it_is_made_of(self):
        model, inputs = Net(), batch()
        plan = fewbit.plan(model, inputs, memory="1GB")
        assert plan.peak.parameters == sum(p.numel() * 4 for p in model.parameters())
        assert plan.peak.optimizer == 2 * plan.peak.parameters + 4 * len([*model.parameters()])  # and AdamW's counts
        assert plan.error == 0 and plan.time == 1 and plan.peak.total == plan.exact_peak
        assert fewbit.plan(model, inputs, memory="1GB", optimizer="sgd").peak.optimizer == 0
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        assert fewbit.plan(model, inputs, memory="1GB", optimizer=optimizer).peak.optimizer == plan.peak.parameters

    def test_may_lie_in_the_optimizers_step(self):
        model = nn.Sequential(nn.Linear(1000, 1000))
        plan = fewbit.plan(model, torch.randn(2, 1000), loss=lambda y: y.sum(), memory="1GB")
        assert "optimizer" in plan.peak.moment
        assert plan.peak.gradients == plan.peak.parameters


class TestTheError:
    def test_is_that_of_rounding_where_blocks_are_recomputed_with_the_same_dropout(self):
        model, inputs = Net(dropout=0.2), batch(32)
        exact = gradient(model, inputs)
        fitted = fewbit.fit(model, inputs, error=1e-6)
        assert any(choice.method == "recompute" for choice in fitted.plan.choices)
        assert (gradient(model, inputs) - exact).norm() <= 1e-6 * exact.norm()

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("memory", [None, "1GB"])
    def test_may_be_limited_to_less_than_any_rounding_brings(self, memory):
        plan = fewbit.plan(Net(), batch(), error=1e-9, memory=memory)
        assert plan.error == 0

    def test_of_a_share_is_within_that_part_of_the_exact_peak(self):
        plan = fewbit.plan(Net(), batch(), memory="80%")
        assert plan.limits["memory"] == int(0.8 * plan.exact_peak) >= plan.peak.total

    @pytest.mark.deep
    def test_of_a_limit_is_kept_with_the_least_memory(self):
        model, inputs = Net(), batch()
        plans = [fewbit.plan(model, inputs, error=error) for error in (0.02, 0.1)]
        assert all(plan.error <= error for plan, error in zip(plans, (0.02, 0.1), strict=True))
        assert plans[0].peak.total > plans[1].peak.total


class TestMeasuring:
    def test_leaves_the_model_as_it_was(self):
        model, inputs = Convs(), images()
        gradient(model, inputs)
        before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
        modules = [type(m) for m in model.modules()]
        fewbit.plan(model, inputs, error=0.1)
        assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
        assert all(torch.equal(a, p.grad) for a, p in zip(before[1], model.parameters(), strict=True))
        assert torch.equal(before[2], torch.get_rng_state())
        assert modules == [type(m) for m in model.modules()]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_takes_what_has_no_bytes_of_its_own(self):
        """An expert without tokens, which saves results of no elements, and a module that returns a sparse tensor."""

        class Sparse(nn.Module):
            def forward(self, x):
                return x.to_sparse()

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.expert, self.sparse = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), Sparse()

            def forward(self, x):
                y = x.index_add(0, torch.where(x[:, 0] > 9)[0], self.expert(x[x[:, 0] > 9]))
                return (y + torch.sparse.mm(self.sparse(x), self.expert[0].weight[:8])).square().mean()

        traced = trace(Step(Net(), (torch.linspace(-1, 1, 64).view(8, 8),), {}))
        assert "expert.1" in traced.calls and not any(x.elements == 0 for x in traced.tensors)

    @pytest.mark.deep
    def test_on_the_meta_device_allocates_nothing_and_says_what_is_estimated(self):
        with torch.device("meta"):
            model, inputs = Net(), {"x": torch.empty(8, 32, 16), "labels": torch.empty(8, 32, dtype=torch.long)}
        plan = fewbit.plan(model, inputs, error=0.1)
        real = fewbit.plan(Net(), batch(), memory="1GB")
        assert "estimated from shapes" in str(plan)
        assert plan.exact_peak == pytest.approx(real.exact_peak, rel=0.02)

    @pytest.mark.deep
    def test_finds_the_largest_batch(self):
        model, inputs = Net(), batch(4)
        plan = fewbit.plan(model, inputs, memory="3MB", batch="max")
        assert plan.peak.total <= 3_000_000
        large = batch(plan.batch)
        fewbit.fit(model, plan=plan)
        assert measured_peak(model, large) + fixed(plan) <= 3_000_000
        with pytest.raises(FewbitError, match="no plan"):
            fewbit.plan(model, batch(int(plan.batch * 1.1) + 1), memory="3MB")


class TestAPlan:
    def test_is_a_file(self, tmp_path):
        model, inputs = Net(), batch()
        plan = fewbit.plan(model, inputs, error=0.1)
        plan.to_json(tmp_path / "plan.json")
        assert Plan.from_json(tmp_path / "plan.json") == plan
        assert pickle.loads(pickle.dumps(plan)) == plan

    def test_can_be_edited(self):
        model, inputs = Net(), batch()
        plan = fewbit.plan(model, inputs, memory="1GB")
        exact = gradient(model, inputs)
        edited = plan.with_choice("layers.0.up:0", "groups", 2)
        fewbit.fit(model, plan=edited)
        wrong = gradient(model, inputs) - exact
        start = sum(p.numel() for p in (*model.start.parameters(), *model.layers[0].norm.parameters()))
        weight = slice(start, start + model.layers[0].up.weight.numel())
        assert wrong[weight].norm() > 0 and wrong.norm() == wrong[weight].norm()
        with pytest.raises(FewbitError, match="no 'nothing'"):
            plan.with_choice("nothing", "exact")
        with pytest.raises(FewbitError, match=r"bits of layers\.0\.up:0"):
            plan.with_choice("layers.0.up:0", "groups", 9)
        with pytest.raises(FewbitError, match=r"layers\.0\.up:0 is exact, and may be exact or .*, not table"):
            plan.with_choice("layers.0.up:0", "table", 3)
        assert "edited since" in str(edited.with_choice("layers.0.up:0", "exact")) and "edited" not in str(plan)

    def test_of_another_model_or_with_a_broken_choice_is_refused_and_equal_layers_are_one_row(self, tmp_path):
        plan = fewbit.plan(Net(), batch(), memory="1GB")
        assert "layers.*.up:0" in str(plan) and "layers.1" not in str(plan).split("peak")[0]
        frozen = Net()
        frozen.layers[0].up.requires_grad_(False)
        for other in (Net(layers=3), Net().bfloat16(), frozen):
            with pytest.raises(FewbitError, match="another model"):
                fewbit.fit(other, plan=plan)
        with pytest.raises(FewbitError, match="a plan needs no batch"):
            fewbit.fit(Net(), plan=plan, memory="1GB")
        plan.to_json(tmp_path / "plan.json")
        text = (tmp_path / "plan.json").read_text().replace('"method": "exact"', '"method": "magic"', 1)
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(FewbitError, match="magic"):
            Plan.from_json(tmp_path / "plan.json")
        with pytest.raises(FewbitError, match="plan is a Plan, of"):
            fewbit.fit(Net(), plan="plan.json")

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"format": "fewbit plan 1"}', '{"format": "fewbit plan 1", "a": 1}']
    )
    def test_of_a_hostile_file_is_refused_in_a_line(self, tmp_path, text):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(FewbitError, match=r"plan\.json"):
            Plan.from_json(tmp_path / "plan.json")


class TestTheFrontier:
    @pytest.mark.deep
    def test_has_plans_and_other_ways_with_what_they_cost(self):
        plan = fewbit.plan(Net(), batch(), memory="1GB", frontier=4)
        points = {point.name: point for point in plan.frontier}
        assert points["exact"].memory == plan.exact_peak and points["exact"].error == 0
        uniform = [points[f"{bits} bits"] for bits in (2, 3, 4, 6, 8)]
        assert all(a.error > b.error > 0 and a.memory < b.memory for a, b in pairwise(uniform))
        plans = sorted((point.memory, point.error) for point in plan.frontier if point.name == "plan")
        assert len(plans) > 2 and plans[-1] == (plan.exact_peak, 0)


class TestFit:
    def test_trains_and_can_be_undone(self):
        model, inputs = Net(), batch()
        before, state = gradient(model, inputs), copy.deepcopy(model.state_dict())
        fitted = fewbit.fit(model, inputs, error=0.2)
        assert fewbit.plan(copy.deepcopy(model), inputs, error=0.2).peak.total == fitted.plan.peak.total
        fewbit.fit(model, inputs, error=0.2)
        assert 0 < (gradient(model, inputs) - before).norm() < 0.5 * before.norm()
        assert list(model.state_dict()) == list(state)
        fewbit.revert(model)
        assert torch.equal(gradient(model, inputs), before)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_leaves_the_forward_pass_as_it_was(self):
        model, inputs = Convs(), images()
        twin = copy.deepcopy(model)
        fewbit.fit(model, inputs, error=0.3)
        for _ in range(2):
            assert torch.equal(model(**inputs)["loss"], twin(**inputs)["loss"])
        with torch.no_grad():
            assert torch.equal(model(**inputs)["loss"], twin(**inputs)["loss"])
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))

    @pytest.mark.deep
    def test_recomputing_counts_running_statistics_once(self):
        model, inputs = Convs(), images(64)
        twin = copy.deepcopy(model)
        fitted = fewbit.fit(model, inputs, error=1e-6)
        assert any(c.method == "recompute" for c in fitted.plan.choices)
        for net in (model, twin):
            net(**inputs)["loss"].backward()
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    @pytest.mark.deep
    @pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_copies_and_pickles_train_by_the_plan_on_their_own(self, twin_of):
        model, inputs = Net(), batch()
        exact = gradient(model, inputs)
        fewbit.fit(model, inputs, error=0.2)
        twin = twin_of(model)
        fewbit.revert(model)
        assert torch.equal(gradient(model, inputs), exact)
        assert (gradient(twin, inputs) - exact).norm() > 0
        assert torch.equal(gradient(fewbit.revert(twin), inputs), exact)

    @pytest.mark.deep
    def test_a_forward_pass_that_fails_leaves_no_hooks_on(self):
        model, inputs = Net(), batch()
        fewbit.fit(model, inputs, error=0.2)
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        weight = torch.randn(64, 64, requires_grad=True)
        x = torch.randn(64, 64, requires_grad=True)
        (gradient_of_weight,) = torch.autograd.grad((x @ weight).sum(), weight)
        assert torch.equal(gradient_of_weight, x.detach().T @ torch.ones(64, 64))
        assert gradient(model, inputs).isfinite().all()


class TestRefreshing:
    @pytest.mark.deep
    def test_moves_bits_within_the_same_memory_while_training(self):
        model, inputs = Net(), batch()
        memory = int(0.75 * fewbit.plan(model, inputs, memory="1GB").exact_peak)
        fitted = fewbit.fit(model, inputs, memory=memory)
        fitted.refresh(every=3)
        first, optimizer = fitted.plan, torch.optim.SGD(model.parameters(), 1.0)
        for step in range(7):
            optimizer.zero_grad()
            model(**inputs)["loss"].backward()
            optimizer.step()
            assert (fitted.plan is first) == (step < 2)
        assert fitted.plan.peak.total <= memory  # the peak itself may move: it follows measured times
        assert measured_peak(model, inputs) + fixed(fitted.plan) <= memory * 1.0001 + 64
        assert fitted.undo() is model
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    @pytest.mark.deep
    def test_leaves_the_training_as_it_is(self):
        model, inputs = Net(dropout=0.1), batch()
        plan = fewbit.plan(model, inputs, memory="1GB")
        exact = gradient(model, inputs)
        fitted = fewbit.fit(model, plan=plan).refresh(every=2)
        assert all(torch.equal(gradient(model, inputs), exact) for _ in range(4))
        assert fitted.plan is not plan and fitted.plan.error == 0

    @pytest.mark.deep
    def test_that_finds_no_plan_keeps_the_one_in_force(self):
        model, inputs = Net(), batch()
        fitted = fewbit.fit(model, inputs, error=0.1)
        plan = fitted.plan
        fitted.refresh(every=2)
        model(**inputs)["loss"].backward()
        with pytest.warns(UserWarning, match="the plan stays as it was: no plan fits"):
            model(**batch(64))["loss"].backward()
        assert fitted.plan is plan and not fitted.unknown

    def test_leaves_the_plan_of_a_model_that_will_be_sharded(self):
        model, inputs = Net(), batch()
        fitted = fewbit.fit(model, inputs, memory="1GB", parallel="fsdp:2").refresh(every=2)
        plan = fitted.plan
        model(**inputs)["loss"].backward()
        with pytest.warns(UserWarning, match="the plan stays as it was: a model that will be sharded"):
            model(**inputs)["loss"].backward()
        assert fitted.plan is plan

    def test_is_refused_in_a_line(self):
        fitted = fewbit.fit(Net(), batch(), memory="1GB")
        with pytest.raises(FewbitError, match="every"):
            fitted.refresh(every=1)


class TestSeveralProcesses:
    @pytest.mark.deep
    def test_take_the_same_plan_and_train_by_it(self, tmp_path):
        one, two = (said.splitlines() for said in said_by_two("plans", tmp_path))
        (plan,) = (line for line in one if line.startswith("plan"))
        assert "groups" in plan and plan in two
        (gradient,) = (line for line in one if line.startswith("gradient"))
        assert gradient.endswith(" 0") and gradient in two
        (errors,) = (line for line in one if line.startswith("errors"))
        assert errors in two, "a guard decides alike on all ranks"

    @pytest.mark.deep
    @pytest.mark.parametrize("part", [0.1, 0.5])
    @pytest.mark.parametrize("kind", ["ddp", FSDP])
    def test_their_memory_is_as_predicted(self, kind, part, tmp_path):
        for said in said_by_two("memory", tmp_path, kind, str(part)):
            (line,) = (line for line in said.splitlines() if line.startswith("budget"))
            budget, predicted, measured, surplus = (int(word) for word in line.split()[1::2])
            assert predicted <= budget
            assert 0.99 * predicted - surplus <= measured <= predicted

    @pytest.mark.deep
    def test_that_share_a_model_hold_a_part_of_it_each(self):
        model, inputs = Net(), batch()
        alone, shared = (fewbit.plan(model, inputs, memory="1GB", parallel=kind) for kind in (None, "fsdp:4"))
        assert shared.peak.parameters == alone.peak.parameters // 4
        assert shared.peak.optimizer == alone.peak.optimizer // 4
        buckets = fewbit.plan(model, inputs, memory="1GB", parallel="ddp")
        assert buckets.peak.total == alone.peak.total + alone.peak.parameters

    @pytest.mark.parametrize("part", [0.2, 0.9])
    def test_microbatches_in_flight_are_counted(self, part):
        """A stage of a pipeline runs three forward passes ahead, then a backward and a forward pass in turn."""
        model, inputs = Net(), batch()
        kind = {"optimizer": "sgd", "parallel": "pipeline:3"}
        least = fewbit.fits(model, inputs, memory=1, **kind).least.total
        exact = fewbit.plan(model, inputs, memory="1GB", **kind).peak.total
        memory = int(least + part * (exact - least))
        fitted = fewbit.fit(model, inputs, memory=memory, **kind)

        def step():
            waiting = [model(**inputs) for _ in range(3)]
            for _ in range(2):
                waiting.pop(0)["loss"].backward()
                waiting.append(model(**inputs))
            while waiting:
                waiting.pop(0)["loss"].backward()

        predicted = fitted.plan.peak.total - fixed(fitted.plan)
        found = allocations(step, torch.device("cpu")).peak
        assert 0.93 * predicted <= found <= predicted <= memory - fixed(fitted.plan)
        assert any(choice.method != "exact" for choice in fitted.plan.choices)


class TestErrorsOfTheUser:
    @pytest.mark.sample(6)
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({}, "give memory="),
            ({"memory": "much"}, "is not a size"),
            ({"memory": 0}, "is not a size"),
            ({"memory": "150%x"}, "is not a share"),
            ({"memory": "50%", "batch": "max"}, "needs memory= in bytes"),
            ({"error": -1}, "error is a number above 0"),
            ({"time": 0.9}, "time is a number of at least 1"),
            ({"memory": "1KB"}, "the least is"),
            ({"memory": "1GB", "optimizer": "adamww"}, "nearest: adamw"),
            ({"memory": "1GB", "batch": "most"}, "batch is None or 'max'"),
            ({"error": 0.1, "batch": "max"}, "needs memory="),
            ({"memory": "1GB", "gpu": "h10"}, "nearest: h100"),
            ({"memory": "1GB", "gpu": ["h100"]}, "is no GPU"),
            ({"memory": "1GB", "price": 1.0}, "price is a Price"),
            ({"memory": "٣GiB"}, "is not a size"),
            ({"error": 0.1, "loss": lambda y: y["loss"].to(torch.complex64)}, "one real number"),
            ({"memory": "1GB", "parallel": "fsdp"}, 'parallel is "ddp" or "fsdp:8"'),
            ({"memory": "1GB", "parallel": "fsdp:2", "compiled": True}, "planned as it runs eagerly"),
            ({"memory": "1GB", "gpu": "h100", "compiled": True}, "measured where it runs: leave out gpu="),
        ],
    )
    def test_are_one_line(self, options, match):
        with pytest.raises(FewbitError, match=match) as caught:
            fewbit.plan(Net(), batch(), **options)
        assert "\n" not in str(caught.value)

    def test_are_of_a_step_without_gradients(self):
        with torch.inference_mode(), pytest.raises(FewbitError, match=r"torch\.inference_mode\(\) has not"):
            fewbit.plan(Net(), batch(), memory="1GB")

    @pytest.mark.parametrize(
        ("make", "data", "loss", "match"),
        [
            (lambda: nn.DataParallel(Net()), batch, None, r"plan before DataParallel, .*, and say parallel="),
            (Net, lambda: torch.randn(2, 3, 16), None, "give loss="),
            (lambda: Net().requires_grad_(False), batch, None, "does not require a gradient"),
            (nn.ReLU, lambda: torch.randn(4, 8, requires_grad=True), torch.sum, "no parameter of this ReLU is trained"),
            (lambda: 3, batch, None, r"must be a torch\.nn\.Module, not int"),
        ],
        ids=["wrapped", "no loss", "no gradient", "no parameter", "no model"],
    )
    def test_are_of_models_that_cannot_be_planned(self, make, data, loss, match):
        with pytest.raises(FewbitError, match=match):
            fewbit.plan(make(), data(), loss=loss, memory="1GB")

    def test_a_tensor_of_as_many_rows_as_samples_that_is_not_of_samples(self):
        class Weighted(Net):
            def forward(self, x, weight):
                return F.cross_entropy(super().forward(x).flatten(0, -2), torch.zeros(x[..., 0].numel()).long(), weight)

        inputs = {"x": torch.randn(10, 16), "weight": torch.ones(10)}
        with pytest.raises(FewbitError, match=r"10 rows for a row a sample, and with 20 the model raises RuntimeError"):
            fewbit.plan(Weighted(1), inputs, memory="1GB", batch="max")


@pytest.mark.deep
def test_fused_experts_that_save_parts_count_their_other_tensors_as_planned():
    pytest.importorskip("transformers")
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, use_cache=False))
    ids = torch.randint(0, 128, (8, 64))
    inputs = {"input_ids": ids, "labels": ids}
    least = fewbit.plan(model, inputs, error=0.5, recompute=False)
    plan = fewbit.plan(model, inputs, memory=least.peak.total, recompute=False)
    if not any(choice.method == "gated" for choice in plan.choices):
        pytest.skip("this transformers' experts are not fused")
    fitted = fewbit.fit(model, plan=plan)
    assert measured_peak(model, inputs) + fixed(plan) <= plan.peak.total * 1.0001 + 64
    assert fitted.unknown == ()
