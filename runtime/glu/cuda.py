"""Placeholder until written."""

from . import reference

forward, backward, copy, values = reference.forward, reference.backward, reference.copy, reference.values
