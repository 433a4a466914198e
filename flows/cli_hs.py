"""`draftsmith hs …`: look after hidden states, finished sets as well as the stores that records travel through."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_gc import as_text
from flows.cli_support import JsonOption, ProgressLine, show_table
from speculators_core.errors import ConfigError, DraftsmithError

if TYPE_CHECKING:
    from hs_connectors import Backend
    from hs_connectors.contract import Entry
    from speculators_core.states.sets import StateSet

app = typer.Typer(
    no_args_is_help=True,
    help="Look after hidden states. PLACE is the directory of a finished set, or a store of records: a directory, "
    'shm:SPACE, s3://BUCKET/PREFIX, mooncake:HOST:PORT, or NAME:{"option": "value", …} for any backend.',
)

PlaceArgument = Annotated[str, typer.Argument(metavar="PLACE", help="set or store")]
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="store of records")]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command("ls")
def list_entries(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """List the records of a store, or the shards of a set."""
    with connector_errors():
        states = find_set(place)
        if states is not None:
            lines = [{"shard": entry.file, "rows": entry.rows, "tokens": entry.tokens} for entry in states.shards]
            show(
                lines,
                [(str(line["shard"]), f"{line['rows']} rows, {line['tokens']} tokens") for line in lines],
                as_json,
            )
            return
        entries = sorted(open_store(place).entries(), key=lambda entry: entry.modified_at)
    show([_facts(entry) for entry in entries], [_line(entry) for entry in entries], as_json)
    if not as_json:
        print(_summary(entries))


@app.command()
def inspect(
    place: PlaceArgument,
    key: Annotated[str | None, typer.Argument(help="a record of the store")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a set or a store holds and who wrote it; with KEY what is in one record."""
    with connector_errors():
        states = find_set(place)
        if states is not None:
            if key is not None:
                raise ConfigError(f"{place} is a set: its rows have no keys", mend="leave KEY out")
            report = {"report": states.report} if as_json else {}
            found = {**states.facts.model_dump(), "rows": states.num_rows, "tokens": states.num_tokens, **report}
        elif key is None:
            store = open_store(place)
            entries = list(store.entries())
            facts = store.announcement() or {}
            found = {"content": _summary(entries), **{f"engine {name}": value for name, value in facts.items()}}
        else:
            found = _describe(open_store(place), key)
    show(found, [(name, str(value)) for name, value in found.items()], as_json)


