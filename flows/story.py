"""A year in the life of a deployment, in minutes: `draftsmith demo --story`, and the trial of the same name.

Everything happens on the real engine, by the same flows as in production; only the reasons for it are made here: a
verifier is fine-tuned, its template is touched, another vLLM is tried, a bad draft is forced into serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path

from flows.retrain import retrain
from flows.upkeep import keep_in_step
from flows.watch import watch
from speculators_core import stages
from speculators_core.config import Recipe, load_recipe
from speculators_core.engine.runtime import probe_runtime
from speculators_core.lifecycle.changes import Change
from speculators_core.lifecycle.promotion import CHAMPION
from speculators_core.run import Run
from speculators_core.store import write_atomic
from speculators_core.types import Json
from speculators_core.verifier.revise import write_telegraphic
from tasks.adapters.prefect_server import free_port
from tasks.adapters.settings import settings
from tasks.judging import measure_version
from tasks.serve_process import ServeProcess, serve_process
from tasks.story import (
    Chapter,
    Load,
    StoryReport,
    learning_curves,
    require,
    retold_revision,
    steady_load,
    tuned_revision,
    write_recipe,
)
from tasks.upkeep import Upkeep
from tasks.versions import history, open_aliases, promote_by_name
from tasks.watch import Finding

TEMPLATE = Path("deployments/recipes/story.yaml")
SECOND_RUNTIME = Path(".venv-vllm-second/bin/python")
SERVE = (
    "serve.poll_s=2",
    "serve.watch.min_drafts=200",
    "serve.engine.max_model_len=1024",
    "serve.engine.kv_cache_gib=0.5",  # two engines beside each other on a small machine
)
ROUNDS = (24, 24, 48)
"""Steps of fine-tuning, one round after the other, until the incumbent's acceptance has fallen far enough."""
STARTUP_S = 600.0
REQUESTS_AFTER = 20

Say = Callable[[str], None]
Facts = dict[str, Json]


class Story:
    """What the chapters share: the recipe, which names the present revision, and what was told so far."""

    def __init__(self, folder: Path, say: Say, stack: ExitStack) -> None:
        self.folder, self._say, self._stack = folder, say, stack
        self.recipe_file, self._report_file = folder / "recipe.yaml", folder / "story.json"
        known = self._report_file.exists()
        self.report = StoryReport.model_validate_json(self._report_file.read_bytes()) if known else StoryReport()
        self._told: list[str] = []
        template = load_recipe(TEMPLATE)
        self.first_verifier = Path(template.verifier.path).absolute()
        self.conversations = Path(template.data.sources[0]).absolute()
        self.name = template.deployment

    def play(self, title: str, chapter: Callable[[Story], Facts]) -> None:
        """A chapter, or what the report says of it where it was played before."""
        known = next((one for one in self.report.chapters if one.title == title), None)
        self._say(f"\n{title}" + ("" if known is None else " (played before)"))
        if known is not None:
            for sentence in known.told:
                self._say(f"  {sentence}")
            return
        self._told, started = [], time.monotonic()
        facts = chapter(self)
        seconds = round(time.monotonic() - started, 1)
        done = Chapter(title=title, seconds=seconds, told=tuple(self._told), facts=facts)
        self.report = StoryReport(chapters=(*self.report.chapters, done))
        text = self.report.model_dump_json(indent=2) + "\n"
        write_atomic(self._report_file, lambda part: part.write_text(text, encoding="utf-8"))
        self._say(f"  ({seconds:.0f} s)")

    def tell(self, sentence: str) -> None:
        """One sentence of the present chapter."""
        self._told.append(sentence)
        self._say(f"  {sentence}")

    def world(self, verifier: Path, *, runtime: Path | None = None, conversations: Path | None = None) -> Recipe:
        """Make the recipe name this verifier, runtime and data, as a person would; the recipe."""
        sections: dict[str, dict[str, Json]] = {
            "verifier": {"path": str(verifier)},
            "data": {"sources": [str(conversations or self.conversations)]},
        }
        if runtime is not None:
            sections["runtime"] = {"python": str(runtime)}
        write_recipe(TEMPLATE, self.recipe_file, **sections)
        return load_recipe(self.recipe_file)

    def look(self) -> Finding:
        """What `watch` finds."""
        started = time.monotonic()
        (reaction,) = watch([str(self.recipe_file)], react_to_changes=False)
        found = reaction.finding
        if found.version is None:
            seen = "no champion yet"
        else:
            seen = f"{', '.join(found.changes)} changed" if found.changes else "nothing changed since it was proven"
        self.tell(f"watch, after {time.monotonic() - started:.1f} s: {seen}; to do: {found.action}")
        for reason in found.reasons:
            self.tell(f"  because {reason}")
        return found

    def keep_in_step(self, finding: Finding) -> Upkeep:
        """What the finding asks for, done by the flow that a worker would run."""
        done: Upkeep = keep_in_step(finding.request())
        self.tell(done.describe())
        return done

    @property
    def champion(self) -> str | None:
        """The version that the alias names."""
        return open_aliases().get_alias(self.name, CHAMPION)

    @property
    def registered_al(self) -> float:
        """The acceptance length that the champion was registered with."""
        al = next(line.al for line in history(self.name).versions if line.version == self.champion)
        assert al is not None
        return al

    @cached_property
    def server(self) -> ServeProcess:
        """`draftsmith serve` of the champion, from the first chapter that asks for it to the story's end."""
        recipe, events = self.folder / "serve.yaml", self.folder / f"events-{time.time_ns()}.jsonl"
        write_recipe(TEMPLATE, recipe)
        home, sets = settings().home, (*SERVE, f"serve.port={free_port()}")
        serving = serve_process(
            self.name,
            home=home,
            log=home / "logs" / "serve-story.log",
            events=events,
            arguments=("--recipe", str(recipe), *(part for key in sets for part in ("--set", key))),
        )
        found = self._stack.enter_context(serving)
        ready = found.wait_for("ready", timeout_s=STARTUP_S)
        self.tell(f"version {ready.version} serves at {ready.address}")
        return found

    def load(self) -> AbstractContextManager[Load]:
        """Clients of the server."""
        address = self.server.wait_for("ready", timeout_s=STARTUP_S).address
        assert address is not None
        return steady_load(address, self.name)


