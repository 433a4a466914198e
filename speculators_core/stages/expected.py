"""What the long stages will take, by the rates of earlier runs of this state root: for plans and for budgets."""

from __future__ import annotations

from speculators_core.lifecycle.plan import Estimate
from speculators_core.run import Run

_BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4}


def capture_estimate(run: Run, tokens: int | None) -> Estimate:
    """Capture of a data set of so many tokens."""
    if tokens is None:
        return Estimate()
    per_token = len(run.layer_ids) * int(run.description.shape.get("hidden_size", 0))
    num_bytes = tokens * per_token * _BYTES_OF.get(run.recipe.capture.dtype, 2)
    return Estimate(tokens, num_bytes, run.rates.of_tokens("states", tokens))


def train_estimate(run: Run, tokens: int | None, splits: dict[str, int] | None = None) -> Estimate:
    """Training on a set of so many tokens, all splits together.

    Args:
        splits: rows of each split of its data set; without it, of the newest data set of the store.
    """
    known = splits or run.rates.meta("dataset", "splits") or {}
    rows = known.get("train", 0) + known.get("validation", 0)
    if tokens is None or not rows:
        return Estimate()
    training = run.recipe.training
    trained = int(tokens * known["train"] / rows * training.epochs)
    if training.max_steps is not None:
        in_a_step = training.row_tokens * training.gradient_accumulation * training.processes
        trained = min(trained, training.max_steps * in_a_step)
    return Estimate(tokens=trained, seconds=run.rates.of_tokens("training", trained))
