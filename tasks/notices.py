"""Messages to people, one an incident, through apprise: webhooks, Slack, mail and a hundred more by one address each.

(Prefect's notification blocks are made of apprise, but live on a Prefect server; promotions happen without one.) A
message is written down first and delivered then: what no channel took is tried again by the next `watch`. The address
of a channel is a secret: it is read from the environment when it is needed, and reaches no log, file or error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from speculators_core.errors import ConfigError, RegistryError
from speculators_core.locks import named_lock
from speculators_core.store import write_atomic
from speculators_core.types import StrictModel
from tasks.adapters.redaction import redact
from tasks.adapters.settings import settings
from tasks.site import Channel, EventName, read_site

log = logging.getLogger(__name__)

_GIVE_UP_S = 24 * 3600.0
_FORGET_S = 90 * 24 * 3600.0


class Notice(StrictModel):
    """One message; its file under `<home>/notices/` remembers that it was sent."""

    event: EventName
    incident: str = Field(description="what it is about: there is one message for it")
    title: str
    lines: tuple[str, ...]
    time: float = Field(default_factory=time.time, description="seconds since 1970")
    sent: tuple[str, ...] = Field((), description="channels that took it, by their variable")

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.event}-{hashlib.sha256(self.incident.encode()).hexdigest()[:16]}.json"


def post(notice: Notice) -> None:
    """Write a message down, unless its incident has one already, and deliver what is to be delivered.

    Never fails for a channel that does not answer, nor for a site file that cannot be read: what was done is done.
    """
    if not (channels := _channels()):
        return
    path = _folder() / notice.name
    if not path.exists():
        _write(path, notice)
    try:
        deliver(channels)
    except RegistryError as error:  # another process has been delivering for minutes
        log.warning("the next `watch` delivers: %s", error)


def deliver(channels: Sequence[Channel] | None = None) -> None:
    """Send every message to each channel that wants it and has not taken it yet; old ones are forgotten."""
    with named_lock(settings().locks, "notices"):
        for path, notice in _notices():
            age = time.time() - notice.time
            if age > _FORGET_S:
                path.unlink(missing_ok=True)
            elif age < _GIVE_UP_S:
                took = tuple(
                    channel.url_variable
                    for channel in (_channels() if channels is None else channels)
                    if channel.url_variable not in notice.sent and _wants(channel, notice) and _send(channel, notice)
                )
                if took:
                    _write(path, notice.model_copy(update={"sent": (*notice.sent, *took)}))


def _channels() -> Sequence[Channel]:
    file = settings().site
    if not file.is_file():
        return ()
    try:
        return read_site(file).notify
    except ConfigError as error:
        log.warning("nobody is told of anything: %s", error)
        return ()


def _wants(channel: Channel, notice: Notice) -> bool:
    return channel.events is None or notice.event in channel.events


def _send(channel: Channel, notice: Notice) -> bool:
    """Whether the channel took it; says why not, without the address."""
    import apprise

    address = os.environ.get(channel.url_variable)
    if not address:
        log.warning("a message waits: the variable %s is not set here: %s", channel.url_variable, notice.title)
        return False
    target = apprise.Apprise()
    with _silent("apprise", "urllib3"):  # they log addresses and bodies
        if not target.add(address):
            log.warning("%s holds no address that apprise knows", channel.url_variable)
            return False
        if not target.notify(title=redact(notice.title), body=redact("\n".join(notice.lines) or notice.title)):
            log.warning("the channel of %s did not take a message: %s", channel.url_variable, notice.title)
            return False
    return True


@contextmanager
def _silent(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _notices() -> Iterator[tuple[Path, Notice]]:
    for path in sorted(_folder().glob("*.json")):
        try:
            yield path, Notice.model_validate_json(path.read_bytes())
        except ValidationError as error:
            log.warning("%s is no message: %s", path, error.errors()[0]["msg"])


def _write(path: Path, notice: Notice) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda part: part.write_text(notice.model_dump_json()))


def _folder() -> Path:
    return settings().home / "notices"
