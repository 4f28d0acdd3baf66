"""A quantizer that notes what it is given."""

from fewbit.quantizers import PerGroup


class Counting:
    """Compresses by `quantizer`; `shapes` are those of what it compressed."""

    def __init__(self, quantizer=None):
        self.quantizer = quantizer or PerGroup(8)
        self.shapes = []

    def within(self, features):
        inner = Counting(self.quantizer.within(features))
        inner.shapes = self.shapes
        return inner

    def compress(self, x):
        self.shapes.append(tuple(x.shape))
        return self.quantizer.compress(x)
