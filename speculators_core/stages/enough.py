"""Whether the gate can be reached at all, asked before the first engine starts."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from speculators_core.config import Recipe
from speculators_core.data.conversations import read_conversations
from speculators_core.data.prepare import SPARED_OF
from speculators_core.data.report import Dropped
from speculators_core.errors import ConfigError
from speculators_core.run import NotProduced, Run
from speculators_core.stages.states import prepare, require_prompts


def require_likely_prompts(run: Run) -> None:
    """See by the prepared data, or else by the number of conversations, that enough prompts can be held back.

    Raises:
        ConfigError: fewer than the gate asks for.
    """
    try:
        dataset = prepare(replace(run, only_look=True, check=False))
    except NotProduced:
        require_conversations(run.recipe)
    else:
        require_prompts(run.recipe, dataset)


def require_conversations(recipe: Recipe) -> None:
    """The same by the sources alone, of which no more is read than the gate needs; near-duplicates are not seen.

    Raises:
        ConfigError: fewer than the gate asks for.
    """
    config, needed = recipe.data, recipe.gate.min_prompts
    answered = config.replies == "regenerate"
    usable = (c for c in read_conversations(config.sources, Dropped()) if answered or c.assistant_turns())
    most = SPARED_OF * needed
    conversations = sum(1 for _ in islice(usable, most if config.max_rows is None else min(most, config.max_rows)))
    held_back = min(config.evaluation_prompts, conversations // SPARED_OF)
    if held_back < needed:
        raise ConfigError(
            f"at most {held_back} prompts can be held back, but gate.min_prompts asks for {needed}",
            mend=f"bring {most} conversations or more (data.sources, data.max_rows) and set data.evaluation_prompts to "
            f"{needed} or more, or lower gate.min_prompts",
        )
