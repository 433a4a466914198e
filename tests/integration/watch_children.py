"""A watch's story in a process of its own: `python watch_children.py NAME ROOT`, with DRAFTSMITH_HOME set.

Each function prints one line of JSON for every step; the tests say what they must be.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tasks.adapters.prefect_server import prefect_api
from tasks.adapters.settings import settings
from tests.integration.planning_world import TEMPLATE, World, serve_runtime


def note(step: str, **facts: Any) -> None:
    print("STEP " + json.dumps({"step": step, **facts}), flush=True)


def story(root: str) -> None:
    """Changes come, are seen once, supersede each other, are taken back; runs fail and are tried again."""
    with prefect_api(settings()) as api, serve_runtime() as runtime:
        world = World(Path(root), runtime.url)
        first = world.register()
        api.wait()
        from prefect.client.orchestration import get_client
        from prefect.states import Failed

        from flows.deploy import deployments
        from flows.watch import watch
        from tasks.deploying import Site, Watch, apply, differences
        from tasks.runs import find_runs

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
        emitted()


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


def emitted() -> None:
    """Which events of ours the server has."""
    import httpx
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL

    EventsWorker.drain_all(timeout=20)
    deadline = time.monotonic() + 20
    names: list[str] = []
    payloads: list[dict[str, Any]] = []
    while len(names) < 4 and time.monotonic() < deadline:
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

        world = World(Path(root), runtime.url)
        world.register()
        api.wait()
        from prefect.client.orchestration import get_client

        from flows.deploy import deployments
        from tasks.deploying import Site, Watch, apply
        from tasks.requests import UpkeepRequest
        from tasks.runs import UPKEEP_DEPLOYMENT, ensure_run

        site = Site(watch=Watch(recipes=(str(world.recipe),)))
        apply(site, deployments(site, settings(), Path.cwd()))
        request = UpkeepRequest(recipe=str(world.recipe))
        run = ensure_run(UPKEEP_DEPLOYMENT, "test", {"request": request.model_dump(mode="json")}, [])
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", site.train_pool.name, "--run-once"]
        worker = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run.run_id).state  # type: ignore[arg-type]
        note("served", worker=worker.returncode, state=state.name if state else None, errors=worker.stderr[-2000:])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
