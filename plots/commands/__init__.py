"""Commands that make the evidence: trainings and measurements whose numbers and figures stand in `plots/results`.

A clone of the repository adds them to `fewbit plot` and `fewbit memory` (cli/lazy.py); an installed wheel has none.
"""
