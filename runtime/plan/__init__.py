"""Memory that a method frees in a model, and the largest batch that this allows; memory.py has the public names."""
