"""What training keeps in memory, measured to the byte: storages, the ops that saved them, and the peak of a step.

plan/memory.py has the public names, `fewbit.memory`.
"""
