"""Plain torch, for any device: the oracle of every kernel."""
