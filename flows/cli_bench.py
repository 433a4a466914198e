"""`draftsmith bench …`: speed, measured on this machine, as ratios of two sides of one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli_hs import connector_errors
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

if TYPE_CHECKING:
    from speculators_core.bench.cases import Case
    from speculators_core.bench.setup import BenchSettings
    from speculators_core.evaluation.records import Measurement
    from speculators_core.run import Run, StageResult

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
    require_peer(peer)
    home = prepare_environment().home
    results, run = run_stages(recipe, overrides, "capture", as_json, show=False)
    from speculators_core.bench.training import bench_training

    settings = bench_settings(run, by_name(results, "capture")).model_copy(update={"steps": steps, "runs": repeats})
    report = bench_training(peer / "bin" / "python", home / "scratch" / "bench-training", settings)
    print(report.model_dump_json(indent=2) if as_json else report.table())


@app.command()
def algorithms(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    only: Annotated[
        str | None, typer.Option("--cases", help="algorithms with commas between; default: all that these states suit")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the recipe's training rows")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each side, with seeds 0, 1, …")] = 2,
    peer: Annotated[Path, typer.Option(help="environment with speculators 0.9.0")] = PEER,
    resume: Annotated[bool, typer.Option("--resume", help="keep the rows of an earlier run")] = False,
    as_json: JsonOption = False,
) -> None:
    """Acceptance of each algorithm beside the peer's, trained on the same states for as long.

    Measured by the engine, or by the reference loop where an engine on a CPU cannot serve it. Takes hours. Each trained
    draft becomes a line of `bench/algorithms.jsonl` in the state root as soon as it is measured.
    """
    require_peer(peer)
    home = prepare_environment().home
    results, run = run_stages(recipe, overrides, "capture", as_json, show=False)
    from speculators_core.bench.algorithms import bench_algorithms, compare_sides, table, validation_prompts
    from speculators_core.bench.cases import case, suited
    from speculators_core.data.rows import RowSet
    from speculators_core.evaluation.measure import measure_draft
    from speculators_core.evaluation.reference.measuring import measure_reference
    from speculators_core.evaluation.runs import Conditions

    dataset = RowSet.open(run.store.path(by_name(results, "prepare").ref))
    prompts = [*dataset.prompts(), *validation_prompts(dataset)]

    conditions = Conditions(
        run.verifier,
        run.fingerprint.digest,
        prompts,
        run.recipe.runtime,
        run.recipe.evaluation.model_copy(update={"max_prompts": len(prompts)}),
        home,
    )

    def measure(draft: Path, told: Case, output: Path) -> Measurement:
        asked = replace(conditions, config=conditions.config.model_copy(update={"k": told.k}))
        by = run.recipe.evaluation.measured_by
        work = measure_reference if (told.by if by == "auto" else by) == "reference" else measure_draft
        return work(draft, asked, output)

    reads_layers = bool(run.aux_layers)
    names = [case(name).name for name in only.split(",")] if only else [each.name for each in suited(reads_layers)]
    rows = []
    for row in bench_algorithms(
        names,
        range(seeds),
        bench_settings(run, by_name(results, "capture"), schedule="linear"),
        peer / "bin" / "python",
        home / "scratch" / "bench-algorithms",
        measure,
        epochs=epochs,
        rows_file=home / "bench" / "algorithms.jsonl",
        resume=resume,
    ):
        rows.append(row)
        if as_json:
            print(row.model_dump_json(), flush=True)
    pairs = compare_sides(rows)
    print("\n".join(pair.model_dump_json() for pair in pairs) if as_json else table(rows, pairs))


@app.command()
def capture(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    rows: Annotated[int, typer.Option(min=1, help="prompts of one pass")] = 50,
    passes: Annotated[int, typer.Option(min=1, help="passes of each side and setting, in turns")] = 9,
    stores: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="STORE",
            help="records through this store, e.g. s3://BUCKET/PREFIX; file, shm or mooncake alone: one made for this; "
            "several: an engine for each, at the same time",
        ),
    ] = None,
    batched: Annotated[
        list[int] | None,
        typer.Option("--batched-tokens", min=1, help="max_num_batched_tokens of an engine without a connector"),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=0, help="generate so many tokens for each row's prompt, as a second kind of work")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Capture speed beside the fastest prefill, and generation, of the same engine without a connector."""
    home = prepare_environment().home
    results, run = run_stages(recipe, overrides, "prepare", as_json, show=False)
    from speculators_core.bench.capture import BatchSettings, bench_capture
    from speculators_core.data.rows import RowSet
    from speculators_core.states.stores import store_at

    config = run.recipe.capture
    with connector_errors():
        configs = [store_at(config, place) for place in stores or []] or [config]
    report = bench_capture(
        RowSet.open(run.store.path(results[-1].ref)),
        run.verifier,
        run.recipe.runtime,
        run.layer_ids,
        run.fingerprint.digest,
        configs,
        home=home,
        scratch=home / "scratch" / "bench-capture",
        settings=[
            BatchSettings(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=tokens)
            for tokens in batched or (512, 1024, 2048, 4096)
        ],
        passes=passes,
        max_rows=rows,
        new_tokens=new_tokens,
    )
    print(report.model_dump_json(indent=2) if as_json else report.table())


