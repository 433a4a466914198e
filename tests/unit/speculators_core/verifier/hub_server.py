"""A model hub on loopback that speaks the few endpoints used: look-up of a revision, and files of a commit."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse


@dataclass
class Hub:
    """Models by id, each with one commit; `asked` lists every request as METHOD and path."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, model: str) -> str:
        """Follows the content, as a commit does."""
        digest = hashlib.sha1()
        for name, content in sorted(self.models[model].items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def fetched(self, name: str) -> bool:
        return any(line.startswith("GET") and line.endswith(f"/{name}") for line in self.asked)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            parsed = urlparse(self.path)
            path = unquote(parsed.path)
            hub.asked.append(f"{self.command} {path}")
            model = next((name for name in hub.models if f"/{name}" in path), None)
            if model is None:
                return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            files, commit = hub.models[model], hub.commit(model)
            if path.startswith(f"/api/models/{model}"):
                rest = path.removeprefix(f"/api/models/{model}").split("/")
                if rest[-1] not in ("", "main", commit) and not rest[-1].endswith(".json"):
                    return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                if rest[1:2] == ["tree"]:
                    return self.send(200, json.dumps([entry(*item) for item in files.items()]).encode())
                blobs = parse_qs(parsed.query).get("blobs", ["False"])[0] != "False"
                siblings = [sibling(*item) if blobs else {"rfilename": item[0]} for item in files.items()]
                body = {"id": model, "sha": commit, "private": False, "tags": [], "downloads": 0, "siblings": siblings}
                return self.send(200, json.dumps(body).encode())
            name = path.split(f"/resolve/{commit}/")[-1]
            if name not in files:
                return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            content = files[name]
            tag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
            if asked := self.headers.get("Range"):
                start, end = asked.removeprefix("bytes=").split("-")
                return self.send(206, content[int(start) : int(end) + 1], tag)
            return self.send(200, content, tag)

        def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            facts = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
            for key, value in facts.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sibling(name: str, content: bytes) -> dict[str, object]:
    facts: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    if name.endswith(".safetensors"):  # what a hub stores as LFS
        facts["lfs"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 134}
    return facts


def entry(name: str, content: bytes) -> dict[str, object]:
    facts: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
    facts["oid"] = hashlib.sha1(content).hexdigest()
    if name.endswith(".safetensors"):
        facts["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return facts
