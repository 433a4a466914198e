"""A deployment that ends in the question whether version 1 of `chat` may serve: `python approval_flow.py` serves it.

The gate's part is played here, since it needs an engine. Asking, suspending, answering and starting over are real.
"""

from __future__ import annotations

from pathlib import Path

from speculators_core.config import load_recipe
from speculators_core.types import ArtifactRef
from tasks import approval
from tasks.adapters.settings import settings
from tasks.policies import pipeline_flow
from tasks.release import PromotionResult, Registration

RECIPE = load_recipe(Path("deployments/recipes/demo.yaml"), ["gate.approval=required", "gate.approval_timeout_s=3600"])
NOWHERE = ArtifactRef(kind="draft", uri="x/y", digest="d" * 64)
REGISTERED = Registration(model="chat", version="1", seconds=0, cached=False)
JUDGED = PromotionResult(
    model="chat",
    version="1",
    outcome="pass",
    reasons=("pass: AL 2.0",),
    aliases=(),
    seconds=0,
    cached=False,
    awaits_approval=True,
)


def promoted(*_: object) -> PromotionResult:
    return JUDGED.model_copy(update={"aliases": ("champion",), "awaits_approval": False})


approval.promote = promoted  # type: ignore[assignment]


@pipeline_flow("ask")
def ask() -> None:
    (settings().home / "starts").open("a").write("start\n")
    done = approval.approved(RECIPE, REGISTERED, NOWHERE, NOWHERE, JUDGED)
    (settings().home / "outcome").write_text(f"{','.join(done.aliases)} {done.awaits_approval}")


if __name__ == "__main__":
    ask.serve(name="ask")
