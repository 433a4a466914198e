"""Algorithms: how to train a draft. Each folder has config, model, objective and export."""
