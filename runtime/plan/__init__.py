"""What a method saves of a model's memory, and how large a batch that leaves room for; memory.py has the public names."""
