"""Policy of every task and flow: what is retried, how, and what a cancel must stop. The work is elsewhere.

Prefect caches nothing: our artifact store is the cache, keyed by content and verified before use. A task's result is a
small JSON reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import Flow, Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.serializers import JSONSerializer
from prefect.tasks import exponential_backoff

from speculators_core import processes
from speculators_core.errors import CaptureError, EngineError, EvaluationError, RegistryError
from tasks.adapters.settings import read_settings
from tasks.runs import cancel_children

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State, TaskRun
    from prefect.flows import FlowStateHook

P = ParamSpec("P")
R = TypeVar("R")

RETRIABLE: tuple[type[Exception], ...] = (EngineError, CaptureError, EvaluationError, RegistryError)
"""What another try may mend: an engine or a registry that was away. Wrong recipes, verifiers, data, formats, full
disks, diverged training and signals stay wrong, and fail at once."""

MAX_RESULT_BYTES = 64 * 1024


def is_retriable(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's `retry_condition_fn`: by the type of the error alone."""
    return isinstance(state.data, RETRIABLE)


def stage_task(
    name: str, *, retries: int = 2, backoff_s: float = 5, tags: Sequence[str] = ()
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task of this name: retried by error type with growing, jittered delays; never cached by Prefect.

    There is no `timeout_seconds`: Prefect cannot stop a thread or a child process. Time limits act on the processes.
    """
    return task(
        name=name,
        tags=list(tags),
        retries=retries,
        retry_delay_seconds=exponential_backoff(backoff_s),
        retry_jitter_factor=0.5,
        retry_condition_fn=is_retriable,
        cache_policy=NO_CACHE,
        persist_result=False,
        result_serializer=_JSON,
    )


def pipeline_flow(
    name: str, *, description: str | None = None, starts_runs: bool = False
) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """A Prefect flow of this name whose engines and trainers end with it, also when it is cancelled or crashes.

    Args:
        starts_runs: it starts runs of deployments, which are to end with it too.
    """
    ends: list[FlowStateHook[..., Any]] = [end_processes, *([cancel_children] if starts_runs else [])]
    return flow(
        name=name,
        description=description,
        persist_result=False,
        result_serializer=_JSON,
        on_running=[own_processes],
        on_cancellation=ends,
        on_crashed=ends,
    )


def own_processes(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Mark the processes that this run will start as its own; a subflow's belong to its parent."""
    if flow_run.parent_task_run_id is None:
        os.environ[processes.OWNER_VARIABLE] = str(flow_run.id)


def end_processes(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the engines and trainers of a cancelled or crashed run.

    Runs in the flow's own process, or in the worker's when that has been killed: only pid files tell what to end, so
    both must have the same DRAFTSMITH_HOME.
    """
    processes.kill_all(read_settings(os.environ).home, owner=str(flow_run.id), grace_s=5)


_JSON: JSONSerializer[Any] = JSONSerializer()
