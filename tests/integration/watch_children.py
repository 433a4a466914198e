"""A watch's story in a process of its own: `python watch_children.py NAME ROOT`, with DRAFTSMITH_HOME set.

Each function prints one line of JSON for every step; the tests say what they must be.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from speculators_core import stages
from speculators_core.config import Recipe, load_recipe
from speculators_core.lifecycle.changes import tags_of
from speculators_core.run import NotProduced, Run
from speculators_core.store import Store
from speculators_core.types import ArtifactRef
from tasks.adapters.prefect_server import UI_RECORD, answers, free_port, prefect_api
from tasks.adapters.registry import DraftRegistry, VersionFacts
from tasks.adapters.settings import settings
from tasks.adapters.tracking import Tracking
from tasks.planning import world_of
from tests.integration.planning_world import MODEL, TEMPLATE, World, serve_runtime


def note(step: str, **facts: Any) -> None:
    print("STEP " + json.dumps({"step": step, **facts}), flush=True)


def story(root: str) -> None:
    """Changes come, are seen once, supersede each other, are taken back; runs fail and are tried again."""
    with prefect_api(settings()) as api, serve_runtime() as runtime:
        world = World(Path(root), runtime)
        first = world.register()
        api.wait()
        from prefect.client.orchestration import get_client
        from prefect.flow_engine import run_flow
        from prefect.states import Failed

        from flows.deploy import deployments
        from flows.upkeep import keep_in_step
        from flows.watch import watch
        from tasks.deploying import apply, differences
        from tasks.requests import UpkeepRequest
        from tasks.runs import UPKEEP_DEPLOYMENT, ensure_run, find_runs
        from tasks.site import Site, Watch

        recipe = str(world.recipe)
        site = Site(watch=Watch(recipes=(recipe,)))
        wanted = deployments(site, settings(), Path.cwd())
        note("deploy", changes=[item.change for item in apply(site, wanted)])
        note("deploy again", changes=[item.change for item in differences(site, wanted)])
        other = Site(watch=Watch(recipes=(recipe,), cron="0 4 * * *"), zombie_minutes=30)
        changed = [item for item in differences(other, deployments(other, settings(), Path.cwd())) if item.fields]
        note("deploy another", fields={item.name: item.fields for item in changed})

        def look(step: str) -> None:
            (reaction,) = watch([recipe])
            with get_client(sync_client=True) as client:
                runs = {str(run.id): run for run in find_runs(client, ["upkeep:chat"])}
            note(
                step,
                action=reaction.finding.action,
                changes=reaction.finding.changes,
                run=reaction.run,
                outcome=reaction.outcome,
                superseded=reaction.superseded,
                states={name: run.state_name for name, run in runs.items()},
                parameters=runs[reaction.run].parameters if reaction.run else None,
            )

        def fail_last() -> None:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(find_runs(client, ["upkeep:chat"])[-1].id, Failed(), force=True)

        look("in step")
        time.sleep(2.1)  # what was written a moment ago is not remembered yet
        watch([recipe] * 10)
        started = time.monotonic()
        processor = time.process_time()
        watch([recipe] * 10)
        note("ten", seconds=time.monotonic() - started, processor=time.process_time() - processor)

        world.train_verifier(2.0)
        look("weights changed")
        look("looked again")
        (world.verifier / "chat_template.jinja").write_text(TEMPLATE + "!")
        look("template too")
        for _ in range(3):
            fail_last()
            look("it failed")
        world.train_verifier(1.0)
        (world.verifier / "chat_template.jinja").write_text(TEMPLATE)
        runtime.version = "0.33.0"
        look("another engine")
        runtime.version = "0.32.0"
        look("taken back")
        runtime.version = "0.33.0"
        look("another engine again")
        runtime.version = "0.32.0"
        world.train_verifier(2.0)
        look("the weights again")
        for part in ("expected", "expected_runtime"):
            request = UpkeepRequest.model_validate({"recipe": recipe, part: "f" * 64})
            gone, cause = {"request": request.model_dump(mode="json")}, f"{part} is gone"
            asked = [ensure_run(UPKEEP_DEPLOYMENT, cause, gone, [])]
            with get_client(sync_client=True) as client:
                run_flow(keep_in_step, flow_run=client.read_flow_run(UUID(asked[0].run_id)))  # as a worker would
            asked += [ensure_run(UPKEEP_DEPLOYMENT, cause, gone, []) for _ in range(2)]
            note(cause, outcomes=[run.outcome for run in asked])
        assert first == "1"

        broken = world.root / "broken.yaml"
        broken.write_text(world.recipe.read_text().replace(str(world.verifier), str(world.root / "gone")))
        world.train_verifier(3.0)
        state: Any = watch([str(broken), recipe], return_state=True)
        with get_client(sync_client=True) as client:
            seen = find_runs(client, ["upkeep:chat"])[-1].state_name
        note("one is broken", state=state.name, message=str(state.message), last=seen)
        shutil.copy(world.recipe, world.root / "copy.yaml")
        backfilled(world)
        emitted(least=8)


def drifted(root: str) -> None:
    """Served acceptance falls, is told once and answered once, and is over when it has recovered."""
    with prefect_api(settings()) as api, serve_runtime() as runtime:
        world = World(Path(root), runtime)
        with world.recipe.open("a") as file:
            file.write("lifecycle: {drift: {min_windows: 4, min_drafts: 300}}\n")
        site = settings().site
        site.write_text("watch: {recipes: [x]}\nnotify: [{url_variable: ONCALL}]\n")
        os.environ["ONCALL"] = runtime.url.replace("http", "json") + "/hook/to-be-kept-secret"
        world.register(**{"al": "1.60", "al.low": "1.55"})
        api.wait()
        from flows.deploy import deployments
        from flows.watch import watch
        from tasks.deploying import apply
        from tasks.site import read_site

        apply(read_site(site), deployments(read_site(site), settings(), Path.cwd()))

        def look(step: str, drafts: int, al: float, times: int) -> None:
            superseded = 0
            for _ in range(times):
                runtime.serve_traffic(drafts, al)
                (reaction,) = watch([str(world.recipe)], metrics={MODEL: f"{runtime.url}/metrics"})
                superseded += len(reaction.superseded)
            found = reaction.finding
            assert found.traffic is not None
            note(
                step,
                state=found.traffic.state,
                action=found.action,
                changes=found.changes,
                outcome=reaction.outcome,
                superseded=superseded,
                messages=[message["title"] for message in runtime.received],
                said=[message["message"] for message in runtime.received],
            )

        look("as registered", 100, 1.6, 6)
        look("fallen", 1000, 1.2, 8)
        look("still fallen", 1000, 1.2, 1)
        look("recovered", 50_000, 1.6, 6)
        away: Any = watch([str(world.recipe)], metrics={MODEL: "http://127.0.0.1:9/metrics"}, return_state=True)
        note("away", state=away.name, message=str(away.message))


def costs(root: str) -> None:
    """A stage that ends, and one that its budget stops: what both took stays with their runs, and people are told."""
    with serve_runtime() as runtime:
        world = World(Path(root), runtime)
        settings().site.write_text("watch: {recipes: [x]}\nnotify: [{url_variable: ONCALL}]\n")
        os.environ["ONCALL"] = runtime.url.replace("http", "json") + "/hook"
        from speculators_core.errors import BudgetError
        from speculators_core.lifecycle.plan import Estimate
        from speculators_core.run import StageResult, produce
        from tasks.observe import observed, parent_run

        def stage(recipe: Recipe, name: str) -> Callable[[Run], StageResult]:
            def build(run: Run, workspace: Path) -> dict[str, Any]:
                (workspace / "data").write_text(name)
                for done in range(11):
                    run.advance(done, 10)
                return {"tokens": 1000}

            return lambda run: produce(
                run,
                name,
                "states",
                name * 8,
                {"rows": "r" * 64},
                lambda path: build(run, path),
                expected=lambda: Estimate(tokens=1000),
            )

        def numbers(run_id: str) -> dict[str, float]:
            metrics = Tracking(world.settings).client.get_run(run_id).data.metrics
            return {name: value for name, value in metrics.items() if name.startswith("cost.")}

        recipe = load_recipe(world.recipe, ["lifecycle.price_per_hour=36000"])
        observed(recipe, "firstone", stage(recipe, "firstone"))
        tight = load_recipe(world.recipe, ["lifecycle.price_per_hour=36000", "budget.tokens=1500"])
        try:
            observed(tight, "otherone", stage(tight, "otherone"))
        except BudgetError as error:
            note("refused", why=error.what)
        parent = parent_run(recipe.digest(), recipe.name)
        tracked = Tracking(world.settings)
        children = tracked.client.search_runs([tracked.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
        note(
            "kept",
            children={run.info.run_name: [run.info.status, numbers(run.info.run_id)] for run in children},
            parent=numbers(parent),
            messages=[message["title"] for message in runtime.received],
        )


def backfilled(world: World) -> None:
    """A backfill of two recipes and two algorithms; then its hook."""
    from types import SimpleNamespace

    from prefect.client.orchestration import get_client

    from flows.upkeep import backfill
    from tasks.requests import BackfillRequest
    from tasks.runs import cancel_children, find_runs

    recipes = [str(world.recipe), str(world.root / "copy.yaml")]
    started = backfill(BackfillRequest(recipes=recipes, algorithms=["eagle3", "peagle"]))
    with get_client(sync_client=True) as client:
        runs = find_runs(client, ["backfill"])
        parent = next(tag for tag in runs[0].tags if tag.startswith("parent:")).removeprefix("parent:")
        further = sorted(str(run.parameters["request"]["overrides"]["further"]) for run in runs)
        cancel_children(*[SimpleNamespace(id=parent)] * 3)  # type: ignore[arg-type]
        states = {run.state_name for run in find_runs(client, ["backfill"])}
    note("backfill", started=len(started), runs=len(runs), further=further, states=sorted(states))


def emitted(least: int) -> None:
    """Which events of ours the server has."""
    import httpx
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL

    EventsWorker.drain_all(timeout=20)
    deadline = time.monotonic() + 20
    names: list[str] = []
    payloads: list[dict[str, Any]] = []
    while len(names) < least and time.monotonic() < deadline:
        wanted = {"filter": {"event": {"name": ["verifier.changed", "engine.changed"]}}}
        found = httpx.post(f"{PREFECT_API_URL.value()}/events/filter", json=wanted, timeout=20).json()["events"]
        found.sort(key=lambda event: str(event["occurred"]))
        names = [event["event"] for event in found]
        payloads = [event["payload"] for event in found]
        time.sleep(0.2)
    note("events", names=names, payloads=payloads)


def served(root: str) -> None:
    """A run of the deployed flow under a real worker."""
    with prefect_api(settings()) as api, serve_runtime() as runtime:
        import subprocess

        world = World(Path(root), runtime)
        world.register()
        api.wait()
        from prefect.client.orchestration import get_client

        from flows.deploy import deployments
        from tasks.deploying import apply
        from tasks.requests import UpkeepRequest
        from tasks.runs import UPKEEP_DEPLOYMENT, ensure_run
        from tasks.site import Site, Watch

        site = Site(watch=Watch(recipes=(str(world.recipe),)))
        apply(site, deployments(site, settings(), Path.cwd()))
        request = UpkeepRequest(recipe=str(world.recipe))
        run = ensure_run(UPKEEP_DEPLOYMENT, "test", {"request": request.model_dump(mode="json")}, [])
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", site.train_pool.name, "--run-once"]
        worker = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run.run_id).state  # type: ignore[arg-type]
        note("served", worker=worker.returncode, state=state.name if state else None, errors=worker.stderr[-2000:])


def automated(root: str) -> None:
    """The automations that `deploy` makes, on Prefect's whole server: a published verifier, and a run that died."""
    import subprocess

    from infra.ui import start_prefect

    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    with start_prefect(settings(), port) as server, serve_runtime() as runtime:
        world = World(Path(root), runtime)
        world.register()
        world.train_verifier(2.0)
        while not answers(f"{url}/health"):
            assert server.poll() is None, server.log.read_text()
            time.sleep(0.1)
        (settings().home / UI_RECORD).write_text(json.dumps({"prefect_api": url}))
        with prefect_api(settings()):
            from prefect.client.orchestration import get_client
            from prefect.events import emit_event
            from prefect.states import Running

            from flows.deploy import deployments
            from tasks.deploying import PUBLISHED, apply
            from tasks.requests import UpkeepRequest
            from tasks.runs import UPKEEP_DEPLOYMENT, ensure_run, find_runs
            from tasks.site import Site, Watch

            watched = Watch(recipes=(str(world.recipe),), cron="0 4 1 1 *")
            site = Site(watch=watched).model_copy(update={"zombie_minutes": 0.2})  # less than a site may ask for
            apply(site, deployments(site, settings(), Path.cwd()))
            with get_client(sync_client=True) as client:
                request = UpkeepRequest(recipe=str(world.recipe)).model_dump(mode="json")
                dead = client.read_flow_run(
                    UUID(ensure_run(UPKEEP_DEPLOYMENT, "dies", {"request": request}, []).run_id)
                )
                client.set_flow_run_state(dead.id, Running(), force=True)
                emit_event(
                    "prefect.flow-run.heartbeat", resource={"prefect.resource.id": f"prefect.flow-run.{dead.id}"}
                )
                emit_event(PUBLISHED, resource={"prefect.resource.id": "hub.model.chat"})
                look = await_found(lambda: [run for run in find_runs(client, []) if by_automation(run)])
                command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", site.watch_pool.name]
                worker = subprocess.run(
                    [*command, "--run-once"], capture_output=True, text=True, timeout=240, check=False
                )
                runs = find_runs(client, ["upkeep:chat"])
                note(
                    "published",
                    looked=str(client.read_flow_run(look[0].id).state_name),
                    keys=[run.idempotency_key for run in runs],
                    states=[run.state_name for run in runs],
                    errors=worker.stderr[-2000:],
                )
                crashed = await_found(lambda: client.read_flow_run(dead.id).state_name == "Crashed")
                note("died", crashed=crashed)
            emitted(least=1)


