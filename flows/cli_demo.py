"""`draftsmith demo`: the loop on the demo's model, or the story of a deployment whose world changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_support import NO_OVERRIDES, prepare_environment


def demo(
    story: Annotated[bool, typer.Option("--story", help="tell what happens when the verifier changes")] = False,
) -> None:
    """Show the loop on a real 135M model; with --story, what keeps a deployment in step when its world changes.

    The story plays on the real engine, some 20 minutes on two cores: a first champion, then nothing, the weights, the
    template or vLLM changes, serving rolls over under load, and a bad draft is forced in and taken back. Each chapter
    is written to story/story.json below DRAFTSMITH_HOME; one that was played is told, not played again.
    """
    if not story:
        from flows.cli import retrain

        retrain(Path("deployments/recipes/demo.yaml"), NO_OVERRIDES)
        return
    settings = prepare_environment()
    from tasks.adapters.prefect_server import prefect_api

    with prefect_api(settings) as api:
        from flows.story import tell_story

        api.wait()
        report = tell_story(lambda line: print(line, flush=True))
    print(f"\nThe end, after {report.seconds / 60:.0f} min. The numbers: {settings.home / 'story' / 'story.json'}")


def add_to(app: typer.Typer) -> None:
    """Make this a command of `draftsmith`."""
    app.command()(demo)
