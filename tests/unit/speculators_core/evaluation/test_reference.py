"""The reference loop writes what the verifier alone would write, and counts what serving would count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators_core import registry
from speculators_core.evaluation.drafts import ServedDraft
from speculators_core.evaluation.reference.decoding import Dice, Drafter, Reply, Sampling, speculate, verify
from speculators_core.evaluation.reference.verifier import ReferenceVerifier
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from speculators_core.states.hf import HiddenStateForward, load_verifier
from speculators_core.types import DraftContext, Sample
from tests.unit.speculators_core.algorithms.native_heads import add_head

VOCAB, LAYERS, K = 12, 8, 3
"""So few tokens that random drafts are right now and then."""
BLOCK: dict[str, Any] = {"layers": 2, "block_size": K + 1, "mask_token_id": VOCAB - 1, "sliding_window": 24}
KNOBS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": K},
    "peagle": {"num_depths": K, "mask_token_id": VOCAB - 1},
    "dflash": BLOCK,
    "dflash2": {**BLOCK, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4},
    "dspark": {**BLOCK, "block_size": K, "markov_rank": 8, "markov_head_type": "rnn"},
    "xpress": {**BLOCK, "xpress_rank": 8, "num_jacobi_passes": 2},
    "mtp": {"num_speculative_steps": K},
}
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9])
LENGTH = 24


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 2 with a MiMo head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    directory = tmp_path_factory.mktemp("verifier")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.4, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return add_head(directory, "mimo")


@pytest.fixture(scope="module")
def alone(verifier: Path) -> list[list[int]]:
    """The verifier's own greedy replies, by the library's loop."""
    model = load_verifier(verifier, "float32")
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, use_cache=False)[0][
            len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


def drafted(kind: str, verifier: Path, target: Path) -> tuple[ServedDraft, Any]:
    """A fresh draft, written as it is served and read back, and its objective."""
    algorithm = registry.resolve(kind)
    config = algorithm.config.model_validate({"kind": kind, **KNOBS[kind]})
    model = algorithm.build(config, verifier, None, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # heads that start at nothing shall count too
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    write_draft(target, algorithm.export(config, model, str(verifier)), ModelCard(title="random"))
    draft = ServedDraft.open(target, verifier)
    return draft, algorithm.objective(draft.config)


def layers_of(draft: ServedDraft) -> tuple[int, ...]:
    return (*draft.algorithm.aux_layers(draft.config, LAYERS), LAYERS)


@pytest.mark.parametrize("kind", registry.names())
def test_greedy_replies_are_the_verifiers_own_and_acceptance_is_what_the_walk_promises(
    kind: str, verifier: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    draft, objective = drafted(kind, verifier, tmp_path / "draft")
    loop = ReferenceVerifier(verifier, layers_of(draft), "float32")
    states = HiddenStateForward(verifier, layers_of(draft), "float32")
    drafter, model = Drafter(draft), draft.module()
    accepted = 0
    for prompt, own in zip(PROMPTS, alone, strict=True):
        reply = speculate(loop, drafter, prompt, k=K, max_new_tokens=LENGTH, ends=())
        assert list(reply.token_ids) == own
        accepted += sum(reply.accepted)
        row = torch.tensor([*prompt, *own])
        aligned = objective.align(
            Sample(row, torch.arange(len(row)) >= len(prompt), states(row), torch.arange(len(row)), 0)
        )
        assert list(objective.walk(model, aligned, K)) == within(reply)
    assert accepted > 0, "or nothing was tested"


@pytest.mark.parametrize("kind", registry.names())
def test_a_draft_computes_in_the_dtype_of_its_verifier(kind: str, verifier: Path, tmp_path: Path) -> None:
    draft, _ = drafted(kind, verifier, tmp_path / "draft")
    loop, drafter = ReferenceVerifier(verifier, layers_of(draft), "auto"), Drafter(draft)
    loop.begin()
    _, states = loop.feed(PROMPTS[0])
    assert states.dtype == torch.bfloat16, "auto: as the files have it"
    states = (states[:, :-1] if states.shape[1] > 1 else states).flatten(1)
    context = DraftContext(torch.tensor([*PROMPTS[0][1:], 7]), states)
    seen: list[Tensor] = []

    class Watching(Dice):
        def distribution(self, logits_V: Tensor) -> Tensor:
            seen.append(logits_V)
            return super().distribution(logits_V)

    tokens, _ = drafter.propose(context, K, Watching(Sampling()))
    assert len(tokens) == K
    likely = [logits[logits.isfinite()].float() for logits in seen]
    assert kind == "dflash2" or all(torch.equal(values, values.bfloat16().float()) for values in likely)


def within(reply: Reply) -> list[int]:
    """Accepted tokens that lie in the reply: a walk knows of no others, while an engine counts them."""
    place, counts = 1, []
    for count in reply.accepted:
        counts.append(min(count, len(reply.token_ids) - place))
        place += count + 1
    return counts


class Planted:
    """Drafts the given tokens, each half of the time something else."""

    def __init__(self, tokens: Sequence[int], prompt: Sequence[int], right: Sequence[int]) -> None:
        self.tokens, self.prompt, self.right = [*prompt, *tokens], prompt, list(right)

    def propose(self, context: DraftContext, k: int, dice: Dice) -> tuple[list[int], list[Tensor]]:
        begin, right = context.input_ids.numel() + 1, self.right.pop(0)
        known = (self.tokens + [0] * k)[begin : begin + k]
        drafts = [token if place < right else (token + 1) % VOCAB for place, token in enumerate(known)]
        return drafts, [torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float() for token in drafts]


def test_drafts_are_counted_whole_and_a_reply_ends_where_it_should(verifier: Path, alone: list[list[int]]) -> None:
    loop = ReferenceVerifier(verifier, (LAYERS,), "float32")
    prompt, own = PROMPTS[0], alone[0]
    planted: Any = Planted(own, prompt, [2, 0, 3, 1, 3])
    reply = speculate(loop, planted, prompt, k=3, max_new_tokens=12, ends=())
    # 1 + (2 + 1) + (0 + 1) + (3 + 1) + (1 + 1) = 11, and the last draft is counted with what the limit cuts off
    assert reply.accepted == (2, 0, 3, 1, 3) and list(reply.token_ids) == own[:12]
    assert reply.accepted_per_position(3) == (4, 3, 2)
    end = own[5]
    planted = Planted(own, prompt, [3] * 12)
    cut = speculate(loop, planted, prompt, k=3, max_new_tokens=12, ends={end})
    assert list(cut.token_ids) == own[: own.index(end) + 1]
    one = speculate(loop, planted, prompt, k=3, max_new_tokens=1, ends=())
    assert one == Reply((own[0],), ()), "a reply of one token is drafted for by nobody"


def test_a_verifier_whose_cache_forgets_nothing_gives_the_same(
    verifier: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import cache_utils

    monkeypatch.setattr(cache_utils, "DynamicLayer", type("Other", (), {}))
    loop = ReferenceVerifier(verifier, (LAYERS,), "float32")
    planted: Any = Planted(alone[1], PROMPTS[1], [1] * LENGTH)
    reply = speculate(loop, planted, PROMPTS[1], k=3, max_new_tokens=LENGTH, ends=())
    assert list(reply.token_ids) == alone[1]


def test_verification_draws_from_the_verifiers_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    target_KV, draft_KV = torch.randn(3, 5, generator=generator), torch.randn(2, 5, generator=generator)
    dice, counts, draws = Dice(Sampling(1.0, seed=1)), torch.zeros(5, 5), 6000
    drafted_KV = [dice.distribution(logits) for logits in draft_KV]
    for _ in range(draws):
        tokens = [dice.draw(q) for q in drafted_KV]
        count, own = verify(tokens, drafted_KV, target_KV, dice)
        written = [*tokens[:count], own]
        if len(written) > 1:
            counts[written[0], written[1]] += 1
        else:  # the next round would draw it from the same distribution
            counts[written[0], dice.draw(dice.distribution(target_KV[1]))] += 1
    p = torch.softmax(target_KV, dim=-1)
    assert float((counts / draws - p[0][:, None] * p[1]).abs().sum()) / 2 < 0.03


@cache
def noise(seed: int) -> Tensor:
    return torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)), dim=-1)


class Careless:
    """Drafts at random, by distributions that have nothing to do with the text."""

    def propose(self, context: DraftContext, k: int, dice: Dice) -> tuple[list[int], list[Tensor]]:
        distributions = [noise(place) for place in range(k)]
        return [dice.draw(q) for q in distributions], distributions


def test_sampled_replies_have_the_verifiers_distribution(verifier: Path) -> None:
    loop = ReferenceVerifier(verifier, (LAYERS,), "float32")
    careless: Any = Careless()
    counts, draws, temperature = torch.zeros(VOCAB, VOCAB), 400, 3.0
    for seed in range(draws):
        sampling = Sampling(temperature, seed)
        reply = speculate(loop, careless, PROMPTS[1], k=2, max_new_tokens=3, ends=(), sampling=sampling)
        counts[reply.token_ids[1], reply.token_ids[2]] += 1
    model = load_verifier(verifier, "float32")
    exact = torch.zeros(VOCAB, VOCAB)

    def after(tokens: list[int]) -> Tensor:
        return torch.softmax(model(torch.tensor([tokens])).logits[0, -1] / temperature, dim=-1)

    firsts = after(PROMPTS[1])
    for first in range(VOCAB):
        seconds = after([*PROMPTS[1], first])
        batch = torch.tensor([[*PROMPTS[1], first, second] for second in range(VOCAB)])
        thirds = torch.softmax(model(batch).logits[:, -1] / temperature, dim=-1)
        exact += firsts[first] * seconds[:, None] * thirds
    expected = exact * draws
    often = expected >= 4
    statistic = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    assert statistic < 1.7 * int(often.sum()), "chi-square: about one for each cell"
