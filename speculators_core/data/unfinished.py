"""A file that long work writes in the end: reserved before it begins, and what is finished of it kept beside it.

`<output>.part` holds a line with the digest of the settings, then a line for each finished record. A run that is
killed leaves it, and the same run goes on there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from speculators_core.errors import ConfigError
from speculators_core.locks import sign
from speculators_core.store.files import file_lock, require_new, write_atomic

log = logging.getLogger(__name__)


@contextmanager
def reserved(output: Path) -> Iterator[None]:
    """Hold a new file for whoever writes it in the end.

    Raises:
        ConfigError: something is there already, it cannot be made, or another process, which is named, holds it.
    """
    lock = output.with_name(f".{output.name}.lock")

    def refuse() -> None:
        holder = "another process"
        with suppress(OSError):  # it is done just now
            holder = f"process {lock.read_text()}"
        raise ConfigError(f"{holder} is writing {output}", mend="wait until it is done, or name another file")

    require_new(output)
    with file_lock(lock, f"{output} is being written", look=refuse):
        sign(lock)
        require_new(output)  # whoever held it may have finished since
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def part_of(output: Path) -> Path:
    """Where finished records lie until the output is written."""
    return output.with_name(output.name + ".part")


def resume(part: Path, settings: str) -> dict[str, dict[str, Any]]:
    """Finished records of an interrupted run, by key, in the order in which they were kept.

    The file is left whole, and begun where there is none, or where it was begun with settings of another digest.
    """
    finished: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    if part.is_file():
        for line in part.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                break  # torn by a kill: what follows cannot be trusted
            if not lines and (not isinstance(entry, Mapping) or entry.get("settings") != settings):
                log.info("%s was begun with other settings: starting anew", part)
                break
            lines.append(line)
            if "key" in entry:
                finished[entry["key"]] = entry["record"]
    part.parent.mkdir(parents=True, exist_ok=True)
    whole = "".join(f"{line}\n" for line in lines or [json.dumps({"settings": settings})])
    write_atomic(part, lambda fresh: fresh.write_text(whole, encoding="utf-8"))
    return finished


def keep(stream: IO[str], key: str, record: Mapping[str, Any]) -> None:
    """Append a finished record to the opened part, durably."""
    stream.write(json.dumps({"key": key, "record": record}) + "\n")
    stream.flush()
    os.fsync(stream.fileno())


def publish(output: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the output as JSON Lines, and drop the part."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    write_atomic(output, lambda fresh: fresh.write_text(text, encoding="utf-8"))
    part_of(output).unlink()
