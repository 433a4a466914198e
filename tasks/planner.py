"""The stages of an action against the store: which are done, why the others are not, and what they will take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculators_core import stages
from speculators_core.lifecycle.changes import Action
from speculators_core.lifecycle.plan import RELEASE, Estimate, PlannedStage, why_missing
from speculators_core.run import NotProduced, Run, StageResult
from speculators_core.stages.expected import capture_estimate, train_estimate
from speculators_core.types import StrictModel

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
                stage if stage.done else stage.model_copy(update={"state": "if needed"})
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
        return self._to_run(name, why, self._measuring(speed=False), priced_as="evaluate")

    def loop(self) -> list[PlannedStage]:
        """Every stage from preflight to promotion; one whose inputs are not made yet is to run too."""
        run, found = self._run, self._found
        order, mode = stages.order_of(run.recipe), run.recipe.hidden_states.mode
        source = "capture" if "capture" in order else "prepare"
        steps: tuple[tuple[str, tuple[str, ...], Callable[[], StageResult]], ...] = (
            ("preflight", (), lambda: stages.preflight(run)),
            ("prepare", (), lambda: stages.prepare(run)),
            ("capture", ("prepare",), lambda: stages.capture(run, found["prepare"].ref)),
            ("train", (source,), lambda: stages.train(run, found[source].ref)),
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
            if name not in order:
                why = f"hidden_states.mode is {mode}: streamed into training"
                planned.append(PlannedStage(name=name, state="skipped", why=why))
                continue
            if lacking := [need for need in needs if need not in found]:
                planned.append(self._estimated(name, f"needs what {lacking[0]} will make"))
                continue
            try:
                found[name] = look_up()
                planned.append(PlannedStage(name=name, state="cached", why="in the store"))
            except NotProduced as error:
                planned.append(self._estimated(name, self._why(error)))
        planned.append(PlannedStage(name=RELEASE, state="run", why="the gate decides, every time"))
        return planned

    def _why(self, error: NotProduced) -> str:
        missing = error.missing
        if missing is None:
            return str(error.what)
        earlier = [item for item in self._run.recorded if item.kind == error.kind]
        why = why_missing(missing.inputs, missing.settings, earlier)
        return why if missing.stage in stages.ORDER else f"{missing.stage}: {why}"

    @property
    def borrows(self) -> bool:
        """Whether the numbers of data are those of another data set: this one is not prepared yet."""
        return "prepare" not in self._found and self._run.rates.meta("dataset", "tokens") is not None

    def _dataset(self, name: str) -> Any:
        """A number of the data set: its own, or else the newest one's."""
        found = self._found.get("prepare")
        return self._run.rates.meta("dataset", name) if found is None else found.summary.get(name)

    def _estimated(self, name: str, why: str) -> PlannedStage:
        return self._to_run(name, why, self._estimate(name), priced_as=name)

    def _to_run(self, name: str, why: str, likely: Estimate, *, priced_as: str) -> PlannedStage:
        cost = self._run.recipe.lifecycle.price(priced_as, likely.seconds)
        return PlannedStage(name=name, state="run", why=why, cost=cost, **likely._asdict())

    def _estimate(self, name: str) -> Estimate:
        tokens = self._dataset("tokens")
        if name == "capture":
            return capture_estimate(self._run, tokens)
        if name == "train":
            return train_estimate(self._run, tokens, self._dataset("splits"))
        if name == "evaluate":
            return self._measuring(self._run.recipe.gate.speed == "require")
        return Estimate(tokens if name == "prepare" else None, None, self._run.rates.whole(_KINDS[name]))

    def _measuring(self, speed: bool) -> Estimate:
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
        took = [seconds for kind in kinds if (seconds := self._run.rates.whole(kind)) is not None]
        written = self._run.rates.meta("measurement", "tokens")
        return Estimate(written, None, round(sum(took), 1) if took else None)
