"""Every differentiable operator of torch's own table, by every way that saves in few bits, beside torch itself.

    make conformance    all of it; broken off, it goes on where it stopped
    make conformance CONFORMANCE="--operators 'amax,nn.functional.*' --ways 'hooks*' --fresh"

One operator, one way, anew (where the Makefile does not reach):

    export PYTHONPATH=$PWD/build/path:$PWD/tests:$PWD/tests/support
    python -m conformance --operators cummax --ways compile --fresh --jobs 1

operators.py  the table: torch.testing._internal.common_methods_invocations.op_db in float32, and its samples
ways.py       the ways: hooks at 4 and 8 bits, checkpoints exact and at 8, the division of the compile backend
step.py       one step: the forward pass, what autograd keeps after it, and the gradients
rules.py      what each step must hold beside the exact one, and the exceptions with their reasons
__main__.py   all rows, resumable; `--fresh` measures anew, whatever is on disk
"""
