"""The KV connector in a real vLLM server on the CPU, against a Hugging Face forward."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from hs_connectors import CaptureSettings, Handle, Reader, Record, kv_transfer_config, open_reader, speculative_config
from hs_connectors.errors import CaptureFailed, ConnectorError, RecordTimeout
from speculators_core.engine.runtime import Runtime, ask_interpreter
from speculators_core.engine.server import Engine, ServerSpec

pytestmark = pytest.mark.engine

LAYERS = (2, 15, 27, 30)
MAX_MODEL_LEN = 512
CHUNK = 128


def spec_for(
    model: Path, root: Path, layers: Sequence[int] = LAYERS, queue_bytes: int = 1 << 30, **options: Any
) -> ServerSpec:
    settings = CaptureSettings(
        "file", {"root": str(root)}, tuple(layers), "fingerprint-of-the-test", queue_bytes=queue_bytes
    )
    return ServerSpec(
        model=str(model),
        max_model_len=MAX_MODEL_LEN,
        kv_cache_gib=0.5,
        speculative=speculative_config(settings),
        kv_transfer=kv_transfer_config(settings),
        **options,
    )


@dataclass(frozen=True)
class Capturing:
    engine: Engine
    reader: Reader
    root: Path

    def complete(self, prompt: Sequence[int], max_tokens: int = 1, *, outputs: bool = False, **body: Any) -> Any:
        body = {
            "model": self.engine.model_name, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **body,
        }  # fmt: skip
        if outputs:
            body["kv_transfer_params"] = {"include_output_tokens": True}
        answer = httpx.post(f"{self.engine.base_url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def record(self, answer: Mapping[str, Any], timeout_s: float = 30) -> Record:
        return self.reader.get(Handle.from_json(answer["kv_transfer_params"]["handle"]), timeout_s)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def capturing(engine: Callable[[ServerSpec], Engine], verifier_dir: Path, root: Path) -> Capturing:
    server = engine(spec_for(verifier_dir, root, max_num_batched_tokens=CHUNK, max_num_seqs=16))
    return Capturing(server, open_reader("file", {"root": str(root)}), root)


@pytest.fixture(scope="module")
def text(verifier_dir: Path) -> list[int]:
    """Token ids of real conversations, one long stream."""
    from transformers import AutoTokenizer

    source = Path(__file__).parents[2] / "deployments" / "data" / "conversations.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(str(verifier_dir))
    ids: list[int] = tokenizer(source.read_text()[:20_000]).input_ids
    assert len(ids) > 2000
    return ids


@pytest.fixture(scope="module")
def reference(verifier_dir: Path) -> Callable[[Record], torch.Tensor]:
    """Cosine [K, T] between a record and a float32 forward of Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(verifier_dir), dtype=torch.float32).eval().model
    before_norm: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0]))

    def cosine(record: Record) -> torch.Tensor:
        before_norm.clear()
        with torch.no_grad():
            states = list(model(record.token_ids[None], output_hidden_states=True).hidden_states)
        states[-1] = before_norm[0]
        expected = torch.stack([states[layer][0] for layer in record.layer_ids])
        return torch.nn.functional.cosine_similarity(record.hidden_states.float().transpose(0, 1), expected, dim=-1)

    return cosine


def assert_equal_to(reference: Callable[[Record], torch.Tensor], record: Record) -> None:
    cosine_KT = reference(record)
    assert cosine_KT.mean(dim=1).min() >= 0.999, cosine_KT.mean(dim=1)
    assert cosine_KT.min() >= 0.98, "one position is from somewhere else"


def test_the_plugin_may_be_loaded_twice(runtime: Runtime) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "(plugin,) = entry_points(group='vllm.general_plugins', name='draftsmith_hs_connectors')\n"
        "register = plugin.load(); register(); register()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory\n"
        "print('class', factory.get_connector_class_by_name('DraftsmithHiddenStates').__module__)"
    )
    done = subprocess.run([str(runtime.python), "-c", code], check=True, capture_output=True, text=True)
    assert "class hs_connectors.vllm.connector" in done.stdout


def test_the_engine_says_what_it_is(capturing: Capturing) -> None:
    facts = capturing.reader.announcement()
    assert facts is not None
    assert facts["vllm"] == capturing.engine.info.vllm and facts["device"] == capturing.engine.info.device
    assert facts["layer_ids"] == list(LAYERS) and facts["verifier_fingerprint"] == "fingerprint-of-the-test"
    assert facts["states_dtype"] == "bfloat16" and facts["codec"] == "none"


