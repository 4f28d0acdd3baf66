"""Plans of trainings (planner.py), and the memory that a method frees and the largest batch that fits (memory.py)."""
