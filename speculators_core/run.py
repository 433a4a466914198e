"""A recipe with its surroundings, and the one way in which a stage finds or makes its artifact."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from speculators_core import registry
from speculators_core.config import Recipe
from speculators_core.engine.runtime import RuntimeInfo, probe_runtime
from speculators_core.errors import DraftsmithError
from speculators_core.lifecycle.plan import MADE_OF, Estimate, MadeOf, Rates, Recorded, recorded
from speculators_core.provenance import versions
from speculators_core.spending import Ledger
from speculators_core.store import Store, sha256_json
from speculators_core.types import ArtifactRef, Json, ProgressCallback, StrictModel
from speculators_core.verifier.facts import VerifierFacts, read_facts
from speculators_core.verifier.files import HUB_ID, VerifierFiles, open_verifier
from speculators_core.verifier.fingerprint import Description, Fingerprint, describe, remember

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary

log = logging.getLogger(__name__)


class WarmStart(StrictModel):
    """An earlier draft whose weights training starts from; what belongs to the verifier comes from the new one."""

    digest: str = Field(description="of the draft's bytes")
    path: str | None = Field(description="its directory; None where a run only looks")
    head: bool = Field(
        True, description="whether its vocabulary and a trained head are taken too: tokens mean the same"
    )
    before: tuple[WarmStart | None, ...] = Field(
        (), description="what that draft itself began from (null: random weights), where that is known"
    )


class StageResult(StrictModel):
    """What a stage hands on: a reference and a few numbers, never data."""

    name: str
    ref: ArtifactRef
    cached: bool
    seconds: float
    summary: dict[str, Any]
    inputs: dict[str, str] = Field(default_factory=dict, description="digests of what went in, by name")


class NotProduced(DraftsmithError):
    """Raised instead of working when a run only looks (`status`, `plan`): of what kind of artifact, made of what."""

    def __init__(
        self, what: str, *, mend: str | None = None, kind: str | None = None, missing: MadeOf | None = None
    ) -> None:
        super().__init__(what, mend=mend)
        self.kind, self.missing = kind, missing


@dataclass(frozen=True)
class Run:
    """A recipe with its surroundings: state root, store, and what was read once.

    warm_start: what training begins from; where the store holds what its `before` led to, it has been trained already ·
    only_look: find results, never make them · check: see that the recipe is possible before the first stage, which
    imports much · watch: entered, with the workspace, around a stage's work.
    """

    recipe: Recipe
    home: Path
    only_look: bool = False
    check: bool = True
    warm_start: WarmStart | None = None
    progress: ProgressCallback | None = None
    watch: Callable[[Path], AbstractContextManager[Any]] | None = None

    @cached_property
    def store(self) -> Store:
        """The artifact store under the state root."""
        return Store(os.environ.get("DRAFTSMITH_STORE") or str(self.home / "store"), scratch=self.home / "scratch")

    @cached_property
    def ledger(self) -> Ledger:
        """What this recipe's stages have taken on this verifier, against its budget; asks no runtime what it is."""
        made = self.recipe.model_dump(
            mode="json", exclude={"budget", "lifecycle", "evaluation", "gate", "export", "serve"}
        )
        name = sha256_json([made, self.fingerprint.digest])[:24]
        return Ledger(self.home / "spent" / name, self.recipe.budget, self.recipe.lifecycle)

    @cached_property
    def recorded(self) -> tuple[Recorded, ...]:
        """Every artifact of the store, with what it was made of."""
        return tuple(recorded(self.store))

    @cached_property
    def rates(self) -> Rates:
        """How fast earlier runs of this state root were."""
        return Rates(self.recorded)

    def advance(self, done: int, total: int) -> None:
        """Progress of a stage that can be cut off anywhere and goes on there: shown, and held against the budget.

        Raises:
            BudgetError: it is used up.
        """
        self.ledger.check(done, total)
        if self.progress is not None:
            self.progress(done, total)

    @cached_property
    def verifier_files(self) -> VerifierFiles:
        """The verifier's files, wherever they lie; a hub's branch is looked up once."""
        verifier = self.recipe.verifier
        return open_verifier(verifier.path, revision=verifier.revision, home=self.home)

    @cached_property
    def verifier(self) -> Path:
        """The verifier's directory, absolute; one on a hub or below a URL is fetched first."""
        return self.verifier_files.local(weights=True)

    @cached_property
    def published_name(self) -> str:
        """What a draft calls its verifier: the recipe's `publish_as`, a hub's id, or the directory."""
        verifier = self.recipe.verifier
        found = HUB_ID.match(verifier.path)
        hub_id = found["id"] if found and not Path(verifier.path).expanduser().exists() else None
        return verifier.publish_as or hub_id or str(self.verifier)

    @cached_property
    def facts(self) -> VerifierFacts:
        """Sizes and conventions read from the verifier's config.json; fetches no weights."""
        return read_facts(self.verifier_files.local(weights=False))

    @cached_property
    def description(self) -> Description:
        """Everything that makes a draft stale when it changes, read once and remembered under the state root."""
        found = describe(self.verifier_files, template_kwargs=self.recipe.data.template_kwargs)
        remember(found, self.home)
        return found

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Digest of all that makes a draft stale."""
        return self.description.fingerprint

    @cached_property
    def runtime(self) -> RuntimeInfo:
        """Version, build, device and model runner of the vLLM in use."""
        return probe_runtime(self.recipe.runtime, home=self.home)

    @cached_property
    def capture_runtime(self) -> RuntimeInfo:
        """The same of the vLLM that captures."""
        other = self.recipe.capture.runtime
        return self.runtime if other is None else probe_runtime(other, home=self.home)

    @cached_property
    def num_layers(self) -> int:
        """Decoder layers; where config.json writes them, nothing else is read."""
        written = self.description.shape.get("num_hidden_layers")
        return written if isinstance(written, int) else self.facts.num_hidden_layers

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """Auxiliary layers that the algorithm reads."""
        algorithm = registry.resolve(str(self.recipe.algorithm["kind"]))
        return algorithm.aux_layers(self.recipe.algorithm_config(), self.num_layers)

    @cached_property
    def given_vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary that the recipe brings; None where the most frequent tokens are taken.

        Raises:
            ConfigError, DataError: it does not fit the verifier, or is of another size than the recipe says.
        """
        source = self.recipe.draft_vocabulary_from
        if source is None:
            return None
        from speculators_core.data.vocabulary import given_vocabulary

        return given_vocabulary(Path(source), self.facts.vocab_size, self.recipe.draft_vocabulary)

    @cached_property
    def draft_shape(self) -> dict[str, Any]:
        """What decides the draft's tensors: algorithm, knobs, vocabulary."""
        given = self.given_vocabulary
        return {
            "algorithm": self.recipe.algorithm_config().model_dump(mode="json"),
            "vocabulary": self.recipe.draft_vocabulary,
            **({} if given is None else {"tokens": given.digest}),
        }

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """Captured layers: the auxiliary ones and the last."""
        return (*self.aux_layers, self.num_layers)