def test_a_prompt_longer_than_a_step_is_captured_whole(
    capturing: Capturing, text: list[int], reference: Callable[[Record], torch.Tensor]
) -> None:
    prompt = text[:450]
    assert len(prompt) > 3 * CHUNK
    record = capturing.record(capturing.complete(prompt))
    assert record.token_ids.tolist() == prompt
    assert record.layer_ids == LAYERS and record.verifier_fingerprint == "fingerprint-of-the-test"
    assert record.hidden_states.dtype == torch.bfloat16 and record.hidden_states.shape == (450, 4, 576)
    assert_equal_to(reference, record)


def test_generation_and_capture_in_one_request(
    capturing: Capturing, text: list[int], reference: Callable[[Record], torch.Tensor]
) -> None:
    prompt = text[100:160]
    answer = capturing.complete(prompt, 40, outputs=True)
    record = capturing.record(answer)
    assert record.token_ids.tolist() == (prompt + answer["choices"][0]["token_ids"])[:-1]
    assert record.extra["prompt_tokens"] == "60"
    assert_equal_to(reference, record)


def test_concurrent_requests_with_shared_prefixes_keep_their_own_states(
    capturing: Capturing, text: list[int], reference: Callable[[Record], torch.Tensor]
) -> None:
    shared = text[:130]
    prompts = [shared[: 16 * i] + text[200 + 37 * i : 230 + 50 * i] for i in range(8)]
    asks = [(prompt, 20 if i % 2 else 1, bool(i % 2)) for i, prompt in enumerate(prompts)]
    for _ in range(2):  # the second time every prompt is a prefix hit
        with ThreadPoolExecutor(len(asks)) as pool:
            answers = list(pool.map(lambda ask: capturing.complete(ask[0], ask[1], outputs=ask[2]), asks))
        for (prompt, _, outputs), answer in zip(asks, answers, strict=True):
            record = capturing.record(answer)
            expected = (prompt + answer["choices"][0]["token_ids"])[:-1] if outputs else prompt
            assert record.token_ids.tolist() == expected
            assert_equal_to(reference, record)
    metrics = httpx.get(f"{capturing.engine.base_url}/metrics", trust_env=False).text
    hits = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert hits and float(hits[0].split()[-1]) > 0


def test_states_reach_to_the_end_of_the_context(
    capturing: Capturing, text: list[int], reference: Callable[[Record], torch.Tensor]
) -> None:
    """vLLM skips the step that keeps states when a sequence outgrows the draft's context: it must not come to that."""
    full, other = text[300 : 300 + MAX_MODEL_LEN - 12], text[1000:1100]
    asks = [(full, 12), (other, 60), (text[: MAX_MODEL_LEN - 1], 1)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda ask: capturing.complete(*ask, outputs=True), asks))
    for answer, (prompt, max_tokens) in zip(answers, asks, strict=True):
        record = capturing.record(answer)
        assert record.token_ids.numel() == len(prompt) + max_tokens - 1
        assert_equal_to(reference, record)


def test_an_aborted_request_leaves_nothing_and_harms_nobody(
    capturing: Capturing, text: list[int], reference: Callable[[Record], torch.Tensor]
) -> None:
    before = set(capturing.root.iterdir())
    body = {"model": capturing.engine.model_name, "prompt": text[:64], "max_tokens": 440, "ignore_eos": True}
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{capturing.engine.base_url}/v1/completions", json=body, timeout=1, trust_env=False)
    answer = capturing.complete(text[:64])
    assert_equal_to(reference, capturing.record(answer))
    capturing.reader.delete(Handle.from_json(answer["kv_transfer_params"]["handle"]))
    assert set(capturing.root.iterdir()) == before


def test_a_hostile_request_id_stays_inside_the_root(capturing: Capturing, text: list[int]) -> None:
    before = {path for path in capturing.root.parent.rglob("*") if path.parent != capturing.root}
    answer = capturing.complete(text[:20], request_id="../../escape/../x")
    assert capturing.record(answer).token_ids.numel() == 20
    assert {path for path in capturing.root.parent.rglob("*") if path.parent != capturing.root} == before


def test_a_wrong_parameter_is_answered_not_captured(capturing: Capturing, text: list[int]) -> None:
    answer = capturing.complete(text[:20], kv_transfer_params={"include_output_tokens": "yes"})
    assert "handle" not in answer["kv_transfer_params"]
    assert "true or false" in answer["kv_transfer_params"]["error"]