def by_automation(run: Any) -> bool:
    """Whether an automation started this run."""
    return run.created_by is not None and run.created_by.type == "AUTOMATION"


def await_found(look: Callable[[], Any], timeout_s: float = 60) -> Any:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def kept(root: str) -> None:
    """The template changed; what serves is as good on it, then another time it is not. Measurements are planted."""
    with prefect_api(settings()) as api, serve_runtime() as runtime:
        world = World(Path(root), runtime)
        recipe = load_recipe(world.recipe, ["gate={speed: report, min_prompts: 50}", "evaluation.baselines=[]"])
        champion = register_draft(world, al="1.60")
        api.wait()
        from flows.upkeep import upkeep
        from tasks.planning import Situation

        for number, rate in enumerate((0.40, 0.20)):
            (world.verifier / "chat_template.jinja").write_text(TEMPLATE + "!" * (number + 1))
            plant_evaluation(Run(recipe, world.home, only_look=True, check=False), champion, rate)
            state: Any = upkeep(recipe, "re-evaluate", return_state=True)
            done = state.result(raise_on_failure=False)
            situation = Situation.of(recipe)
            note(
                "kept" if number == 0 else "fell",
                state=state.name,
                kept=getattr(done, "kept", None),
                error=type(done).__name__,
                action=situation.decision.action,
                reasons=situation.decision.reasons,
            )


