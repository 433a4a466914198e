"""What served acceptance is held against."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from speculators_core.lifecycle.drift import Registered
from tasks.planning import Situation
from tasks.traffic import registered

FINGERPRINT, RUNTIME = "f" * 64, "r" * 64


@pytest.mark.parametrize(
    ("al", "low", "expected"),
    [
        ("1.63", "1.58", Registered(al=1.63, al_low=1.58)),
        ("1.63", "n/a", Registered(al=1.63)),
        ("1,63", "1.58", None),
    ],
)
def test_a_tag_that_holds_no_number_counts_as_missing(al: str, low: str, expected: Registered | None) -> None:
    tags = {"verifier.fingerprint": FINGERPRINT, "runtime.key": RUNTIME, "al": al, "al.low": low}
    world = SimpleNamespace(verifier=SimpleNamespace(digest=FINGERPRINT), runtime_key=RUNTIME)
    situation: Any = SimpleNamespace(view=SimpleNamespace(tags={"1": tags}), world=world)
    assert registered(cast(Situation, situation), "1") == expected
