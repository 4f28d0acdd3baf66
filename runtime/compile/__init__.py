"""Few bits under `torch.compile`: all that the forward pass hands to the backward pass, no change to a model.

torch.compile(model, backend="fewbit", options={"bits": "auto"})

options.py      what can be chosen
backend.py      the entry to Inductor
partitioner.py  chooses what is saved, and rewrites both graphs
attention.py    lets attention's probabilities sum to one where queries and keys are rounded
branches.py     bounds exponentials in branches that their arguments choose
delicate.py     finds poles, exponents and periods, by the ranges that values cannot leave (ranges.py)
roles.py        what the backward pass does with each value
codes.py        quantize and dequantize, in plain torch that Inductor fuses
rewrite.py      puts codes in place of what the forward graph saves
direct_calls.py lets Inductor's code call the CPU's kernels without torch's dispatcher
integers.py     narrower integers, where their range is known
splice.py       writes such a function into a graph
preview.py      the report of a model, without Inductor's kernels
report.py       what is saved, tensor by tensor
"""
