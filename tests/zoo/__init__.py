"""Many small models of `transformers` and `timm`, each trained for a step in every way that fewbit offers.

models.py     the models: a name → a module with random weights, its inputs and a loss
wide.py       155 more, from the default configurations of transformers, and small_networks.py (`make zoo ZOO=--wide`)
methods.py    the ways: a name → how a model is converted, and what is set around its forward pass
measure.py    one row: what a method does to a model
rules.py      what each row must hold
__main__.py   all rows, resumable (`make zoo`)
"""
