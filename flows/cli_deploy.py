"""`draftsmith deploy`: what the Prefect server is to hold, applied idempotently, the difference shown first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_support import JsonOption, prepare_environment, show_table
from speculators_core.errors import ConfigError


def deploy(
    site: Annotated[Path, typer.Argument(metavar="SITE", help="pools, schedule, watched recipes")] = Path(
        "deployments/site.yaml"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the difference and change nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put pools, deployments and automations on the Prefect server; safe to repeat.

    Needs a server that keeps running: `make ui`, or PREFECT_API_URL. Runs then execute where a worker is started:
    `prefect worker start --pool draftsmith-train` and the same for draftsmith-watch.
    """
    settings = prepare_environment()
    from tasks.adapters.prefect_server import prefect_api, running_ui_api

    if settings.prefect_api_url is None and running_ui_api(settings.home) is None:
        raise ConfigError(
            "there is no Prefect server to deploy to: a private one ends with its command",
            mend="start one with `make ui`, or set PREFECT_API_URL",
        )
    with prefect_api(settings) as api:
        from flows.deploy import deployments
        from tasks.deploying import apply, differences
        from tasks.site import read_site

        loaded = read_site(site)
        api.wait()
        wanted = deployments(loaded, settings, Path.cwd())
        found = differences(loaded, wanted) if dry_run else apply(loaded, wanted)
    if as_json:
        print(json.dumps([item.model_dump() for item in found], indent=2))
        return
    rows = [(item.change, "\n  ".join([f"{item.kind} {item.name}", *item.fields])) for item in found]
    show_table("would change" if dry_run else "changed", rows)


def add_to(app: typer.Typer) -> None:
    """Make this a command of `draftsmith`."""
    app.command()(deploy)
