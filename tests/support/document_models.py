"""The small models that the examples of the documents run on."""

import torch
from torch import nn


def mlp():
    """A network of three linear layers with GELU, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    return model, torch.randn(128, 64)


def cnn():
    """Two blocks of batch normalization, ReLU and convolution, and images."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(2) for layer in (nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    images = torch.randn(8, 3, 16, 16)
    model(images)
    return model, images


def llama():
    """A Llama of two small layers, and token ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config), torch.randint(256, (2, 64))


def gpt2():
    """A GPT-2 of two small layers, and token ids."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    return model, torch.randint(256, (2, 64))
