"""Quantized inference by V-Quant: weights and activations in 3 to 5 bits, the few large ones in 16 (vquant.py)."""
