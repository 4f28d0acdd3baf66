"""The PyTorch runtime: activations that keep a few bits of their input for the backward pass."""
