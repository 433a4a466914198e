"""What a recipe's `training.warm_start` names: a draft that lies somewhere, or one in the registry, by its bytes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from speculators_core.config import Recipe
from speculators_core.errors import ConfigError
from speculators_core.evaluation.served import draft_digest
from speculators_core.lifecycle.changes import TOKENIZER_TAG
from speculators_core.lifecycle.promotion import CHAMPION
from speculators_core.run import Run, WarmStart
from tasks.adapters.settings import settings

log = logging.getLogger(__name__)

BEGAN_TAG = "training.began_from"
"""JSON of what a version's training began from: digest and head, or null for random weights."""


def recipe_start(recipe: Recipe) -> WarmStart | None:
    """The draft that training begins from, fetched; None for random weights.

    Raises:
        ConfigError: no such directory, or no such alias.
        FormatError: the directory holds no draft.
        RegistryError: the registry is away, or the draft's files were changed.
    """
    name = recipe.training.warm_start
    if name is None:
        return None
    model, _, alias = name.rpartition("@")
    if name == CHAMPION or (model and not Path(name).is_dir()):
        return registered_start(recipe, model or recipe.deployment, alias)
    directory = Path(name).expanduser().absolute()
    if not directory.is_dir():
        raise ConfigError(
            f"training.warm_start: there is no draft at {name}",
            mend="name the directory of an exported draft, `champion`, or model@alias",
        )
    return WarmStart(digest=draft_digest(directory), path=str(directory))


def registered_start(recipe: Recipe, model: str, alias: str) -> WarmStart | None:
    """A registered draft by the alias that it holds now; None where the deployment has no champion yet."""
    from tasks.versions import fetch_draft, open_aliases

    database = settings().sqlite_file
    aliases = None if database is not None and not database.exists() else open_aliases()
    version = None if aliases is None else aliases.get_alias(model, alias)
    if aliases is None or version is None:
        if recipe.training.warm_start == CHAMPION:
            log.info("warm_start=champion: nothing serves %s yet, so training begins from random weights", model)
            return None
        raise ConfigError(
            f"training.warm_start: no version of {model} holds the alias {alias}",
            mend="see `draftsmith status RECIPE` for the aliases there are",
        )
    tags = aliases.tags(model, version)
    path, digest = fetch_draft(settings(), tags, model, version)
    tokenizer = Run(recipe, settings().home).fingerprint.parts["tokenizer"]
    log.info("warm start from %s version %s digest=%s", model, version, digest[:12])
    return WarmStart(digest=digest, path=str(path), head=tags.get(TOKENIZER_TAG) == tokenizer, before=began_from(tags))


def began_from(tags: Mapping[str, str]) -> tuple[WarmStart | None, ...]:
    """What a version's own training began from, as `WarmStart.before` has it; empty where that cannot be read."""
    try:
        began = json.loads(tags.get(BEGAN_TAG, ""))
        return (None if began is None else WarmStart(path=None, **began),)
    except (ValueError, TypeError):  # not recorded, or edited by hand
        return ()
