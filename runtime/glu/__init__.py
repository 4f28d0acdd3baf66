"""Gated linear units in few bits: h = act(gate) · up, and the whole block down(act(gate(x)) · up(x)) around it.

Eager PyTorch keeps gate, act(gate), up and h for the backward pass, four tensors of tokens × intermediate. What the
gradients need of them is

    d_gate = grad · up · act'(gate)        d_up = grad · act(gate)        d_down = grad_outputᵀ · h,  h = act(gate) · up

and that is kept in few bits: the code of act'(gate) in a table of this project, and copies of up and act(gate) by the
per-group quantizer, whose stochastic rounding is unbiased. The two copies are rounded independently, so their product
is an unbiased h too. The default 3 + 4.125 + 4.125 bits are 0.70 of *one* tensor in bfloat16.

    plan.py        what is kept, and how many bytes that is
    reference.py   the mathematics in plain torch: the oracle; cpu.py and cuda.py are its kernels
    ops.py         the ops that torch.compile sees, and the choice of kernels by device
    graph.py       forward and backward: what is saved, what is computed from it
    functional.py  swiglu, geglu, reglu, glu; modules.py: the same as modules
    block.py       GatedMLP, the whole block; conversion.py finds such blocks in models
    errors.py      what each part costs the gradients, measured
"""
