"""`draftsmith fingerprint`, `diff`, `why`, `plan`, `apply`: what changed, what that means, and doing it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli_support import (
    NO_OVERRIDES,
    JsonOption,
    RecipeArgument,
    SetOption,
    load,
    prepare_environment,
    print_table,
    show_table,
)

if TYPE_CHECKING:
    from speculators_core.lifecycle.plan import Plan, PlannedStage

LOCATION = "a directory, a hub id as OWNER/NAME[@REVISION], or a URL such as s3://bucket/prefix"
LocationArgument = Annotated[str, typer.Argument(metavar="VERIFIER", help=LOCATION)]


def fingerprint(verifier: LocationArgument, as_json: JsonOption = False) -> None:
    """Digest of all that makes a draft stale, with one digest for each part.

    Hashes of large files are remembered: a second look costs nothing. A hub's own sums are used, so that no weights
    are downloaded.
    """
    home = prepare_environment().home
    from speculators_core.verifier.fingerprint import describe_location

    found = describe_location(verifier, home=home).fingerprint
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    show_table(verifier, [("fingerprint", found.digest), *found.parts.items()])


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=LOCATION)],
    after: Annotated[str, typer.Argument(metavar="B", help=LOCATION)],
    lines: Annotated[int, typer.Option(min=1, help="lines to show of each part")] = 40,
    as_json: JsonOption = False,
) -> None:
    """What differs between two verifiers: which parts, which keys and lines of texts, which tensors of the weights.

    The values of tensors are compared where both lie on disk; elsewhere their names, shapes and dtypes.
    """
    home = prepare_environment().home
    from speculators_core.verifier.difference import difference, tensor_changes
    from speculators_core.verifier.files import LocalFiles, open_verifier
    from speculators_core.verifier.fingerprint import describe

    one, two = open_verifier(before, home=home), open_verifier(after, home=home)
    old, new = describe(one), describe(two)
    changes = difference(old, new)
    weights = None
    if any(change.part == "weights" for change in changes):
        on_disk = isinstance(one, LocalFiles) and isinstance(two, LocalFiles)
        weights = tensor_changes(one, old, two, new, values=on_disk)
    if as_json:
        told = {
            "same": not changes,
            "before": old.fingerprint.digest,
            "after": new.fingerprint.digest,
            "changes": [change.model_dump(mode="json") for change in changes],
            "tensors": None if weights is None else weights.model_dump(mode="json"),
        }
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return
    if not changes:
        print("no difference: a draft for one fits the other")
    for change in changes:
        print(change.part)
        for line in change.lines[:lines]:
            print(f"  {line}")
        if len(change.lines) > lines:
            print(f"  … {len(change.lines) - lines} more (--lines)")
    if weights is not None:
        for name, found in (
            ("changed", weights.changed),
            ("of another shape or dtype", weights.reshaped),
            ("added", weights.added),
            ("removed", weights.removed),
        ):
            if found:
                print(f"  {len(found)} tensors {name}: {', '.join(found[:4])}{' …' if len(found) > 4 else ''}")
        values = "" if weights.values_compared else " by name and shape; values were not compared"
        print(f"  {weights.same} tensors are equal{values}")


def why(
    target: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="a recipe file, or a registered model")],
    overrides: SetOption = NO_OVERRIDES,
    runtime: Annotated[str, typer.Option("--runtime", help="with MODEL: the vLLM that serves: interpreter or URL")] = (
        ".venv-vllm/bin/python"
    ),
    as_json: JsonOption = False,
) -> None:
    """Say in a few lines why the draft that serves is stale, or that it is not."""
    prepare_environment()
    from tasks.planning import explain, explain_model

    if Path(target).suffix in (".yaml", ".yml") or Path(target).exists():
        found = explain(load(Path(target), overrides))
    else:
        from speculators_core.engine.runtime import Runtime

        found = explain_model(target, Runtime(url=runtime) if "://" in runtime else Runtime(python=runtime))
    print(found.model_dump_json(indent=2) if as_json else "\n".join(found.lines()))


def plan(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    price: Annotated[float | None, typer.Option("--price-per-hour", min=0, help="price of the machine")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="file to write it to; default: plans/RECIPE.json of the state root"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what has to be done to keep the recipe's deployment in step, and write that down for `apply`.

    Stages that are in the store are not done again; for the others it says what changed. Times come from earlier runs.
    """
    home = prepare_environment().home
    if price is not None:
        overrides = [*overrides, f"lifecycle.price_per_hour={price}"]
    loaded = load(recipe, overrides)
    from speculators_core.store.files import require_place, write_atomic
    from tasks.planning import make_plan

    target = out or home / "plans" / f"{loaded.name}.json"
    require_place(target)
    found = make_plan(loaded)
    text = found.model_dump_json(indent=2)
    write_atomic(target, lambda part: part.write_text(text + "\n", encoding="utf-8"))
    if as_json:
        print(text)
        return
    show_plan(found)
    print(f"plan         {target}")
    if found.action != "nothing":
        print(f"do it        draftsmith apply {target}")


