"""`fewbit.convert`: replaces layers and activations of a model, in place, by those that save few bits.

api          `convert` and `revert`; pipeline.py: the methods and their order
find         the activations of a model; recognize.py: which activation a module is; filters.py: include and exclude
actnn, blpa, gated_mlps, vquant    a method each
swap         changes the class of a layer and back; placement.py: puts one module in the place of another
report       what was replaced, what was left and why; measure.py: the bytes saved on a batch
"""
