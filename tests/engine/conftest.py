"""Session fixtures for tests on a real engine: one server for each configuration, all gone at the end."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import Engine, ServerSpec, serve

ROOT = Path(__file__).resolve().parents[2]
KEEP = 2
"""Servers alive at a time, in each of the processes that test; the one unused for longest makes room."""

KV_CACHE_GIB = 0.5
"""Of a server whose test does not say: several are up at once, and prompts are short."""

EngineFactory = Callable[[ServerSpec], Engine]


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """The runtime that `make setup` made, or the one that DRAFTSMITH_RUNTIME names."""
    python = Path(os.environ.get("DRAFTSMITH_RUNTIME", ROOT / ".venv-vllm" / "bin" / "python"))
    assert python.is_file(), f"no runtime at {python}: run `make setup`"
    return Runtime(python=str(python))


@pytest.fixture(scope="session")
def verifier_dir() -> Path:
    """The demo's verifier, which `make setup` made."""
    path = ROOT / ".draftsmith" / "verifiers" / "SmolLM2-135M-Instruct"
    assert (path / "model.safetensors").is_file(), f"no verifier at {path}: run `make setup`"
    return path


@pytest.fixture(scope="session")
def engine_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pid files and logs of the session's servers lie."""
    return tmp_path_factory.mktemp("engine-home")


@pytest.fixture(scope="session")
def engine(runtime: Runtime, engine_home: Path) -> Iterator[EngineFactory]:
    """Factory: `engine(ServerSpec(...))` gives a running server, the same one for the same configuration."""
    running: OrderedDict[str, tuple[Engine, ExitStack]] = OrderedDict()

    def get(spec: ServerSpec) -> Engine:
        if "kv_cache_gib" not in spec.model_fields_set:
            spec = spec.model_copy(update={"kv_cache_gib": KV_CACHE_GIB})
        key = spec.model_dump_json()
        if key in running:
            server, stack = running[key]
            if server.process is not None and server.process.poll() is None:
                running.move_to_end(key)
                return server
            stack.close()  # a test has killed it
            del running[key]
        while len(running) >= KEEP:
            running.popitem(last=False)[1][1].close()
        stack = ExitStack()
        server = stack.enter_context(serve(runtime, spec, home=engine_home))
        running[key] = (server, stack)
        return server

    yield get
    for _, stack in running.values():
        stack.close()
