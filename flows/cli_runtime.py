"""`draftsmith runtime …`: vLLM servers that somebody else runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_support import NO_OVERRIDES, JsonOption, RecipeArgument, SetOption, load, prepare_environment

app = typer.Typer(no_args_is_help=True, help="Servers that somebody else runs: how to start one, and does it fit?")


@app.command()
def flags(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    draft: Annotated[
        Path | None, typer.Option(help="a draft's directory: how to serve it for an evaluation, instead of a capture")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="verifier (or draft) as the server's own host names it, where that differs")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the command that starts a server for this recipe, on another host or by other hands.

    For a capture the recipe says where the server is reached and where it puts its records, e.g.
    --set 'capture.runtime={url: "http://gpu:8000", store: {config: {root: /shared/records}}}'.
    Its environment needs vLLM and draftsmith-hs-connectors (pip install ./hs_connectors).
    """
    from speculators_core.remote import capture_command, draft_command
    from speculators_core.run import Run

    run = Run(load(recipe, overrides), prepare_environment().home)
    command = capture_command(run, model=model) if draft is None else draft_command(run, draft, model=model)
    print(json.dumps({"command": command}, indent=2) if as_json else shlex.join(command))


@app.command()
def check(recipe: RecipeArgument, overrides: SetOption = NO_OVERRIDES) -> None:
    """Ask the recipe's servers who they are, and agree with the one that is to capture."""
    from speculators_core.remote import greet_servers
    from speculators_core.run import Run

    run = Run(load(recipe, overrides), prepare_environment().home)
    greet_servers(run)
    print(f"runtime {run.runtime.key}, capture by {run.capture_runtime.key}")
