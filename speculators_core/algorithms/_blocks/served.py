"""What proposers have in common: knobs as config.json states them, logits as vLLM has them, and the ways to draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from speculators_core.algorithms._blocks.block_draft import BlockDraft
from speculators_core.algorithms._blocks.block_objective import served_blocks
from speculators_core.algorithms._blocks.feature_draft import FeatureDraft
from speculators_core.algorithms._blocks.geometry import FULL
from speculators_core.algorithms._blocks.unrolled import GoOn
from speculators_core.errors import FormatError
from speculators_core.types import Choose, DraftContext, ExportedDraft, StrictModel

Knobs = TypeVar("Knobs", bound=StrictModel)


def stated(config: type[Knobs], draft: ExportedDraft, read: Callable[[ExportedDraft], dict[str, Any]]) -> Knobs:
    """The knobs that a draft states; those of training alone keep their defaults.

    Args:
        read: their values; KeyError, IndexError or TypeError where keys lack.

    Raises:
        FormatError: keys are missing, or of values that no such draft has.
    """
    try:
        return config(**read(draft))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        kind = draft.config.get("speculators_model_type")
        raise FormatError(
            f"its config.json is not that of our {kind} drafts: {type(error).__name__}: {error}",
            mend="export the draft again",
        ) from error


def feature_knobs(draft: ExportedDraft) -> dict[str, Any]:
    """Knobs of a `FeatureDraft`, and how many tokens it drafts."""
    served = draft.config
    layers = served["transformer_layer_config"]
    kinds, window = list(layers["layer_types"]), layers["sliding_window"]
    return {
        "style": layers["model_type"],
        "layers": len(kinds),
        "intermediate_size": layers["intermediate_size"],
        "aux_layers": tuple(served["eagle_aux_hidden_state_layer_ids"]),
        "norm_before_residual": served["norm_before_residual"],
        "norm_before_fc": served["norm_before_fc"],
        "fc_norm": served["fc_norm"],
        "sliding_window": window,
        "full_attention_layers": _full_layers(kinds, window),
        "speculative_tokens": stated_tokens(draft),
    }


def block_knobs(draft: ExportedDraft) -> dict[str, Any]:
    """Knobs of a `BlockDraft`."""
    served = draft.config
    layers = served["transformer_layer_config"]
    kinds, window = list(layers["layer_types"]), layers["sliding_window"]
    return {
        "layers": len(kinds),
        "intermediate_size": layers["intermediate_size"],
        "aux_layers": tuple(served["aux_hidden_state_layer_ids"]),
        "block_size": served["block_size"],
        "sample_from_anchor": served["sample_from_anchor"],
        "sliding_window": window,
        "full_attention_indices": _full_layers(kinds, window),
        "sliding_window_non_causal": served["sliding_window_non_causal"],
        "mask_token_id": served["mask_token_id"],
    }


def masked_block_knobs(draft: ExportedDraft) -> dict[str, Any]:
    """Knobs of a draft from masks alone, whose mask may have an embedding of its own."""
    return block_knobs(draft) | {"train_mask_embedding": "mask_embedding" in draft.tensors}


def stated_tokens(draft: ExportedDraft) -> int:
    """Tokens a step that the draft's config asks for."""
    return int(draft.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])


def _full_layers(kinds: list[str], window: int | None) -> tuple[int, ...]:
    return () if window is None else tuple(index for index, kind in enumerate(kinds) if kind == FULL)


def vocabulary_logits(model: FeatureDraft | BlockDraft, hidden_KH: Tensor, bias_KD: Tensor | None = None) -> Tensor:
    """[K, V] of normalised states; tokens that the draft cannot propose get −inf, as in vLLM.

    Args:
        bias_KD: what a head on top adds, in the draft's own vocabulary.
    """
    head_DH = model.lm_head.weight
    if not torch.is_autocast_enabled(hidden_KH.device.type):  # which would round what was just widened
        head_DH = head_DH.to(hidden_KH.dtype)
    logits_KD = hidden_KH @ head_DH.T
    if bias_KD is not None:
        logits_KD = logits_KD + bias_KD
    logits_KD = logits_KD * model.draft_logit_scale
    if model.vocabulary is None:
        return logits_KD
    logits_KV = logits_KD.new_full((hidden_KH.shape[0], model.embed_tokens.num_embeddings), float("-inf"))
    logits_KV[:, model.vocabulary.verifier_ids_D] = logits_KD
    return logits_KV


def all_at_once(logits_KV: Tensor, choose: Choose) -> Tensor:
    """The logits of tokens that do not depend on each other, once each has been chosen."""
    for place, logits_V in enumerate(logits_KV):
        choose(place, logits_V)
    return logits_KV


def one_by_one(k: int, choose: Choose, logits_after: Callable[[int, list[int]], Tensor]) -> Tensor:
    """Logits [K, V] of tokens that each depend on those before.

    Args:
        logits_after: (place, tokens chosen so far) -> [V].
    """
    chosen: list[int] = []
    rows = []
    for place in range(k):
        rows.append(logits_after(place, chosen))
        chosen.append(choose(place, rows[-1]))
    return torch.stack(rows)


def unrolled(
    k: int, choose: Choose, logits_of: Callable[[Tensor], Tensor], unroll: Callable[[GoOn], list[Tensor]]
) -> Tensor:
    """Logits [K, V] of a draft that is fed its own tokens and states, see `GoOn`.

    Args:
        logits_of: normalised states [1, H] -> [1, V].
    """
    rows: list[Tensor] = []

    def chosen(step: int, normed_RH: Tensor) -> Tensor:
        rows.append(logits_of(normed_RH)[0])
        return torch.tensor([choose(step, rows[-1])], device=normed_RH.device)

    last_RH = unroll(chosen)[-1]
    chosen(k - 1, last_RH)
    return torch.stack(rows)


def filled_block(model: BlockDraft, context: DraftContext, k: int, *, slots: int | None = None) -> Tensor:
    """States [B, H] of the block behind the newest token, which stands behind the last feature.

    Args:
        slots: of the block; None: as many as k tokens take.
    """
    anchor = context.input_ids.numel()
    blocks = served_blocks(
        model.knobs,
        torch.zeros(anchor + 1, dtype=torch.int64),
        torch.tensor([anchor]),
        k if slots is None else slots - model.knobs.first_slot,
    )
    hidden_MBH: Tensor = model(
        row_before(context),
        torch.arange(anchor + 1),
        functional.pad(context.aux_TAH.to(model.fc.weight.dtype), (0, 0, 0, 1)),  # a block reads features before it
        blocks,
    )
    return hidden_MBH[0]


def row_before(context: DraftContext) -> Tensor:
    """int64 [T + 1]: the tokens of positions 0 to T; the first is not known, and stands in for itself."""
    return torch.cat([context.input_ids[:1], context.input_ids])