def tell_story(say: Say) -> StoryReport:
    """All chapters in their order; one that was played before is only told again.

    Raises:
        EvaluationError: it went another way than it must.
    """
    with ExitStack() as stack:
        story = Story(settings().home / "story", say, stack)
        story.play("The first champion", first_champion)
        story.play("Nothing changed", nothing_changed)
        story.play("A light fine-tune", light_fine_tune)
        story.play("Only the chat template changed", template_changed)
        story.play("Only vLLM changed", engine_changed)
        story.play("A fine-tune that matters, under load", heavy_fine_tune)
        story.play("A bad draft, by force", bad_draft)
        story.play("Warm or cold", warm_or_cold)
        return story.report


def first_champion(story: Story) -> Facts:
    """Nothing serves yet: the whole loop."""
    story.world(story.first_verifier)
    finding = story.look()
    if finding.action != "nothing":
        done = story.keep_in_step(finding)
        require(done.loop is not None and done.loop.gate.passed, "the first draft did not pass the gate")
    story.tell(f"version {story.champion} is the champion, with acceptance length {story.registered_al:.3f}")
    return {"version": story.champion, "al": story.registered_al}


def nothing_changed(story: Story) -> Facts:
    """A look that costs nothing."""
    story.world(story.first_verifier)
    started = time.monotonic()
    finding = story.look()
    require(finding.action == "nothing", f"nothing changed, and it asks to {finding.action}")
    return {"watch_seconds": round(time.monotonic() - started, 2)}


def light_fine_tune(story: Story) -> Facts:
    """A revision that answers as before: the incumbent is measured, and kept."""
    revision = tuned_revision(
        story.first_verifier, story.folder / "verifiers" / "light", story.conversations, steps=2, learning_rate=5e-6
    )
    story.world(revision)
    return kept(story, "weights")


def template_changed(story: Story) -> Facts:
    """A template that says the same in other words."""
    story.world(retold_revision(story.first_verifier, story.folder / "verifiers" / "retold"))
    return kept(story, "chat_template")


def engine_changed(story: Story) -> Facts:
    """The same pair on another vLLM."""
    if not SECOND_RUNTIME.exists():
        story.tell("there is no second vLLM here: `python3 infra/setup.py --second-vllm` makes one")
        return {"skipped": True}
    story.world(story.first_verifier, runtime=SECOND_RUNTIME)
    return kept(story, "runtime")


def kept(story: Story, change: Change) -> Facts:
    """One change after which the incumbent holds."""
    finding, before = story.look(), story.champion
    require(change in finding.changes and finding.action == "re-evaluate", f"{finding.changes}: {finding.action}")
    done = story.keep_in_step(finding)
    require(done.kept and story.champion == before, "the incumbent was not kept")
    assert done.incumbent is not None
    al = done.incumbent.cell.al
    story.tell(f"doing nothing is best: acceptance length {story.registered_al:.3f} as registered, {al:.3f} here")
    require(story.look().action == "nothing", "it is not in step now")
    return {"registered_al": story.registered_al, "al": al}


