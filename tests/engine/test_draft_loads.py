"""The real vLLM loads every shape of draft that we write, given the draft's directory alone, and drafts as we would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hs_connectors.probe import ProbeSettings
from speculators_core import registry
from speculators_core.data.rows import Prompt
from speculators_core.engine.client import GenerationRequest
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import Engine
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.measure import measure_draft
from speculators_core.evaluation.parity_logits import replay
from speculators_core.evaluation.runs import Conditions
from speculators_core.evaluation.served import draft_digest, drafted_tokens, served_name
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from tests.unit.speculators_core.algorithms.tiny import Vocabulary

pytestmark = pytest.mark.engine

SHAPES: dict[str, dict[str, Any]] = {
    "default-reduced": {"draft_size": 4096},
    "qwen3-two-layers-fc-norm": {
        "style": "qwen3",
        "layers": 2,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
    },
    "llama-four-features-two-layers": {
        "aux_layers": (1, 9, 20, 28),
        "layers": 2,
        "norm_before_residual": False,
        "sliding_window": None,
        "speculative_tokens": 2,
        "draft_size": 4096,
    },
    "in-parallel-qwen3-two-layers-fc-norm": {
        "kind": "peagle",
        "style": "qwen3",
        "layers": 2,
        "norm_before_fc": False,
        "fc_norm": True,
        "num_depths": 5,
        "speculative_tokens": 4,
        "draft_size": 4096,
    },
    "in-blocks-two-layers-own-mask": {"kind": "dflash", "layers": 2, "block_size": 5, "draft_size": 4096},
}
"""Knobs of a draft (eagle3 unless its kind is named), and the size of its vocabulary."""


def every_nth(draft_size: int, verifier_size: int) -> Vocabulary:
    ids = torch.arange(draft_size) * (verifier_size // draft_size)
    t2d = torch.zeros(verifier_size, dtype=torch.bool)
    t2d[ids] = True
    return Vocabulary(ids - torch.arange(draft_size), t2d)


def fresh_draft(shape: str, verifier_dir: Path, target: Path) -> Path:
    """An untrained draft whose norms are all different, so that none could stand in for another."""
    knobs = dict(SHAPES[shape])
    draft_size = knobs.pop("draft_size", None)
    algorithm = registry.resolve(knobs.get("kind", "eagle3"))
    config = algorithm.config(**knobs)
    model = algorithm.build(config, verifier_dir, every_nth(draft_size, 49152) if draft_size else None, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() == 1:
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
    return write_draft(target, algorithm.export(config, model, str(verifier_dir)), ModelCard(title=shape))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, verifier_dir: Path) -> Callable[[str], Path]:
    """The draft of a shape, made once; the engine's recording lies beside it."""
    root = tmp_path_factory.mktemp("drafts")

    def get(shape: str) -> Path:
        draft = root / shape / "draft"
        return draft if draft.exists() else fresh_draft(shape, verifier_dir, draft)

    return get


def spec_for(draft: Path) -> ServerSpec:
    return ServerSpec(
        model=str(draft),
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,  # the longer prompt comes in two steps
        kv_cache_gib=1.0,
        per_request_metrics=True,
        speculative={"num_speculative_tokens": drafted_tokens(draft)},
        env=ProbeSettings(str(draft.parent / "probe"), steps=40).to_environment(),
        extra_args=("--no-enable-prefix-caching", "--served-model-name", str(draft), served_name(draft_digest(draft))),
    )


PROMPTS = [(1, 504, 260), tuple(range(300, 345))]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_untrained_draft_is_served_alone_and_drafts_what_our_module_does(
    shape: str,
    engine: Callable[[ServerSpec], Engine],
    drafts: Callable[[str], Path],
    verifier_dir: Path,
    tmp_path: Path,
) -> None:
    draft = drafts(shape)
    requests = [
        GenerationRequest(id=str(i), prompt_token_ids=prompt, max_tokens=12, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    with engine(spec_for(draft)).client() as client:
        before = client.counters()
        answers = list(client.generate(requests, concurrency=2))
        after = client.counters()
    assert [len(answer.token_ids) for answer in answers] == [12, 12]
    counted = after.drafts - before.drafts
    assert counted > 0
    assert after.draft_tokens - before.draft_tokens == counted * drafted_tokens(draft)
    found = replay(draft.parent / "probe", draft, verifier_dir, dtype="bfloat16")
    assert found.holds and found.agreement == 1.0, found.describe()
    assert found.requests == 2 and found.steps > 12 and len(found.positions) == drafted_tokens(draft)
    if "norm_before_residual" in json.loads((draft / "config.json").read_text()):
        wrong = wrongly_stated(draft, tmp_path / "wrong")
        found = replay(draft.parent / "probe", wrong, verifier_dir, dtype="bfloat16", max_steps=12)
        assert not found.holds and found.explained_by == "norm_before_residual", found.describe()


def test_a_draft_that_somebody_else_serves_is_measured_by_url_and_stays_untested(
    engine: Callable[[ServerSpec], Engine], drafts: Callable[[str], Path], verifier_dir: Path, tmp_path: Path
) -> None:
    *_, other, last = SHAPES
    draft = drafts(last)
    server = engine(spec_for(draft))  # the one that runs still
    prompts = [
        Prompt(id=str(i), domain="all", messages=(), prompt_token_ids=prompt) for i, prompt in enumerate(PROMPTS)
    ]
    config = EvaluationConfig(k=None, max_new_tokens=8, concurrency=2, warmup_prompts=0)
    conditions = Conditions(verifier_dir, "f" * 64, prompts, Runtime(url=server.base_url), config, tmp_path)
    found = measure_draft(draft, conditions, tmp_path / "measured")
    assert found.identity.runtime_key == f"untested:{server.info.vllm}"
    assert found.drafts > 0 and found.divergences is None and found.k == drafted_tokens(draft)
    with pytest.raises(EvaluationError, match="is to be measured"):
        measure_draft(drafts(other), conditions, tmp_path / "other")


def wrongly_stated(draft: Path, target: Path) -> Path:
    """The same draft, saying of its first residual that it is taken elsewhere."""
    target.mkdir()
    for file in draft.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((draft / "config.json").read_text())
    config["norm_before_residual"] = not config["norm_before_residual"]
    (target / "config.json").write_text(json.dumps(config))
    return target
