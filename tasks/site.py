"""`deployments/site.yaml`: everything about an installation that is neither code nor a recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from speculators_core.config import read_yaml, validate
from speculators_core.types import StrictModel, may_hold_secret

EventName = Literal[
    "verifier.changed", "engine.changed", "traffic.drifted", "gate.refused", "draft.promoted", "draft.rolled-back",
    "budget.exceeded",
]  # fmt: skip


def is_variable(text: str) -> bool:
    """Whether this is the name of an environment variable, as the file writes them."""
    return re.fullmatch(r"[A-Z][A-Z0-9_]*", text) is not None


class Pool(StrictModel):
    """A work pool of processes: one for each kind of hardware."""

    name: str = Field(description="as `prefect worker start --pool` names it")
    limit: int = Field(1, ge=1, description="runs at once")


def _no_secrets(addresses: dict[str, str]) -> dict[str, str]:
    for deployment, address in addresses.items():
        if may_hold_secret(address):  # it becomes a parameter of each watch
            raise ValueError(
                f"the address of {deployment} may hold no secret: put it into an environment variable, and name that "
                "here (it is read where workers run)"
            )
    return addresses


Counters = Annotated[dict[str, str], AfterValidator(_no_secrets)]
"""Deployment → address of the engine's counters, or the environment variable that holds it."""


class Watch(StrictModel):
    """What is watched, and when."""

    recipes: tuple[str, ...] = Field(min_length=1, description="recipe files, relative to where the workers run")
    cron: str = Field("*/15 * * * *", description="when to look")
    timezone: str = Field("UTC", description="of the cron expression")
    metrics: Counters = Field(
        default_factory=dict,
        description="deployment: address of the /metrics of the engine that serves it, or the environment variable "
        "that holds it where it has a password; `draftsmith serve` needs none",
    )


class Channel(StrictModel):
    """Where messages go. The file names a variable and holds no secret: it is checked in."""

    url_variable: str = Field(
        description="environment variable with an address as apprise writes it: jsons://host/path for a plain webhook, "
        "slack://…, mailto://… (read where commands and workers run)",
    )
    events: tuple[EventName, ...] | None = Field(None, description="which; null: all")

    @field_validator("url_variable")
    @classmethod
    def _a_name(cls, value: str) -> str:
        if not is_variable(value):  # it may be the address itself, which no error may show
            raise ValueError("must be the name of an environment variable that holds the address, e.g. ONCALL_URL")
        return value


class Site(StrictModel):
    """`deployments/site.yaml`: everything about a Prefect installation that is not code."""

    watch: Watch
    train_pool: Pool = Field(Pool(name="draftsmith-train"), description="where drafts are captured for and trained")
    watch_pool: Pool = Field(Pool(name="draftsmith-watch"), description="for short runs that only look or start others")
    notify: tuple[Channel, ...] = Field((), description="who is told of what happened, one message an incident")
    zombie_minutes: float = Field(
        15, ge=9, description="a run without a heartbeat for so long is marked crashed (a beat is 3 minutes)"
    )


def read_site(path: Path) -> Site:
    """Read the site's file. ConfigError names what is wrong with it."""
    content = read_yaml(path)
    return validate(Site, content if isinstance(content, dict) else {}, where=str(path))