@app.command()
def online(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    steps: Annotated[int, typer.Option(min=8, help="optimiser steps that are counted")] = 60,
    cores: Annotated[tuple[int, int], typer.Option(help="processors of the engine and of the trainer")] = (0, 1),
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each; the median counts")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Training while an engine streams states to it, beside each of them alone; a processor for each.

    Records travel as the recipe says: `--set capture.backend=shm` or `mooncake` makes a store for this.
    """
    home = prepare_environment().home
    results, run = run_stages(recipe, overrides, "capture", as_json, show=False)
    from speculators_core.bench.online import bench_online
    from speculators_core.run import Run
    from speculators_core.stages.draft import train_request
    from speculators_core.stages.streaming import streaming

    scratch, streamed = home / "scratch" / "bench-online", run.recipe.hidden_states
    engine = streamed.engines[0].model_copy(update={"cores": (cores[0],)})
    streamed = streamed.model_copy(update={"mode": "online", "cache_gib": 0.0, "engines": (engine,)})
    uncached = run.recipe.capture.model_copy(update={"prefix_caching": False})  # the same rows are asked for again
    beside = Run(run.recipe.model_copy(update={"hidden_states": streamed, "capture": uncached}), home)
    report = bench_online(
        train_request(run, run.store.path(by_name(results, "capture").ref), Path()),
        streaming(beside, by_name(results, "prepare").ref, scratch),
        home,
        scratch,
        steps=steps,
        core=cores[1],
        rounds=rounds,
    )
    print(report.model_dump_json(indent=2) if as_json else report.table())


@app.command()
def store(
    places: Annotated[
        list[str],
        typer.Argument(metavar="STORE…", help="as in `draftsmith hs`; shm or mooncake alone: one made for this"),
    ],
    codec: Annotated[str, typer.Option(help="how states are encoded: none or fp8")] = "none",
    mib: Annotated[int, typer.Option(min=1, help="states of a record, MiB")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="measured puts and gets of each")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Put and get of large records, beside plain writes and reads of the same bytes where there are such."""
    home = prepare_environment().home
    from speculators_core.bench.store import bench_store

    for place in places:
        with connector_errors():
            speed = bench_store(place, home, codec=codec, mib=mib, rounds=rounds)
        print(speed.model_dump_json() if as_json else speed.line(), flush=True)


def require_peer(peer: Path) -> None:
    """ConfigError where the peer's environment is missing."""
    if not (peer / "bin" / "python").exists():
        raise ConfigError(f"there is no environment of the peer at {peer}", mend="python3 infra/setup.py --peer")


def bench_settings(run: Run, states: StageResult, schedule: Literal["none", "linear"] = "none") -> BenchSettings:
    """What both trainers are told of a recipe."""
    from speculators_core.bench.setup import BenchSettings

    return BenchSettings(
        states=str(run.store.path(states.ref)),
        verifier=str(run.verifier),
        draft_vocabulary=run.recipe.draft_vocabulary or run.facts.vocab_size,
        row_tokens=run.recipe.training.row_tokens,
        optimizer=run.recipe.training.optimizer.kind,
        learning_rate=run.recipe.training.optimizer.learning_rate,
        schedule=schedule,
    )
