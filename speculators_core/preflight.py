"""Before anything expensive: is the recipe possible, and does the runtime load a draft of this shape?"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from speculators_core import registry
from speculators_core.config import Recipe
from speculators_core.data.prepare import check_content
from speculators_core.data.rows import RowSet
from speculators_core.data.template import ChatTemplate
from speculators_core.drafts import export_untrained, try_warm_start
from speculators_core.engine.client import GenerationRequest
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.server import serve
from speculators_core.errors import ConfigError, DataError, EngineError
from speculators_core.evaluation.served import served_directory, speculation
from speculators_core.formats.card import ModelCard
from speculators_core.states.gates import check_layers, check_source
from speculators_core.types import DraftPlan
from speculators_core.verifier.facts import VerifierFacts

log = logging.getLogger(__name__)

PROBE_TOKENS = 16


def check_inputs(recipe: Recipe, facts: VerifierFacts, verifier: Path, layer_ids: tuple[int, ...]) -> None:
    """Everything else that can be known to be wrong without an engine, after `check_sizes`.

    Raises:
        ConfigError, DataError, VerifierError: naming the field and the mend.
    """
    check_layers(layer_ids, facts.num_hidden_layers)
    check_source(recipe.capture.source, facts)
    plan = DraftPlan(
        verifier,
        facts.vocab_size,
        recipe.draft_vocabulary,
        row_tokens=recipe.training.row_tokens,
        allow_unservable=recipe.export.allow_unservable,
        k=recipe.evaluation.k,
    )
    registry.resolve(str(recipe.algorithm["kind"])).check(recipe.algorithm_config(), plan)
    check_content(recipe.data)
    ChatTemplate.load(verifier, recipe.data.template_kwargs)
    if recipe.verifier.publish_as is None:
        log.warning("the draft will name its verifier by a local path; set verifier.publish_as to make it portable")


def check_sizes(recipe: Recipe, facts: VerifierFacts) -> None:
    """What the verifier's config.json alone denies: known before its weights are fetched or hashed.

    Raises:
        ConfigError: more tokens than its vocabulary, or longer rows than its context.
    """
    size = recipe.draft_vocabulary
    if size is not None and size > facts.vocab_size:
        raise ConfigError(
            f"draft_vocabulary is {size}, but the verifier's vocabulary has {facts.vocab_size} tokens",
            mend=f"set draft_vocabulary to at most {facts.vocab_size}, or to null for all of it",
        )
    context = facts.max_position_embeddings
    if recipe.data.max_length > context:
        raise ConfigError(
            f"data.max_length is {recipe.data.max_length}, but the verifier's context is {context}",
            mend=f"set data.max_length to at most {context}",
        )


def check_warm_start(recipe: Recipe, verifier: Path, start: Path, *, head: bool) -> None:
    """Whether training can begin from this draft.

    Raises:
        ConfigError: it is of another algorithm or shape.
        FormatError, TrainingError: it is no draft, or torn.
    """
    try_warm_start(recipe.algorithm, verifier, recipe.draft_vocabulary, start, head=head)


def check_rows(recipe: Recipe, verifier: Path, rows: RowSet) -> None:
    """What prepared rows tell before anything is captured: whether the algorithm can learn from them.

    Raises:
        ConfigError: they hold the token that stands for one to be drafted.
        DataError: no training row, or none with enough of the verifier's tokens in a run.
    """
    from speculators_core.training.loader import PackedRows, Uncaptured

    algorithm, settings = registry.resolve(str(recipe.algorithm["kind"])), recipe.algorithm_config()
    mask = algorithm.mask_token(settings, verifier)
    if mask is not None and (times := rows.occurrences(mask)):
        raise ConfigError(
            f"token {mask} stands for a token to be drafted, but the data holds it {times} times: "
            "the draft could not tell one from the other",
            mend="name a special token that your data never holds: algorithm.mask_token_id",
        )
    length = recipe.training.row_tokens
    packed = PackedRows(Uncaptured(rows), algorithm.objective(settings), "train", length)
    count = len(packed.positions)
    if not any(bool(packed.objective.denominators(packed.batch([row])).any()) for row in range(count)):
        raise DataError(
            f"there is nothing to learn for {algorithm.name} in any of the {count} training rows: within "
            f"training.row_tokens = {length}, none holds enough tokens of the verifier in a run",
            mend="bring longer replies, or raise training.row_tokens; see `draftsmith data sample RECIPE`",
        )


def serve_untrained(recipe: Recipe, home: Path, workspace: Path) -> dict[str, Any]:
    """Export an untrained draft, have the runtime serve it alone, and draft a few tokens.

    Raises:
        EngineError: the runtime does not load the shape, or drafts nothing, and `export.allow_unservable` is not set.
    """
    try:
        found = _serve_untrained(recipe, home)
    except EngineError as error:
        if not recipe.export.allow_unservable:
            raise
        log.warning("this draft cannot be served here, as export.allow_unservable permits: %s", error.what)
        found = {"drafts": 0, "unservable": error.what}
    (workspace / "preflight.json").write_text(json.dumps(found) + "\n")
    return found


def _serve_untrained(recipe: Recipe, home: Path) -> dict[str, Any]:
    verifier = Path(recipe.verifier.path).absolute()
    with tempfile.TemporaryDirectory(prefix="preflight-", dir=ensure(home / "scratch")) as scratch:
        draft = export_untrained(
            recipe.algorithm,
            verifier,
            recipe.draft_vocabulary,
            str(verifier),
            Path(scratch) / "draft",
            ModelCard(title="untrained draft"),
        )
        return serve_briefly(recipe, draft, verifier, home)


def serve_briefly(recipe: Recipe, draft: Path, verifier: Path, home: Path) -> dict[str, Any]:
    """Have the runtime serve a draft alone, and draft a few tokens.

    Raises:
        EngineError: the runtime does not load it, or drafts nothing.
    """
    started = time.monotonic()
    with served_directory(draft, verifier, ensure(home / "scratch")) as directory:
        spec = ServerSpec(
            model=str(directory),
            max_model_len=256,
            max_num_seqs=1,
            kv_cache_gib=recipe.evaluation.kv_cache_gib,
            speculative=speculation(directory, None),
            trust_remote_code=recipe.verifier.trust_remote_code,
        )
        with serve(recipe.runtime, spec, home=home) as engine, engine.client() as client:
            probe = GenerationRequest(id="probe", prompt_token_ids=(1, 2, 3), max_tokens=PROBE_TOKENS, ignore_eos=True)
            list(client.generate([probe], concurrency=1))
            drafts = client.counters().drafts
            vllm = engine.info.vllm
    if not drafts:
        raise EngineError(
            "the runtime served the draft but never drafted with it",
            mend="look in the server's log for why speculation was turned off",
        )
    return {"drafts": drafts, "vllm": vllm, "seconds": round(time.monotonic() - started, 1)}


def ensure(directory: Path) -> Path:
    """The directory, made if it isn't there."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory
