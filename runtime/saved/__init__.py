"""What autograd saves in code that is not ours: in few bits by hooks, or computed again from a block's input."""
