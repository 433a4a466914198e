"""`draftsmith adopt`: a draft that somebody else trained, measured and judged like one of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_convert import BinOption, FromOption, LayersOption, MaskOption, TokensOption, options_of
from flows.cli_support import (
    NO_OVERRIDES,
    JsonOption,
    RecipeArgument,
    SetOption,
    load,
    prepare_environment,
    show_loop,
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(adopt)


def adopt(
    recipe: RecipeArgument,
    source: Annotated[str, typer.Argument(help="directory or hub id (OWNER/NAME@REVISION) of a draft")],
    overrides: SetOption = NO_OVERRIDES,
    layout: FromOption = "auto",
    aux_layers: LayersOption = None,
    mask_token_id: MaskOption = None,
    speculative_tokens: TokensOption = None,
    allow_bin: BinOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take over a draft that somebody else trained: convert, serve, measure, register, and let the gate judge it.

    The recipe says which verifier, data, evaluation, gate and deployment; its algorithm is to be the draft's.
    """
    settings = prepare_environment()
    loaded = load(recipe, overrides)
    options = options_of(layout, aux_layers, mask_token_id, speculative_tokens, allow_bin)
    from tasks.adapters.prefect_server import prefect_api

    with prefect_api(settings) as api:
        from flows.adopt import adopt as flow

        api.wait()
        summary = flow(loaded, str(Path(source).absolute()) if Path(source).is_dir() else source, options)
    show_loop(summary, settings.home / loaded.name / "adopted.json", as_json)
