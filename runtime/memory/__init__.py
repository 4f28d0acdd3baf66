"""Measures the memory of training to the byte: saved storages, the ops that saved them, and the peak of a step.

plan/memory.py has the public names, `fewbit.memory`.
"""
