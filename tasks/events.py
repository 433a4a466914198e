"""Typed events: what happened, about which deployment. They are hints: whoever acts on one looks at the world anew."""

from __future__ import annotations

from typing import ClassVar

from prefect.events import emit_event
from pydantic import Field

from speculators_core.lifecycle.changes import Change
from speculators_core.types import StrictModel


class DeploymentEvent(StrictModel):
    """Base: one event about one deployment (a recipe's `deployment`)."""

    event: ClassVar[str]
    deployment: str = Field(description="registered model, and what serves it")
    recipe: str = Field(description="the recipe's file")
    version: str | None = Field(description="champion")
    reasons: tuple[str, ...] = Field(description="what changed, in sentences")

    def emit(self) -> None:
        """Send it to Prefect; does nothing where no server listens."""
        resource = {
            "prefect.resource.id": f"draftsmith.deployment.{self.deployment}",
            "prefect.resource.name": self.deployment,
        }
        emit_event(self.event, resource=resource, payload=self.model_dump(mode="json"))


class VerifierChanged(DeploymentEvent):
    """The verifier is not the one that the champion was proven on."""

    event = "verifier.changed"
    fingerprint: str
    changes: tuple[Change, ...]


class EngineChanged(DeploymentEvent):
    """The runtime is not the one that the champion was proven on."""

    event = "engine.changed"
    runtime_key: str
    vllm: str
