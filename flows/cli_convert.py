"""`draftsmith convert`: drafts of other people's layouts into ours, and ours into theirs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli_support import JsonOption, numbers, prepare_environment, show_model
from speculators_core.errors import ConfigError

if TYPE_CHECKING:
    from speculators_core.convert.options import ConvertOptions


FromOption = Annotated[
    str,
    typer.Option(
        "--from",
        help="layout of SOURCE: auto, speculators, safeai (EAGLE-3; also SpecForge's, SGLang's, Model Optimizer's and "
        "AngelSlim's), peagle, zlab (DFlash, DFlash2), deepspec (DSpark), native (a verifier with a head of its own)",
    ),
]
LayersOption = Annotated[
    str | None, typer.Option(help="verifier layers that feed the draft, e.g. 2,15,27: i is the state after i layers")
]
MaskOption = Annotated[int | None, typer.Option(min=0, help="mask token, where the draft's config.json has none")]
TokensOption = Annotated[
    int | None, typer.Option(min=1, help="tokens that vLLM shall draft at a time; default: the layout's own number")
]
BinOption = Annotated[
    bool, typer.Option("--allow-bin", help="open .bin and .pt files with torch's restricted unpickler")
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(convert)


def convert(
    source: Annotated[str, typer.Argument(help="directory or hub id (OWNER/NAME@REVISION) of a draft")],
    output: Annotated[Path, typer.Argument(help="directory to write; it must not exist yet")],
    verifier: Annotated[
        str | None, typer.Option(help="directory or hub id of the verifier that the draft was trained for")
    ] = None,
    layout: FromOption = "auto",
    target: Annotated[str, typer.Option("--to", help="layout of OUTPUT: draftsmith, safeai or sglang")] = "draftsmith",
    publish_as: Annotated[
        str | None, typer.Option(help="hub id of the verifier to write into the draft; without it, the verifier's own")
    ] = None,
    aux_layers: LayersOption = None,
    mask_token_id: MaskOption = None,
    speculative_tokens: TokensOption = None,
    allow_bin: BinOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a draft, after its names, shapes and vocabulary have been checked against config and verifier.

    Missing or unknown tensors are listed, and nothing is written. Pickled files are refused with a safe way.
    """
    from speculators_core.convert import TARGETS, convert_to
    from speculators_core.convert import convert as convert_here
    from speculators_core.convert.fetch import fetch_source, fetch_verifier
    from speculators_core.store.files import require_new

    if target not in ("draftsmith", *TARGETS):
        raise ConfigError(f"--to {target!r} is not a layout", mend=f"choose draftsmith or {', '.join(TARGETS)}")
    require_new(output)
    home = prepare_environment().home
    options = options_of(layout, aux_layers, mask_token_id, speculative_tokens, allow_bin)
    found = fetch_source(source, home=home, allow_bin=allow_bin)
    directory, name = fetch_verifier(verifier, found, home=home)
    if target in TARGETS:
        done = convert_to(target, found, output, directory, options)
    else:
        done = convert_here(found, output, directory, publish_as or name, options)
    if as_json:
        show_model(done, as_json)
        return
    print(f"{done.layout} -> {done.target}: {done.algorithm}, {done.tensors} tensors in {done.path}")
    for note in done.notes:
        print(f"  {note}")


def options_of(
    layout: str, aux_layers: str | None, mask_token_id: int | None, speculative_tokens: int | None, allow_bin: bool
) -> ConvertOptions:
    """What the command line says about a checkpoint."""
    from speculators_core.convert.options import ConvertOptions

    return ConvertOptions(
        layout=layout,
        aux_layers=None if aux_layers is None else numbers("--aux-layers", aux_layers),
        mask_token_id=mask_token_id,
        speculative_tokens=speculative_tokens,
        allow_bin=allow_bin,
    )
