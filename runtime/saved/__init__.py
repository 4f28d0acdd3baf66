"""What autograd saves in code that is not ours: in few bits by hooks, or computed again from a block's input.

hooks.py         `compress_saved_tensors`: autograd's hooks, and the mode that sees which function saves
exactness.py     what they must not round, by function and history
store.py         what they save: codes, exact tensors and bits, of each piece of memory once (forms.py)
checkpoint.py    `fewbit.checkpoint`: blocks that are computed again (recompute.py), from rounded inputs (inputs.py), by
                 the decisions of the first time (decisions.py; rules.py, by operator)
tiles.py         modules over tiles of tokens, computed again tile by tile, and which modules may be
"""
