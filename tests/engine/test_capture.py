"""Capture on the real engine: states that agree with an independent forward, and no row captured twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from hs_connectors.contract import Handle
from hs_connectors.registry import open_reader
from speculators_core.data.config import DataConfig
from speculators_core.data.prepare import prepare
from speculators_core.data.rows import RowSet
from speculators_core.engine.client import GenerationRequest
from speculators_core.engine.server import Engine
from speculators_core.errors import CaptureError
from speculators_core.states.capture import CaptureReport, capture, capture_server
from speculators_core.states.collect import Rows
from speculators_core.states.config import CaptureConfig
from speculators_core.states.gates import check_layers
from speculators_core.states.replies import store_handles
from speculators_core.states.sets import StateSet
from tests.environment import ROOT, child_environment

pytestmark = pytest.mark.engine

LAYERS = (2, 15, 27, 30)
FINGERPRINT = "f" * 64
NUM_ROWS = 16


def prepared(directory: Path, verifier_dir: Path, count: int) -> RowSet:
    source = directory / "conversations.jsonl"
    with (ROOT / "deployments" / "data" / "conversations.jsonl").open() as stream:
        source.write_text("".join(islice(stream, count)))
    config = DataConfig(sources=(str(source),), evaluation_prompts=0, validation_share=0.2)
    prepare(config, verifier_dir, directory / "prepared")
    return RowSet.open(directory / "prepared")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, verifier_dir: Path) -> RowSet:
    return prepared(tmp_path_factory.mktemp("rows"), verifier_dir, NUM_ROWS)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CaptureConfig:
    records = tmp_path_factory.mktemp("records")
    return CaptureConfig(shard_tokens=700, concurrency=4, backend_config={"root": str(records), "fsync": False})


@pytest.fixture
def capturing(engine, config: CaptureConfig, verifier_dir: Path, tmp_path: Path) -> Engine:
    return engine(capture_server(config, verifier_dir, LAYERS, FINGERPRINT, tmp_path, max_model_len=512))


def run(
    rows: Rows, engine: Engine, config: CaptureConfig, workspace: Path, verifier_dir: Path, **more
) -> CaptureReport:
    return capture(rows, engine, LAYERS, FINGERPRINT, config, workspace, verifier_dir=verifier_dir, **more)


def records_of(config: CaptureConfig) -> list[str]:
    return [path.name for path in Path(config.backend_config["root"]).glob("*.safetensors")]


def test_captured_states_agree_with_an_independent_forward(capturing, rows, config, verifier_dir, tmp_path):
    seen: list[tuple[int, int]] = []
    report = run(rows, capturing, config, tmp_path, verifier_dir, progress=lambda *counts: seen.append(counts))
    assert report.parity is not None and report.parity.method == "hf" and len(report.parity.rows) == 4
    assert [layer.layer for layer in report.parity.layers] == list(LAYERS)
    assert all(layer.cosine >= 0.999 for layer in report.parity.layers), report.parity
    assert (report.rows, report.captured_rows, report.reused_shards) == (rows.num_rows, rows.num_rows, 0)
    assert report.shards > 2 and seen[-1] == (rows.num_rows, rows.num_rows)
    states = StateSet.open(tmp_path)
    states.verify()
    assert states.row_indices == list(range(rows.num_rows)) and states.facts.verifier_fingerprint == FINGERPRINT
    for row, expected in zip(states.rows(), (rows.row(i) for i in range(rows.num_rows)), strict=True):
        assert torch.equal(row.input_ids, expected.input_ids) and torch.equal(row.loss_mask, expected.loss_mask)
        assert row.split == expected.split and row.hidden_states.dtype == torch.bfloat16
    assert records_of(config) == [] and not (tmp_path / ".records").exists()


def test_a_verifier_too_large_to_load_is_compared_by_its_next_tokens(capturing, rows, config, verifier_dir, tmp_path):
    small = config.model_copy(update={"parity_memory_gib": 0.01})
    report = run(rows, capturing, small, tmp_path, verifier_dir)
    assert report.parity is not None and report.parity.method == "argmax" and report.parity.agreement == 1.0


def test_a_killed_capture_goes_on_at_the_shard(capturing, rows, config, verifier_dir, tmp_path):
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from speculators_core.data.rows import RowSet
        from speculators_core.engine.runtime import RuntimeInfo
        from speculators_core.engine.server import Engine
        from speculators_core.states.capture import capture
        from speculators_core.states.config import CaptureConfig
        url, model, info, config, rows, workspace, verifier = sys.argv[1:]
        engine = Engine(url, model, RuntimeInfo.model_validate_json(info), Path("none"), None)
        config = CaptureConfig.model_validate_json(config).model_copy(update={"parity_rows": 0, "concurrency": 1})
        capture(RowSet.open(Path(rows)), engine, (2, 15, 27, 30), "f" * 64, config, Path(workspace),
                verifier_dir=Path(verifier))
    """)
    workspace = tmp_path / "set"
    facts = (capturing.base_url, capturing.model_name, capturing.info.model_dump_json(), config.model_dump_json())
    child = subprocess.Popen(
        [sys.executable, "-c", script, *facts, str(rows.path), str(workspace), str(verifier_dir)],
        env=child_environment(),
    )
    first = workspace / "shard-00000.safetensors"
    deadline = time.monotonic() + 120
    while not first.exists():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    finished = {path: path.stat().st_mtime_ns for path in workspace.glob("shard-*.safetensors")}
    report = run(rows, capturing, config, workspace, verifier_dir)
    assert report.reused_shards == len(finished) >= 1
    assert 0 < report.captured_rows < report.rows == rows.num_rows
    assert finished == {path: path.stat().st_mtime_ns for path in finished}
    StateSet.open(workspace).verify()
    assert report.parity is not None and all(layer.cosine >= 0.999 for layer in report.parity.layers)


