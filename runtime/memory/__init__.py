"""What training keeps in memory, measured to the byte: see api.py for the public names."""
