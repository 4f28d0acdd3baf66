"""The checker of proofs: it shares nothing with the compiler that writes them, and needs python-flint alone."""
