"""A fresh XPress draft for a verifier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.block_build import build_block_draft
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary
from speculators_core.algorithms.xpress.config import XPressConfig
from speculators_core.algorithms.xpress.model import XPressDraft
from speculators_core.verifier.facts import VerifierFacts

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary


def build(config: XPressConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> XPressDraft:
    """See `build_block_draft`."""

    def make(
        facts: VerifierFacts, geometry: LayerGeometry, num_aux: int, vocabulary: ReducedVocabulary | None, mask: int
    ) -> XPressDraft:
        return XPressDraft(
            config,
            geometry,
            num_aux,
            vocabulary,
            mask_token_id=mask,
            draft_logit_scale=facts.logit_scale,
        )

    return build_block_draft(config, verifier_dir, draft_vocabulary, seed, make)
