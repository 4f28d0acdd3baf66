"""act(gate) · up: the forward bits, what is kept to the byte, gradients beside torch's, wrong arguments."""

import math
import weakref

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.functional import geglu, swiglu
from fewbit.quantizers import PerGroup
from fewbit.runtime import ops
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.tensors.glu_parts import KEEPS, Wanted
from glu_cases import DTYPES, UNITS, grads, kept_bytes, pair, relative, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1),
    "empty": lambda x: x[:0],
    "one number": lambda x: x[0, 0],
}


def grads_of_sum(function, inputs, options):
    return torch.autograd.grad(function(*inputs, **options).sum(), inputs)


class TestForward:
    @pytest.mark.parametrize("keep", KEEPS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", UNITS)
    def test_is_torch_s_bit_for_bit(self, name, dtype, keep):
        ours, act = UNITS[name]
        gate, up = pair((37, 129), dtype)
        assert same(ours(gate, up, keep=keep), act(gate) * up)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_in_any_layout_with_the_same_strides(self, layout):
        gate, up = (LAYOUTS[layout](x) for x in pair((16, 40)))
        ours, exact = swiglu(gate, up), F.silu(gate) * up
        assert same(ours, exact) and ours.stride() == exact.stride()

    @pytest.mark.parametrize("options", [{"keep": "parts"}, {"keep": "inputs"}, {"rounding": "stochastic"}], ids=str)
    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
    def test_gradients_in_any_layout_are_those_of_dense_tensors(self, backend, layout, options):
        gate, up = (backend.put(x.detach()).requires_grad_() for x in pair((16, 40)))
        dense = [LAYOUTS[layout](x).detach().clone(memory_format=torch.contiguous_format) for x in (gate, up)]
        torch.manual_seed(1)
        ours = torch.autograd.grad(swiglu(LAYOUTS[layout](gate), LAYOUTS[layout](up), **options).sum(), (gate, up))
        torch.manual_seed(1)
        theirs = grads_of_sum(swiglu, [x.requires_grad_() for x in dense], options)
        assert all(same(LAYOUTS[layout](a), b) for a, b in zip(ours, theirs, strict=True))

    def test_awkward_numbers(self):
        gate = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38, -3e38]).repeat(8).requires_grad_()
        up = gate.detach().view(8, 8).t().reshape(-1).requires_grad_()
        assert same(swiglu(gate, up), F.silu(gate) * up)

    def test_without_gradients_nothing_is_kept(self):
        gate, up = pair((8, 256))
        with torch.no_grad():
            assert kept_bytes(swiglu, gate, up)[0] == 0