def register_draft(world: World, al: str) -> ArtifactRef:
    """A champion with real files, proven on the world as it is."""
    run = Run(load_recipe(world.recipe), world.home)
    workspace = run.store.workspace("draft", "a" * 64)
    (workspace / "config.json").write_text("{}")
    (workspace / "model.safetensors").write_bytes(b"weights")
    draft = run.store.publish(workspace, "draft", "a" * 64, {}, producer={})
    path, seen, tracking = run.store.path(draft), world_of(run), Tracking(world.settings)
    facts = VersionFacts(
        draft_digest=draft.digest, verifier_name="v", verifier_uri=str(world.verifier), k=3, algorithm="eagle3",
        verifier_fingerprint=seen.verifier.digest, tokenizer_sha256=seen.verifier.parts["tokenizer"],
        chat_template_sha256=seen.verifier.parts["chat_template"], vllm_version=seen.runtime.vllm,
        runtime_key=seen.runtime_key, al=float(al), gate_outcome="pass", extra=tags_of(seen),
    )  # fmt: skip
    run_id = tracking.open_parent("9" * 64, name="recipe", tags={})
    manifest = path.parent / "manifest.json"
    done = DraftRegistry(tracking).register(MODEL, path, manifest, facts, run_id=run_id, retry_hint="-")
    tracking.client.set_registered_model_alias(MODEL, "champion", done.version)
    return draft


