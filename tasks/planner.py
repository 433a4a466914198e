"""The stages of an action against the store: which are done, why the others are not, and what they will take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from speculators_core import stages
from speculators_core.lifecycle.changes import Action
from speculators_core.lifecycle.plan import PlannedStage, Rates, Recorded, why_missing
from speculators_core.run import MADE_OF, MadeOf, NotProduced, Run, StageResult
from speculators_core.types import ArtifactRef, StrictModel

_BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4}
_KINDS = {"preflight": "preflight", "prepare": "dataset", "capture": "states", "train": "training", "export": "draft"}
_KINDS |= {"regenerate": "replies"}


class Champion(StrictModel):
    """The version that serves, and the digest of its draft where it is recorded."""

    version: str
    draft: str | None


class Planner:
    """Lays out the stages of an action, with what the store holds and what earlier runs took."""

    def __init__(self, run: Run, champion: Champion | None) -> None:
        """`run` only looks, and starts from the weights that the action would start from."""
        self._run = run
        self._champion = champion
        self._found: dict[str, StageResult] = {}

    def stages(self, action: Action) -> tuple[PlannedStage, ...]:
        """The action's stages in order."""
        if action == "nothing":
            return ()
        loop = self.loop()
        incumbent = self.incumbent()
        if action == "re-evaluate":
            first = [stage for stage in loop if stage.name == "prepare"]
            rest = [
                stage if stage.state == "cached" else stage.model_copy(update={"state": "if needed"})
                for stage in loop
                if stage.name != "prepare"
            ]
            return (*first, *incumbent, *rest)
        return (*loop[:-1], *incumbent, loop[-1])

    def incumbent(self) -> list[PlannedStage]:
        """The champion on what is there now: always measured, as what doing nothing would be."""
        if self._champion is None:
            return []
        name = f"measure version {self._champion.version}"
        dataset, digest = self._found.get("prepare"), self._champion.draft
        if dataset is None or digest is None:
            return [self._incumbent(name, "needs the prompts that prepare will make")]
        try:
            result = stages.evaluate(self._run, Path(), digest, dataset.ref)
        except NotProduced as error:
            return [self._incumbent(name, self._why(error))]
        return [PlannedStage(name=name, state="cached", why=f"AL {result.summary['acceptance']['al']:.3f}")]

    def _incumbent(self, name: str, why: str) -> PlannedStage:
        tokens, _, seconds = self._measuring(speed=False)
        cost = self._rates.cost("evaluate", seconds)
        return PlannedStage(name=name, state="run", why=why, tokens=tokens, seconds=seconds, cost=cost)

    def loop(self) -> list[PlannedStage]:
        """Every stage from preflight to promotion; one whose inputs are not made yet is to run too."""
        run, found = self._run, self._found
        steps: tuple[tuple[str, tuple[str, ...], Callable[[], StageResult]], ...] = (
            ("preflight", (), lambda: stages.preflight(run)),
            ("prepare", (), lambda: stages.prepare(run)),
            ("capture", ("prepare",), lambda: stages.capture(run, found["prepare"].ref)),
            ("train", ("capture",), lambda: stages.train(run, found["capture"].ref)),
            ("export", ("train",), lambda: stages.export(run, found["train"].ref)),
            (
                "evaluate",
                ("export", "prepare"),
                lambda: stages.evaluate_exported(run, found["export"].ref, found["prepare"].ref),
            ),
        )
        assert tuple(name for name, _, _ in steps) == stages.ORDER
        planned: list[PlannedStage] = []
        for name, needs, look_up in steps:
            if lacking := [need for need in needs if need not in found]:
                planned.append(self._estimated(name, f"needs what {lacking[0]} will make"))
                continue
            try:
                found[name] = look_up()
                planned.append(PlannedStage(name=name, state="cached", why="in the store"))
            except NotProduced as error:
                planned.append(self._estimated(name, self._why(error)))
        planned.append(PlannedStage(name="register and promote", state="run", why="the gate decides, every time"))
        return planned

    def _why(self, error: NotProduced) -> str:
        missing = error.missing
        if missing is None:
            return str(error.what)
        earlier = [item for item in self._recorded if item.kind == error.kind]
        why = why_missing(missing.inputs, missing.settings, earlier)
        return why if missing.stage in stages.ORDER else f"{missing.stage}: {why}"

    @cached_property
    def _recorded(self) -> list[Recorded]:
        """Every artifact of the store, with what it was made of."""
        return [recorded(self._run, ref) for ref in self._run.store.artifacts()]

    @cached_property
    def _rates(self) -> Rates:
        return Rates(self._recorded, self._run.recipe.lifecycle)

    def _dataset(self, name: str) -> Any:
        """A number of the data set: its own, or else the newest one's."""
        found = self._found.get("prepare")
        return self._rates.meta("dataset", name) if found is None else found.summary.get(name)

    def _estimated(self, name: str, why: str) -> PlannedStage:
        tokens, num_bytes, seconds = self._estimate(name)
        return PlannedStage(
            name=name,
            state="run",
            why=why,
            tokens=tokens,
            num_bytes=num_bytes,
            seconds=seconds,
            cost=self._rates.cost(name, seconds),
        )

    def _estimate(self, name: str) -> tuple[int | None, int | None, float | None]:
        """(tokens, bytes of hidden states, seconds) of a stage; None for what nothing measured can tell."""
        run, rates, tokens = self._run, self._rates, self._dataset("tokens")
        if name == "capture" and tokens is not None:
            per_token = len(run.layer_ids) * int(run.description.shape.get("hidden_size", 0))
            return (
                tokens,
                tokens * per_token * _BYTES_OF.get(run.recipe.capture.dtype, 2),
                rates.of_tokens("states", tokens),
            )
        if name == "train" and tokens is not None:
            splits, rows = self._dataset("splits") or {}, self._dataset("rows") or 0
            trained = int(tokens * splits.get("train", rows) / rows * run.recipe.training.epochs) if rows else None
            return trained, None, rates.of_tokens("training", trained)
        if name == "evaluate":
            return self._measuring(run.recipe.gate.speed == "require")
        return tokens if name == "prepare" else None, None, rates.whole(_KINDS[name])

    def _measuring(self, speed: bool) -> tuple[int | None, None, float | None]:
        """Tokens written and seconds of measuring a draft, and the verifier alone where that is not done yet."""
        run, dataset = self._run, self._found.get("prepare")
        kinds = ["measurement", *(["speed"] if speed else [])]
        try:
            if dataset is None:
                kinds.append("baseline")
            elif run.recipe.runtime.url is None:  # a server that somebody else runs serves no verifier alone
                stages.baseline(run, dataset.ref)
        except NotProduced:
            kinds.append("baseline")
        took = [seconds for kind in kinds if (seconds := self._rates.whole(kind)) is not None]
        written = self._rates.meta("measurement", "tokens")
        return written, None, round(sum(took), 1) if took else None


def recorded(run: Run, ref: ArtifactRef) -> Recorded:
    """What an artifact says of itself."""
    meta = dict(run.store.manifest(ref).meta)
    kept = meta.pop(MADE_OF, None)
    made = None if kept is None else MadeOf.model_validate(kept)
    return Recorded(
        kind=ref.kind,
        inputs=None if made is None else made.inputs,
        settings={} if made is None else made.settings,
        seconds=None if made is None else made.seconds,
        finished=(made.finished or 0.0) if made else 0.0,
        meta=meta,
    )