def produce(
    run: Run,
    stage: str,
    kind: str,
    key: str,
    inputs: Mapping[str, str],
    build: Callable[[Path], Mapping[str, Any]],
    *,
    settings: Mapping[str, Json] | None = None,
    expected: Callable[[], Estimate] | None = None,
) -> StageResult:
    """Find the artifact of this key, or build it in a workspace that survives a kill, and publish it.

    Args:
        inputs: digests of what goes in, by name.
        build: writes the files into the workspace and returns the artifact's metadata (JSON).
        settings: what else is in the key: the recipe's values, versions of packages.
        expected: what the work will take, asked where there is a budget; None: what the last one of its kind took.

    Raises:
        BudgetError: it would take more than the recipe's budget has left.
    """
    start = time.monotonic()
    made_of = MadeOf(stage=stage, inputs=dict(inputs), settings=dict(settings or {}))

    def result(ref: ArtifactRef, *, cached: bool) -> StageResult:
        summary = {name: value for name, value in run.store.manifest(ref).meta.items() if name != MADE_OF}
        seconds = time.monotonic() - start
        log.info("stage=%s %s seconds=%.1f", stage, "cached" if cached else "done", seconds)
        return StageResult(name=stage, ref=ref, cached=cached, seconds=seconds, summary=summary, inputs=dict(inputs))

    if found := run.store.find(kind, key):
        return result(found, cached=True)
    if run.only_look:
        raise NotProduced(f"{stage} has not been run for these inputs", kind=kind, missing=made_of)
    with run.store.single_flight(kind, key):
        if found := run.store.find(kind, key):  # another process finished it while we waited
            return result(found, cached=True)
        workspace = run.store.workspace(kind, key)
        log.info("stage=%s start", stage)
        likely = expected or (lambda: Estimate(seconds=run.rates.whole(kind)))
        with (
            run.ledger.attempt(stage, key, lambda: likely().amount) as finished_with,
            run.watch(workspace) if run.watch else nullcontext(),
        ):
            meta = dict(build(workspace))
            finished_with(meta)
        took = {"seconds": round(time.monotonic() - start, 3), "finished": round(time.time(), 3)}
        kept = made_of.model_copy(update=took)
        meta[MADE_OF] = kept.model_dump(mode="json")
        return result(run.store.publish(workspace, kind, key, meta, producer=versions()), cached=False)


def together(result: StageResult, parts: Sequence[StageResult]) -> StageResult:
    """The last part's result, as long as all parts took, and found only where all were."""
    seconds, cached = sum(part.seconds for part in parts), all(part.cached for part in parts)
    return result.model_copy(update={"seconds": seconds, "cached": cached})
