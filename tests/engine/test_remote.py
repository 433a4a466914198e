"""A server that somebody else runs: started by hand with the printed command, used by its URL."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from speculators_core import stages
from speculators_core.config import load_recipe
from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.errors import CaptureError, ConfigError
from speculators_core.processes import supervise
from speculators_core.remote import capture_command, greet_servers
from speculators_core.run import Run
from speculators_core.states.sets import StateSet
from tests.engine.loop import RECIPE
from tests.environment import ROOT

pytestmark = pytest.mark.engine

READY_S = 300


def a_run(home: Path, url: str, records: Path, *overrides: str) -> Run:
    """The demo's recipe on a few rows, with a server of somebody else for everything."""
    remote = f"runtime={{url: '{url}', store: {{config: {{root: '{records}'}}}}}}"
    sets: tuple[str, ...] = (
        remote,
        "data.max_rows=14",
        "data.evaluation_prompts=2",
        "data.max_length=400",
        "capture.parity_rows=2",
    )
    sets += overrides
    return Run(load_recipe(RECIPE, sets), home)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """State root, URL on a free port, and where the records go."""
    root = tmp_path_factory.mktemp("remote")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return root / "home", f"http://127.0.0.1:{port}", root / "records"


@pytest.fixture(scope="module")
def url(place: tuple[Path, str, Path], runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as a user would start it: the command, its interpreter, nothing of ours around it."""
    home, address, records = place
    command = capture_command(a_run(home, address, records))
    assert command[0] == "python"
    log = tmp_path_factory.mktemp("log") / "server.log"
    environment = {"PYTHONPATH": None, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one import of vLLM in place of three
    # supervised only so that it ends with this process, however that ends
    with supervise([str(runtime.python), *command[1:]], name="by-hand", home=home, log=log, env=environment) as server:
        deadline = time.monotonic() + READY_S
        while not _healthy(address):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.3)
        yield address


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the recipe's paths begin


def test_rows_are_captured_by_url_and_the_set_is_that_of_our_own_runtime(
    url: str, place: tuple[Path, str, Path], runtime: Runtime
) -> None:
    home, _, records = place
    run = a_run(home, url, records)
    assert run.runtime == probe_runtime(runtime), "engine.json and the interpreter tell different things"
    preflight, *_, capture = stages.run_until(run, "capture")
    assert (preflight.summary["drafts"], preflight.summary["vllm"]) == (0, run.runtime.vllm)
    parity = capture.summary["parity"]
    assert capture.summary["rows"] >= 10 and parity["method"] == "hf"
    assert all(layer["cosine"] >= 0.999 for layer in parity["layers"])
    StateSet.open(run.store.path(capture.ref)).verify()
    assert [path.name for path in records.iterdir()] == ["engine.json"]
    ours = Run(run.recipe.model_copy(update={"runtime": runtime}), home, only_look=True)
    assert stages.capture(ours, stages.prepare(ours).ref).ref == capture.ref, "our own interpreter finds it"


@pytest.mark.parametrize(
    ("override", "term", "ours", "theirs"),
    [
        ("algorithm.aux_layers=[3, 9]", "layer_ids", r"\[3, 9, 30\]", r"\[2, 15, 27, 30\]"),
        ("data.template_kwargs={tone: warm}", "verifier_fingerprint", "[0-9a-f]{64}", "[0-9a-f]{64}"),
        ("capture.dtype=float32", "states_dtype", "float32", "bfloat16"),
        ("capture.codec=fp8", "codec", "fp8", "none"),
    ],
)
def test_a_server_of_other_terms_is_refused_with_both_sides_and_the_command(
    url: str, place: tuple[Path, str, Path], override: str, term: str, ours: str, theirs: str
) -> None:
    home, _, records = place
    run = a_run(home, url, records, override)
    with pytest.raises(CaptureError, match=rf"wanted: {term}\n(.|\n)*≠ +{term} +{ours} +{theirs}\n") as raised:
        greet_servers(run)
    assert raised.value.mend is not None and "--kv-transfer-config" in raised.value.mend
    assert run.fingerprint.digest in raised.value.mend  # the command is for this recipe


def test_a_server_that_says_nothing_serves_for_evaluation_only(
    url: str, place: tuple[Path, str, Path], tmp_path: Path
) -> None:
    home, _, records = place
    run = a_run(home, url, tmp_path)
    assert run.runtime.key == f"untested:{run.runtime.vllm}"
    with pytest.raises(CaptureError, match=r"published no engine\.json(.|\n)*evaluation only"):
        next(stages.run_until(run, "capture"))
    storeless = a_run(home, url, records, f"runtime={{url: '{url}'}}")
    with pytest.raises(ConfigError, match=r"names no `store`"):
        next(stages.run_until(storeless, "capture"))
