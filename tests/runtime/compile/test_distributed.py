"""Few bits between the passes under torch's wrappers for several processes; here a group of one."""

import copy
from functools import partial

import pytest
import torch
from compiled import LanguageModel, exactly, gradients, op_by_op
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner
from torch.nn.parallel import DistributedDataParallel

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

TOKENS = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(0))
BACKEND = op_by_op(FewbitPartitioner(CompileOptions(bits=8, smallest=1024)))
compiled = partial(torch.compile, backend=BACKEND)


@pytest.fixture(autouse=True)
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.deep
def test_data_parallel():
    model = LanguageModel()
    loss, true = gradients(exactly(copy.deepcopy(model)), TOKENS)
    torch._dynamo.reset()
    few_loss, near = gradients(compiled(DistributedDataParallel(model)), TOKENS)
    assert torch.equal(loss, few_loss)
    assert 0.001 < (near - true).norm() / true.norm() < 0.02


def test_fully_sharded_with_blocks_compiled_by_themselves():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    model = LanguageModel()
    loss, true = gradients(copy.deepcopy(model), TOKENS)
    for block in model.blocks:
        fsdp.fully_shard(block)
    fsdp.fully_shard(model)
    for block in model.blocks:
        block.forward = compiled(block.forward)
    few_loss = model(TOKENS)
    few_loss.backward()
    near = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    torch.testing.assert_close(few_loss.detach(), loss)
    assert 0.001 < (near - true).norm() / true.norm() < 0.02
