"""What a Prefect server is to hold for us, against what it holds: pools with limits, deployments, automations.

`differences` only reads. `apply` makes the server so; done again, it changes nothing. A schedule that somebody paused
on the server stays paused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from pydantic import Field

from speculators_core.errors import ConfigError
from speculators_core.lifecycle.plan import leaves
from speculators_core.types import StrictModel
from tasks.adapters.redaction import redact
from tasks.site import Pool, Site

LOOK_NOW = "draftsmith: look now"
ZOMBIES = "draftsmith: runs that stopped beating"
PUBLISHED = "verifier.published"
"""Event by which anything outside asks for a look: a publishing pipeline, a hub's webhook relay."""
_HEARTBEAT = "prefect.flow-run.heartbeat"
_SHOWN = 60


class Difference(StrictModel):
    """One object of the server."""

    kind: Literal["pool", "deployment", "automation"]
    name: str
    change: Literal["create", "update", "same"]
    fields: tuple[str, ...] = Field((), description="field: on the server → wanted")


def differences(site: Site, wanted: Sequence[RunnerDeployment]) -> list[Difference]:
    """Every object against the server, pools first."""
    with get_client(sync_client=True) as client:
        found = [pool_difference(client, pool) for pool in (site.train_pool, site.watch_pool)]
        found += [deployment_difference(client, deployment) for deployment in wanted]
        return found + [automation_difference(client, site, name) for name in (LOOK_NOW, ZOMBIES)]


def apply(site: Site, wanted: Sequence[RunnerDeployment]) -> list[Difference]:
    """Make the server so; what was found different before."""
    found = differences(site, wanted)
    todo = {(item.kind, item.name): item.change for item in found}
    with get_client(sync_client=True) as client:
        for pool in (site.train_pool, site.watch_pool):
            if todo["pool", pool.name] == "create":
                client.create_work_pool(WorkPoolCreate(name=pool.name, type="process", concurrency_limit=pool.limit))
            elif todo["pool", pool.name] == "update":
                client.update_work_pool(pool.name, WorkPoolUpdate(concurrency_limit=pool.limit))
    for deployment in wanted:
        if todo["deployment", full_name(deployment)] != "same":
            deployment.apply()
    with get_client(sync_client=True) as client:
        for name in (LOOK_NOW, ZOMBIES):
            existing = client.read_automations_by_name(name)
            automation = wanted_automation(client, site, name)
            assert automation is not None, "its deployment was applied above"
            if todo["automation", name] == "create" or not existing:
                automation.create()
            elif todo["automation", name] == "update":
                automation.id = existing[0].id
                automation.update()
    return found


def full_name(deployment: RunnerDeployment) -> str:
    """flow/deployment."""
    return f"{deployment.flow_name}/{deployment.name}"


def pool_difference(client: SyncPrefectClient, pool: Pool) -> Difference:
    """A pool against the server."""
    try:
        existing = client.read_work_pool(pool.name)
    except ObjectNotFound:
        return Difference(kind="pool", name=pool.name, change="create")
    if existing.type != "process":
        raise ConfigError(
            f"the work pool {pool.name} exists and is of type {existing.type}, not process",
            mend="name another pool in the site's file",
        )
    return compared("pool", pool.name, {"limit": existing.concurrency_limit}, {"limit": pool.limit})


def deployment_difference(client: SyncPrefectClient, wanted: RunnerDeployment) -> Difference:
    """A deployment against the server; whether a schedule is paused is the server's affair."""
    name = full_name(wanted)
    try:
        existing = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return Difference(kind="deployment", name=name, change="create")
    plain = ("entrypoint", "work_pool_name", "parameters", "tags", "description", "job_variables")

    def facts(of: Any, schema: Any) -> dict[str, Any]:
        schedules = [schedule.schedule.model_dump(mode="json") for schedule in of.schedules or []]
        form = schema if isinstance(schema, dict) else schema.model_dump(mode="json", exclude_unset=True)
        return {**{field: getattr(of, field) for field in plain}, "schedules": schedules, "form": form}

    return compared(
        "deployment",
        name,
        facts(existing, existing.parameter_openapi_schema or {}),
        facts(wanted, wanted._parameter_openapi_schema),
    )


def automation_difference(client: SyncPrefectClient, site: Site, name: str) -> Difference:
    """An automation against the server."""
    wanted = wanted_automation(client, site, name)
    existing = client.read_automations_by_name(name)
    if wanted is None or not existing:
        return Difference(kind="automation", name=name, change="create")

    def facts(of: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(of.model_dump_json(include={"description", "trigger", "actions"}))
        found["trigger"].pop("id", None)
        for names in ("after", "expect", "for_each"):
            found["trigger"][names] = sorted(found["trigger"].get(names) or [])
        return found

    return compared("automation", name, facts(existing[0]), facts(wanted))


def wanted_automation(client: SyncPrefectClient, site: Site, name: str) -> Automation | None:
    """The automation of this name; None while the deployment that it starts does not exist."""
    if name == ZOMBIES:
        terminal = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled")}
        return Automation(
            name=ZOMBIES,
            description="A run whose process died cannot say so: it is marked crashed, and `watch` starts another.",
            trigger=EventTrigger(
                after={_HEARTBEAT},
                expect={_HEARTBEAT, *terminal},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(minutes=site.zombie_minutes),
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat")],
        )
    try:
        watch = client.read_deployment_by_name("watch/draftsmith")
    except ObjectNotFound:
        return None
    return Automation(
        name=LOOK_NOW,
        description=f"Whoever publishes a verifier emits `{PUBLISHED}`, and `watch` looks at once.",
        trigger=EventTrigger(expect={PUBLISHED}, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
        actions=[RunDeployment(deployment_id=watch.id)],
    )


def compared(
    kind: Literal["pool", "deployment", "automation"], name: str, existing: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Difference:
    """A difference from two sets of fields."""
    before, after = leaves(_plain(existing)), leaves(_plain(wanted))
    fields = tuple(
        f"{field}: {_shown(before.get(field))} → {_shown(after.get(field))}"
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field)
    )
    return Difference(kind=kind, name=name, change="update" if fields else "same", fields=fields)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str, sort_keys=True))


def _shown(value: Any) -> str:
    text = redact(json.dumps(value, default=str))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
