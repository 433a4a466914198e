"""What served acceptance is held against."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from speculators_core.errors import EngineError
from speculators_core.lifecycle.drift import Registered, windows_path
from tasks.planning import Situation
from tasks.traffic import registered, take_reading
from tests.integration.planning_world import serve_runtime

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


def test_an_address_that_holds_a_password_is_read_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = SimpleNamespace(deployment="chat")
    situation: Any = SimpleNamespace(run=SimpleNamespace(home=tmp_path, recipe=recipe))
    with pytest.raises(EngineError, match="CHAT_METRICS, which should hold their address, is not set"):
        take_reading(situation, "1", "CHAT_METRICS", 1.0)
    monkeypatch.setenv("NO_PROXY", "*")
    with serve_runtime() as runtime:
        address = f"{runtime.url.replace('//', '//me:hunter2@')}/metrics"
        monkeypatch.setenv("CHAT_METRICS", address)
        take_reading(situation, "1", "CHAT_METRICS", 1.0)
        assert windows_path(tmp_path, "chat").with_suffix(".reading.json").exists()
        monkeypatch.setenv("CHAT_METRICS", address.replace(runtime.url[-5:], "9"))
        with pytest.raises(EngineError, match=r"cannot be read at http://\[redacted\]@") as refused:
            take_reading(situation, "1", "CHAT_METRICS", 1.0)
    assert "hunter2" not in str(refused.value)
