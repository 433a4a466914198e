"""`draftsmith stitch`: a tuned native head back into the verifier that serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_support import JsonOption
from speculators_core.errors import ConfigError


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(stitch)


def stitch(
    draft: Annotated[Path, typer.Argument(help="exported draft of an algorithm that is served by its verifier")],
    verifier: Annotated[Path, typer.Argument(help="directory of the verifier that it was trained for")],
    target: Annotated[Path, typer.Argument(help="directory to write; it must not exist yet")],
    as_json: JsonOption = False,
) -> None:
    """Write a verifier with a tuned native head in it; every other tensor and file is proven to be unchanged.

    vLLM loads a native head from the verifier itself: serve TARGET with the printed --speculative-config.
    """
    from speculators_core import registry
    from speculators_core.evaluation.served import drafted_tokens
    from speculators_core.formats.directory import read_config
    from speculators_core.store.files import require_new

    require_new(target)
    kind = str(read_config(draft).get("speculators_model_type"))
    algorithm = registry.resolve(kind)
    if algorithm.stitch is None:
        raise ConfigError(f"a draft of {kind} is served alone, it needs no stitching", mend=f"vllm serve {draft}")
    count = algorithm.stitch(draft, verifier, target, link=False)
    told = {"method": kind, "num_speculative_tokens": drafted_tokens(draft)}
    if as_json:
        print(json.dumps({"target": str(target), "replaced_tensors": count, "speculative_config": told}))
        return
    print(f"{count} tensors replaced, all others identical: {target}")
    print(f"vllm serve {target} --speculative-config '{json.dumps(told)}'")
