"""Networks of the wide zoo besides transformers' types: a U-Net, a graph network, recurrent ones, time series."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A block of diffusion's U-Net: normalization, SiLU and convolution, twice, with the step's embedding between."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.step = nn.Sequential(nn.SiLU(), nn.Linear(32, outputs))
        self.second = nn.Sequential(
            nn.GroupNorm(4, outputs), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        h = self.first(x) + self.step(step)[:, :, None, None]
        return self.skip(x) + self.second(h)


class Attention(nn.Module):
    """Attention among the pixels of a picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).view_as(x))


class UNet(nn.Module):
    """Diffusion's U-Net, which predicts the noise of a picture."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList([Residual(16, 16, dropout), Residual(16, 32, dropout)])
        self.shrink = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.middle, self.attention = Residual(32, 32, dropout), Attention(32)
        self.up = nn.ModuleList([Residual(64, 32, dropout), Residual(48, 16, dropout)])
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")
        self.leave = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, picture: Tensor, step: Tensor) -> Tensor:
        t = self.time(step)
        first = self.down[0](self.enter(picture), t)
        second = self.down[1](self.shrink(first), t)
        h = self.attention(self.middle(second, t))
        h = self.grow(self.up[0](torch.cat([h, second], 1), t))
        return self.leave(self.up[1](torch.cat([h, first], 1), t))


class Graph(nn.Module):
    """Messages along edges, weighted by a softmax over the edges of a node, and gated updates of the nodes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.score = nn.Linear(16, 32), nn.Linear(64, 1)
        self.message, self.update = nn.Sequential(nn.Linear(64, 32), nn.ELU(inplace=True)), nn.GRUCell(32, 32)
        self.norm, self.drop, self.read = nn.BatchNorm1d(32), nn.Dropout(dropout), nn.Linear(32, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = F.leaky_relu(self.embed(nodes))
        for _ in range(2):
            pair = torch.cat([h[source], h[target]], -1)
            weight = F.leaky_relu(self.score(pair), 0.2).exp()
            total = torch.zeros(len(h), 1).index_add(0, target, weight)
            messages = self.message(pair) * (weight / total[target])
            h = self.update(torch.zeros_like(h).index_add_(0, target, messages), h)
            h = self.drop(self.norm(h))
        return self.read(h)


class Recurrent(nn.Module):
    """Layers of torch's own recurrent modules in turn."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(64, 32), nn.LSTM(32, 32, 2, batch_first=True, dropout=dropout)
        self.gru, self.rnn = nn.GRU(32, 16, bidirectional=True, batch_first=True), nn.RNN(32, 32, batch_first=True)
        self.read = nn.Sequential(nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 64))

    def forward(self, words: Tensor) -> Tensor:
        return self.read(self.rnn(self.gru(self.lstm(self.embed(words))[0])[0])[0])


class Convolutions(nn.Module):
    """A temporal network for series: dilated convolutions, gates, and weights that are normalized."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.enter = nn.Conv1d(4, 32, 1)
        self.layers = nn.ModuleList([norm(nn.Conv1d(32, 64, 2, dilation=2**i)) for i in range(3)])
        self.drop, self.leave = nn.Dropout(dropout), nn.Conv1d(32, 4, 1)

    def forward(self, series: Tensor) -> Tensor:
        x = self.enter(series)
        for i, layer in enumerate(self.layers):
            x = x + self.drop(F.glu(layer(F.pad(x, (2**i, 0))), 1))
        return self.leave(x.relu_())


def patched(kind: str) -> Callable[[float], nn.Module]:
    """Return what makes one of transformers' models of patches of series."""

    def make(dropout: float) -> nn.Module:
        import transformers

        sizes = {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4, "d_model": 32}
        drops = {"dropout": dropout, "head_dropout": dropout}
        config = getattr(transformers, f"{kind}Config")(**sizes, **drops, prediction_length=8)
        return getattr(transformers, f"{kind}ForPrediction")(config)

    return make


def ring() -> dict[str, Tensor]:
    """Return a graph of nodes in a ring, with as many edges besides."""
    nodes = torch.arange(32)
    edges = torch.stack([torch.cat([nodes, torch.randperm(32)]), torch.cat([nodes.roll(1), torch.randperm(32)])])
    return {"nodes": torch.randn(32, 16), "edges": edges}


@dataclass(frozen=True)
class Network:
    """What makes a network, and a batch for it."""

    make: Callable[[float], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "u-net": Network(UNet, lambda: {"picture": torch.randn(2, 3, 16, 16), "step": torch.rand(2, 1)}),
        "graph network": Network(Graph, ring),
        "recurrent": Network(Recurrent, lambda: {"words": torch.randint(64, (4, 16))}),
        "temporal convolutions": Network(Convolutions, lambda: {"series": torch.randn(4, 4, 32)}),
        "patchtst": Network(patched("PatchTST"), lambda: {"past_values": torch.randn(4, 32, 2)}),
        "patchtsmixer": Network(patched("PatchTSMixer"), lambda: {"past_values": torch.randn(4, 32, 2)}),
    }
)


def of_network(name: str, dropout: float) -> Any:
    return NETWORKS[name].make(dropout)
