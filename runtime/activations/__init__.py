"""Activations that save few bits: functions, modules, and torch's own functions caught in a block of code.

functional         torch.nn.functional's names and arguments, with `bits` and `table`; gated.py: act(gate) · up
modules            the same as modules; gated_modules.py
dispatch           shared by all of them: computes f(x) and saves codes; plain tensors without the dispatcher of torch
arguments          from an activation (a name, an expression, a callable), bits and an optional table to what ops call
following          tables that follow the training; inverted.py: outputs and one bit in place of codes
catch              `with few_bit(bits=3)`: torch's functions in any code
"""
