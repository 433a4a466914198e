"""A server that answers with recorded states through a real store, as a capturing vLLM does: the same bits every time.

As a program it takes the flags of vLLM's server, and answers with the set that RECORDED_STATES names, a row in
RECORDED_DELAY seconds.

What a live engine computes for a row depends, in the last bits, on what else is in its batch; how states travel can be
proved only where they are the same on every road. Real vLLM has its tests in tests/engine.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from hs_connectors.contract import NORM_POINT, SETTINGS_KEY, CaptureSettings, Record
from hs_connectors.registry import open_writer
from speculators_core.engine.remote import CaptureTerms, RecordStore
from speculators_core.engine.runtime import Runtime
from speculators_core.states.sets import StateSet


class RecordedEngine:
    """Serves from its construction until `stop`.

    `change` turns each record into what is written instead (None: nothing); `delay_s` is what a request takes;
    `asked` lists the prompts in the order of their arrival.
    """

    def __init__(
        self,
        states: Mapping[tuple[int, ...], Tensor],
        store: RecordStore,
        terms: CaptureTerms,
        *,
        announced: Mapping[str, Any] | None = None,
        delay_s: Callable[[], float] = lambda: 0.0,
        change: Callable[[Record], Record | None] = lambda record: record,
        port: int = 0,
        model: str = "verifier",
    ) -> None:
        self.store = store
        self.asked: list[tuple[int, ...]] = []
        self.most_active = 0
        self._active = 0
        self._down = False
        started = time.time()
        writer = open_writer(store.backend, store.config, terms.codec)
        facts = {"vllm": "0.32.0", "device": "cpu", "model_runner": "v1", "max_model_len": 4096, "started_at": started}
        said = terms.model_dump(exclude={"context"}) | {"norm_point": NORM_POINT, "layer_ids": list(terms.layer_ids)}
        writer.announce({**facts, **said, **(announced or {})})
        engine, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                metrics = f"process_start_time_seconds {started}\n"
                answers = {"/version": '{"version": "0.32.0"}', "/metrics": metrics, "/health": ""}
                self._send(200, answers.get(self.path, json.dumps({"data": [{"id": model}]})).encode())

            def do_POST(self) -> None:
                ids = tuple(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"])
                with lock:
                    engine.asked.append(ids)
                    engine._active += 1
                    engine.most_active = max(engine.most_active, engine._active)
                time.sleep(delay_s())
                if engine._down:
                    self.close_connection = True  # killed with the request in its hands
                    return
                key = f"r{len(ids)}-{secrets.token_hex(8)}"
                fingerprint = terms.verifier_fingerprint
                record = change(
                    Record(states[ids], torch.tensor(ids), terms.layer_ids, terms.states_dtype, fingerprint)
                )
                handle = {"backend": store.backend, "key": key}
                choice = {"token_ids": [1], "text": "", "finish_reason": "length", "prompt_token_ids": ids}
                answer = {"choices": [choice], "kv_transfer_params": {"handle": handle}}
                with lock:
                    engine._active -= 1
                if record is not None:
                    writer.put(key, record)
                self._send(200, json.dumps(answer).encode())

            def _send(self, status: int, payload: bytes) -> None:
                if engine._down:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.runtime = Runtime(url=f"http://127.0.0.1:{self._http.server_address[1]}", store=store)

    def stop(self) -> None:
        """Gone as after a SIGKILL: connections drop, the port is free."""
        self._down = True
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> RecordedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._down:
            self.stop()


def main(argv: list[str]) -> None:
    """Serve as the flags say, until killed."""

    def flag(name: str) -> str:
        return argv[argv.index(name) + 1]

    extra = json.loads(flag("--kv-transfer-config"))["kv_connector_extra_config"]
    settings = CaptureSettings.from_json(extra[SETTINGS_KEY])
    recorded = StateSet.open(os.environ["RECORDED_STATES"])
    terms = CaptureTerms(
        layer_ids=settings.layer_ids,
        states_dtype=flag("--dtype"),
        codec=settings.codec,
        verifier_fingerprint=settings.verifier_fingerprint,
    )
    delay = float(os.environ["RECORDED_DELAY"])
    RecordedEngine(
        {tuple(row.input_ids.tolist()): row.hidden_states.clone() for row in recorded.rows()},
        RecordStore(backend=settings.backend, config=dict(settings.backend_config)),
        terms,
        delay_s=lambda: delay,
        port=int(flag("--port")),
        model=flag("--served-model-name"),
    )
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv)
