"""What the ops run on: `reference` (plain torch, any device), `cpu` (Numba)."""