def apply(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="a file that `draftsmith plan` wrote")],
    as_json: JsonOption = False,
) -> None:
    """Carry out a plan; refuse when verifier, runtime, data or champion are not those that it was made for."""
    settings = prepare_environment()
    from tasks.planning import read_plan, require_same_world

    found, recipe = read_plan(file)
    require_same_world(found, recipe)
    if found.action == "nothing":
        print("{}" if as_json else "nothing to do")
        return
    from tasks.adapters.prefect_server import prefect_api

    with prefect_api(settings) as api:
        from flows.upkeep import upkeep

        api.wait()
        done = upkeep(recipe, found.action)
    if done.loop is not None:
        done.loop.write(settings.home / recipe.name / "report.json")
    print(done.model_dump_json(indent=2, by_alias=True) if as_json else done.describe())


def show_plan(found: Plan) -> None:
    """A plan for people."""
    from speculators_core.lifecycle.changes import MEANING

    print(f"{found.deployment}: {found.action}: {MEANING[found.action]}")
    for reason in found.reasons:
        print(f"  because {reason}")
    for change in found.details:
        print(f"    {change.part}: {'; '.join(change.lines[:3])}{' …' if len(change.lines) > 3 else ''}")
    if found.stages:
        from rich.table import Table

        table = Table()
        for heading in ("stage", "", "why", "tokens", "states", "time", "cost"):
            table.add_column(heading, justify="right" if heading in ("tokens", "states", "time", "cost") else "left")
        for stage in found.stages:
            table.add_row(stage.name, stage.state, stage.why, *numbers(stage))
        print_table(table)
        certain = [stage for stage in found.stages if stage.state == "run"]
        for label, stages in (("will run", certain), ("at most", found.to_run)):
            if (told := sum_of(stages)) and (stages is certain or len(stages) > len(certain)):
                print(f"{label:12} {told}")
    for note in found.notes:
        print(f"note         {note}")


def sum_of(stages: Sequence[PlannedStage]) -> str:
    """Time and cost of several stages; says so where something in it is unknown. Empty where nothing takes long."""
    from speculators_core.lifecycle.plan import total

    seconds, cost = total(stages, "seconds"), total(stages, "cost")
    known = "" if seconds is None else duration(seconds) + ("" if cost is None else f", {cost:.2f}")
    if not any(stage.untimed for stage in stages):
        return known
    return f"unknown; at least {known}" if known else "unknown"


def numbers(stage: PlannedStage) -> tuple[str, str, str, str]:
    """Tokens, bytes, time and cost of a stage; `?` where a stage will run and nothing was measured yet."""
    unknown = "?" if stage.untimed else ""
    return (
        "" if stage.tokens is None else f"{stage.tokens:,}",
        "" if stage.num_bytes is None else f"{stage.num_bytes / 1e9:.2f} GB",
        unknown if stage.seconds is None else duration(stage.seconds),
        "" if stage.cost is None else f"{stage.cost:.2f}",
    )


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def add_to(app: typer.Typer) -> None:
    """Make these commands of `draftsmith`."""
    for command in (plan, apply, why, diff, fingerprint):
        app.command()(command)
