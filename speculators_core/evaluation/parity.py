"""The parity ladder of a draft in a live engine: from token ids to acceptance length, and the first rung that breaks.

One server is started, with the draft and with the draft probe; every rung looks at that one run.

    token ids           our template's = the engine's
    hidden states       what the engine fed the draft = a Hugging Face forward
    draft logits        the engine's drafter = the module that is trained, fed the same
    proposals           the tokens we would have drafted = those that it drafted
    acceptance length   what of our proposals the verifier would have accepted = what it accepted
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor

from hs_connectors.probe import ProbedStep, ProbeSettings
from speculators_core.data.check import check_against_engine
from speculators_core.data.rows import RowSet
from speculators_core.engine.client import EngineClient, GenerationRequest
from speculators_core.engine.config import NO_PREFIX_CACHING, ServerSpec
from speculators_core.engine.metrics import SpecDecodeCounters
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import serve
from speculators_core.errors import ConfigError, DraftsmithError, EvaluationError
from speculators_core.evaluation.drafts import ServedDraft
from speculators_core.evaluation.parity_logits import LogitParity, read_steps, replay_steps
from speculators_core.evaluation.served import drafted_tokens, served_directory, speculation
from speculators_core.states.parity import compare_states
from speculators_core.types import Json, StrictModel
from speculators_core.verifier.facts import read_facts

Outcome = Literal["holds", "breaks", "skipped"]
AL_TOLERANCE = 0.03
"""Part of the served acceptance length by which the predicted one may differ (where two tokens tie)."""


class ParityConfig(StrictModel):
    """How much of a live engine is looked at."""

    prompts: int = Field(8, ge=1, description="held-back prompts to answer")
    max_new_tokens: int = Field(32, ge=2, description="longest reply in tokens")
    dtype: str = Field("bfloat16", description="the engine's dtype; float32 shows smaller faults")
    k: int | None = Field(None, ge=1, description="drafted tokens a step; null: what the draft's config names")
    cosine: float = Field(0.999, ge=0, le=1, description="least mean cosine of a layer's states")
    states_rows: int = Field(4, ge=0, description="replies whose states are compared; 0: none, for verifiers too large")
    kv_cache_gib: float = Field(2.0, gt=0, description="size of the engine's KV cache in GiB")


class Rung(StrictModel):
    """One comparison."""

    name: str = Field(description="which")
    outcome: Outcome = Field(description="holds, breaks, or was not looked at")
    text: str = Field(description="figures, and what is wrong")


class Ladder(StrictModel):
    """All rungs, from the bottom up."""

    draft: str = Field(description="directory of the draft")
    algorithm: str = Field(description="the draft's")
    vllm: str = Field(description="version of the engine")
    rungs: tuple[Rung, ...] = Field(description="in order")
    logits: LogitParity | None = Field(description="figures of the draft logits")

    @property
    def broken(self) -> Rung | None:
        """The first rung that breaks: what to mend, for all above follow from it."""
        return next((rung for rung in self.rungs if rung.outcome == "breaks"), None)


def walk_ladder(
    draft_dir: Path,
    verifier_dir: Path,
    rows: RowSet,
    runtime: Runtime,
    config: ParityConfig,
    *,
    home: Path,
    template_kwargs: dict[str, Json] | None = None,
    trust_remote_code: bool = False,
) -> Ladder:
    """Serve the draft, answer held-back prompts, and compare what happened with what we compute.

    Args:
        rows: prepared rows, with prompts held back.
        home: state root for the engine and for the recording, which is removed at the end.

    Raises:
        ConfigError: a runtime given by URL (its owner would have to turn the probe on), or no prompts.
        EngineError: the engine did not start, or died.
        EvaluationError: nothing was recorded, or the probe does not see how the algorithm is served.
        FormatError: the draft is not one of ours.
    """
    if runtime.url is not None:
        raise ConfigError(
            "the parity ladder starts its own engine, and the recipe's runtime is a URL",
            mend="--set runtime='{python: .venv-vllm/bin/python}'",
        )
    prompts = rows.prompts()[: config.prompts]
    if not prompts:
        raise ConfigError("there are no prompts held back", mend="set data.evaluation_prompts and prepare again")
    draft = ServedDraft.open(draft_dir, verifier_dir)
    if draft.algorithm.stitch is not None:
        raise EvaluationError(f"the draft probe does not see a head that is served inside its verifier ({draft.name})")
    k = config.k or drafted_tokens(draft_dir)
    longest = max(len(prompt.prompt_token_ids) for prompt in prompts) + config.max_new_tokens + k
    rendered = max(rows.length(index) for index in range(rows.num_rows))  # the rows that the first rung asks for
    requests = [
        GenerationRequest(id=p.id, prompt_token_ids=p.prompt_token_ids, max_tokens=config.max_new_tokens)
        for p in prompts
    ]
    (home / "scratch").mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="probe-", dir=home / "scratch") as recording,
        served_directory(draft_dir, verifier_dir, home / "scratch") as served,
    ):
        spec = ServerSpec(
            model=str(served.resolve()),
            dtype=config.dtype,
            max_model_len=min(max(longest, rendered) + 8, read_facts(verifier_dir).max_position_embeddings),
            max_num_seqs=4,
            kv_cache_gib=config.kv_cache_gib,
            speculative=speculation(served, k),
            extra_args=(NO_PREFIX_CACHING,),  # the probe must see every request from its beginning
            env=ProbeSettings(recording, steps=len(prompts) * (config.max_new_tokens + 1)).to_environment(),
            trust_remote_code=trust_remote_code,
        )
        with serve(runtime, spec, home=home) as engine, engine.client() as client:
            tokens = _looked_at("token ids", lambda: _token_ids(rows, client, template_kwargs))
            before = client.counters()
            for _ in client.generate(requests, concurrency=4):
                pass
            counted = client.counters() - before
        steps = read_steps(Path(recording), len(prompts) * (config.max_new_tokens + 1))
    logits, choices = replay_steps(steps, draft, config.dtype)
    return Ladder(
        draft=str(draft_dir),
        algorithm=draft.name,
        vllm=engine.info.vllm,
        rungs=(
            tokens,
            _looked_at("hidden states", lambda: _hidden_states(steps, draft, verifier_dir, config, trust_remote_code)),
            Rung(name="draft logits", outcome="holds" if logits.holds else "breaks", text=logits.describe()),
            proposals_rung(logits),
            acceptance_rung(steps, choices, counted),
        ),
        logits=logits,
    )


def _looked_at(name: str, look: Callable[[], tuple[Outcome, str]]) -> Rung:
    """A rung whose check raises when it breaks."""
    try:
        outcome, text = look()
    except DraftsmithError as error:
        outcome, text = "breaks", error.what
    return Rung(name=name, outcome=outcome, text=text)


def _token_ids(rows: RowSet, client: EngineClient, template_kwargs: dict[str, Json] | None) -> tuple[Outcome, str]:
    found = check_against_engine(rows, client, template_kwargs=template_kwargs)
    found.require()
    return "holds", f"{found.agreed} of {found.checked} renderings are the engine's"


def _hidden_states(
    steps: Sequence[ProbedStep], draft: ServedDraft, verifier_dir: Path, config: ParityConfig, trust_remote_code: bool
) -> tuple[Outcome, str]:
    from speculators_core.states.hf import reference_states

    last = {step.request_id: step for step in steps}  # the longest context of each
    chosen = dict(enumerate(list(last.values())[: config.states_rows]))
    if not chosen:
        return "skipped", "no rows were asked for"
    layers = draft.algorithm.aux_layers(draft.config, read_facts(verifier_dir).num_hidden_layers)
    reference = reference_states(
        verifier_dir,
        [(index, step.token_ids) for index, step in chosen.items()],
        layers,
        "float32",
        trust_remote_code=trust_remote_code,
    )
    served = {index: step.features.view(len(step.features), len(layers), -1) for index, step in chosen.items()}
    report = compare_states(served, reference, layers, config.cosine)
    least = min(layer.cosine for layer in report.layers)
    return "holds", f"cosine at least {least:.5f} over layers {list(layers)}, {report.tokens} tokens"


def proposals_rung(logits: LogitParity) -> Rung:
    """Greedy drafts as a whole: one other token is another draft."""
    text = f"{logits.same_drafts} of {logits.steps} drafts are the engine's, ties left out"
    return Rung(name="proposals", outcome="holds" if logits.same_drafts == logits.steps else "breaks", text=text)


def acceptance_rung(steps: Sequence[ProbedStep], choices: Sequence[Tensor], counted: SpecDecodeCounters) -> Rung:
    """Tokens that the verifier wrote after each draft against what we would have drafted there.

    Args:
        choices: our K tokens of each step.
        counted: by the engine over the same requests.
    """
    drafts = predicted = served = 0
    for (this, ours), (following, _) in _consecutive(steps, choices):
        written = following.fed_ids[len(this.fed_ids) :]
        if len(written) > len(ours) + 1:  # a chunk of the prompt: its draft was never verified
            continue
        length = min(len(written), len(ours))
        drafts += 1
        predicted += int((ours[:length] == written[:length]).long().cumprod(0).sum())
        served += len(written) - 1
    if not drafts:
        return Rung(name="acceptance length", outcome="skipped", text="no draft was seen to be verified")
    ours_al, engine_al = 1 + predicted / drafts, 1 + served / drafts
    text = (
        f"predicted {ours_al:.3f}, served {engine_al:.3f} over {drafts} drafts; the engine counted "
        f"{counted.acceptance_length:.3f} over all {counted.drafts}"
    )
    holds = abs(ours_al - engine_al) <= AL_TOLERANCE * engine_al
    return Rung(name="acceptance length", outcome="holds" if holds else "breaks", text=text)


def _consecutive(
    steps: Sequence[ProbedStep], choices: Sequence[Tensor]
) -> list[tuple[tuple[ProbedStep, Tensor], tuple[ProbedStep, Tensor]]]:
    by_request: dict[str, list[tuple[ProbedStep, Tensor]]] = {}
    for step, ours in zip(steps, choices, strict=True):
        by_request.setdefault(step.request_id, []).append((step, ours))
    return [pair for own in by_request.values() for pair in pairwise(own)]
