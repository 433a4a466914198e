"""Tags of a version that say which verifier it was made for, and how that is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from speculators_core.errors import RegistryError

VERIFIER_TAG, REVISION_TAG, TEMPLATE_TAG = "verifier.uri", "verifier.revision", "verifier.template_kwargs"


def template_kwargs_of(tags: Mapping[str, str], model: str, version: str) -> dict[str, Any]:
    """What the chat template was rendered with; RegistryError where somebody made the tag something else."""
    text = tags.get(TEMPLATE_TAG) or "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RegistryError(
            f"tag {TEMPLATE_TAG} of {model} version {version} is no JSON object: {text[:100]!r}",
            mend="put back what `draftsmith register` wrote, or delete the tag where the recipe has no template_kwargs",
        )
    return found
