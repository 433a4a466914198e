"""What `draftsmith doctor` looks at."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from speculators_core.errors import DraftsmithError
from speculators_core.types import StrictModel

if TYPE_CHECKING:
    from speculators_core.config import Recipe
    from tasks.adapters.settings import Settings

MIN_FREE_GIB = 5


class Finding(StrictModel):
    """One thing that was looked at."""

    name: str
    ok: bool | None = Field(description="None: not looked at")
    text: str


def examine(settings: Settings, recipe: Recipe | None) -> list[Finding]:
    """Look at the machine, the stores and, given a recipe, at its verifier and runtime."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("environment", describe_environment),
        ("state root", lambda: check_disk(settings)),
        ("orphans", lambda: reap(settings)),
        ("mlflow", lambda: check_mlflow(settings)),
        ("for serve", lambda: describe_if_there("haproxy", find_proxy)),
        ("for mooncake", lambda: describe_if_there("mooncake", find_mooncake)),
    ]
    if recipe is None:
        from speculators_core.config import DEFAULT_RUNTIME
        from speculators_core.engine.runtime import probe_runtime

        checks.append(("runtime", lambda: describe_runtime(probe_runtime(DEFAULT_RUNTIME, home=settings.home))))
    else:
        from speculators_core.run import Run

        run = Run(recipe, settings.home)
        checks += [
            ("runtime", lambda: describe_runtime(run.runtime)),
            ("verifier", lambda: f"{run.facts.model_type}, {run.facts.num_hidden_layers} layers at {run.verifier}"),
            ("fingerprint", lambda: run.fingerprint.digest),
            ("recipe", lambda: check_recipe(run)),
            ("capture store", lambda: check_store(recipe)),
        ]
    return told_once([look(name, check) for name, check in checks])


def told_once(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, of which a fault that ended several checks is told by the first of them alone."""
    first: dict[str, str] = {}
    told = []
    for finding in findings:
        where = finding.name if finding.ok else first.setdefault(finding.text, finding.name)
        again = Finding(name=finding.name, ok=None, text=f"not looked at: see {where}")
        told.append(finding if where == finding.name else again)
    return told


def look(name: str, check: Callable[[], str]) -> Finding:
    """One check; an error of ours becomes a finding. Addresses are shown without the passwords in them."""
    from tasks.adapters.redaction import redact

    try:
        return Finding(name=name, ok=True, text=redact(check()))
    except DraftsmithError as error:
        return Finding(name=name, ok=False, text=redact(str(error)))


def describe_environment() -> str:
    """The interpreter that runs this, and what it trains with."""
    versions = " ".join(f"{name} {version(name)}" for name in ("draftsmith", "torch", "prefect", "mlflow"))
    return f"{sys.executable}: Python {sys.version.split()[0]}, {versions}"


def describe_if_there(name: str, find: Callable[[], str]) -> str:
    """What only one feature needs: where it is missing, that is said and no fault."""
    try:
        return find()
    except DraftsmithError as error:
        return f"no {name}, and only what is named here needs it: {error}"


def find_proxy() -> str:
    """Path of HAProxy; ConfigError where there is none."""
    from speculators_core.serving.proxy import find_haproxy

    return find_haproxy()


def find_mooncake() -> str:
    """Where the extra `mooncake` lies; DraftsmithError where it cannot be loaded."""
    try:
        module = import_module("mooncake.store")
    except ImportError as error:
        raise DraftsmithError(
            str(error), mend="the extra `mooncake`, and Debian's libcurl4, libibverbs1 and librdmacm1"
        ) from error
    return str(Path(str(module.__file__)).parent)


def check_disk(settings: Settings) -> str:
    """Free space under the state root."""
    free = shutil.disk_usage(settings.home).free / 2**30
    if free < MIN_FREE_GIB:
        raise DraftsmithError(
            f"only {free:.1f} GiB are free at {settings.home}", mend="free some, or set DRAFTSMITH_HOME to another disk"
        )
    return f"{settings.home}, {free:.0f} GiB free"


def reap(settings: Settings) -> str:
    """End what dead runs left behind."""
    from speculators_core.processes import reap_orphans

    ended = reap_orphans(settings.home)
    return f"ended {', '.join(ended)}" if ended else "none"


def check_mlflow(settings: Settings) -> str:
    """Open the tracking store."""
    from tasks.adapters.tracking import Tracking

    return Tracking(settings).uri


def check_recipe(run: object) -> str:
    """Everything about a recipe that can be wrong without an engine."""
    from speculators_core.preflight import check_inputs, check_sizes
    from speculators_core.run import Run
    from speculators_core.stages import require_likely_prompts

    assert isinstance(run, Run)
    check_sizes(run.recipe, run.facts)
    check_inputs(run.recipe, run.facts, run.verifier, run.layer_ids)
    require_likely_prompts(run)
    return f"layers {', '.join(map(str, run.layer_ids))}"


def check_store(recipe: Recipe) -> str:
    """Ask the store that hidden states travel through."""
    from speculators_core.states.stores import check_store

    return check_store(recipe.capture)


def describe_runtime(info: object) -> str:
    """One line about a runtime."""
    from speculators_core.engine.runtime import RuntimeInfo

    assert isinstance(info, RuntimeInfo)
    return f"vLLM {info.vllm} on {info.device}, model runner {info.model_runner}, transformers {info.transformers}"
