"""What tests of the compile backend share: the partitioner without Inductor's kernels, and the bytes a graph keeps."""

import copy
from functools import partial

import torch
import torch._inductor.lowering  # which decompositions of pooling expect to be there
from fewbit.runtime.compile.branches import bound_branches
from fewbit.runtime.compile.nodes import packet
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner
from fewbit.runtime.compile.roles import classify
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.nn import functional as F


def op_by_op(partitioner):
    """Return a backend that runs the graphs of `partitioner` op by op: what it computes, without a C++ compiler."""

    def run(graph, inputs, **_):
        return make_boxed_func(graph.forward)

    def partition(graph, inputs, **how):
        with V.set_fake_mode(detect_fake_mode(inputs)):
            joint_graph_passes(graph)  # as Inductor does: it writes a softmax of x / c otherwise
        return partitioner(graph, inputs, **how)

    def backend(gm, inputs):
        compiler = aot_autograd(
            fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table()
        )
        return compiler(gm, inputs)

    return backend


def few_bits(model, dynamic=None, reports=None, **options):
    """Return `model` compiled with few bits between its passes, run op by op; a list takes its graphs' reports."""

    class Reporting(FewbitPartitioner):
        def with_codes(self, *args):
            graphs, report = super().with_codes(*args)
            (reports if reports is not None else []).append(report)
            return graphs, report

    backend = op_by_op(Reporting(CompileOptions.of(options)))
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)


def forward_of(model, *inputs, **options):
    """The nodes of the forward graph that few bits leave."""
    found = []

    class Looking(FewbitPartitioner):
        def __call__(self, *args, **kwargs):
            forward, backward = super().__call__(*args, **kwargs)
            found.extend(forward.graph.nodes)
            return forward, backward

    torch.compile(model, backend=op_by_op(Looking(CompileOptions.of(options))), fullgraph=True)(*inputs)
    return found


def roles_in(model, *inputs):
    """The roles of the nodes of the joint graph, by operator: a set for each."""
    found = {}

    class Looking(FewbitPartitioner):
        def __call__(self, gm, joint_inputs, **kwargs):
            bound_branches(gm.graph)
            for node, role in classify(gm.graph).items():
                found.setdefault(packet(node), set()).add(role)
            return super().__call__(gm, joint_inputs, **kwargs)

    torch.compile(model, backend=op_by_op(Looking(CompileOptions())), fullgraph=True)(*inputs)
    return found


def exactly(model, fullgraph=True):
    """Return `model` compiled likewise, with torch's own partitioner."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

    return torch.compile(model, backend=op_by_op(partial(partition, compiler="inductor")), fullgraph=fullgraph)


def kept_tensors(result, leave=()):
    """Return the tensors that the graph of `result` keeps, one of each memory, none of the memory of `leave`."""
    seen = {x.untyped_storage().data_ptr() for x in leave}
    nodes, known, kept = [result.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        nodes += [following for following, _ in node.next_functions]
        saved = [*getattr(node, "saved_tensors", ()), *getattr(node, "_tensors_no_vc_check", ())]
        saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for x in saved:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in seen:
                seen.add(x.untyped_storage().data_ptr())
                kept.append(x)
    return kept


def kept_bytes(result, leave=()):
    """Return the bytes of `kept_tensors`."""
    return sum(x.untyped_storage().nbytes() for x in kept_tensors(result, leave))


def gradients(model, *inputs):
    """Return the loss and the gradients of the parameters in one vector."""
    for p in model.parameters():
        p.grad = None
    loss = model(*inputs)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient_error(model, *inputs, **options):
    """Return the relative error of the gradients in few bits beside those of the exact graph."""
    _, true = gradients(exactly(copy.deepcopy(model)), *inputs)
    _, near = gradients(few_bits(model, **options), *inputs)
    return float((near - true).norm() / true.norm())


class Perceptron(nn.Module):
    """Two linear maps with a GELU and a normalization between them, and the mean square of what comes out."""

    def __init__(self, width=128):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 4 * width),
            nn.LayerNorm(4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x)))).square().mean()


class Block(nn.Module):
    """A transformer's block: norm, attention, norm, MLP, two residuals."""

    def __init__(self, width=128, heads=2, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class LanguageModel(nn.Module):
    """Two blocks between an embedding and a cross entropy."""

    def __init__(self, words=320, width=128, dropout=0.0, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten())
