"""Records over shared memory, S3 and Mooncake from a real engine: right, slowed by a full store, and counted."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import torch

from hs_connectors import (
    CaptureSettings,
    Handle,
    Reader,
    kv_transfer_config,
    open_backend,
    open_reader,
    speculative_config,
)
from speculators_core.engine.server import Engine, ServerSpec
from tests.services import MooncakeServer, S3Server

pytestmark = pytest.mark.engine

LAYERS = (2, 30)
ROOM = 1 << 20
"""Bytes of the shared memory: some nine records of a hundred tokens in fp8."""


@dataclass(frozen=True)
class Store:
    backend: str
    config: dict[str, Any]
    engine: Engine
    reader: Reader

    def complete(self, prompt: list[int]) -> Handle:
        body = {"model": self.engine.model_name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{self.engine.base_url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return Handle.from_json(answer.json()["kv_transfer_params"]["handle"])

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.engine.base_url}/metrics", trust_env=False).text
        found = re.findall(rf"^vllm:hidden_states_{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert len(found) == 1, (name, re.findall("^vllm:hidden.*$", text, re.MULTILINE))
        return float(found[0])


def start(
    engine: Callable[[ServerSpec], Engine], verifier: Path, backend: str, config: dict[str, Any], codec: str = "none"
) -> Store:
    settings = CaptureSettings(backend, config, LAYERS, "fingerprint", codec=codec, queue_bytes=ROOM)
    server = engine(
        ServerSpec(
            model=str(verifier),
            max_model_len=256,
            kv_cache_gib=0.5,
            max_num_seqs=16,
            speculative=speculative_config(settings),
            kv_transfer=kv_transfer_config(settings),
        )
    )
    return Store(backend, config, server, open_reader(backend, config))


@pytest.fixture(scope="module")
def text(verifier_dir: Path) -> list[int]:
    from transformers import AutoTokenizer

    source = Path(__file__).parents[2] / "deployments" / "data" / "conversations.jsonl"
    ids: list[int] = AutoTokenizer.from_pretrained(str(verifier_dir))(source.read_text()[:10_000]).input_ids
    return ids


@pytest.fixture(scope="module")
def expected(verifier_dir: Path) -> Callable[[list[int]], torch.Tensor]:
    """States [T, K, H] of a float32 forward of Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(verifier_dir), dtype=torch.float32).eval().model
    before_norm: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0]))

    def forward(prompt: list[int]) -> torch.Tensor:
        before_norm.clear()
        with torch.no_grad():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        return torch.stack([states[2][0], before_norm[0][0]], dim=1)

    return forward


@pytest.fixture(scope="module")
def shm(engine: Callable[[ServerSpec], Engine], verifier_dir: Path) -> Iterator[Store]:
    space = f"test-{uuid4().hex}"
    config = {"space": space, "max_bytes": ROOM, "full_timeout_s": 60}
    try:
        yield start(engine, verifier_dir, "shm", config, codec="fp8")
    finally:
        shutil.rmtree(f"/dev/shm/draftsmith-{space}", ignore_errors=True)


def assert_captured(store: Store, prompt: list[int], states: torch.Tensor, cosine: float) -> None:
    handle = store.complete(prompt)
    record = store.reader.get(handle, 30)
    store.reader.delete(handle)
    assert record.token_ids.tolist() == prompt and record.hidden_states.dtype == torch.bfloat16
    found = torch.nn.functional.cosine_similarity(record.hidden_states.float(), states, dim=-1)
    assert found.mean(dim=0).min() >= cosine, found.mean(dim=0)


def test_fp8_states_in_shared_memory_are_those_of_the_verifier(
    shm: Store, text: list[int], expected: Callable[[list[int]], torch.Tensor]
) -> None:
    assert (shm.reader.announcement() or {})["codec"] == "fp8"
    assert_captured(shm, text[:100], expected(text[:100]), 0.998)


def test_a_full_store_slows_the_engine_and_loses_nothing(shm: Store, text: list[int]) -> None:
    """Nobody reads for a while: answers still come, records wait in the queue and in their cache blocks."""
    before = {name: shm.metric(name) for name in ("records_total", "errors_total")}
    prompts = [text[3 * i : 3 * i + 100] for i in range(40)]
    with ThreadPoolExecutor(16) as pool:
        handles = list(pool.map(shm.complete, prompts))
    time.sleep(0.5)
    stored = [entry.num_bytes for entry in open_backend("shm", shm.config).entries()]
    assert 3 <= len(stored) < 20 and sum(stored) <= ROOM
    shm.complete(text[:20])  # its steps carry the numbers
    assert shm.metric("queue_records") >= 2 and 0 < shm.metric("queue_bytes") <= ROOM
    assert shm.metric("held_requests") > 0 and shm.metric("queue_oldest_seconds") > 0
    asked = dict(zip(handles, prompts, strict=True))
    deadline = time.monotonic() + 60
    while asked:  # in the order of their arrival: a full store has no room for the one that a reader would insist on
        assert time.monotonic() < deadline, f"{len(asked)} records never came, of an engine that is idle"
        there = {entry.key for entry in open_backend("shm", shm.config).entries()}
        for handle in [handle for handle in asked if handle.key in there]:
            assert shm.reader.get(handle, 30).token_ids.tolist() == asked.pop(handle)
            shm.reader.delete(handle)
    shm.complete(text[:20])
    assert shm.metric("records_total") - before["records_total"] >= len(prompts)
    assert shm.metric("errors_total") == before["errors_total"]
    assert shm.metric("bytes_total") > 40 * 100 * 2 * 576 * 2 and shm.metric("lag_seconds_total") > 0


@pytest.mark.trial
def test_states_travel_over_s3(
    engine: Callable[[ServerSpec], Engine], verifier_dir: Path, s3_environment: S3Server, text: list[int],
    expected: Callable[[list[int]], torch.Tensor],
) -> None:  # fmt: skip
    store = start(engine, verifier_dir, "s3", {"root": f"s3://{s3_environment.bucket}/{uuid4().hex}"})
    assert_captured(store, text[:100], expected(text[:100]), 0.999)


@pytest.mark.trial
def test_states_travel_over_mooncake(
    engine: Callable[[ServerSpec], Engine], verifier_dir: Path, mooncake_service: MooncakeServer, text: list[int],
    expected: Callable[[list[int]], torch.Tensor],
) -> None:  # fmt: skip
    store = start(engine, verifier_dir, "mooncake", {**mooncake_service.config, "space": "engine"})
    assert_captured(store, text[:100], expected(text[:100]), 0.999)


def test_a_verifier_with_latent_attention_is_refused_with_the_reason(
    engine: Callable[[ServerSpec], Engine], verifier_dir: Path, tmp_path: Path
) -> None:
    from speculators_core.errors import EngineError

    make_latent_verifier(tmp_path / "model", verifier_dir)
    with pytest.raises(EngineError) as caught:
        start(engine, tmp_path / "model", "file", {"root": str(tmp_path / "states")})
    assert "multi-head latent attention" in str(caught.value)


def make_latent_verifier(target: Path, tokenizer_of: Path) -> None:
    """A random DeepSeek-V3 of two layers."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    config = DeepseekV3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=30,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=512, q_lora_rank=32, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
        first_k_dense_replace=30, max_position_embeddings=256,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(target)
    for file in tokenizer_of.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, target)
