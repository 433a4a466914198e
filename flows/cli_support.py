"""What the commands share: options, the environment, running stages, printing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculators_core.errors import ConfigError, DraftsmithError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

    from speculators_core.config import Recipe
    from speculators_core.run import Run, StageResult
    from speculators_core.summary import LoopSummary
    from tasks.adapters.settings import Settings

RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="recipe file, e.g. deployments/recipes/demo.yaml")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="A.B=C", help="override a key of the recipe; repeatable")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for scripts instead of text")]
NO_OVERRIDES: list[str] = []
_WIDEST = 10_000


def prepare_environment() -> Settings:
    """Set what Prefect and MLflow read before either is imported."""
    from tasks.adapters.settings import apply_environment

    return apply_environment()


def load(recipe: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe with its overrides."""
    from speculators_core.config import load_recipe

    return load_recipe(recipe, overrides)


def run_stages(
    recipe: Path, overrides: Sequence[str], last: str, as_json: bool, *, show: bool = True
) -> tuple[list[StageResult], Run]:
    """Run the stages up to `last`, without Prefect and MLflow; print what each did."""
    settings = prepare_environment()
    from speculators_core.run import Run
    from speculators_core.stages import run_until
    from tasks.warm_start import recipe_start

    loaded = load(recipe, overrides)
    progress = None if as_json else ProgressLine()
    run = Run(loaded, settings.home, warm_start=recipe_start(loaded), progress=progress)
    results: list[StageResult] = []
    for result in run_until(run, last):
        results.append(result)
        if show and not as_json:
            print(f"{result.name:12} {'cached' if result.cached else f'{result.seconds:.0f} s':8} {result.ref.uri}")
    if as_json and show:
        print(json.dumps([r.model_dump(mode="json") for r in results], indent=2))
    return results, run


def evaluated(recipe: Path, overrides: Sequence[str]) -> tuple[list[StageResult], Run]:
    """The stages of a recipe that has been evaluated, found in the store, and a run to go on with; nothing is made.

    Raises:
        ConfigError: fewer prompts than the gate asks for. DraftsmithError: a stage is not done yet.
    """
    settings = prepare_environment()
    from speculators_core.run import NotProduced, Run
    from speculators_core.stages import require_prompts, run_until
    from tasks.warm_start import recipe_start

    loaded = load(recipe, overrides)
    run = Run(loaded, settings.home, only_look=True, warm_start=recipe_start(loaded))
    try:
        results = list(run_until(run, "evaluate"))
    except NotProduced as error:
        raise DraftsmithError(
            f"{recipe} is not evaluated yet: {error.what}", mend=f"draftsmith retrain {recipe}"
        ) from error
    require_prompts(loaded, by_name(results, "prepare"))
    return results, replace(run, only_look=False)


class ProgressLine:
    """One line on a terminal, rewritten in place; silent elsewhere."""

    def __call__(self, done: int, total: int) -> None:
        """Show done of total."""
        if sys.stderr.isatty():
            end = "\n" if done >= total else ""
            print(
                f"\r{done:,} of {total:,} ({100 * done / max(total, 1):.0f} %) ", end=end, file=sys.stderr, flush=True
            )


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas; ConfigError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of whole numbers", mend="write them as 2,15,27") from None


def model_of(target: str) -> str:
    """The registered model that is meant: a recipe's deployment where a recipe file is named."""
    path = Path(target)
    return load(path, []).deployment if path.suffix in (".yaml", ".yml") else target


def by_name(results: Sequence[StageResult], name: str) -> StageResult:
    """The result of one stage."""
    return next(r for r in results if r.name == name)


def copy_draft(source: Path, target: Path) -> None:
    """Copy a draft to a directory that doesn't exist yet."""
    import shutil

    from speculators_core.store.files import require_new, write_directory

    require_new(target)
    write_directory(target, lambda partial: shutil.copytree(source, partial))


def show_loop(summary: LoopSummary, target: Path, as_json: bool) -> None:
    """Write what a loop found, and print it as JSON or as a table with where to go on."""
    from speculators_core.summary import rows

    summary.write(target)
    if as_json:
        print(summary.model_dump_json(indent=2, by_alias=True))
        return
    show_table(summary.recipe, rows(summary))
    print(f"report       {target}")
    print("pages        make ui   (Prefect's and MLflow's, over the same stores)")
    print(f"serve it     vllm serve {summary.draft.path}")


def show_model(value: BaseModel, as_json: bool, text: str | None = None) -> None:
    """Print a result as JSON, or as a line, or as a table of its fields."""
    if as_json:
        print(value.model_dump_json(indent=2))
    elif text is not None:
        print(text)
    else:
        show_table("", [(name, str(field)) for name, field in value.model_dump().items()])


def show_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Label and value pairs in two columns."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    for label, value in rows:
        table.add_row(label, value)
    print_table(table)


def print_table(table: Table) -> None:
    """Print it as it stands: brackets in a cell are text, never rich's markup, and no word is cut or broken.

    Where a path or a digest needs more room than the terminal has, the table is wider: it can be copied then.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(markup=False)
    least = Measurement.get(console, console.options.update(max_width=_WIDEST), table).minimum
    console.width = max(console.width, least)
    console.print(table)
