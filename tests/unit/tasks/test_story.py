"""The story's props: a recipe as a person would change it, curves that tell when, clients that count failures."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from speculators_core.config import load_recipe
from speculators_core.errors import EvaluationError
from tasks import story
from tasks.story import Learning, require, steady_load, write_recipe
from tests.environment import ROOT


def test_a_recipe_is_written_only_where_it_changes(tmp_path: Path) -> None:
    template, target = ROOT / "deployments" / "recipes" / "story.yaml", tmp_path / "story" / "recipe.yaml"
    write_recipe(template, target, verifier={"path": "/elsewhere"}, data={"sources": ["/a.jsonl"]})
    found = load_recipe(target)
    assert (found.verifier.path, found.data.sources) == ("/elsewhere", ("/a.jsonl",))
    assert found.training == load_recipe(template).training and found.verifier.license == "apache-2.0"
    before = target.stat().st_mtime_ns
    write_recipe(template, target, verifier={"path": "/elsewhere"}, data={"sources": ["/a.jsonl"]})
    assert target.stat().st_mtime_ns == before


def test_a_curve_tells_when_an_acceptance_length_was_reached() -> None:
    curve = Learning(warm=True, points=((1000, 1.1), (2000, 1.3), (3000, 1.25), (4000, 1.4)))
    assert (curve.reached(1.3), curve.reached(1.35), curve.reached(1.5)) == (2000, 4000, None)


def test_a_story_that_goes_another_way_ends() -> None:
    require(True, "")
    with pytest.raises(EvaluationError, match="went another way: the draft failed"):
        require(False, "the draft failed")


def test_clients_ask_until_it_is_over_and_count_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if len(asked) == 2 else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    monkeypatch.setattr(story, "_PAUSE_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with steady_load(f"http://127.0.0.1:{server.server_address[1]}/", "chat", clients=1) as load:
        deadline = time.monotonic() + 30
        while load.answered < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    count = len(asked)
    time.sleep(0.1)
    server.shutdown()
    server.server_close()
    thread.join()
    assert len(asked) == count == load.answered + 1 and len(load.failures) == 1 and "500" in load.failures[0]
    assert asked[0]["model"] == "chat" and asked[0]["max_tokens"] == 24
