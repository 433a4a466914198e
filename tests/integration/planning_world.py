"""A small world to plan in: a verifier, data, a recipe, a runtime that answers, and a registry."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from speculators_core.config import load_recipe
from speculators_core.lifecycle.changes import tags_of
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, GATE_TAG, RUNTIME_TAG
from speculators_core.run import Run
from tasks.adapters.settings import Settings, read_settings
from tasks.adapters.tracking import Tracking
from tasks.planning import world_of
from tests.environment import ROOT, child_environment

MODEL = "chat"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 100,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 512, "initializer_range": 0.02,
    "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}\n{{ m.content }}\n{% endfor %}"


class World:
    """A state root with a verifier, data, a runtime somewhere else, and a recipe."""

    def __init__(self, root: Path, runtime: Runtime) -> None:
        self.root, self.home, self.verifier = root, root / "home", root / "verifier"
        self.verifier.mkdir()
        for name, content in {
            "config.json": json.dumps(CONFIG),
            "generation_config.json": json.dumps({"eos_token_id": 2}),
            "tokenizer.json": "{}",
            "chat_template.jinja": TEMPLATE,
        }.items():
            (self.verifier / name).write_text(content)
        self.train_verifier(1.0)
        self.data = root / "talks.jsonl"
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        self.data.write_text(json.dumps({"conversations": turns}))
        self.recipe = root / "recipe.yaml"
        content = {
            "name": "chat", "deployment": MODEL, "verifier": {"path": str(self.verifier)}, "runtime": runtime.recipe(),
            "data": {"sources": [str(self.data)]}, "algorithm": {"kind": "eagle3"},
        }  # fmt: skip
        self.recipe.write_text(yaml.safe_dump(content))
        self.settings: Settings = read_settings({"DRAFTSMITH_HOME": str(self.home)})

    def train_verifier(self, value: float) -> None:
        save_file({"model.norm.weight": torch.full((64,), value)}, self.verifier / "model.safetensors")

    def register(self, **tags: str) -> str:
        """A version that was proven on the world as it is."""
        run = Run(load_recipe(self.recipe), self.home)
        world = world_of(run)
        client = Tracking(self.settings).client
        if not client.search_registered_models(f"name = '{MODEL}'"):
            client.create_registered_model(MODEL)
        every = {
            FINGERPRINT_TAG: world.verifier.digest, RUNTIME_TAG: world.runtime_key, GATE_TAG: "pass",
            "verifier.uri": str(self.verifier), "vllm.version": world.runtime.vllm, "algorithm": "eagle3",
            "draft.digest": "d" * 64, **tags_of(world), **tags,
        }  # fmt: skip
        version = client.create_model_version(MODEL, source=str(self.root), tags=every)
        client.set_registered_model_alias(MODEL, "champion", version.version)
        return str(version.version)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.cli", *arguments]
        environ = child_environment(self.home) | {"NO_PROXY": "*", "no_proxy": "*"}
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)

    def say(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.say(*arguments, "--json"))
        return found


@dataclass
class Runtime:
    """A server that answers as vLLM with our plugin does when it is asked who it is, or for its counters; it also takes
    messages."""

    url: str
    records: Path
    version: str = "0.32.0"
    drafts: int = 0
    accepted: int = 0
    received: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of what was posted to it."""

    def recipe(self) -> dict[str, Any]:
        """As a recipe names it."""
        return {"url": self.url, "store": {"config": {"root": str(self.records)}}}

    def announce(self) -> None:
        """Say in the store of its records what it is: what was measured on a server that does not proves nothing."""
        facts = {"vllm": self.version, "build": "vllm", "device": "cpu", "model_runner": "v1"}
        captures = {"layer_ids": [1], "states_dtype": "bfloat16", "verifier_fingerprint": "none"}
        (self.records / "engine.json").write_text(json.dumps({**facts, **captures}))

    def serve_traffic(self, drafts: int, al: float) -> None:
        """Count so many drafts with this acceptance length."""
        self.drafts += drafts
        self.accepted += round(drafts * (al - 1))

    def metrics(self) -> str:
        counts = {"drafts": self.drafts, "accepted_tokens": self.accepted}
        return "".join(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {n}.0\n' for name, n in counts.items())


@contextmanager
def serve_runtime() -> Iterator[Runtime]:
    class Server(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            runtime.announce()
            version = json.dumps({"version": runtime.version})
            self.answer(runtime.metrics() if self.path == "/metrics" else version)

        def do_POST(self) -> None:
            runtime.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer("")

        def answer(self, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as records:
            runtime = Runtime(f"http://127.0.0.1:{server.server_address[1]}", Path(records))
            yield runtime
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
