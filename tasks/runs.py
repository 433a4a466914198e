"""Runs of our deployments: start one for a cause, see which go on, cancel what a newer cause made void."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling
from pydantic import Field

from speculators_core.errors import ConfigError
from speculators_core.types import StrictModel

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

log = logging.getLogger(__name__)

OVER = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
BROKEN = (StateType.FAILED, StateType.CRASHED)
MAX_ATTEMPTS = 3
VOID = "void"
"""Tag of a run that was ended, or did nothing, because its cause was gone: should that come again, so does a run."""
DEPLOYMENT = "draftsmith"
UPKEEP_DEPLOYMENT = f"keep-in-step/{DEPLOYMENT}"

Outcome = Literal["started", "exists", "given up"]


class StartedRun(StrictModel):
    """A run for a cause: a new one, the one that exists already, or the last of too many that failed."""

    outcome: Outcome
    run_id: str
    attempt: int = Field(description="1 for the first run for this cause")


def ensure_run(deployment: str, cause: str, parameters: Mapping[str, Any], tags: Sequence[str]) -> StartedRun:
    """Make sure that there is a run of a deployment for a cause, and only one that goes on or succeeded.

    A run that failed or crashed is followed by another attempt, MAX_ATTEMPTS in all; one that somebody cancelled is
    not; one that was void does not count. Prefect's idempotency key keeps two watchers from starting it twice.

    Args:
        deployment: as flow/name.
        cause: what it is for; equal causes are one run.

    Raises:
        ConfigError: there is no such deployment.
    """
    with get_client(sync_client=True) as client:
        try:
            known = client.read_deployment_by_name(deployment)
        except ObjectNotFound as error:
            raise ConfigError(
                f"Prefect has no deployment {deployment}", mend="run `draftsmith deploy` first, on the same server"
            ) from error
        mark = f"cause:{cause}"
        earlier = find_runs(client, [mark])
        attempt = len(earlier) + 1
        if counted := [run for run in earlier if not is_void(run)]:
            last = counted[-1]
            broken = last.state_type in BROKEN
            if not broken or len(counted) >= MAX_ATTEMPTS:
                outcome: Outcome = "given up" if broken else "exists"
                return StartedRun(outcome=outcome, run_id=str(last.id), attempt=len(earlier))
        key = f"{cause}#{earlier[-1].id if earlier else 0}"
        run = client.create_flow_run_from_deployment(
            known.id, parameters=dict(parameters), tags=[*tags, mark], idempotency_key=key
        )
    log.info("started %s for %s: attempt %d, run %s", deployment, cause, attempt, run.id)
    return StartedRun(outcome="started", run_id=str(run.id), attempt=attempt)


def supersede(tag: str, cause: str | None) -> tuple[str, ...]:
    """Cancel runs with a tag that go on for another cause than this one (None: for any); the ids of what was asked.

    One that has not begun is cancelled at once; one that works is told to, and its hook ends its processes.
    """
    with get_client(sync_client=True) as client:
        runs = find_runs(client, [tag], going_on=True)
        void = [run for run in runs if cause is None or f"cause:{cause}" not in run.tags]
        for run in void:
            cancel_run(client, run, "a newer change made it void")
    return tuple(str(run.id) for run in void)


def cancel_children(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of a flow that starts runs of deployments: they end with it."""
    with get_client(sync_client=True) as client:
        for run in find_runs(client, [f"parent:{flow_run.id}"], going_on=True):
            cancel_run(client, run, "the run that started it was cancelled or crashed")


def is_void(run: FlowRun) -> bool:
    """Whether a run ended, or is ending, because its cause was gone. One that was marked and goes on is not void."""
    return VOID in run.tags and run.state_type in (*OVER, StateType.CANCELLING)


def mark_void(client: SyncPrefectClient, run: FlowRun) -> None:
    """Mark a run as void; its end is another matter."""
    client.update_flow_run(run.id, tags=sorted({*run.tags, VOID}))


def void_own_run(run_id: str) -> None:
    """Say of the run that we are in that its cause was gone when it began."""
    with get_client(sync_client=True) as client:
        mark_void(client, client.read_flow_run(UUID(run_id)))


def cancel_run(client: SyncPrefectClient, run: FlowRun, why: str) -> None:
    """Cancel a run whose cause is gone: at once where nothing works for it yet, else through its runner."""
    begun = run.state_type in (StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED)
    if run.state_type != StateType.CANCELLING:  # somebody's cancel stays theirs
        log.info("cancelling run %s: %s", run.id, why)
        mark_void(client, run)  # first: cut off after this, it is cancelled by whoever comes next
        client.set_flow_run_state(run.id, Cancelling(message=why) if begun else Cancelled(message=why))


def find_runs(client: SyncPrefectClient, tags: Sequence[str], *, going_on: bool = False) -> list[FlowRun]:
    """All runs, or all that are not over, that have all these tags, the oldest first."""
    asked: dict[str, Any] = {"tags": {"all_": list(tags)}}
    if going_on:
        asked["state"] = {"type": {"not_any_": OVER}}
    wanted = FlowRunFilter.model_validate(asked)
    found: list[FlowRun] = []
    oldest_first = FlowRunSort.EXPECTED_START_TIME_ASC
    while page := client.read_flow_runs(flow_run_filter=wanted, sort=oldest_first, offset=len(found)):
        found += page  # as many as the server calls a page
    return found
