"""What a method saves of a model's memory, and how large a batch that allows; memory.py has the public names."""
