"""`draftsmith bench …`: speed, measured on this machine, as ratios of two sides of one run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_support import (
    NO_OVERRIDES,
    JsonOption,
    RecipeArgument,
    SetOption,
    by_name,
    prepare_environment,
    run_stages,
)
from speculators_core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure speed; results are ratios, since machines are noisy.")

PEER = Path(".venv-peer")


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    against_peer: Annotated[
        bool, typer.Option("--against-peer", help="train both on the same rows, order, threads and shapes")
    ] = False,
    peer: Annotated[Path, typer.Option(help="environment with speculators 0.9.0")] = PEER,
    steps: Annotated[int, typer.Option(min=21, help="optimiser steps of a run, 20 of them to warm up")] = 60,
    repeats: Annotated[int, typer.Option(min=1, help="alternating runs of each side; the median counts")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Training speed, memory and loss beside speculators 0.9.0, on the recipe's states."""
    if not against_peer:
        raise ConfigError("bench train compares with another trainer", mend="add --against-peer")
    if not (peer / "bin" / "python").exists():
        raise ConfigError(f"there is no environment of the peer at {peer}", mend="python3 infra/setup.py --peer")
    home = prepare_environment().home
    results, run = run_stages(recipe, overrides, "capture", as_json, show=False)
    from speculators_core.bench.training import BenchSettings, bench_training

    states = run.store.path(by_name(results, "capture").ref)
    settings = BenchSettings(
        states=str(states),
        verifier=str(run.verifier),
        draft_vocabulary=run.recipe.draft_vocabulary or run.facts.vocab_size,
        row_tokens=run.recipe.training.row_tokens,
        steps=steps,
        runs=repeats,
    )
    report = bench_training(
        states, run.verifier, peer / "bin" / "python", home / "scratch" / "bench-training", settings=settings
    )
    print(report.model_dump_json(indent=2) if as_json else report.table())


@app.command()
def capture(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    rows: Annotated[int, typer.Option(min=1, help="prompts of one pass")] = 200,
    passes: Annotated[int, typer.Option(min=1, help="passes of each side and setting")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Capture speed beside the fastest prefill of the same engine without a connector."""
    home = prepare_environment().home
    results, run = run_stages(recipe, overrides, "prepare", as_json, show=False)
    from speculators_core.bench.capture import BatchSettings, bench_capture
    from speculators_core.data.rows import RowSet

    config = run.recipe.capture
    batched = (512, 1024, 2048, 4096)
    settings = [BatchSettings(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=tokens) for tokens in batched]
    report = bench_capture(
        RowSet.open(run.store.path(results[-1].ref)),
        run.verifier,
        run.recipe.runtime,
        run.layer_ids,
        run.fingerprint.digest,
        config,
        home=home,
        scratch=home / "scratch" / "bench-capture",
        settings=settings,
        passes=passes,
        max_rows=rows,
    )
    print(json.dumps(report.model_dump(mode="json"), indent=2) if as_json else report.table())
    if report.ratio < 0.9 and not as_json:
        print("capture is more than 10 % slower than the fastest prefill", file=sys.stderr)
