"""Losses of a draft against its verifier: `terms` reads a recipe (no torch), `closed_form` has the formulas, `fused`
evaluates them together with the vocabulary projection.
"""
