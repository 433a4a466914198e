"""How the client behaves on the wire: a bare HTTP server plays the network's part; vLLM's is in tests/engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from speculators_core.engine.client import EngineClient, GenerationRequest, RequestError
from speculators_core.errors import EngineError, EngineTimeout

Answer = tuple[int, dict]


class Wire:
    """A server whose answers are given by `reply(number of the request, path, body)`; status 0 drops the connection."""

    def __init__(self) -> None:
        self.reply: Callable[[int, str, dict], Answer] = lambda number, path, body: (200, completion(body))
        self.bodies: list[dict] = []
        self.active = self.most_active = 0
        lock = threading.Lock()
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "the-model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    wire.bodies.append(body)
                    number = len(wire.bodies)
                    wire.active += 1
                    wire.most_active = max(wire.most_active, wire.active)
                status, answer = wire.reply(number, self.path, body)
                with lock:
                    wire.active -= 1
                self._send(status, answer)

            def _send(self, status: int, answer: dict) -> None:
                if status == 0:
                    self.close_connection = True
                    return
                payload = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                return  # a client that hangs up is part of the tests

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def completion(body: dict) -> dict:
    prompt = body["prompt"]
    choice = {"token_ids": prompt[::-1], "text": "t", "finish_reason": "stop", "prompt_token_ids": prompt}
    return {"choices": [choice], "kv_transfer_params": {"handle": 1}}


def request(number: int) -> GenerationRequest:
    return GenerationRequest(id=f"r{number}", prompt_token_ids=(number, number + 1), max_tokens=1)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_order_is_the_requests_whatever_finishes_first(wire: Wire) -> None:
    def slow_first(number: int, path: str, body: dict) -> Answer:
        time.sleep(0.3 if body["prompt"][0] == 0 else 0.0)
        return 200, completion(body)

    wire.reply = slow_first
    finished: list[str] = []
    with EngineClient(wire.url) as client:
        results = list(
            client.generate(map(request, range(8)), concurrency=4, on_result=lambda r: finished.append(r.id))
        )
    assert [result.id for result in results] == [f"r{i}" for i in range(8)]
    assert [result.token_ids for result in results] == [(i + 1, i) for i in range(8)]
    assert finished[-1] == "r0"
    assert results[0].kv_transfer_params == {"handle": 1}


def test_concurrency_is_what_was_asked(wire: Wire) -> None:
    def slow(number: int, path: str, body: dict) -> Answer:
        time.sleep(0.05)
        return 200, completion(body)

    wire.reply = slow
    with EngineClient(wire.url) as client:
        list(client.generate(map(request, range(12)), concurrency=3))
    assert wire.most_active == 3


def test_requests_are_read_only_a_little_ahead(wire: Wire) -> None:
    read: list[int] = []

    def endless() -> Iterator[GenerationRequest]:
        for number in range(10_000):
            read.append(number)
            yield request(number)

    with EngineClient(wire.url) as client:
        results = client.generate(endless(), concurrency=2)
        for _ in range(5):
            next(results)
        results.close()
    assert len(read) < 20


def test_a_busy_server_and_a_dropped_connection_are_tried_again(wire: Wire) -> None:
    troubles = {1: (503, {}), 2: (0, {}), 3: (429, {})}
    wire.reply = lambda number, path, body: troubles.get(number) or (200, completion(body))
    with EngineClient(wire.url) as client:
        assert [result.id for result in client.generate([request(1)], concurrency=1)] == ["r1"]
    assert len(wire.bodies) == 4


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_refusal_is_not_tried_again_and_names_its_request(wire: Wire, status: int) -> None:
    wire.reply = lambda number, path, body: (status, {"error": {"message": "because"}})
    with EngineClient(wire.url) as client, pytest.raises(RequestError, match=r"'r7'.*because") as raised:
        list(client.generate([request(7)], concurrency=1))
    assert (raised.value.request_id, raised.value.status) == ("r7", status)
    assert len(wire.bodies) == 1


def test_refused_requests_can_be_left_out(wire: Wire) -> None:
    wire.reply = lambda number, path, body: (400, {}) if body["prompt"][0] == 1 else (200, completion(body))
    refused: list[str] = []
    with EngineClient(wire.url) as client:
        results = client.generate(
            map(request, range(3)), concurrency=2, on_error=lambda e: refused.append(e.request_id)
        )
        assert [result.id for result in results] == ["r0", "r2"]
    assert refused == ["r1"]


def test_silence_is_a_timeout(wire: Wire) -> None:
    def silent(number: int, path: str, body: dict) -> Answer:
        time.sleep(1)
        return 200, completion(body)

    wire.reply = silent
    with EngineClient(wire.url, timeout_s=0.2) as client, pytest.raises(EngineTimeout, match="did not answer"):
        list(client.generate([request(1)], concurrency=1))
    assert len(wire.bodies) == 1


def test_a_dead_process_is_told_at_once(wire: Wire) -> None:
    def dead() -> None:
        raise EngineError("the vLLM server died")

    wire.reply = lambda number, path, body: (0, {})
    started = time.monotonic()
    with EngineClient(wire.url, check=dead) as client, pytest.raises(EngineError, match="died"):
        list(client.generate(map(request, range(50)), concurrency=4))
    assert time.monotonic() - started < 3
    assert len(wire.bodies) < 50


def test_nobody_there_is_an_error() -> None:
    with EngineClient("http://127.0.0.1:9") as client, pytest.raises(EngineError, match="cannot be reached"):
        client.model_name()


def test_an_answer_of_another_form_is_an_error(wire: Wire) -> None:
    wire.reply = lambda number, path, body: (200, {"choices": []})
    with EngineClient(wire.url) as client, pytest.raises(EngineError, match="another form"):
        list(client.generate([request(1)], concurrency=1))


def test_a_request_has_one_prompt() -> None:
    for wrong in ({}, {"prompt_token_ids": (1,), "messages": []}):
        with pytest.raises(ValidationError, match="exactly one"):
            GenerationRequest(id="x", max_tokens=1, **wrong)
