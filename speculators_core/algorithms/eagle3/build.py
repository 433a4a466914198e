"""A fresh EAGLE-3 draft for a verifier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.feature_build import build_feature_draft
from speculators_core.algorithms.eagle3.config import Eagle3Config
from speculators_core.algorithms.eagle3.model import Eagle3Draft

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary


def build(config: Eagle3Config, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> Eagle3Draft:
    """A draft of that shape on the CPU, see `build_feature_draft`; ConfigError, VerifierError."""
    return build_feature_draft(
        config,
        verifier_dir,
        draft_vocabulary,
        seed,
        lambda facts, geometry, num_aux, vocabulary: Eagle3Draft(
            config, geometry, num_aux, vocabulary, draft_logit_scale=facts.logit_scale
        ),
    )
