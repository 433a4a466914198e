"""`draftsmith gc` and `pin`: what the store keeps, and what may go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli_support import JsonOption, prepare_environment, show_model, show_table
from speculators_core.errors import ConfigError

if TYPE_CHECKING:
    from speculators_core.lifecycle.retention import Plan


def gc(
    apply: Annotated[bool, typer.Option("--apply/--dry-run", help="delete, or only show what would go")] = False,
    keep_days: Annotated[float, typer.Option(min=0, help="keep what was used within these days")] = 14.0,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="size that the store shall not exceed, e.g. 500GiB or 2TB")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what of the store may go, and with --apply delete it. Nothing that is referred to is ever deleted.

    Kept: what registered versions refer to (under an alias with all that it was made of), pins, what is in use just
    now. Hidden states are the largest part of a store: pin those that you want to train on again.
    """
    prepare_environment()
    size = None if quota is None else as_bytes(quota)
    from tasks.retention import collect, plan_gc

    if not apply:
        plan = plan_gc(keep_days=keep_days, quota_bytes=size)
        show_plan(plan, as_json)
        if not as_json and plan.deletions:
            print("nothing was deleted; --apply deletes")
        return
    done = collect(keep_days=keep_days, quota_bytes=size)
    if as_json:
        print(done.model_dump_json(indent=2))
        return
    show_plan(done.plan, as_json=False)
    print(f"deleted {len(done.deleted)} of {len(done.plan.deletions)}; wanted by now: {', '.join(done.left) or 'none'}")


def pin(
    reference: Annotated[
        str | None, typer.Argument(metavar="REF", help="address, kind/key or digest of an artifact, or its beginning")
    ] = None,
    why: Annotated[str, typer.Option("--why", help="reason, shown by gc")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="let it go again")] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep an artifact whatever its age; without REF list what is pinned."""
    home = prepare_environment().home
    from tasks import retention

    if reference is None:
        if remove:
            raise ConfigError("--remove needs a REF", mend="`draftsmith pin` lists what is pinned")
        pins = retention.read_pins(home)
        if as_json:
            import json

            print(json.dumps([one.model_dump() for one in pins], indent=2))
        elif not pins:
            print("nothing is pinned")
        else:
            show_table("pinned", [(_short(one.name), f"{one.when}  {one.why}") for one in pins])
        return
    done = retention.unpin(reference) if remove else retention.pin(reference, why=why)
    show_model(done, as_json, f"{'unpinned' if remove else 'pinned'} {done.name}")


def show_plan(plan: Plan, as_json: bool) -> None:
    """A plan as a table, deletions last, and its sums."""
    if as_json:
        print(plan.model_dump_json(indent=2))
        return
    lines = sorted(plan.lines, key=lambda line: (line.fate == "delete", -line.num_bytes))
    show_table(
        "store",
        [
            (
                f"{line.fate:6} {_short(line.name)}",
                f"{as_text(line.num_bytes):>10}  idle {line.idle_days:.1f} d  {line.reason}",
            )
            for line in lines
        ],
    )
    print(f"keeps {as_text(plan.kept_bytes)}, would free {as_text(plan.freed_bytes)}")
    if plan.over_quota:
        print(f"{as_text(plan.over_quota)} above the quota remain: referred to, or used within the hour")


def as_bytes(text: str) -> int:
    """Bytes of a size such as 1024, 500MB, 1.5TiB."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGTP", 1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    number = text.strip().upper().rstrip("BIKMGTP ")
    unit = text.strip().upper()[len(number) :].strip()
    try:
        size = round(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise ConfigError(f"{text!r} is no size", mend="write e.g. 500GiB or 2TB")
    return size


def as_text(num_bytes: int) -> str:
    """A size for readers."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _short(name: str) -> str:
    *kind, digest = name.split("/")
    return "/".join((*kind, digest[:12]))


def add_to(app: typer.Typer) -> None:
    """Make these commands of `draftsmith`."""
    for command in (gc, pin):
        app.command()(command)
