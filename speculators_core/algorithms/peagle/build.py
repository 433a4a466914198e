"""A fresh P-EAGLE draft for a verifier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from speculators_core.algorithms._blocks.feature_build import build_feature_draft
from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.algorithms._blocks.mask_token import mask_token, resolve_mask_token
from speculators_core.algorithms._blocks.vocabulary import ReducedVocabulary
from speculators_core.algorithms.peagle.config import PEagleConfig
from speculators_core.algorithms.peagle.model import PEagleDraft
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan
from speculators_core.verifier.facts import VerifierFacts

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary


def build(config: PEagleConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> PEagleDraft:
    """A draft of that shape on the CPU, see `build_feature_draft`.

    Its embedding is trained: a float32 copy of the verifier's. The mask's features are N(0, 1).

    Raises:
        ConfigError: layers, vocabulary or mask token that this verifier does not have.
        VerifierError: the directory cannot be used.
    """

    def make(
        facts: VerifierFacts, geometry: LayerGeometry, num_aux: int, vocabulary: ReducedVocabulary | None
    ) -> PEagleDraft:
        mask = resolve_mask_token(Path(verifier_dir), facts, config.mask_token_id, trusted=True)
        return PEagleDraft(config, geometry, num_aux, vocabulary, mask, draft_logit_scale=facts.logit_scale)

    model = build_feature_draft(config, verifier_dir, draft_vocabulary, seed, make)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.mask_hidden.normal_(generator=generator)
    return model


def check(config: PEagleConfig, plan: DraftPlan) -> None:
    """Refuse what would only fail after capture.

    Raises:
        ConfigError: no usable mask token, packed rows too short for a chain, or an evaluation beyond what is learned.
    """
    mask_token(config, plan.verifier_dir)
    if plan.row_tokens <= config.num_depths:
        raise ConfigError(
            f"training.row_tokens is {plan.row_tokens}, too short for chains of algorithm.num_depths "
            f"= {config.num_depths} tokens",
            mend="raise training.row_tokens; 1024 is usual",
        )
    if plan.k is not None and plan.k > config.num_depths:
        raise ConfigError(
            f"evaluation.k is {plan.k}, but only algorithm.num_depths = {config.num_depths} tokens are learned",
            mend="raise algorithm.num_depths, or lower evaluation.k",
        )
