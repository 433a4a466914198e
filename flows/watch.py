"""Watch declared verifiers and runtimes, and start what each change asks for. Imports no MLflow: it runs often."""

from __future__ import annotations

from tasks.policies import pipeline_flow
from tasks.site import Counters
from tasks.watch import Reaction, look_at, react, require_all_seen


@pipeline_flow("watch", description=__doc__)
def watch(recipes: list[str], react_to_changes: bool = True, metrics: Counters | None = None) -> list[Reaction]:
    """Look at every recipe; for each change one run that sees to it, and an end to runs for older changes.

    It reads the world anew each time: what an earlier watch, or a lost event, has missed is found by the next.

    Args:
        metrics: deployment → address of its engine's counters, or the variable that holds it; `draftsmith serve` notes
            its own.
    """
    findings = look_at(recipes, metrics or {})
    reactions = react(findings) if react_to_changes else [Reaction(finding=finding) for finding in findings]
    require_all_seen(findings)
    return reactions
