"""`fewbit.convert`: replaces layers and activations of a model, in place, by those that save few bits.

api          `convert` and `revert`; options.py: the keywords, and the methods that they stand for, in their order
find         the activations of a model, and include and exclude; recognize.py: which activation a module is
few_bit_forms    the few-bit forms of activations; neighbours.py: which of them would only add memory
method       what a method is; actnn, attention, blpa, chunked_loss, gated_mlps, normalizations, vquant: one each
swap         changes the class of a layer and back, or puts one module in the place of another: all, or nothing
report       what was replaced, what was left and why, what stays exact, and the bytes saved on a batch
"""
