"""Activations that save few bits: functions, modules, and torch's own functions caught in a block of code.

functional         torch.nn.functional's names and arguments, with `bits` and `table`; gated.py: act(gate) · up
modules            the same as modules, on base.py; gated_modules.py
generate           the text of a function and of a module, from the activation's row in backends/activation_spec.py
dispatch           what they all call: f(x) computed, and codes kept
user_functions     activations of the user's own, an expression in x or a callable
catch              `with few_bit(bits=3)`: torch's functions in any code
fast_path          how plain tensors on the CPU go past the dispatcher; transforms.py: under torch.func
table_lookup       from an activation, bits and perhaps a table to the key of a registered table
"""