class TestKept:
    @settings(max_examples=30, deadline=None)
    @given(
        n=st.integers(0, 1100),
        bits=st.integers(1, 4),
        up_bits=st.integers(1, 8),
        second_bits=st.integers(1, 8),
        needs=st.sampled_from([(True, True), (True, False), (False, True)]),
    )
    def test_parts_to_the_byte(self, n, bits, up_bits, second_bits, needs):
        gate, up = (x.detach().requires_grad_(need) for x, need in zip(pair(n), needs, strict=True))
        kept, _ = kept_bytes(lambda g, u: swiglu(g, u, bits=bits, copy_bits=(up_bits, second_bits)), gate, up)
        eights, groups = -(-n // 8), -(-n // 256)
        code_and_up = eights * (bits + up_bits) + 4 * groups
        second = eights * second_bits + 4 * groups
        assert kept == needs[0] * code_and_up + needs[1] * second
        plan = plan_of("silu", (), bits, (up_bits, second_bits), "parts", None)
        assert kept == plan.nbytes(n, 4, Wanted(*needs, False))

    def test_default_and_leanest_in_units_of_bfloat16(self):
        gate, up = pair((64, 512), torch.bfloat16)
        unit = 64 * 512 * 2
        assert kept_bytes(swiglu, gate, up)[0] / unit == 11.25 / 16 <= 0.75
        assert kept_bytes(lambda g, u: swiglu(g, u, keep="inputs"), gate, up)[0] / unit == 8.25 / 16 <= 0.55
        assert kept_bytes(lambda g, u: swiglu(g, u, keep="exact"), gate, up)[0] / unit == 2

    @pytest.mark.parametrize("keep", ("parts", "inputs"))
    def test_gate_and_up_are_given_back(self, keep):
        leaves = pair((8, 256))
        gate, up = (x * 1 for x in leaves)
        y = swiglu(gate, up, keep=keep)
        memory = [weakref.ref(x) for x in (gate, up)]
        del gate, up
        assert [m() for m in memory] == [None, None]
        grads(y, leaves)


class TestGradients:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", UNITS)
    def test_exact_are_torch_s_bit_for_bit(self, name, dtype):
        ours, act = UNITS[name]
        gate, up = pair((37, 129), dtype)
        for a, b in zip(
            grads(ours(gate, up, keep="exact"), (gate, up)), grads(act(gate) * up, (gate, up)), strict=True
        ):
            assert same(a, b)

    @pytest.mark.parametrize("keep", ("parts", "inputs"))
    @pytest.mark.parametrize("name", UNITS)
    def test_many_bits_are_near(self, name, keep):
        """Eight bits: the copies err by 1/255 of a group's range of about 6 deviations, rounded at random."""
        ours, act = UNITS[name]
        gate, up = pair((64, 256))
        y = ours(gate, up, bits=8, copy_bits=8, keep=keep)
        near = [relative(a, b) for a, b in zip(grads(y, (gate, up)), grads(act(gate) * up, (gate, up)), strict=True)]
        # relu' jumps: of the 1.9 % of gates within a step of 0 half at most get the wrong side, and half of all gates
        # pass a gradient: √(0.0095 / 0.5).
        assert near[0] < (6 / 255 if (name, keep) != ("reglu", "inputs") else 0.14)
        assert near[1] < 6 / 255

    def test_what_they_are_made_of(self):
        """With one 4-bit copy of up and of act(gate), and the code of the few-bit activation alone."""
        gate, up = pair(700)
        torch.manual_seed(5)
        y = swiglu(gate, up)
        torch.manual_seed(5)
        seeds = ops.draw_seeds(gate, 2)
        plan = plan_of("silu", (), None, 4, "parts", None)
        _, _, packed_up, packed_act, groups = ops.glu(gate, up, seeds, "silu", (), plan.table, 4, 4, False)
        up_copy = ops.read_copy(packed_up, groups[:2], 4, (700,), torch.float32)
        act_copy = ops.read_copy(packed_act, groups[2:], 4, (700,), torch.float32)
        w = torch.randn(700, generator=torch.Generator().manual_seed(9))
        level = torch.autograd.grad(fewbit.functional.silu(gate), gate, torch.ones(700))[0]
        d_gate, d_up = grads(y, (gate, up))
        assert same(d_gate, w * up_copy * level) and same(d_up, w * act_copy)

    def test_copies_are_those_of_the_quantizer(self):
        x = torch.randn(1000)
        packed, groups = ops.copy_in_groups(x, torch.tensor([77]), 4)
        fixed = torch.Generator()
        seed = PerGroup(4, 256).compress(x, generator=fixed.manual_seed(3))
        drawn = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=fixed.manual_seed(3)))
        packed, groups = ops.copy_in_groups(x, torch.tensor([drawn]), 4)
        assert same(ops.read_copy(packed, groups, 4, (1000,), torch.float32), seed.decompress())

    def test_copies_and_their_product_are_unbiased(self):
        """By Hoeffding's bound: N draws within a width w have a mean off by more than w √(ln(2/δ) / 2N) once in 1/δ.

        Of each element alone, and, far sharper, of all of them together: their draws are independent.
        """
        gate, up = pair(256)
        N, δ, w = 1000, 1e-9, torch.ones(256)
        plan = plan_of("silu", (), 3, 2, "parts", None)
        level = torch.autograd.grad(fewbit.functional.silu(gate), gate, w)[0]
        gate, up = gate.detach(), up.detach()
        exact = torch.stack([up * level, F.silu(gate), F.silu(gate) * up])
        constants = ("silu", (), plan.table, 2, 2, False)
        total, groups = torch.zeros(3, 256, dtype=torch.float64), torch.empty(0)
        for seed in range(N):
            _, *parts = ops.glu(gate, up, torch.tensor([seed, seed + 10**9]), *constants)
            groups = parts[3].float()
            total += torch.stack(ops.glu_backward(w, *parts, *constants, [True] * 3))
        step_up, step_act = groups[1] / 3, groups[3] / 3
        of_h = (up.abs() + step_up) * step_act + (exact[1].abs() + step_act) * step_up
        width = torch.stack([step_up * level.abs(), step_act.expand(256), of_h]).clamp(min=1e-6)
        off = (total / N - exact) / width
        assert (off.abs() <= math.sqrt(math.log(2 / δ) / (2 * N))).all()
        assert (off.mean(1).abs() <= math.sqrt(math.log(2 / δ) / (2 * N * 256))).all()

    def test_reglu_passes_nothing_where_the_gate_is_closed(self):
        gate, up = pair((4, 256))
        with torch.no_grad():
            up[0, 0] = math.inf  # spoils its group's copy
            gate[0, 0] = -1.0
        d_gate, _ = grads(fewbit.functional.reglu(gate, up), (gate, up))
        assert (d_gate[gate <= 0] == 0).all()

    def test_the_same_seed_gives_the_same_gradients(self):
        gate, up = pair((4, 256))
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(grads(swiglu(gate, up), (gate, up)))
        assert same(runs[0][0], runs[1][0]) and not same(runs[0][0], runs[2][0])

    def test_second_derivatives_and_forward_mode_are_refused_and_torch_func_gives_torch_s_own(self):
        gate, up = pair(256)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(swiglu(gate, up).sum(), gate, create_graph=True)
        with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
            swiglu(torch.autograd.forward_ad.make_dual(gate, torch.ones(256)), up)
        gate, up = (x.detach() for x in pair(64))
        ours = torch.func.grad(lambda g: swiglu(g, up).sum())(gate)
        torch.testing.assert_close(ours, torch.func.grad(lambda g: (F.silu(g) * up).sum())(gate))


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"keep": "all"}, "keep is one of 'parts', 'inputs', 'exact', not 'all'"),
            ({"copy_bits": 0}, "copy_bits is an integer from 1 to 8, not 0"),
            ({"copy_bits": (4, 9)}, "copy_bits is an integer from 1 to 8, not 9"),
            ({"copy_bits": (4, 4, 4)}, "or two: of up and of act"),
            ({"copy_bits": "44"}, "or two: of up and of act"),
            ({"bits": 9}, "bits"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(FewbitError, match=message.replace("(", r"\(")):
            swiglu(*pair(8), **arguments)

    def test_other_shapes_dtypes_and_things(self):
        gate, up = pair((4, 8))
        with pytest.raises(
            FewbitError, match=r"one shape, dtype and device, not float32 \(4, 8\) on cpu and float32 \(8,\)"
        ):
            swiglu(gate, up[0])
        with pytest.raises(FewbitError, match="float64"):
            swiglu(gate, up.double())
        with pytest.raises(FewbitError, match="up is a tensor, not 1"):
            swiglu(gate, 1)
        with pytest.raises(FewbitError, match="approximate"):
            geglu(gate, up, "fast")
        complexes = [x.to(torch.complex64) for x in pair(8)]
        with pytest.raises(TypeError, match="takes float32"):
            fewbit.functional.glu(*complexes)


class TestModules:
    @pytest.mark.parametrize(
        ("module", "unit"),
        [(fewbit.SwiGLU, "swiglu"), (fewbit.GEGLU, "geglu"), (fewbit.ReGLU, "reglu"), (fewbit.GLU, "glu")],
    )
    def test_are_their_functions(self, module, unit):
        gate, up = pair((4, 256))
        torch.manual_seed(0)
        ours = grads(module(copy_bits=5)(gate, up), (gate, up))
        torch.manual_seed(0)
        assert same(ours[0], grads(UNITS[unit][0](gate, up, copy_bits=5), (gate, up))[0])
        assert module().state_dict() == {}

    def test_repr(self):
        assert repr(fewbit.SwiGLU(bits=2, copy_bits=(3, 5))) == "SwiGLU(bits=2, copy_bits=(3, 5))"
        assert repr(fewbit.GEGLU("tanh", keep="inputs")) == "GEGLU(copy_bits=4, keep='inputs')"
        assert repr(fewbit.ReGLU(keep="exact")) == "ReGLU(keep='exact')"
