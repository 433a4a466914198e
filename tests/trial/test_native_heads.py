"""Native heads on the real engine: trained, stitched back, served, and accepted as often as the walk says.

So it is measured, not argued, which state serving feeds a head: fed the other one, the walk promises something else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators_core.algorithms.mtp.build import build
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.export import export
from speculators_core.algorithms.mtp.families import FAMILIES, layer_config
from speculators_core.algorithms.mtp.model import MTPHead
from speculators_core.algorithms.mtp.native import to_native
from speculators_core.algorithms.mtp.objective import MTPObjective
from speculators_core.engine.client import GenerationRequest
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import serve
from speculators_core.evaluation.served import served_directory, speculation
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from speculators_core.states.hf import HiddenStateForward
from speculators_core.types import Aligned, Sample
from tests.unit.speculators_core.algorithms.tiny import pack

pytestmark = [pytest.mark.engine, pytest.mark.trial]

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / ".draftsmith" / "verifiers" / "SmolLM2-135M-Instruct"
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.04,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "mimo": {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]},
    "glm4_moe": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}
PROMPTS, PROMPT, REPLY, K = 64, 6, 60, 2


def sentences(count: int, length: int) -> Tensor:
    """Random beginnings, then a word that follows from the two before it, in long cycles.

    So a head needs both its inputs: the token, and the state that knows the one before.
    """
    draws = torch.Generator().manual_seed(5)
    orders = torch.stack([torch.randperm(64, generator=draws) for _ in range(4)])
    ids = torch.randint(0, 64, (count, length))
    for at in range(2, length):
        last, before = ids[:, at - 1], ids[:, at - 2]
        ids[:, at] = orders[last % 4, last // 4 * 4 + before % 4]  # a bijection of (before % 4, last)
    return ids + 100


def make_verifier(directory: Path, name: str) -> Path:
    """A model of the family, taught a language of 64 words, with a random head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = COMMON | KINDS[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    with torch.no_grad():
        weight = model.base_model.norm.weight  # such that it matters on which side of this norm a state is taken
        weight.uniform_(0.3, 3.0).mul_(torch.randint(0, 2, weight.shape) * 2 - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        ids = sentences(16, PROMPT + REPLY)
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(text | {"dtype": "bfloat16"}))
    family = next(family for family in FAMILIES if family.name == name)
    head = MTPHead(MTPConfig(), family, layer_config(family, text))
    drawn = {
        key: (0.1 * torch.randn(value.shape) if value.dim() > 1 else torch.ones(value.shape)).bfloat16()
        for key, value in head.head_tensors().items()
    }
    native = {key: value.contiguous() for key, value in to_native(drawn, family, head.depth, ()).items()}
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | native, weights, metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, directory / file)
    return directory


def as_aligned(objective: MTPObjective, forward: HiddenStateForward, ids: list[int]) -> Aligned:
    tokens = torch.tensor(ids)
    mask = torch.arange(len(ids)) >= PROMPT
    sample = Sample(tokens, mask, forward(tokens).float(), torch.arange(len(ids)), row=0)
    return objective.align(sample)


def expected_al(objective: MTPObjective, head: MTPHead, rows: list[Aligned]) -> float:
    walked = [count for row in rows for count in objective.walk(head, row, K)]
    return 1 + sum(walked) / len(walked)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only make threads wait for each other, for minutes where the machine does other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", KINDS)
def test_a_tuned_head_is_accepted_as_the_walk_says(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    verifier = make_verifier(tmp_path / "verifier", name)
    config = MTPConfig(num_speculative_steps=K)
    objective = MTPObjective(config)
    torch.manual_seed(0)
    prompts = sentences(PROMPTS, PROMPT)
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.bfloat16)
    written = model.generate(prompts, max_new_tokens=REPLY, do_sample=False, eos_token_id=None).tolist()
    forward = HiddenStateForward(verifier, (COMMON["num_hidden_layers"],), "bfloat16")
    rows = [as_aligned(objective, forward, ids) for ids in written]

    head = build(config, verifier, None, 0)
    before = expected_al(objective, head, rows[-16:])
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=2e-3)
    for step in range(70):
        batch = pack([rows[(step * 8 + i) % (PROMPTS - 16)] for i in range(8)], 8 * (PROMPT + REPLY))
        with torch.autocast("cpu", torch.bfloat16):
            result = objective.step(head, batch, objective.denominators(batch))
        torch.autograd.backward(result.loss)
        optimizer.step()
        optimizer.zero_grad()
    draft = write_draft(tmp_path / "draft", export(config, head, str(verifier)), ModelCard(title=name))

    runtime = Runtime(python=str(ROOT / ".venv-vllm" / "bin" / "python"))
    with served_directory(draft, verifier, tmp_path) as directory:
        tuned = build(config, directory, None, 0)
        spec = ServerSpec(
            model=str(directory), max_model_len=256, max_num_seqs=8, kv_cache_gib=1.0,
            speculative=speculation(directory, K),
        )  # fmt: skip
        with serve(runtime, spec, home=tmp_path / "home", startup_timeout_s=900) as engine, engine.client() as client:
            requests = [
                GenerationRequest(id=str(i), prompt_token_ids=tuple(ids), max_tokens=REPLY, ignore_eos=True)
                for i, ids in enumerate(prompts[-16:].tolist())
            ]
            replies = list(client.generate(requests, concurrency=8))
            counted = client.counters()
    served = 1 + counted.accepted / counted.drafts
    again = [
        as_aligned(objective, forward, [*ids, *reply.token_ids])
        for ids, reply in zip(prompts[-16:].tolist(), replies, strict=True)
    ]
    promised = expected_al(objective, tuned, again)
    tuned.family = replace(tuned.family, fed_normed=not tuned.family.fed_normed)
    otherwise = expected_al(objective, tuned, again)
    print(f"{name}: AL before {before:.3f}, walked {promised:.3f}, served {served:.3f}, fed otherwise {otherwise:.3f}")
    assert served > before + 0.1
    assert promised == pytest.approx(served, rel=0.05)
    assert abs(otherwise - served) > 2 * abs(promised - served)
