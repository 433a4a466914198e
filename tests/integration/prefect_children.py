"""Flows that tests run in processes of their own: `python prefect_children.py NAME`, with DRAFTSMITH_HOME set."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from tasks.adapters.prefect_server import prefect_api
from tasks.adapters.settings import settings


def retries() -> None:
    """Run one task for each kind of error; print how often each ran, and what Prefect's settings are."""
    with prefect_api(settings()) as api:
        from prefect.settings import get_current_settings

        from speculators_core import errors
        from tasks.policies import pipeline_flow, stage_task

        attempts: dict[str, int] = {}

        @stage_task("fails-twice", backoff_s=0.01)
        def fails_twice(kind: str) -> dict[str, Any]:
            attempts[kind] = attempts.get(kind, 0) + 1
            if attempts[kind] < 3:
                raise getattr(errors, kind, ValueError)("no")
            return {"uri": "store/x", "digest": kind}

        @pipeline_flow("retries")
        def run(kind: str) -> dict[str, Any]:
            return fails_twice(kind)

        api.wait()
        results: dict[str, str] = {}
        for kind in ("EngineError", "RegistryError", "ConfigError", "DiskSpaceError", "Interrupted", "ValueError"):
            try:
                results[kind] = run(kind)["digest"]
            except Exception as error:
                results[kind] = type(error).__name__
        found = get_current_settings()
        print(
            json.dumps(
                {
                    "attempts": attempts,
                    "results": results,
                    "home": str(found.home),
                    "serializer": found.results.default_serializer,
                    "analytics": found.server.analytics_enabled,
                    "server_pid": api.process.pid if api.process else None,
                }
            )
        )


def show(secret: str) -> None:
    """A flow that shows a stage's report and a candidate's, both with a secret in them; print Prefect's artifacts."""
    with prefect_api(settings()) as api:
        from prefect.client.orchestration import get_client
        from prefect.context import get_run_context

        from speculators_core.config import load_recipe
        from speculators_core.evaluation.candidate import CandidateReport
        from speculators_core.run import Run, StageResult
        from speculators_core.types import ArtifactRef
        from tasks.observe import show_summary
        from tasks.policies import pipeline_flow
        from tasks.reporting import publish_report
        from tests.environment import ROOT

        words = {name: "x" for name in ("recipe", "algorithm", "verifier", "vllm", "outcome", "measured", "command")}
        lists = {name: () for name in ("arms", "speeds", "parts", "data_card", "curves", "stages")}
        about = {"model": "chat", "version": "1", "reasons": (f"measured at {secret}",), "prompts": 1, "k": 1}
        report = CandidateReport.model_validate({**words, **lists, **about})
        told = settings().home / "report.md"
        told.write_text(f"# {secret}")
        ref = ArtifactRef(kind="evaluation", uri="x/evaluation/y", digest="d" * 64)
        result = StageResult(name="evaluate", ref=ref, cached=False, seconds=1, summary={})
        run = Run(load_recipe(ROOT / "deployments" / "recipes" / "demo.yaml"), settings().home)

        @pipeline_flow("show")
        def shows() -> str:
            show_summary("evaluate", result, told)
            publish_report(run, report)
            return str(get_run_context().flow_run.id)

        api.wait()
        own = shows()
        with get_client(sync_client=True) as client:
            found = [artifact for artifact in client.read_artifacts() if str(artifact.flow_run_id) == own]
        print(json.dumps({artifact.key: artifact.data for artifact in found}))


def hold_child() -> None:
    """A flow that starts a supervised child, says so in <home>/child.json, and waits."""
    with prefect_api(settings()) as api:
        from prefect.context import get_run_context

        from tasks.policies import pipeline_flow

        @pipeline_flow("hold-child")
        def hold() -> None:
            start_child(str(get_run_context().flow_run.id))

        api.wait()
        hold()


def serve() -> None:
    """Serve such a flow from a runner, as a deployment under `flow.serve` would be."""
    from tasks.policies import pipeline_flow

    pipeline_flow("served")(served).serve("test", limit=1, webserver=False)


def served() -> None:
    """Body of the served flow."""
    from prefect.context import get_run_context

    start_child(str(get_run_context().flow_run.id))


def start_child(flow_run_id: str) -> None:
    """Start a child in a session of its own, and wait for ever."""
    from speculators_core.processes import supervise

    home = settings().home
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = supervise(argv, name="engine", home=home, log=home / "logs" / "engine.log")
    record = home / "child.partial"
    record.write_text(json.dumps({"group": child.group, "flow_run_id": flow_run_id, "pid": os.getpid()}))
    record.replace(home / "child.json")
    time.sleep(600)


def end_as_hook(flow_run_id: str) -> None:
    """Call the hook in another process than the flow's, as Prefect's runner does."""
    from types import SimpleNamespace
    from typing import cast

    from tasks.policies import end_processes

    end_processes(*cast(Any, (None, SimpleNamespace(id=flow_run_id), None)))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
