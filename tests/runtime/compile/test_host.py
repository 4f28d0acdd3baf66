"""Codes that wait in host memory: by the graph, and run op by op on a pretended device, which frees what was copied."""

import pytest
import torch
from compiled import op_by_op
from fewbit.runtime.compile import host, rewrite
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner
from torch import nn

pytest.importorskip("torch._functorch._activation_offloading.offload_ops", reason="torch offloads from 2.13 on")


class Device:
    """A device whose copies take until they are waited for; what a copy was made of is gone then."""

    def __init__(self):
        self.under_way, self.most, self.copied = 0, 0, {"offload": 0, "reload": 0}

    def copy(self, kind, x):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.copied[kind] += x.nbytes
        return x.clone()

    def offload(self, x):
        return self.copy("offload", x)

    def reload(self, x, device, size, stride):
        assert (x.shape, x.stride()) == (torch.Size(size), tuple(stride))
        return self.copy("reload", x)

    def wait(self, x, keepalive, last_use_of_storage=None):
        self.under_way -= 1
        keepalive.untyped_storage().resize_(0)
        return x


class Net(nn.Module):
    """Four layers, each of which saves 512 KiB in 8 bits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.SiLU()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def trained(device, **options):
    """The gradient of a step, its loss, and what was reported."""
    reports = []

    class Pretending(FewbitPartitioner):
        def with_codes(self, *args):
            graphs, report = super().with_codes(*args)
            reports.append(report)
            calls = {"ao.offload": device.offload, "ao.reload": device.reload, "ao.wait_tensor": device.wait}
            for module in graphs:
                for node in module.graph.nodes:
                    node.target = calls.get(str(node.target).rpartition(".")[0], node.target)
                module.recompile()
            return graphs, report

    torch.compiler.reset()
    torch.manual_seed(0)
    model = Net()
    backend = op_by_op(Pretending(CompileOptions.of({"tables": False, **options})))
    loss = torch.compile(model, backend=backend, fullgraph=True)(torch.randn(4096, 128))
    loss.backward()
    (report,) = reports
    return loss, [p.grad for p in model.parameters()], report


@pytest.mark.parametrize(("most", "bits"), [("1200KiB", 8), ("1GiB", 2)])
def test_gradients_are_those_without_it(most, bits, monkeypatch):
    """Within the memory, two copies under way at most, and nothing is read once it was copied away."""
    monkeypatch.setattr(host, "is_on_device", lambda node: True)
    monkeypatch.setattr(rewrite, "has_kernels", lambda *_: False)  # those of the CPU: a GPU's codes are the graph's own
    none, device = Device(), Device()
    loss, expected, plain = trained(none, bits=bits)
    again, found, report = trained(device, host_memory=most, bits=bits)
    assert none.copied["offload"] == 0 == plain.host_bytes
    assert report.host_bytes == device.copied["offload"] == device.copied["reload"]
    assert report.nbytes == plain.nbytes and device.under_way == 0
    if most == "1200KiB":
        assert 800 << 10 < report.host_bytes <= 1200 << 10 and device.most == 1
    else:
        assert report.host_bytes > 0.9 * sum(t.nbytes for t in report.tensors if t.bits is not None)
    assert torch.equal(loss, again) and all(map(torch.equal, expected, found))


def test_on_the_cpu_nothing_moves():
    """Its memory is the host's."""
    device = Device()
    assert trained(device, bits=8, host_memory="1GiB")[2].host_bytes == 0 and not device.copied["offload"]
