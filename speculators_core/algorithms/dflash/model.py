"""The DFlash draft is its backbone: the states of the masks go to the vocabulary head as they are."""

from __future__ import annotations

from speculators_core.algorithms._blocks.block_draft import BlockDraft


class DFlashDraft(BlockDraft):
    """Decoder layers over anchored blocks, and nothing on top."""
