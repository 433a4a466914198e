"""The `draftsmith` command. Heavy imports stay inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from flows import (
    cli_adopt,
    cli_bench,
    cli_convert,
    cli_data,
    cli_demo,
    cli_deploy,
    cli_gc,
    cli_hs,
    cli_keys,
    cli_parity,
    cli_plan,
    cli_registry,
    cli_runtime,
    cli_serve,
    cli_stitch,
)
from flows.cli_support import (
    NO_OVERRIDES,
    JsonOption,
    RecipeArgument,
    SetOption,
    by_name,
    copy_draft,
    evaluated,
    load,
    prepare_environment,
    run_stages,
    show_loop,
    show_model,
    show_table,
)
from speculators_core.errors import ConfigError, DraftsmithError, Interrupted

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs are filled anew to the terminal's width
    help="Keep the draft model of a vLLM deployment in step with its verifier.\n\n"
    "`draftsmith retrain RECIPE` runs the whole loop; the other commands run one stage of it, with what comes before "
    "taken from the store, or made where it is missing there. State lives under DRAFTSMITH_HOME (default .draftsmith).",
)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_hs.app, name="hs")
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_runtime.app, name="runtime")

STOPPED = 130
"""Exit status after a signal."""


def show_version(wanted: bool) -> None:
    """Print what is installed, and stop."""
    if wanted:
        from importlib.metadata import version

        print(f"draftsmith {version('draftsmith')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version and stop")
    ] = False,
) -> None:
    """What every command takes before its name."""


@app.command()
def retrain(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything and say what would run")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the whole loop: preflight, prepare, capture, train, export, evaluate, register, promote."""
    if dry_run:
        from speculators_core.run import Run
        from speculators_core.stages import require_likely_prompts

        require_likely_prompts(Run(load(recipe, overrides), prepare_environment().home))
        status(recipe, overrides, as_json)
        return
    settings = prepare_environment()
    loaded = load(recipe, overrides)
    if loaded.runtime.url is not None:
        raise ConfigError(
            "retrain serves a draft that does not exist yet, and the recipe's runtime is a server of somebody else",
            mend="give `runtime` an interpreter, and the server's URL to `capture.runtime`",
        )
    from tasks.adapters.prefect_server import prefect_api

    with prefect_api(settings) as api:
        from flows.retrain import retrain as flow

        api.wait()
        summary = flow(loaded)
    show_loop(summary, settings.home / loaded.name / "report.json", as_json)


