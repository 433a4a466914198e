"""Typed events: what happened, about which deployment. They are hints: whoever acts on one looks at the world anew.

An event goes to Prefect, where one listens, and as a message to whom `site.yaml` names.
"""

from __future__ import annotations

from typing import ClassVar

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL
from pydantic import Field

from speculators_core.lifecycle.changes import Change
from speculators_core.types import StrictModel
from tasks.adapters.redaction import scrub
from tasks.notices import Notice, post
from tasks.site import EventName


class DeploymentEvent(StrictModel):
    """Base: one event about one deployment (a recipe's `deployment`)."""

    event: ClassVar[EventName]
    deployment: str = Field(description="registered model, and what serves it")
    version: str | None = Field(description="the version that it is about; of a change, the champion")
    reasons: tuple[str, ...] = Field(description="what happened, in sentences")

    def emit(self, incident: str) -> None:
        """Send it to Prefect, where one is asked for, and to the site's channels.

        Args:
            incident: names what it is about; a second event of this kind for it is no second message.
        """
        if FlowRunContext.get() is not None or PREFECT_API_URL.value() is not None:  # else one would be started for it
            resource = {
                "prefect.resource.id": f"draftsmith.deployment.{self.deployment}",
                "prefect.resource.name": self.deployment,
            }
            emit_event(self.event, resource=resource, payload=scrub(self.model_dump(mode="json"), allow_text=True))
        title = f"{self.deployment}: {self.event}" + (f" (version {self.version})" if self.version else "")
        post(Notice(event=self.event, incident=f"{self.deployment} {incident}", title=title, lines=self.reasons))


class VerifierChanged(DeploymentEvent):
    """The verifier is not the one that the champion was proven on."""

    event = "verifier.changed"
    recipe: str = Field(description="the recipe's file")
    fingerprint: str
    changes: tuple[Change, ...]


class EngineChanged(DeploymentEvent):
    """The runtime is not the one that the champion was proven on."""

    event = "engine.changed"
    recipe: str = Field(description="the recipe's file")
    runtime_key: str
    vllm: str


class TrafficDrifted(DeploymentEvent):
    """Real requests get fewer tokens accepted than the champion was registered with."""

    event = "traffic.drifted"
    recipe: str = Field(description="the recipe's file")
    al: float = Field(description="served acceptance length")
    limit: float = Field(description="what it fell below")


class GateRefused(DeploymentEvent):
    """A trained draft may not serve."""

    event = "gate.refused"
    outcome: str


class DraftPromoted(DeploymentEvent):
    """Another version is the champion."""

    event = "draft.promoted"
    displaced: str | None


class DraftRolledBack(DeploymentEvent):
    """The version that served before serves again."""

    event = "draft.rolled-back"
    displaced: str | None


class BudgetExceeded(DeploymentEvent):
    """A run stopped at its recipe's budget."""

    event = "budget.exceeded"
    recipe: str = Field(description="the recipe's name")
