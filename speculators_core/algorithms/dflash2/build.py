"""A fresh DFlash2 draft for a verifier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.block_build import build_block_draft
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary
from speculators_core.algorithms.dflash2.config import DFlash2Config
from speculators_core.algorithms.dflash2.model import DFlash2Draft
from speculators_core.errors import ConfigError
from speculators_core.verifier.facts import VerifierFacts

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary


def build(
    config: DFlash2Config, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int
) -> DFlash2Draft:
    """See `build_block_draft`. ConfigError where the vocabulary is reduced, or H does not divide into groups."""

    def make(
        facts: VerifierFacts, geometry: LayerGeometry, num_aux: int, vocabulary: ReducedVocabulary | None, mask: int
    ) -> DFlash2Draft:
        if vocabulary is not None:
            raise ConfigError("DFlash2 chooses among all of the verifier's tokens", mend="set draft_vocabulary to null")
        if geometry.hidden_size % config.conv_group_size:
            raise ConfigError(
                f"algorithm.conv_group_size {config.conv_group_size} does not divide the verifier's hidden size "
                f"{geometry.hidden_size}",
                mend="name a divisor",
            )
        return DFlash2Draft(
            config,
            geometry,
            num_aux,
            mask_token_id=mask,
            trains_mask=config.train_mask_embedding and not config.compat,
        )

    return build_block_draft(config, verifier_dir, draft_vocabulary, seed, make)
