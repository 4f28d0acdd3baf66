"""A process of sharded trainings: prints for each kind how gradients in few bits compare with those of one process."""

import hashlib
import sys

import fewbit
import torch
from fewbit.quantizers import PerGroup
from plan_cases import Gated, planned_by
from processes import HAS_FSDP, PROCESSES, group_of_two, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def tensor_parallel(mesh, local=False):
    """Whose activations are DTensors between the projections of an MLP, or their local parts."""
    model = made()
    wide = {name: ColwiseParallel(use_local_output=local) for name in ("gate_proj", "up_proj")}
    for layer in model.layers:
        parallelize_module(layer.mlp, mesh, {**wide, "down_proj": RowwiseParallel()})
    return model


def made():
    torch.manual_seed(0)
    return Gated()


def gradient(model, context=None):
    """The whole gradient of a step."""
    torch.manual_seed(2)  # alike on all ranks, as tensor parallelism asks
    model.zero_grad()
    with context or torch.autograd.set_grad_enabled(True):
        loss = model(**batch)["loss"]
    loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in grads])


def error(found):
    return float((found - exact).norm() / exact.norm())


class Sizes:
    """A quantizer that notes the shapes that it is given."""

    def __init__(self, shapes):
        self.shapes = shapes

    def compress(self, x):
        self.shapes.append(tuple(x.shape))
        return PerGroup(8).within(x.shape[-1]).compress(x)


def compare(kind, make, parallel):
    """Hooks, checkpoints, and a plan that was made before the model was sharded."""
    print("kind", kind)
    shapes = []
    print("exact", error(gradient(make())) < 1e-6)
    found = gradient(make(), fewbit.compress_saved_tensors(Sizes(shapes)))
    print("hooks", 0 < error(found) < 0.05, sorted(set(shapes)))
    model = make()
    fewbit.checkpoint(model, bits=8)
    print("checkpoint", 0 < error(gradient(model)) < 0.05)
    if parallel is None:  # tables and parts of gated MLPs take no DTensors
        plan, _ = planned_by(made(), batch, lambda option: option.method == "groups" and option.bits == 8)
    else:
        plan = fewbit.plan(made(), batch, error=0.1, parallel=parallel)
    fitted = fewbit.fit(make(), plan=plan)
    found = gradient(fitted.model)
    print("plan", 0 < error(found) < 0.2, fitted.unknown, [(c.target, c.method, c.bits) for c in fitted.plan.choices])
    model = make()
    for layer in model.layers:
        layer.compile(backend="fewbit", options={"bits": 8})
    off, report = error(gradient(model)), fewbit.compile_report(model)
    print("compiled", 0 < off < 0.05, report.nbytes < 0.5 * report.exact_graph_bytes)
    print("gradient", hashlib.sha256(found.numpy().tobytes()).hexdigest())


def planned_after(mesh):
    """A plan of a tensor-parallel model, whose memory is that of a rank; DTensors that modules take are refused."""
    model, whole = tensor_parallel(mesh, local=True), fewbit.plan(made(), batch, error=0.1)
    fitted = fewbit.fit(model, batch, error=0.1)
    print("kind planned after")
    print("plan", fitted.plan.peak.total < whole.peak.total, 0 < error(gradient(model)) < 0.2, fitted.unknown)
    for wrong in ({}, {"compiled": True}):
        try:
            fewbit.plan(tensor_parallel(mesh, local=bool(wrong)), batch, error=0.1, **wrong)
        except fewbit.FewbitError as refused:
            print("refused", refused)


class Stage(nn.Module):
    """The layers of one rank of a pipeline."""

    def __init__(self, model, layers, first):
        super().__init__()
        self.start, self.layers = (model.start if first else None), nn.ModuleList(layers)
        self.head = None if first else model.head

    def forward(self, x):
        x = x if self.start is None else self.start(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def pipeline():
    """Four microbatches in flight, by a plan of each stage for one of them."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = made()
    stage = Stage(model, [model.layers[rank]], rank == 0)
    micro = torch.randn(2, 32, 16 if rank == 0 else 64)
    plan = fewbit.plan(stage, micro, loss=lambda y: y.square().mean(), error=0.05)
    fitted = fewbit.fit(stage, plan=plan)
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, PROCESSES, torch.device("cpu")),
        n_microbatches=4,
        loss_fn=lambda y, labels: nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten()),
    )
    schedule.step(*([batch["x"]] if rank == 0 else []), **({"target": batch["labels"]} if rank else {}))
    own = {name: p.grad for name, p in stage.named_parameters()}
    names = {n: n.replace("layers.0", f"layers.{rank}") for n in own}
    expected = dict(zip(dict(model.named_parameters()), parts(model), strict=True))
    off = sum(float((own[n] - expected[names[n]]).square().sum()) for n in own)
    norm = sum(float(expected[names[n]].square().sum()) for n in own)
    print("kind pipeline")
    print("plan", 0 < (off / norm) ** 0.5 < 0.2, fitted.unknown)


def parts(model):
    flat = exact.split([p.numel() for p in model.parameters()])
    return [g.view(p.shape) for g, p in zip(flat, model.parameters(), strict=True)]


rank, meeting = int(sys.argv[1]), sys.argv[2]
with group_of_two(rank, meeting):
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 32, 16), "labels": torch.randint(0, 10, (8, 32))}
    exact = gradient(made())
    device_mesh = init_device_mesh("cpu", (PROCESSES,))
    compare("tensor-parallel", lambda: tensor_parallel(device_mesh), None)
    planned_after(device_mesh)
    pipeline()
    if HAS_FSDP:
        compare("fsdp", lambda: sharded(model := made(), model.layers), "fsdp:2")
