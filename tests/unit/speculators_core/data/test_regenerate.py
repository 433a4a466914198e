"""What is asked anew, and what is refused before an engine starts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from speculators_core.data.config import DataConfig, RegenerationConfig
from speculators_core.data.conversations import normalise
from speculators_core.data.regenerate import _key, regenerate
from speculators_core.engine.runtime import Runtime
from speculators_core.errors import ConfigError, DiskSpaceError, EngineError
from speculators_core.states.config import CaptureConfig
from speculators_core.states.replies import REPLIES, answer


def test_the_key_follows_the_questions_and_not_the_old_answers() -> None:
    def key(question: str, answer: str, **more: object) -> str:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return _key(normalise({"id": "x", "messages": messages, **more}))

    assert key("a", "b") == key("a", "c") != key("d", "b")
    tool = {"name": "f", "parameters": {}}
    assert key("a", "b", tools=[tool]) != key("a", "b")


def test_sampled_replies_are_not_captured_in_the_same_request(tmp_path: Path) -> None:
    sampled = RegenerationConfig(temperature=0.7)
    with pytest.raises(ConfigError, match="cannot be captured in the same request") as caught:
        regenerate([], None, None, None, sampled, tmp_path / "x", capture=True)  # type: ignore[arg-type]
    assert caught.value.mend and "draftsmith data regenerate" in caught.value.mend
    with pytest.raises(ValueError, match=r"draftsmith data regenerate --temperature"):
        DataConfig(sources=("x",), replies="regenerate", regeneration=sampled)
    DataConfig(sources=("x",), regeneration=sampled)


def test_states_of_replies_that_cannot_fit_on_the_disk_are_refused_before_an_engine_starts(
    tmp_path: Path, verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"role": "user", "content": "why? " * 50}, {"role": "assistant", "content": "so"}]
    talks = [normalise({"id": str(number), "messages": asked}) for number in range(1500)]

    def ask(free: int, most_bytes: float = math.inf) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        answer(
            talks, Runtime(python="/nowhere"), (1, 2), "f" * 64, CaptureConfig(), RegenerationConfig(),
            tmp_path / REPLIES, records=tmp_path, most_bytes=most_bytes, verifier_dir=verifier, home=tmp_path,
            template_kwargs={},
        )  # fmt: skip

    with pytest.raises(
        DiskSpaceError, match=r"need 0\.0[3-9] GiB, and 0\.01 GiB are free[\s\S]*mend: .*data\.max_rows"
    ):
        ask(10 << 20)
    for fits in ({"free": 1 << 40}, {"free": 10 << 20, "most_bytes": 5 << 20}):
        with pytest.raises(EngineError, match="there is no interpreter"):
            ask(**fits)