def heavy_fine_tune(story: Story) -> Facts:
    """A revision that speaks otherwise: the incumbent falls, a draft is trained from it, and serving rolls over."""
    told = story.folder / "telegraphic.jsonl"
    if not told.exists():
        write_telegraphic(story.conversations, told)
    margin, registered, first = load_recipe(TEMPLATE).gate.margin, story.registered_al, story.champion
    assert first is not None
    revision, fall, al = story.first_verifier, 0.0, registered
    for number, steps in enumerate(ROUNDS, start=1):
        target = story.folder / "verifiers" / f"telegraphic-{number}"
        revision = tuned_revision(revision, target, told, steps=steps, learning_rate=1e-4)
        run = Run(story.world(revision, conversations=told), settings().home)
        al = measure_version(run, story.name, first, stages.prepare(run).ref).al or 1.0
        fall = 1 - al / registered
        story.tell(f"after {steps} steps of fine-tuning the incumbent's acceptance length is {al:.3f}: {fall:.1%} less")
        if fall >= 2 * margin:
            break
    require(fall >= 2 * margin, f"it fell by {fall:.1%}, less than twice the margin of {margin:.0%}")
    with story.load() as load:
        finding = story.look()
        require("weights" in finding.changes and finding.action == "retrain", f"{finding.changes}: {finding.action}")
        done = story.keep_in_step(finding)
        assert done.loop is not None
        require(done.loop.gate.passed, f"the gate says {done.loop.gate.outcome}: {done.loop.gate.reasons}")
        version, before = done.loop.registry.version, load.answered
        rolled = story.server.wait_for("rolled", version=version, timeout_s=STARTUP_S)
        while load.answered < before + REQUESTS_AFTER and not load.failures:
            time.sleep(0.5)
    require(not load.failures, f"{len(load.failures)} requests failed: {load.failures[:1]}")
    now = done.loop.acceptance.al
    story.tell(f"version {version} has {now:.3f} where version {first} had {al:.3f}")
    story.tell(
        f"it served {rolled.seconds} s after that; {load.answered} requests were answered meanwhile, none failed"
    )
    return {
        "registered_al": registered,
        "incumbent_al": al,
        "fall": round(fall, 4),
        "version": version,
        "al": now,
        "roll_seconds": rolled.seconds,
        "requests": load.answered,
        "failed": 0,
    }


def bad_draft(story: Story) -> Facts:
    """A draft that learnt nothing is refused by the gate, forced into serving, and taken back by the supervisor."""
    good = story.champion
    poor = retrain(load_recipe(story.recipe_file, ["training.max_steps=2"]))
    require(not poor.gate.passed and story.champion == good, "the gate let a bad draft pass")
    version = poor.registry.version
    assert version is not None
    story.tell(f"version {version} has acceptance length {poor.acceptance.al:.3f}: {poor.gate.outcome}")
    with story.load() as load:
        key = probe_runtime(load_recipe(story.recipe_file).runtime, home=settings().home).key
        seen = len(story.server.events())
        promote_by_name(story.name, version, key, force=True, why="the story wants a villain")
        story.tell(f"version {version} is promoted by force")
        back = story.server.wait_for("rolled_back", timeout_s=STARTUP_S, after=seen)
        deadline = time.monotonic() + 60
        while story.champion != good and time.monotonic() < deadline:
            time.sleep(0.5)
    require(story.champion == good, f"version {story.champion} is the champion, not {good}")
    require(not load.failures, f"{len(load.failures)} requests failed: {load.failures[:1]}")
    story.tell(f"the supervisor takes it back after {back.seconds} s: {back.reason}")
    return {"version": version, "al": poor.acceptance.al, "back_seconds": back.seconds, "requests": load.answered}


def warm_or_cold(story: Story) -> Facts:
    """What beginning from the champion's weights saved."""
    recipe = load_recipe(story.recipe_file)
    run = Run(recipe, settings().home)
    stages.train(run, stages.capture(run, stages.prepare(run).ref).ref)
    (warm,), (cold,) = ([one for one in learning_curves(recipe) if one.warm is began] for began in (True, False))
    tokens, al = cold.points[-1]
    reached = warm.reached(al)
    if reached is None:
        story.tell(f"the cold start walks to {al:.3f} in {tokens:,} tokens; the warm start never does")
    else:
        verdict = "fewer" if reached < tokens else "no fewer"
        story.tell(f"the cold start walks to {al:.3f} in {tokens:,} tokens, the warm start in {reached:,}: {verdict}")
    return {"cold_al": al, "cold_tokens": tokens, "warm_tokens": reached, "warm_al": warm.points[-1][1]}
