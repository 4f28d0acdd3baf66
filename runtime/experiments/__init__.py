"""Trainings that show what few-bit activations cost: real data, real models, small enough for any machine."""
