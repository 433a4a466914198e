"""The engines of a run as they are now: written by who keeps them, read again by training when one fails."""

from __future__ import annotations

import threading
from pathlib import Path

from pydantic import Field, ValidationError

from speculators_core.engine.runtime import Runtime
from speculators_core.errors import EngineError
from speculators_core.store import write_atomic
from speculators_core.types import StrictModel


class BookContent(StrictModel):
    """What the file holds."""

    engines: dict[str, Runtime] = Field(default_factory=dict, description="servers that answer, by seat")
    lost: dict[str, str] = Field(default_factory=dict, description="seats that nobody starts again, with the cause")
    seats: int = Field(ge=1, description="engines that there should be")

    @property
    def starting(self) -> bool:
        """Whether somebody starts an engine just now: it will answer, or be told as lost."""
        return len(self.engines) + len(self.lost) < self.seats

    @property
    def hopeless(self) -> str | None:
        """Why no engine will come any more; None while one may."""
        return "; ".join(self.lost.values()) if len(self.lost) == self.seats else None


class AddressBook:
    """One file. Several threads of one process write; others read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def open(self, seats: int) -> None:
        """Begin anew, with no engine yet."""
        self._write(BookContent(seats=seats))

    def enter(self, seat: str, server: Runtime) -> None:
        """The server of a seat answers there."""
        self._change(seat, server, None)

    def strike(self, seat: str, cause: str | None = None) -> None:
        """The server of a seat is gone; with a cause, for good."""
        self._change(seat, None, cause)

    def read(self) -> BookContent:
        """Its content. EngineError where there is none: nobody keeps engines for this run."""
        try:
            return BookContent.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            mend = "let the flow start the training: it keeps the engines, and this list of them"
            raise EngineError(f"{self.path} lists no engines: {error}", mend=mend) from error

    def _change(self, seat: str, server: Runtime | None, cause: str | None) -> None:
        with self._lock:
            content = self.read()
            engines = {name: known for name, known in content.engines.items() if name != seat}
            if server is not None:
                engines[seat] = server
            lost = content.lost if cause is None else {**content.lost, seat: cause}
            self._write(content.model_copy(update={"engines": engines, "lost": lost}))

    def _write(self, content: BookContent) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, lambda part: part.write_text(content.model_dump_json(indent=1) + "\n"))