@app.command()
def prepare(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Turn conversations into token rows with loss masks; before that, see that the runtime loads such a draft."""
    results, _ = run_stages(recipe, overrides, "prepare", as_json)
    from speculators_core.data.report import summed_up

    found = by_name(results, "prepare").summary
    if not as_json:
        splits = ", ".join(f"{count} {name}" for name, count in found["splits"].items())
        print(f"             {found['conversations']} conversations, {found['tokens']} tokens: {splits}")
        print(f"             {summed_up(found)}")


@app.command()
def preflight(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Serve an untrained draft of the recipe's shape: does the runtime load it?"""
    run_stages(recipe, overrides, "preflight", as_json)


@app.command()
def capture(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Capture the verifier's hidden states with vLLM; goes on at the shard where it was cut off."""
    run_stages(recipe, overrides, "capture", as_json)


@app.command()
def train(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Train the draft on captured states; goes on at the last whole checkpoint."""
    run_stages(recipe, overrides, "train", as_json)


@app.command()
def export(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    to: Annotated[Path | None, typer.Option(help="also copy the draft to this new directory")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the trained draft as `vllm serve` loads it."""
    if to is not None:
        from speculators_core.store.files import require_new

        require_new(to)
    results, run = run_stages(recipe, overrides, "export", as_json)
    source = run.store.path(results[-1].ref)
    if to is not None:
        copy_draft(source, to)
    if not as_json:
        print(f"draft        {to or source}")


@app.command()
def evaluate(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Measure acceptance, losslessness and speed on the real engine.

    Where that cannot serve the draft (`export.allow_unservable`), the reference loop measures acceptance alone.
    """
    results, run = run_stages(recipe, overrides, "evaluate", as_json)
    if not as_json:
        print((run.store.path(results[-1].ref) / "report.md").read_text())


@app.command()
def register(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Register the evaluated draft in MLflow; safe to repeat. A draft that is not evaluated yet is refused."""
    results, run = evaluated(recipe, overrides)
    from tasks.release import register_draft

    version = register_draft(run, by_name(results, "export").ref, by_name(results, "evaluate").ref)
    show_model(version, as_json, f"{version.model} version {version.version}")


@app.command()
def status(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES, as_json: JsonOption = False) -> None:
    """Say which stages of a recipe are done, what would run, and what is registered."""
    prepare_environment()
    loaded = load(recipe, overrides)
    from tasks.release import describe_status

    found = describe_status(loaded)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    show_table(loaded.name, [(line.name, line.text) for line in found.lines])
    named = shlex.join([str(recipe), *(part for override in overrides for part in ("--set", override))])
    if found.done:
        print(f"next: nothing; `draftsmith plan {named}` tells whether it is still in step")
    else:
        print(f"next: `draftsmith retrain {named}`; `draftsmith plan {named}` tells tokens, bytes and time")


@app.command()
def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="also check this recipe's verifier and runtime")] = None,
    overrides: SetOption = NO_OVERRIDES,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: environments, runtime, stores, disk, and what earlier runs left behind."""
    if overrides and recipe is None:
        raise ConfigError("--set overrides a recipe, and none is named", mend="draftsmith doctor RECIPE --set A.B=C")
    settings = prepare_environment()
    from flows.doctor import examine

    findings = examine(settings, load(recipe, overrides) if recipe else None)
    if as_json:
        print(json.dumps([f.model_dump() for f in findings], indent=2))
    else:
        marks = {True: "ok ", False: "BAD", None: "-  "}
        show_table("doctor", [(f"{marks[f.ok]} {f.name}", f.text) for f in findings])
    if any(f.ok is False for f in findings):
        raise typer.Exit(1)


# the loop's commands come first in --help
cli_demo.add_to(app)
cli_keys.add_to(app)
cli_plan.add_to(app)
cli_deploy.add_to(app)
cli_registry.add_to(app)
cli_serve.add_to(app)
cli_parity.add_to(app)
cli_gc.add_to(app)
cli_stitch.add_to(app)
cli_convert.add_to(app)
cli_adopt.add_to(app)


def describe_os_error(error: OSError) -> DraftsmithError:
    """An error of the operating system as one of ours: what, where, and how to mend it."""
    from speculators_core.store.files import disk_full

    where = str(error.filename or "")
    return disk_full(error, where or "see above", "writing") or DraftsmithError(
        f"{where}: {error.strerror or error}".removeprefix(": "),
        mend="see that it exists, that you may read and write it, and that it answers; then run the command again",
    )


def require_utf8(texts: Iterable[str]) -> None:
    """ConfigError for a file name in another encoding: JSON, safetensors and databases could not hold it."""
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"{text!a} is not UTF-8", mend="give the file or directory another name")


def require_words(arguments: Iterable[str]) -> None:
    """ConfigError for an empty argument, which as a path would be the directory that one happens to be in."""
    if "" in arguments:
        raise ConfigError("one of the arguments is empty", mend="is a variable of the shell unset?")


def tell_failure(said: str, what: str, mend: str | None) -> None:
    """Say on stderr why the command ends; with --json also on stdout, as JSON on a line."""
    print(f"{said}: {DraftsmithError(what, mend=mend)}", file=sys.stderr)
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": what, "mend": mend}, ensure_ascii=False))


def stop_as_ctrl_c(number: int, _: object) -> None:
    """Handler of SIGTERM: leave as at Ctrl-C, so that whatever is open is closed and the status is 130."""
    raise KeyboardInterrupt


def is_news(record: logging.LogRecord) -> bool:
    """Whether the terminal shows a record: not what Prefect says of an error of ours, which `main` tells once."""
    if not record.name.startswith(("prefect.flow_runs", "prefect.task_runs")):
        return True
    ours = record.exc_info is not None and isinstance(record.exc_info[1], DraftsmithError)
    return not ours and not record.getMessage().startswith("Finished in state Failed")


def require_output() -> None:
    """DraftsmithError where standard output is closed: what a command prints would be lost, and it would succeed."""
    if sys.stdout is None:
        raise DraftsmithError("standard output is closed", mend="let it go to a terminal, a file, a pipe or /dev/null")


def drop_unwritten() -> None:
    """Forget what standard output does not take: Python would try again at its end, and complain in its own words."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command; errors of ours become one clear message and an exit status (2 recipe, 1 other, 130 signal)."""
    signal.signal(signal.SIGTERM, stop_as_ctrl_c)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    for handler in logging.getLogger().handlers:
        handler.addFilter(is_news)
    for noisy in ("httpx", "httpcore", "alembic", "mlflow", "matplotlib", "prefect.server"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        require_output()
        require_words(sys.argv[1:])
        require_utf8([*sys.argv[1:], str(Path.cwd()), os.environ.get("DRAFTSMITH_HOME", "")])
        status = app(standalone_mode=False)  # a command's typer.Exit comes back as its number
        sys.stdout.flush()  # a full disk is met here, then, and not when Python ends
        if status == STOPPED:
            raise KeyboardInterrupt  # which typer made a number of
        sys.exit(status if isinstance(status, int) else 0)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Interrupted as stop:
        tell_failure("stopped", stop.what, stop.mend)
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        tell_failure("stopped", "a signal came", "run the same command again: what was finished is kept")
        sys.exit(STOPPED)
    except DraftsmithError as error:
        tell_failure("error", error.what, error.mend)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # whoever reads has enough; typer leaves alike
        sys.exit(1)
    except OSError as error:  # the disk's or the network's word, at a place that has no better one
        told = describe_os_error(error)
        tell_failure("error", told.what, told.mend)
        logging.getLogger(__name__).debug("raised here", exc_info=error)
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "format_message"):  # of typer, about the command line
            error.show()
            if "--json" in sys.argv[1:]:
                print(json.dumps({"error": error.format_message(), "mend": None}))
            sys.exit(getattr(error, "exit_code", 2))
        raise
    finally:
        drop_unwritten()


if __name__ == "__main__":
    main()
