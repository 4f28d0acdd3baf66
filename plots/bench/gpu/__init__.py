"""What only a GPU can show, in five calls of at most ten minutes: `make gpu-1` to `make gpu-5`.

    python -m fewbit.plots.bench.gpu checks -o gpu-1.json --limit 60

    checks      versions, every kernel beside plain torch, threads, CUDA graphs, the compile backend
    tests       the tests that need a GPU, and compute-sanitizer
    kernels     each kernel beside a copy, what ncu counts of it, activations
    trainings   a layer of Llama-3-8B and a model of 1B: peak, time and loss of every way
    rest        the other benches

Each runs its parts in processes of their own, several at the same time where nothing is timed, and collects what came
of them, errors too. The JSON is written after each part, so that a call that is broken off keeps what it has, and the
next one goes on from there. With `--toy` all of it runs on the CPU, in sizes that show nothing: a test does that.
"""