@app.command()
def verify(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """Read every byte of a set or a store and check it; the status is 1 where something is wrong."""
    with connector_errors():
        states = find_set(place)
        if states is not None:
            states.verify()  # the error names the damaged shard
            show({"rows": states.num_rows, "problems": []}, [("verified", f"{states.num_rows} rows")], as_json)
            return
        from hs_connectors.upkeep import check

        good, problems = 0, []
        for found in check(open_store(place)):
            good += found.problem is None
            if found.problem is not None:
                problems.append({"key": found.entry.key, "problem": found.problem})
    lines = [(line["key"], line["problem"]) for line in problems] + [("verified", f"{good} records")]
    show({"records": good, "problems": problems}, lines, as_json)
    if problems:
        raise typer.Exit(1)


@app.command()
def gc(
    store: StoreArgument,
    lease: Annotated[str, typer.Option(metavar="TIME", help="a reader has this long to take a record")] = "1h",
    apply: Annotated[bool, typer.Option("--apply/--dry-run", help="delete, or only show what would go")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which records nobody will take any more, and with --apply delete them and what killed writers left.

    A record is leased to its reader from when it was written; readers delete what they have taken. What is older than a
    lease belongs to nobody: its reader died. What bears the name of a record and is none is named and stays; the status
    is 1 then.
    """
    with connector_errors():
        if find_set(store) is not None:
            raise ConfigError(f"{store} is a finished set, no store", mend="`draftsmith gc` looks after sets")
        from hs_connectors.upkeep import collect

        expired = collect(open_store(store), as_seconds(lease), apply=apply)
    gone = [found.entry for found in expired if found.problem is None]
    lines = [(found.entry.key, found.problem) if found.problem else _line(found.entry) for found in expired]
    show([_facts(found.entry) | {"problem": found.problem} for found in expired], lines, as_json)
    if not as_json:
        print(f"{'deleted' if apply else 'would delete'} {_summary(gone)}")
    if len(gone) < len(expired):
        raise typer.Exit(1)


@app.command()
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="set or store")],
    target: Annotated[str, typer.Argument(metavar="TO", help="new directory for a set, or a store of any backend")],
    as_json: JsonOption = False,
) -> None:
    """Copy a set to another directory, or records to another store; every byte is verified on the way.

    A copy that was cut off goes on when it is started again. A store of another engine's states is refused as TO.
    """
    with connector_errors():
        states = find_set(source)
        if states is not None:
            from speculators_core.states.copying import copy_set

            copied = copy_set(states, Path(target))
            show({"rows": copied.num_rows}, [("copied", f"{copied.num_rows} rows to {target}")], as_json)
            return
        from hs_connectors.registry import locate, open_backend
        from hs_connectors.upkeep import Copied
        from hs_connectors.upkeep import copy as copy_records

        origin = open_store(source)
        total, sums = sum(entry.kind == "record" for entry in origin.entries()), Copied(0, 0, 0)
        progress = ProgressLine()
        for sums in copy_records(origin, open_backend(*locate(target))):
            progress(sums.records + sums.there, total)
    text = f"{sums.records} records, {as_text(sums.num_bytes)}; {sums.there} were there already"
    show(vars(sums), [("copied", text)], as_json)


def find_set(place: str) -> StateSet | None:
    """The finished set in that directory (or in an artifact's `data/`), or None where the place is a store."""
    from speculators_core.states.sets import INDEX_NAME, StateSet

    within = (Path(place), Path(place) / "data")
    return next((StateSet.open(path) for path in within if (path / INDEX_NAME).is_file()), None)


def open_store(place: str) -> Backend:
    """The store at that address; ConfigError for a file, and for a directory with nothing of ours in it."""
    from hs_connectors.registry import locate, open_backend

    name, config = locate(place)
    store = open_backend(name, config)
    if name == "file":
        root = Path(config["root"])
        mend = "`draftsmith status RECIPE` says where its set lies"
        if root.is_file():
            raise ConfigError(f"{root} is a file; a set or a store is a directory", mend=mend)
        if not root.is_dir():
            raise ConfigError(f"there is no directory {root}", mend=mend)
        held = any(not path.name.startswith(".") for path in root.iterdir())  # dotted: what killed writers left
        if held and store.announcement() is None and next(iter(store.entries()), None) is None:
            raise ConfigError(
                f"{root} is neither a set nor a store: it holds no index, record, marker or announcement", mend=mend
            )
    return store


@contextmanager
def connector_errors() -> Iterator[None]:
    """What hs_connectors refuses, as errors of ours."""
    from hs_connectors.errors import ConnectorError, SettingsError

    try:
        yield
    except SettingsError as error:
        raise ConfigError(error.what, mend=error.mend) from error
    except ConnectorError as error:
        raise DraftsmithError(error.what, mend=error.mend) from error


def as_seconds(text: str) -> float:
    """Seconds of a time such as 90, 90s, 15m, 1h or 7d."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{text!r} is no time", mend="write e.g. 90s, 15m, 1h or 7d")
    return seconds


def show(value: Any, lines: list[tuple[str, str]], as_json: bool) -> None:
    """The value for scripts, or the lines for people."""
    if as_json:
        json.dump(value, sys.stdout, indent=2, default=str)
        print()
    elif lines:
        show_table("", lines)


def _describe(store: Backend, key: str) -> dict[str, Any]:
    from hs_connectors.contract import check_key
    from hs_connectors.record import unpack

    payload = store.fetch(check_key(key), 0)
    record = unpack(payload)
    return {
        "tokens": len(record.token_ids),
        "layer_ids": list(record.layer_ids),
        "hidden_size": record.hidden_states.shape[-1],
        "dtype": record.dtype,
        "num_bytes": len(payload),
        "verifier_fingerprint": record.verifier_fingerprint,
        **record.extra,
    }


def _facts(entry: Entry) -> dict[str, Any]:
    return vars(entry) | {"age_s": round(time.time() - entry.modified_at, 1)}


def _line(entry: Entry) -> tuple[str, str]:
    return entry.key, f"{entry.kind:6}  {as_text(entry.num_bytes):>10}  {time.time() - entry.modified_at:.0f} s old"


def _summary(entries: list[Entry]) -> str:
    records = [entry for entry in entries if entry.kind == "record"]
    total = as_text(sum(entry.num_bytes for entry in records))
    return f"{len(records)} records, {total}, {len(entries) - len(records)} error markers"
