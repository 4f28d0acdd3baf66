"""Activations that save few bits: functions, modules, and torch's own functions caught in a block of code.

functional         torch.nn.functional's names and arguments, with `bits` and `table`; gated.py: act(gate) · up
modules            the same as modules, based on base.py; gated_modules.py
generate           source text of functions and modules, from the rows of backends/activation_spec.py
dispatch           shared by all of them: computes f(x) and saves codes; plain tensors without the dispatcher of torch
user_functions     user-defined activations: an expression in x or a callable
catch              `with few_bit(bits=3)`: torch's functions in any code
transforms         under torch.func
table_lookup       from an activation, bits and an optional table to the key of a registered table
"""