def plant_evaluation(run: Run, draft: ArtifactRef, rate: float) -> None:
    """What prepare, measure and evaluate would have left for this draft, with a known acceptance."""
    import numpy as np

    from speculators_core.data.rows import Prompt, RowRecord, RowWriter
    from speculators_core.evaluation.report import write_report
    from tests.unit.speculators_core.evaluation.planted import planted_report

    prompts = [
        Prompt(id=f"prompt-{n}", domain="all", messages=({"role": "user", "content": "hi"},), prompt_token_ids=(1, 2))
        for n in range(128)
    ]
    writer = RowWriter()
    writer.add(RowRecord("row", "all", "train", "row", (1,)), [1, 2, 3], [0, 1, 1])
    dataset = plant(run, "dataset", lambda: stages.prepare(run), lambda path: writer.write(path, prompts, [], {}))

    def counted(path: Path) -> None:
        (path / "measurement.json").write_text(f"{rate}")

    report = planted_report(np.full(128, rate), np.random.default_rng(0))
    plant(run, "measurement", lambda: stages.measure(run, Path(), draft.digest, dataset), counted)
    plant(
        run,
        "evaluation",
        lambda: stages.evaluate(run, Path(), draft.digest, dataset),
        lambda path: write_report(report, path),
    )


def plant(run: Run, kind: str, look: Callable[[], Any], write: Callable[[Path], object]) -> ArtifactRef:
    """Publish under the key that the stage looks for."""
    found: list[str] = []
    original = type(run.store).find

    def find(store: Store, asked: str, key: str) -> ArtifactRef | None:
        if asked == kind:
            found.append(key)
        return original(store, asked, key)

    type(run.store).find = find  # type: ignore[method-assign]
    try:
        look()
    except NotProduced:
        pass
    finally:
        type(run.store).find = original  # type: ignore[method-assign]
    workspace = run.store.workspace(kind, found[-1])
    write(workspace)
    return run.store.publish(workspace, kind, found[-1], {"acceptance": {"al": 0.0}, "tokens": 1, "al": 1.0})


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