def test_a_store_that_vanishes_and_returns(
    capturing: Capturing, text: list[int], reference: Callable[[Record], torch.Tensor]
) -> None:
    away = capturing.root.with_name("away")
    capturing.root.rename(away)
    try:
        promised = capturing.complete(text[:30])
        with pytest.raises(RecordTimeout):
            capturing.record(promised, 1)
        capturing.complete(text[:30])  # its step carries the news to the scheduler
        refused = capturing.complete(text[:30])
        assert "takes no records" in refused["kv_transfer_params"]["error"]
    finally:
        away.rename(capturing.root)
    with pytest.raises(CaptureFailed, match="No such file"):  # the marker that was owed arrives
        capturing.record(promised, 10)
    deadline = time.monotonic() + 20
    while "handle" not in (answer := capturing.complete(text[:30]))["kv_transfer_params"]:
        assert time.monotonic() < deadline, "captures did not resume"
    assert_equal_to(reference, capturing.record(answer))


@pytest.fixture
def full_disk(capturing: Capturing) -> Iterator[None]:
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(capturing.root)]
    if mount is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield
    subprocess.run(["umount", str(capturing.root)], check=True)


def test_a_full_disk_fails_records_and_not_the_engine(full_disk: None, capturing: Capturing, text: list[int]) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: capturing.complete(text[i : i + 20]), range(16)))
    written, failed = 0, 0
    for answer in answers:
        try:
            capturing.record(answer)
            written += 1
        except CaptureFailed:
            failed += 1
        except ConnectorError:
            assert "error" in answer["kv_transfer_params"]
            failed += 1
    assert written > 0 and failed > 0 and written + failed == len(answers)


def test_states_that_are_not_finite_fail_and_what_is_owed_is_written_at_a_stop(
    engine: Callable[[ServerSpec], Engine], verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    poison = 7
    home = tmp_path_factory.mktemp("tiny")
    model, root = home / "model", home / "states"
    make_tiny_verifier(model, verifier_dir, poison)
    # queue_bytes=1: no record fits, so one is written at a time and the others wait in their cache blocks
    spec = spec_for(model, root, (1, 2), 1, max_num_seqs=8, extra_args=("--shutdown-timeout", "20"))
    server = engine(spec)
    tiny = Capturing(server, open_reader("file", {"root": str(root)}), root)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: tiny.complete(range(100, 140 + i)), range(40)))
    poisoned = tiny.complete([*range(100, 120), poison, *range(120, 140)])
    assert server.process is not None
    server.process.stop(grace_s=30)
    for i, answer in enumerate(answers):
        assert tiny.record(answer, 0).token_ids.tolist() == list(range(100, 140 + i))
    with pytest.raises(CaptureFailed, match=r"layers \[1, 2\] are not finite"):
        tiny.record(poisoned, 0)


def make_tiny_verifier(target: Path, tokenizer_of: Path, poison: int) -> None:
    """A random Llama of two layers whose embedding of one token is not a number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=MAX_MODEL_LEN, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    model.save_pretrained(target)
    for file in tokenizer_of.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, target)


_ONE_CANNOT_BE_COPIED = """
import json, os, torch
from hs_connectors.contract import CaptureSettings
from hs_connectors.vllm.connector import Capture, _WorkerHalf
from hs_connectors.vllm.staging import Stager

settings = CaptureSettings("file", {"root": os.environ["STORE"]}, (1,), "a verifier")
worker = _WorkerHalf(settings, Stager(torch.ones(4, 1, 8, 4)), {"device": "cpu"})
blocks = {"before": 1, "none": 99, "after": 2}
asked = [Capture(name, name, tuple(range(8)), 8, (block,)) for name, block in blocks.items()]
released = worker.advance(asked) | worker.advance([])
worker.close()
print("DRAFTSMITH" + json.dumps(sorted(released)))
"""


def test_states_that_cannot_be_copied_fail_their_record_and_give_their_blocks_back(
    runtime: Runtime, tmp_path: Path
) -> None:
    assert runtime.python is not None
    told = ask_interpreter(Path(runtime.python), _ONE_CANNOT_BE_COPIED, variables={"STORE": str(tmp_path)})
    assert json.loads(told) == ["after", "before", "none"], "blocks that nobody gave back would be the engine's end"
    reader = open_reader("file", {"root": str(tmp_path)})
    for name in ("before", "after"):
        assert bool((reader.get(Handle("file", name), 0).hidden_states == 1).all())
    with pytest.raises(CaptureFailed, match="could not be copied out of the cache: index out of range"):
        reader.get(Handle("file", "none"), 0)
