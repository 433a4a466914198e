"""Prefect tasks: policy here, work in speculators_core."""

from tasks.adapters.settings import apply_environment

apply_environment()  # before any module of ours imports Prefect, which would settle in ~/.prefect for good
