"""Bricks of draft models, shared by algorithms and named after none."""
