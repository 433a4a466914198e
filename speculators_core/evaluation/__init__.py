"""Acceptance on a real engine: measured runs, statistics over prompts, and a report.

`measure_baseline` and `measure_draft` each run one engine and leave a directory; `compare` turns two
such directories into a report without any engine. `evaluate` does all three.
"""
