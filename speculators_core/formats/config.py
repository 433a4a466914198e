"""config.json of a draft in the speculators format, typed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from speculators_core.types import MOST_DRAFTED, StrictModel

FORMAT_VERSION = "0.9.0"
"""Version of the speculators format that is written; readers show it and do not check it."""


class GreedyProposal(StrictModel):
    """How the draft proposes: the only method that the format knows."""

    proposal_type: Literal["greedy"] = Field(default="greedy", description="discriminator")
    speculative_tokens: int = Field(
        ge=1, le=MOST_DRAFTED, description="tokens that vLLM drafts at a time unless told otherwise"
    )
    verifier_accept_k: int = Field(default=1, ge=1, description="of the format; vLLM ignores it")
    accept_tolerance: float = Field(default=0.0, ge=0, description="of the format; vLLM ignores it")


class VerifierReference(StrictModel):
    """The model that vLLM serves when it is given the draft alone."""

    name_or_path: str = Field(min_length=1, description="hub id, or a local path that only this machine knows")
    architectures: tuple[str, ...] = Field(description="copied from the verifier's config.json")


class SpeculatorsSection(StrictModel):
    """What vLLM needs to set speculation up."""

    algorithm: str = Field(description="same as speculators_model_type")
    default_proposal_method: Literal["greedy"] = Field(default="greedy", description="one of the proposal_types")
    proposal_methods: tuple[GreedyProposal, ...] = Field(min_length=1, description="vLLM reads the first")
    verifier: VerifierReference


class SpeculatorsFormat(StrictModel):
    """Keys that everything in this format has. There is no `model_type`: vLLM knows the format by its absence."""

    architectures: tuple[str, ...] = Field(min_length=1, description="class names of the format")
    dtype: Literal["bfloat16"] = Field(default="bfloat16", description="of the stored floats")
    speculators_config: SpeculatorsSection
    speculators_model_type: str = Field(description="the algorithm; vLLM chooses its loader by it")
    speculators_version: str = Field(default=FORMAT_VERSION, description="version of the format")
    tie_word_embeddings: Literal[False] = Field(default=False, description="embedding and head are separate tensors")
    transformer_layer_config: dict[str, Any] = Field(description="decoder configuration of the draft's layers")
    transformers_version: str = Field(description="version whose configuration keys are used")

    @model_validator(mode="after")
    def _one_algorithm(self) -> SpeculatorsFormat:
        if self.speculators_config.algorithm != self.speculators_model_type:
            raise ValueError("speculators_config.algorithm and speculators_model_type differ")
        if "model_type" not in self.transformer_layer_config:
            raise ValueError("transformer_layer_config has no model_type")
        return self


class SpeculatorConfig(SpeculatorsFormat):
    """A draft with a vocabulary head of its own."""

    draft_vocab_size: int = Field(ge=1, description="rows of the draft's head")
    target_hidden_size: int | None = Field(default=None, description="verifier's hidden size where it differs")


class NativeHeadConfig(SpeculatorsFormat):
    """A verifier's own multi-token head (mtp): vLLM loads it from the verifier that it is stitched into."""

    num_nextn_predict_layers: Literal[1] = Field(default=1, description="heads; there is one")


class FeatureDraftConfig(SpeculatorConfig):
    """A draft that joins verifier features (eagle3: it continues from its own states)."""

    embed_requires_grad: bool = Field(description="whether the embedding was trained")
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = Field(min_length=1, description="ascending and distinct")
    fc_norm: bool = Field(description="a norm for each feature")
    norm_before_fc: bool = Field(description="one norm over all features")
    norm_before_residual: bool = Field(description="first residual is the normed feature")
    norm_output: bool = Field(description="the normed state is handed on")

    @model_validator(mode="after")
    def _sound(self) -> FeatureDraftConfig:
        ids = self.eagle_aux_hidden_state_layer_ids
        if list(ids) != sorted(set(ids)):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids {list(ids)} must be ascending and distinct, as vLLM captures them"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other")
        return self


class ParallelFeatureDraftConfig(FeatureDraftConfig):
    """A draft that joins verifier features and proposes everything in one pass over masked rows (peagle)."""

    mask_token_id: int = Field(ge=0, description="token of the masked rows, in the verifier's vocabulary")


class BlockDraftConfig(SpeculatorConfig):
    """A draft that fills in the masks behind the newest token (dflash)."""

    aux_hidden_state_layer_ids: tuple[int, ...] = Field(min_length=1, description="ascending and distinct")
    block_size: int = Field(ge=2, description="slots of a block, the newest token's included")
    mask_token_id: int = Field(ge=0, description="what fills the other slots, in the verifier's vocabulary")
    sample_from_anchor: bool = Field(description="the newest token's slot drafts too")
    sliding_window_non_causal: bool = Field(description="slots see each other both ways on sliding layers too")

    @model_validator(mode="after")
    def _ascending(self) -> BlockDraftConfig:
        ids = self.aux_hidden_state_layer_ids
        if list(ids) != sorted(set(ids)):
            raise ValueError(
                f"aux_hidden_state_layer_ids {list(ids)} must be ascending and distinct, as vLLM captures them"
            )
        return self


class SelectingBlockDraftConfig(BlockDraftConfig):
    """Blocks with convolutions along them, whose tokens are chosen by the token before (dflash2)."""

    conv_kernel_size: int = Field(ge=1, description="slots that a convolution reaches")
    conv_group_size: int = Field(ge=1, description="channels that share a dynamic kernel")
    selector_rank: int = Field(ge=1, description="rank of the transition score")
    selector_top_k: int = Field(ge=1, description="tokens that the selector chooses among")


class RefinedBlockDraftConfig(BlockDraftConfig):
    """Blocks refined in parallel rounds (xpress); vLLM 0.32 has no loader for it."""

    xpress_rank: int = Field(ge=1, description="width of the refiner")
    xpress_mlp_ratio: int = Field(ge=1, description="width of its feed-forward part in units of the rank")
    num_jacobi_passes: int = Field(ge=1, description="rounds of refinement when it is served")


class CorrectedBlockDraftConfig(BlockDraftConfig):
    """Blocks whose logits are corrected by the token before, from left to right (dspark)."""

    markov_rank: int = Field(ge=0, description="rank of the correction; 0: none")
    markov_head_type: Literal["vanilla", "gated", "rnn"] = Field(description="what it depends on beside that token")
    enable_confidence_head: bool = Field(description="each token comes with a confidence")
    confidence_head_with_markov: bool = Field(description="which knows the token before")


CONFIGS: dict[str, type[SpeculatorsFormat]] = {
    "dflash": BlockDraftConfig,
    "dflash2": SelectingBlockDraftConfig,
    "dspark": CorrectedBlockDraftConfig,
    "eagle3": FeatureDraftConfig,
    "mtp": NativeHeadConfig,
    "xpress": RefinedBlockDraftConfig,
    "peagle": ParallelFeatureDraftConfig,
}
"""Configuration class by speculators_model_type."""