def test_states_captured_while_replies_are_generated_become_a_set(capturing, rows, config, verifier_dir, tmp_path):
    """Prompt and reply in one request: the set's rows are one token shorter, and agree with the same forward."""
    prompts = [rows.row(number).input_ids[: int(rows.row(number).loss_mask.long().argmax())] for number in range(6)]
    requests = [
        GenerationRequest(
            id=str(number),
            prompt_token_ids=tuple(prompt.tolist()),
            max_tokens=24,
            kv_transfer_params={"include_output_tokens": True},
        )
        for number, prompt in enumerate(prompts)
    ]
    with capturing.client() as client:
        before = client.counters()
        generations = list(client.generate(requests, concurrency=4))
        after = client.counters()
    assert after == before, "what the speculative method proposes is not verified: a reply is one token wide in a step"
    replies = Replies(generations, [len(prompt) for prompt in prompts])
    handles = {n: Handle.from_json(one.kv_transfer_params["handle"]) for n, one in enumerate(generations)}
    reader = open_reader(config.backend, config.backend_config)
    report = store_handles(replies, handles, reader, LAYERS, FINGERPRINT, config, tmp_path, verifier_dir=verifier_dir)
    assert report.rows == 6 and report.parity is not None
    assert all(layer.cosine >= 0.999 for layer in report.parity.layers), report.parity
    assert StateSet.open(tmp_path).lengths == [len(replies.row(number).input_ids) - 1 for number in range(6)]
    assert not {f"{handle.key}.safetensors" for handle in handles.values()} & set(records_of(config))


class Replies:
    """Prompt and reply of each generation as a row."""

    def __init__(self, generations, prompt_lengths):
        self._generations, self._prompt_lengths = generations, prompt_lengths
        self.num_rows = len(generations)

    def row(self, index: int, /):
        class Row:
            pass

        row, generation = Row(), self._generations[index]
        row.index, row.split = index, "train"
        row.input_ids = torch.tensor([*generation.prompt_token_ids, *generation.token_ids])
        row.loss_mask = torch.arange(len(row.input_ids)) >= self._prompt_lengths[index]
        return row


def test_an_engine_of_another_verifier_is_refused_before_the_first_request(
    capturing, rows, config, verifier_dir, tmp_path
):
    with pytest.raises(
        CaptureError, match=r"(?s)wanted: verifier_fingerprint\n.*≠ +verifier_fingerprint +0000\S+ +ffff"
    ):
        capture(rows, capturing, LAYERS, "0" * 64, config, tmp_path / "a", verifier_dir=verifier_dir)
    layers = check_layers((3, 30), 30)
    with pytest.raises(CaptureError, match=r"(?s)wanted: layer_ids\n.*≠ +layer_ids +\[3, 30\] +\[2, 15, 27, 30\]"):
        capture(rows, capturing, layers, FINGERPRINT, config, tmp_path / "b", verifier_dir=verifier_dir)


def test_an_engine_that_dies_is_noticed_and_the_rest_is_captured_later(
    capturing, engine, config, verifier_dir, tmp_path
):
    """Last: it costs the engine, which has rows enough not to be done before it is killed."""
    workspace, rows = tmp_path / "set", prepared(tmp_path, verifier_dir, 4 * NUM_ROWS)

    def kill(done: int, total: int) -> None:
        if list(workspace.glob("shard-*.safetensors")) and capturing.process.poll() is None:
            os.killpg(capturing.process.group, signal.SIGKILL)

    started = time.monotonic()
    quiet = config.model_copy(update={"parity_rows": 0})
    with pytest.raises(CaptureError, match=r"(?s)engine failed after \d+ of \d+ rows.*goes on after the last finished"):
        run(rows, capturing, quiet, workspace, verifier_dir, progress=kill)
    assert time.monotonic() - started < 60
    finished = len(list(workspace.glob("shard-*.safetensors")))
    assert finished >= 1
    again = engine(capture_server(config, verifier_dir, LAYERS, FINGERPRINT, tmp_path, max_model_len=512))
    report = run(rows, again, config, workspace, verifier_dir)
    assert report.reused_shards == finished and report.captured_rows < report.rows
    StateSet.open(workspace).verify()
