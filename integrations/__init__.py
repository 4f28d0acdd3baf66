"""fewbit in the tools that people train with: callbacks for transformers' Trainer and for Lightning.

    from fewbit.integrations.transformers import FewbitCallback     Trainer, and TRL's trainers
    from fewbit.integrations.lightning import FewbitCallback        Lightning

What both do is in `preparation.py`: make a model keep less, by a method or a plan, and keep what it learned.
"""
