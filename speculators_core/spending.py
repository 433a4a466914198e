"""The ledger of a run: what each attempt at a stage took, noted while it works, and held against the budget.

One small file an attempt lies under `<home>/spent/<run>/`, so that neither a kill nor a second process loses count. A
run here is what a recipe makes for one verifier, whatever its budget and the version of vLLM: the same command with a
higher budget goes on with the same ledger.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core.errors import BudgetError
from speculators_core.lifecycle.budget import Amount, BudgetConfig, excess
from speculators_core.lifecycle.changes import LifecycleConfig
from speculators_core.store import write_atomic
from speculators_core.types import StrictModel

_NOTE_EVERY_S = 5.0


class Entry(StrictModel):
    """One attempt at one stage, finished or not."""

    stage: str
    key: str = Field(description="input digest of what it makes, and which part of it")
    took: Amount


class Ledger:
    """Everything that a run has taken so far, and the attempt that works now."""

    def __init__(self, folder: Path, budget: BudgetConfig, lifecycle: LifecycleConfig) -> None:
        self._folder, self._budget, self._lifecycle = folder, budget, lifecycle
        self._attempt: _Attempt | None = None

    @property
    def limited(self) -> bool:
        """Whether there is a budget at all."""
        return self._budget != BudgetConfig()

    def entries(self, but: Path | None = None) -> Iterator[Entry]:
        """Every attempt, but the one of this file."""
        for path in sorted(self._folder.glob("*.json")):
            if path != but:
                yield Entry.model_validate_json(path.read_bytes())

    def spent(self, but: Path | None = None) -> Amount:
        """All attempts together, but the one of this file."""
        return sum((entry.took for entry in self.entries(but)), Amount())

    def priced(self, stage: str, amount: Amount) -> Amount:
        """The amount at the price of the stage's hours."""
        return amount.model_copy(update={"cost": self._lifecycle.price(stage, amount.seconds) or 0.0})

    @contextmanager
    def attempt(
        self, stage: str, key: str, expected: Callable[[], Amount]
    ) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Count what the block takes; it calls what is handed to it with the artifact's metadata when it is done.

        Args:
            key: of what is made; that of a part, which may be made beside others, is the whole's, `-` and more.
            expected: what the whole stage is expected to take, from rates of earlier runs; asked only where there is a
                budget. What earlier attempts at it took is taken off.

        Raises:
            BudgetError: it would take more than is left, or (from `check`) has.
        """
        earlier = sum((entry.took for entry in self.entries() if f"{entry.key}-".startswith(f"{key}-")), Amount())
        wanted = self.priced(stage, expected()).less(earlier) if self.limited else Amount()
        spent = self.spent() if self.limited else Amount()
        if over := excess(self._budget, spent + wanted):
            raise BudgetError(
                f"{stage} would go beyond the budget: {'; '.join(over)}",
                mend="raise it in the recipe (`--set budget.hours=…`) and run the same command again: it goes on here",
            )
        path = self._folder / f"{stage}-{key[:12]}-{time.time_ns()}-{os.getpid()}.json"
        self._attempt = _Attempt(stage, key, path, spent, earlier, wanted)
        try:
            yield self._attempt.finished_with
        finally:
            self._note(self._attempt)
            self._attempt = None

    def check(self, done: int, total: int) -> None:
        """Note how far the present attempt is; cheap when called often.

        Raises:
            BudgetError: all attempts together have gone beyond the budget.
        """
        attempt = self._attempt
        if attempt is None:
            return
        attempt.reached(done, total)
        took = self.priced(attempt.stage, attempt.took())
        if over := excess(self._budget, attempt.spent + took):
            raise BudgetError(
                f"{attempt.stage} stopped at {done} of {total}, the budget is used up: {'; '.join(over)}",
                mend="what is done is kept: raise the budget in the recipe (`--set budget.hours=…`), and the same "
                "command goes on here",
            )
        if time.monotonic() - attempt.noted > _NOTE_EVERY_S:
            self._note(attempt)
            if self.limited:
                attempt.spent = self.spent(but=attempt.path)  # others may work beside it

    def _note(self, attempt: _Attempt) -> None:
        entry = Entry(stage=attempt.stage, key=attempt.key, took=self.priced(attempt.stage, attempt.took()))
        attempt.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(attempt.path, lambda part: part.write_text(entry.model_dump_json()))
        attempt.noted = time.monotonic()


class _Attempt:
    """An attempt at work: its time is measured; until it ends its tokens and bytes are its share of the expected."""

    def __init__(self, stage: str, key: str, path: Path, spent: Amount, earlier: Amount, wanted: Amount) -> None:
        self.stage, self.key, self.path, self.spent = stage, key, path, spent
        self.noted = self._started = time.monotonic()
        self._earlier, self._wanted, self._share, self._first = earlier, wanted, 0.0, -1
        self._made: Amount | None = None

    def reached(self, done: int, total: int) -> None:
        """Where it stands; it began where it stood first."""
        if self._first < 0:
            self._first = done
        self._share = (done - self._first) / max(1, total - self._first)

    def finished_with(self, meta: Mapping[str, Any]) -> None:
        """What it made, by its artifact's metadata; what earlier attempts at it had made is theirs."""
        whole = Amount(tokens=meta.get("tokens", 0), num_bytes=meta.get("num_bytes", 0))
        self._made = whole.less(self._earlier)

    def took(self) -> Amount:
        """So far."""
        so_far = self._made or Amount(
            tokens=int(self._share * self._wanted.tokens), num_bytes=int(self._share * self._wanted.num_bytes)
        )
        return so_far.model_copy(update={"seconds": round(time.monotonic() - self._started, 3)})
