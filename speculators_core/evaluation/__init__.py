"""Acceptance on a real engine: measured runs, statistics over prompts, and a report.

`measure_baseline`, `measure_draft` and `measure_speed` run engines under common `Conditions`, and each leaves a
directory; `compare` turns such directories into a report without any engine.
"""
