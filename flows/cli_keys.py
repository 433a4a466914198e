"""`draftsmith keys`: the reference of a recipe, from its declaration."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Annotated

import typer

from flows.cli_support import JsonOption


def keys(
    under: Annotated[
        str | None, typer.Argument(metavar="KEY", help="only this key, or the keys of this section, e.g. data")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain every key of a recipe: its type, its default and what it is for.

    The knobs of `algorithm` say which algorithms own them.
    """
    from speculators_core.keys import Key, describe_keys

    found = describe_keys(under)
    if as_json:
        print(json.dumps([key.model_dump() for key in found], indent=2, ensure_ascii=False))
        return
    owners: dict[Key, list[str]] = {}
    for key in found:
        owners.setdefault(key.model_copy(update={"algorithm": None}), []).append(key.algorithm or "")
    for key, kinds in owners.items():
        owned = f"; a knob of {', '.join(kinds)}" if any(kinds) else ""
        where = f" where {key.within} is" if key.within else ""
        default = f"must be given{where}" if key.default is None else f"default {key.default}"
        print(f"{key.name}   {key.type}; {default}{owned}")
        print(textwrap.indent(textwrap.fill(key.meaning, shutil.get_terminal_size().columns - 8), "    "))


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(keys)
