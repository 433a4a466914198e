"""Props of the demo's story: revisions of the verifier, a client that never rests, and what training took."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml
from pydantic import Field

from speculators_core import stages
from speculators_core.config import Recipe, read_yaml
from speculators_core.errors import EvaluationError, TrainingError
from speculators_core.lifecycle.plan import MADE_OF, MadeOf
from speculators_core.processes import supervise
from speculators_core.run import Run
from speculators_core.store import write_atomic
from speculators_core.training.callbacks.metrics_log import read_metrics
from speculators_core.types import Json, StrictModel
from tasks.adapters.settings import settings

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_REQUEST_TIMEOUT_S = 120.0


class Chapter(StrictModel):
    """What happened in a chapter."""

    title: str
    seconds: float
    told: tuple[str, ...] = Field(description="sentences, in their order")
    facts: dict[str, Json] = Field(description="the numbers in them")


class StoryReport(StrictModel):
    """The story so far; a chapter that is in it is not played again."""

    chapters: tuple[Chapter, ...] = ()

    @property
    def seconds(self) -> float:
        """Of all chapters."""
        return sum(chapter.seconds for chapter in self.chapters)


def require(true: bool, what: str) -> None:
    """Raises EvaluationError where the story goes another way than it must."""
    if not true:
        raise EvaluationError(f"the story went another way: {what}")


def write_recipe(template: Path, target: Path, **sections: dict[str, Json]) -> None:
    """A recipe with keys of its sections set otherwise; written only where that changes it."""
    content = read_yaml(template)
    for name, values in sections.items():
        content[name] = {**content.get(name, {}), **values}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    if not target.exists() or target.read_text() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, lambda part: part.write_text(text, encoding="utf-8"))


def tuned_revision(source: Path, target: Path, conversations: Path, *, steps: int, learning_rate: float) -> Path:
    """A verifier fine-tuned from another in a process of its own; found again where it is there.

    Raises:
        TrainingError: it failed; its log says why.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    home = settings().home
    command = [sys.executable, "-m", "speculators_core.verifier.revise"]
    arguments = [str(source), str(target), str(conversations), str(steps), str(learning_rate)]
    with supervise(command + arguments, name="revise", home=home, log=home / "logs" / "revise.log") as process:
        if process.wait():
            raise TrainingError(f"the fine-tune of {source} failed", mend=f"see {process.log}")
    return target


def retold_revision(source: Path, target: Path) -> Path:
    """A verifier whose chat template alone differs: a comment that changes nothing of what it renders."""
    if not target.exists():
        shutil.copytree(source, target)
        template = target / "chat_template.jinja"
        template.write_text("{# another hand was here #}" + template.read_text())
    return target


@contextmanager
def steady_load(address: str, model: str, *, clients: int = 2) -> Iterator[Load]:
    """Clients that ask one short question after the other for as long as the block lasts."""
    load = Load(address, model)
    threads = [threading.Thread(target=load.work, name=f"load-{n}", daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.over.set()
        for thread in threads:
            thread.join(_REQUEST_TIMEOUT_S)


class Load:
    """Counts of what the clients asked."""

    def __init__(self, address: str, model: str) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self.over = threading.Event()
        self._url, self._model = f"{address.rstrip('/')}/v1/chat/completions", model

    def work(self) -> None:
        """One client's requests, until it is over."""
        with httpx.Client(timeout=_REQUEST_TIMEOUT_S) as client:
            for number in range(1_000_000):
                if self.over.wait(_PAUSE_S):
                    return
                question = f"Tell me fact number {number} about the sea."
                body = {"model": self._model, "messages": [{"role": "user", "content": question}], "max_tokens": 24}
                try:
                    client.post(self._url, json={**body, "temperature": 0.0}).raise_for_status()
                    self.answered += 1
                except httpx.HTTPError as error:
                    log.warning("a request failed: %s", error)
                    self.failures.append(str(error))


class Learning(StrictModel):
    """How a training went: (tokens seen, walked acceptance length) at each validation."""

    warm: bool
    points: tuple[tuple[int, float], ...]

    def reached(self, al: float) -> int | None:
        """Tokens after which the acceptance length was first reached; None: it never was."""
        return next((tokens for tokens, reached in self.points if reached >= al), None)


def learning_curves(recipe: Recipe) -> list[Learning]:
    """Every training on the recipe's states, by how it began.

    Raises:
        NotProduced: the states have not been captured.
    """
    run = Run(recipe, settings().home, only_look=True)
    states = stages.capture(run, stages.prepare(run).ref).ref
    found = []
    for ref in run.store.artifacts("training"):
        made_of = MadeOf.model_validate(run.store.manifest(ref).meta[MADE_OF])
        if made_of.inputs["states"] == states.digest and made_of.settings["training"]["max_steps"] is None:
            lines = read_metrics(run.store.path(ref) / "metrics.jsonl")
            points = [(line["tokens"], line["eal"]) for line in lines if line.get("eal") is not None]
            found.append(Learning(warm="warm start" in made_of.inputs, points=tuple(points)))
    return found
