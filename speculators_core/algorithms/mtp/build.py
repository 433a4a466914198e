"""A verifier's own head, taken out of its checkpoint to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speculators_core.algorithms._blocks.borrowed import borrow
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.families import FAMILIES, Family, family_of, layer_config
from speculators_core.algorithms.mtp.model import MTPHead
from speculators_core.algorithms.mtp.native import read_native
from speculators_core.errors import ConfigError
from speculators_core.types import DraftPlan
from speculators_core.verifier.facts import VerifierFacts, read_config, read_facts

if TYPE_CHECKING:
    from speculators_core.data.vocabulary import DraftVocabulary


def build(config: MTPConfig, verifier_dir: Path, draft_vocabulary: DraftVocabulary | None, seed: int) -> MTPHead:
    """The head with the verifier's own weights: float32 where it is trained, bfloat16 where it is frozen.

    `seed` decides nothing, since nothing is drawn.

    Raises:
        ConfigError: a draft vocabulary, or a verifier without a native head that is known.
        VerifierError: the directory cannot be used, or lacks the head's tensors.
    """
    verifier_dir = Path(verifier_dir)
    facts, family, text = read_family(verifier_dir)
    if draft_vocabulary is not None:
        raise _whole_vocabulary()
    with torch.random.fork_rng(devices=[]):  # the library draws weights, which are overwritten
        head = MTPHead(config, family, layer_config(family, text))
    wanted = head.head_tensors()
    head.load_state_dict(read_native(verifier_dir, family, head.depth, wanted), strict=False)
    head.verifier_architectures, head.text_config = facts.architectures, dict(text)
    parts = borrow(verifier_dir, facts, None)
    head.borrow(parts.embed_VH, parts.head_DH)
    head.teacher = parts.teacher
    return head


def check(config: MTPConfig, plan: DraftPlan) -> None:
    """Refuse what would only fail after capture.

    Raises:
        ConfigError: a draft vocabulary, a verifier without a known native head, or packed rows shorter than a chain.
    """
    read_family(plan.verifier_dir)
    if plan.draft_vocabulary is not None and plan.draft_vocabulary != plan.vocab_size:
        raise _whole_vocabulary()
    if plan.row_tokens <= config.num_speculative_steps + 1:
        raise ConfigError(
            f"training.row_tokens is {plan.row_tokens}, too short for chains of algorithm.num_speculative_steps "
            f"= {config.num_speculative_steps} tokens",
            mend="raise training.row_tokens; 1024 is usual",
        )


def read_family(verifier_dir: Path) -> tuple[VerifierFacts, Family, dict[str, Any]]:
    """Facts, family and text configuration of a verifier with a native head.

    Raises:
        ConfigError: none is known for its architecture, or it has several in a row.
    """
    facts, top = read_facts(verifier_dir), read_config(verifier_dir)
    nested = top.get("text_config")
    text = nested if isinstance(nested, dict) and nested else top
    family = family_of(facts.model_type, facts.architectures)
    if family is None:
        raise ConfigError(
            f"algorithm mtp trains a verifier's own multi-token head; none is known for {facts.model_type} "
            f"({', '.join(facts.architectures)})",
            mend=f"choose another algorithm, or a verifier of {', '.join(family.name for family in FAMILIES)}",
        )
    heads = text.get("num_nextn_predict_layers", text.get("mtp_num_hidden_layers", 1))
    if heads != 1:
        raise ConfigError(
            f"this verifier has {heads} native heads in a row; only one that is run several times can be trained",
            mend="choose another algorithm",
        )
    return facts, family, dict(text)


def _whole_vocabulary() -> ConfigError:
    return ConfigError(
        "draft_vocabulary is set, but a native head proposes from the verifier's whole vocabulary",
        mend="remove draft_vocabulary from the recipe",
    )
