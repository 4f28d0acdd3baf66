"""`fewbit.convert`: layers and activations of a model replaced in place by those that save few bits.

api          `convert` and `revert`; pipeline.py: the methods in the order in which a model takes them
find         the activations of a model; recognize.py: which activation a module is; filters.py: which are wanted
actnn, blpa, gated_mlps, vquant    a method each
swap         layers that change their class and back; placement.py: one module in the place of another
report       what was replaced, what was left and why; measure.py: what that saves on a batch
"""
