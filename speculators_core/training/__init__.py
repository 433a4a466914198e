"""Training of a draft: packing, loading, the loop, optimisers, checkpoints, callbacks.

Knows no algorithm: it sees a module and an `Objective`. Import the submodules; this one stays light,
so that reading a recipe does not load torch.
"""
