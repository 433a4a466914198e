"""Data sets by id, against a local server that speaks the few endpoints used. (The real hub is unseen here.)"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from .conftest import CONVERSATIONS

ROOT = Path(__file__).parents[4]
NAME = "garden/talks"
FILES = {"train.jsonl": (CONVERSATIONS / "multi_turn.jsonl").read_bytes(), "README.md": b"# Talks\n"}


class Hub(BaseHTTPRequestHandler):
    """One data set of one commit; `commit` is set by the test."""

    protocol_version = "HTTP/1.1"
    commit = "a" * 40

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        if self.path.endswith(f"/paths-info/{self.commit}"):
            self.send([entry for entry in self.tree() if str(entry["path"]) in unquote(asked)])
        else:
            self.refuse()

    def answer(self) -> None:
        path = urlparse(self.path).path
        api = f"/api/datasets/{NAME}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{self.commit}"):
            siblings = [{"rfilename": name} for name in FILES]
            self.send(
                {"id": NAME, "sha": self.commit, "private": False, "tags": [], "siblings": siblings, "downloads": 0}
            )
        elif path.startswith(f"{api}/tree/"):
            self.send(self.tree())
        elif path.startswith(f"/datasets/{NAME}/resolve/") and path.rsplit("/", 1)[1] in FILES:
            body = FILES[path.rsplit("/", 1)[1]]
            self.send(body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": self.commit})
        else:
            self.refuse()

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in FILES.items()
        ]

    def refuse(self) -> None:
        self.send({"error": "Not Found"}, {"X-Error-Code": "EntryNotFound"}, status=404)

    def send(self, body: object, headers: dict[str, str] | None = None, status: int = 200) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(raw)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


CODE = """
import json, sys
from speculators_core.data.conversations import hub_identity, read_conversations
from speculators_core.errors import DataError
for source in sys.argv[1:]:
    try:
        ids = [conversation.id for conversation in read_conversations([source])]
        print(json.dumps([ids, hub_identity(source)]))
    except DataError as error:
        print(json.dumps([error.what, error.mend]))
"""


def read(endpoint: str, home: Path, *sources: str) -> list[list[str]]:
    """In a process of its own: the endpoint is read when the libraries are imported."""
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *sources],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_data_sets_are_read_and_pinned_and_errors_teach(hub: str, tmp_path: Path) -> None:
    found, unknown, no_split = read(hub, tmp_path, f"hf:{NAME}", "hf:garden/nothing", f"hf:{NAME}:holdout")
    assert found == [["garden", "bread"], f"hf:{NAME}@{Hub.commit}:train"]
    for what, mend in (unknown, no_split):
        assert "cannot be loaded" in what and mend
