"""Layers of transformers: torch.nn has none of them, and few bits can keep what they save."""

import copy
import pickle

import fewbit
import pytest
import torch
from fewbit import memory
from fewbit.runtime.layers import CompressedLayer
from fewbit.runtime.layers.callers import forget_inputs
from fewbit.runtime.layers.huggingface import like
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers")
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

NORMS = [LlamaRMSNorm, GptOssRMSNorm, NemotronHRMSNorm, T5LayerNorm, Gemma2RMSNorm]
CASES = [(Conv1D, (48, 64)), *((norm, (64,)) for norm in NORMS)]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)


def make(case, dtype=torch.float32):
    cls, arguments = case
    torch.manual_seed(0)
    layer = cls(*arguments).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def results(layer, x):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@each
def test_they_are_known(case):
    assert like(case[0]) is (nn.Linear if case[0] is Conv1D else nn.RMSNorm)
    assert like(nn.Linear) is None


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_output_is_theirs_bit_for_bit_and_8_bits_give_their_gradients(case, dtype):
    layer, x = make(case, dtype), torch.randn(6, 32, 64, dtype=dtype)
    expected = results(layer, x)
    fewbit.convert(layer, level="L2", bits=8)
    found = results(layer, x)
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        # An element errs by a step at most, 1/255 of a range of about 6 deviations; bfloat16 rounds by 2⁻⁸ as well.
        assert (a - b).norm() <= (0.024 + (0.01 if dtype is torch.bfloat16 else 0)) * b.norm()
        assert a.dtype == b.dtype and a.shape == b.shape


@pytest.mark.sample(2)
@each
def test_gradients_are_unbiased(case):
    """The mean of N draws comes nearer with the root of N."""
    layer, x = make(case), torch.randn(4, 16, 64)
    expected = results(layer, x)[1:]
    fewbit.convert(layer, level="L2", bits=2)
    draws = [results(layer, x)[1:] for _ in range(256)]
    for i, exact in enumerate(expected):
        errors = torch.stack([draw[i] - exact for draw in draws])
        # What one copy of x̄ leaves, Var[x̄] h/n of the gradient of x, is 1/9 of 6² deviations by 64 elements at most.
        bias = (errors.mean(0).norm() / exact.norm()).item()
        assert bias <= 3 * errors.flatten(1).norm(dim=1).mean() / 16 / exact.norm() + 0.07


@each
def test_they_stay_what_they_are(case):
    layer = make(case)
    before = repr(layer)
    report = fewbit.convert(layer, level="L2")
    assert isinstance(layer, case[0]) and isinstance(layer, CompressedLayer)
    assert len(report.replaced) == 1 and report.replaced[0].was == before and "bits=4" in report.replaced[0].now
    fewbit.revert(layer)
    assert type(layer) is case[0] and repr(layer) == before


@each
def test_copies_and_pickles_work_and_can_be_reverted(case):
    layer, x = make(case), torch.randn(4, 16, 64)
    fewbit.convert(layer, level="L2")
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(again) is type(layer)
        assert torch.equal(again(x), layer(x))
        fewbit.revert(again)
        assert type(again) is case[0]


@each
def test_without_a_gradient_nothing_is_kept(case):
    layer, x = make(case), torch.randn(4, 16, 64)
    fewbit.convert(layer, level="L2")
    layer.requires_grad_(False)
    assert memory.profile(layer, x).total == 0
    assert torch.equal(layer(x), make(case)(x))


def test_a_forward_of_another_kind_is_left():
    class Louder(LlamaRMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Louder(64))
    report = fewbit.convert(model, level="L2")
    assert not report.replaced and type(model[0]) is Louder


def test_convolutions_alone_are_converted_at_l1():
    report = fewbit.convert(nn.Sequential(Conv1D(8, 64), LlamaRMSNorm(64)), level="L1")
    assert not report.replaced and {row.why for row in report.left} == {"this level leaves it"}


def test_v_quant_takes_the_linear_ones():
    model = nn.Sequential(Conv1D(64, 64), LlamaRMSNorm(64))
    report = fewbit.convert(model, outliers=0.02, bits=3)
    assert [row.name for row in report.replaced] == ["0"]
    model(torch.randn(4, 64)).sum().backward()


def kept_by(model, kind, ids):
    return sum(row.bytes for row in memory.profile(model, ids).saved if row.kind == kind)


def test_what_llama_and_gpt2_keep_in_them_falls():
    """LlamaRMSNorm keeps two tensors and its weight in float32, then 4.125 bits; Conv1D keeps its input."""
    config = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, intermediate_size=128))
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, **small))
    ids = torch.randint(0, 100, (4, 64))
    for model, kind, share in ((llama, "LlamaRMSNorm", 1 / 12), (gpt2, "Conv1D", 1 / 6)):
        weights = sum(
            p.numel() * p.element_size() for m in model.modules() if type(m).__name__ == kind for p in m.parameters()
        )
        exact = kept_by(model, kind, ids)
        fewbit.convert(model, level="L2")
        assert kept_by(model, kind, ids) <= share * exact + weights


@pytest.mark.deep
def test_they_are_eagers_in_one_graph_of_any_batch():
    model = nn.Sequential(LlamaRMSNorm(32), Conv1D(48, 32), Gemma2RMSNorm(48), T5LayerNorm(48))
    fewbit.convert(model, level="L2", bits=4)
    forget_inputs(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (17, 20, 23):
        x = torch.randn(n, 6, 32)
        results = []
        for call in (compiled, model):
            model.zero_grad()
            torch.manual_seed(n)
            y = call(x)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *results))
    assert counter.frame_count <= 2
