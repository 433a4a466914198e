"""`draftsmith bench …`: speed, measured on this machine."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Measure speed; results are ratios, since machines are noisy.")
