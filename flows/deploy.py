"""Our deployments, defined from code: `watch` on a schedule, `keep-in-step` and `backfill` with their forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType

from flows.upkeep import backfill, keep_in_step
from flows.watch import watch
from tasks.adapters.settings import Settings
from tasks.runs import DEPLOYMENT
from tasks.site import Site

TAGS = ["draftsmith"]


def deployments(site: Site, settings: Settings, root: Path) -> list[RunnerDeployment]:
    """The three deployments; their runs work in `root`, on this state root, as processes of a worker there.

    Secrets and addresses of stores are not written into them: a run inherits them from its worker's environment.
    """
    where: dict[str, Any] = {"working_dir": str(root), "env": {"DRAFTSMITH_HOME": str(settings.home)}}
    common: dict[str, Any] = {
        "name": DEPLOYMENT,
        "tags": TAGS,
        "job_variables": where,
        "entrypoint_type": EntrypointType.MODULE_PATH,
    }
    found = [
        watch.to_deployment(
            **common,
            description="Looks whether a verifier or runtime has changed, and starts what that asks for.",
            parameters={"recipes": list(site.watch.recipes), "metrics": site.watch.metrics},
            schedule=Cron(site.watch.cron, timezone=site.watch.timezone),
            work_pool_name=site.watch_pool.name,
        ),
        keep_in_step.to_deployment(
            **common,
            description="Brings a deployment's draft in step: by hand, or for `watch`.",
            work_pool_name=site.train_pool.name,
        ),
        backfill.to_deployment(
            **common,
            description="Trains a draft for every recipe with every algorithm.",
            work_pool_name=site.watch_pool.name,
        ),
    ]
    return cast(list[RunnerDeployment], found)  # coroutines only where an event loop runs already
