"""A recipe with its surroundings, and the one way in which a stage finds or makes its artifact."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from speculators_core import registry
from speculators_core.config import Recipe
from speculators_core.engine.runtime import RuntimeInfo, probe_runtime
from speculators_core.errors import DraftsmithError
from speculators_core.provenance import versions
from speculators_core.store import Store
from speculators_core.types import ArtifactRef, ProgressCallback, StrictModel
from speculators_core.verifier.facts import VerifierFacts, read_facts
from speculators_core.verifier.fingerprint import Fingerprint, fingerprint

log = logging.getLogger(__name__)


class StageResult(StrictModel):
    """What a stage hands on: a reference and a few numbers, never data."""

    name: str
    ref: ArtifactRef
    cached: bool
    seconds: float
    summary: dict[str, Any]
    inputs: dict[str, str] = Field(default_factory=dict, description="digests of what went in, by name")


class NotProduced(DraftsmithError):
    """Raised instead of working when a run only looks (`status`, `--dry-run`)."""


@dataclass(frozen=True)
class Run:
    """A recipe with its surroundings: state root, store, and what was read once.

    only_look: find results, never make them · watch: entered, with the workspace, around a stage's work.
    """

    recipe: Recipe
    home: Path
    only_look: bool = False
    progress: ProgressCallback | None = None
    watch: Callable[[Path], AbstractContextManager[Any]] | None = None

    @cached_property
    def store(self) -> Store:
        """The artifact store under the state root."""
        return Store(os.environ.get("DRAFTSMITH_STORE") or str(self.home / "store"), scratch=self.home / "scratch")

    @cached_property
    def verifier(self) -> Path:
        """The verifier's directory, absolute."""
        return Path(self.recipe.verifier.path).absolute()

    @cached_property
    def facts(self) -> VerifierFacts:
        """Sizes and conventions read from the verifier's config.json."""
        return read_facts(self.verifier)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Digest of all that makes a draft stale."""
        return fingerprint(self.verifier, home=self.home, template_kwargs=self.recipe.data.template_kwargs)

    @cached_property
    def runtime(self) -> RuntimeInfo:
        """Version, build, device and model runner of the vLLM in use."""
        return probe_runtime(self.recipe.runtime, home=self.home)

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """Auxiliary layers that the algorithm reads."""
        algorithm = registry.resolve(str(self.recipe.algorithm["kind"]))
        return algorithm.aux_layers(self.recipe.algorithm_config(), self.facts.num_hidden_layers)

    @cached_property
    def draft_shape(self) -> dict[str, Any]:
        """What decides the draft's tensors: algorithm, knobs, vocabulary."""
        return {
            "algorithm": self.recipe.algorithm_config().model_dump(mode="json"),
            "vocabulary": self.recipe.draft_vocabulary,
        }

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """Captured layers: the auxiliary ones and the last."""
        return (*self.aux_layers, self.facts.num_hidden_layers)


def produce(
    run: Run,
    stage: str,
    kind: str,
    key: str,
    inputs: Mapping[str, str],
    build: Callable[[Path], Mapping[str, Any]],
) -> StageResult:
    """Find the artifact of this key, or build it in a workspace that survives a kill, and publish it.

    Args:
        build: writes the files into the workspace and returns the artifact's metadata (JSON).
    """
    start = time.monotonic()

    def result(ref: ArtifactRef, *, cached: bool) -> StageResult:
        summary = dict(run.store.manifest(ref).meta)
        seconds = time.monotonic() - start
        log.info("stage=%s %s seconds=%.1f", stage, "cached" if cached else "done", seconds)
        return StageResult(name=stage, ref=ref, cached=cached, seconds=seconds, summary=summary, inputs=dict(inputs))

    if found := run.store.find(kind, key):
        return result(found, cached=True)
    if run.only_look:
        raise NotProduced(f"{stage} has not been run for these inputs")
    with run.store.single_flight(kind, key):
        if found := run.store.find(kind, key):  # another process finished it while we waited
            return result(found, cached=True)
        workspace = run.store.workspace(kind, key)
        log.info("stage=%s start", stage)
        with run.watch(workspace) if run.watch else nullcontext():
            meta = dict(build(workspace))
        return result(run.store.publish(workspace, kind, key, meta, producer=versions()), cached=False)
