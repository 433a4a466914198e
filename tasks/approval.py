"""A person's word between the gate and the alias, where the recipe asks for it.

A run of a deployment suspends: its process ends, nothing is held, and Prefect's page asks with a form, the candidate's
report beside it. Answered, the run starts over, finds every stage in the store, and goes on here. Unanswered it ends
after `gate.approval_timeout_s`, and promotes nothing. Elsewhere (a command line, a subflow) nobody can be asked: the
version stays challenger, and `draftsmith promote MODEL VERSION` is the approval.
"""

from __future__ import annotations

import logging

from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from speculators_core.config import Recipe
from speculators_core.types import ArtifactRef
from tasks.release import APPROVED, PromotionResult, Registration, promote
from tasks.versions import APPROVAL_NOTE_TAG, APPROVAL_TAG, open_aliases

log = logging.getLogger(__name__)

REFUSED = "refused"


class Approval(RunInput):
    """The form."""

    approve: bool = Field(False, description="let this version serve")
    who: str = Field("", description="who decides; kept with the version")
    why: str = Field("", description="reason; kept with the version")


def approved(
    recipe: Recipe, registration: Registration, draft: ArtifactRef, dataset: ArtifactRef, judged: PromotionResult
) -> PromotionResult:
    """Ask for approval where the verdict waits for it, and promote when it is given; called in a flow's body.

    Side effect: suspends the flow run, which ends this process.
    """
    if not judged.awaits_approval:
        return judged
    model, version = judged.model, judged.version
    if not may_suspend():
        log.warning("version %s of %s waits: draftsmith promote %s %s", version, model, model, version)
        return judged
    description = f"**{model} version {version}** passed the gate. Shall it serve?\n\n" + "\n".join(
        f"- {reason}" for reason in judged.reasons
    )
    answer = suspend_flow_run(
        wait_for_input=Approval.with_initial_data(
            description=f"{description}\n\nIts report: artifact `report-{model}`."
        ),
        timeout=recipe.gate.approval_timeout_s,
        key=f"approve-{model}-{version}",  # the same when the run starts over: it is not asked twice
    )
    said = APPROVED if answer.approve else REFUSED
    note = f"{said} by {answer.who or 'somebody'}: {answer.why or 'no reason given'}"
    open_aliases().set_tags(model, version, {APPROVAL_TAG: said, APPROVAL_NOTE_TAG: note})
    log.info("approval=%s model=%s version=%s", said, model, version)
    if not answer.approve:
        return judged.model_copy(update={"reasons": (*judged.reasons, note), "awaits_approval": False})
    return promote(recipe, registration, draft, dataset)


def may_suspend() -> bool:
    """Whether this flow run can be suspended: one of a deployment, and nobody's subflow."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    return run is not None and run.deployment_id is not None and run.parent_task_run_id is None
