"""What every reader of a foreign layout shares: the verifier, what is borrowed from it, and the finished draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from speculators_core.convert.layouts import Layout
from speculators_core.convert.options import ConvertOptions
from speculators_core.convert.source import Source
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.config import CONFIGS, GreedyProposal, SpeculatorsSection, VerifierReference
from speculators_core.types import ExportedDraft
from speculators_core.verifier.facts import VerifierFacts, read_facts
from speculators_core.verifier.weights import VerifierHead, read_head

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where the mask token is written, see vLLM's `v1/spec_decode/llm_base_proposer.py`."""
FLOATS = ("float32", "float16", "bfloat16")

Draft = ExportedDraft


@dataclass(frozen=True)
class Reading:
    """One checkpoint on its way into our format.

    verifier: its directory; None where the user names none · publish: name of the verifier as the draft shall state
    it; None leaves what the checkpoint says · notes: what the reader filled in, in sentences.
    """

    source: Source
    layout: Layout
    verifier: Path | None
    publish: str | None
    options: ConvertOptions
    notes: list[str] = field(default_factory=list)

    @cached_property
    def facts(self) -> VerifierFacts:
        """Of the verifier."""
        return read_facts(self.verifier_dir)

    @cached_property
    def head(self) -> VerifierHead:
        """Embedding and head of the verifier."""
        return read_head(self.verifier_dir, self.facts)

    @property
    def verifier_dir(self) -> Path:
        """The verifier; ConfigError where it is needed and was not named."""
        if self.verifier is None:
            raise ConfigError(
                f"a checkpoint in the layout {self.layout.name} leaves to its verifier what the draft has to state",
                mend="name the verifier's directory or hub id: --verifier",
            )
        return self.verifier

    def note(self, text: str) -> None:
        """Remember a sentence for the report."""
        self.notes.append(text)

    def require_shape(self, channels: int, tokens: int) -> None:
        """FormatError unless the draft reads features and tokens of this verifier's sizes."""
        for what, drafts, verifiers in (
            ("channels", channels, self.facts.hidden_size),
            ("tokens", tokens, self.facts.vocab_size),
        ):
            if drafts != verifiers:
                raise FormatError(
                    f"the draft is for a verifier of {drafts} {what}, and {self.verifier_dir} has {verifiers}",
                    mend="name the verifier that it was trained for",
                )

    def mask_token(self, config: Mapping[str, Any]) -> int:
        """The mask token that the user names, or config.json. FormatError where neither does."""
        if self.options.mask_token_id is not None:
            return self.options.mask_token_id
        written = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
        if written is None:
            raise FormatError(
                "config.json names no mask token (mask_token_id, pard_token or ptd_token_id)",
                mend="say which it was trained with: --mask-token-id",
            )
        return int(written)

    def with_borrowed(self, tensors: Mapping[str, Tensor], draft_size: int) -> dict[str, Tensor]:
        """The tensors, and the verifier's embedding and head where the draft has none of its own."""
        found = dict(tensors)
        whole = draft_size == self.facts.vocab_size
        if "embed_tokens.weight" not in found:
            found["embed_tokens.weight"] = self.head.embed_VH
            self.note("the embedding is the verifier's")
        elif not self._same(found["embed_tokens.weight"], self.head.embed_VH):
            self.note("its embedding differs from the verifier's, and is kept")
        if "lm_head.weight" not in found and whole:
            found["lm_head.weight"] = self.head.head_VH
            self.note("the head is the verifier's")
        return found

    def without_borrowed(self, tensors: Mapping[str, Tensor], draft_size: int) -> dict[str, Tensor]:
        """The tensors without copies of the verifier's embedding and whole head, which the engine shares.

        Raises:
            FormatError: they are no copies, so that the draft would be served with others.
        """
        found = dict(tensors)
        whole = draft_size == self.facts.vocab_size
        for name in ("embed_tokens.weight", *(("lm_head.weight",) if whole else ())):
            if name not in found:
                continue
            verifiers = self.head.embed_VH if name.startswith("embed") else self.head.head_VH
            if not self._same(found.pop(name), verifiers):
                raise FormatError(
                    f"its {name} is not the verifier's, and in this format the verifier's is used",
                    mend="name the verifier that the draft was trained for",
                )
        return found

    def draft(
        self,
        kind: str,
        layers: Mapping[str, Any],
        keys: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        speculative_tokens: int,
    ) -> Draft:
        """config.json and tensors in the dtypes in which they are served.

        Raises:
            FormatError: its settings contradict each other.
        """
        import transformers

        verifier = VerifierReference(
            name_or_path=self.publish or str(self.verifier_dir), architectures=self.facts.architectures
        )
        try:
            section = SpeculatorsSection(
                algorithm=kind,
                proposal_methods=(GreedyProposal(speculative_tokens=speculative_tokens),),
                verifier=verifier,
            )
            config = CONFIGS[kind](
                architectures=(ARCHITECTURES[kind],),
                speculators_model_type=kind,
                speculators_config=section,
                transformer_layer_config=dict(layers),
                transformers_version=transformers.__version__,
                **keys,
            )
        except ValidationError as error:
            lines = "; ".join(
                f"{'.'.join(map(str, problem['loc']))} {problem['msg'].removeprefix('Value error, ')}".lstrip()
                for problem in error.errors()
            )
            raise FormatError(f"config.json: {lines}") from None
        return Draft(config.model_dump(mode="json"), self.served(tensors))

    def served(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Floats in bfloat16; FormatError for quantised ones."""
        import torch

        found: dict[str, Tensor] = {}
        rounded: set[str] = set()
        for name, tensor in tensors.items():
            if name in ("d2t", "t2d"):
                found[name] = tensor
                continue
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in FLOATS:
                raise FormatError(f"{name} is {dtype}: quantised drafts are not converted")
            if dtype != "bfloat16" and not torch.equal(tensor.bfloat16().to(tensor.dtype), tensor):
                rounded.add(dtype)
            found[name] = tensor.bfloat16()
        if rounded:
            self.note(f"rounded from {' and '.join(sorted(rounded))} to bfloat16")
        return found

    def _same(self, tensor: Tensor, verifiers: Tensor) -> bool:
        """Whether they are equal as they are served."""
        import torch

        return tensor.shape == verifiers.shape and torch.equal(tensor.bfloat16(), verifiers.bfloat16())


def authors_layers(depth: int) -> tuple[int, ...]:
    """The layers that EAGLE-3's authors take of a verifier of `depth`; FormatError where it is too shallow."""
    return require_layers((2, depth // 2, depth - 3), depth)


def require_layers(ids: Sequence[int], depth: int) -> tuple[int, ...]:
    """Layer ids as they are; FormatError unless ascending, distinct, and layers of the verifier."""
    if list(ids) != sorted(set(ids)) or not all(0 <= layer <= depth for layer in ids):
        raise FormatError(
            f"layers {list(ids)} feed the draft; they must ascend, and a verifier of {depth} layers has 0 to {depth}",
            mend="name the verifier that the draft was trained for, or its layers: --aux-layers",
        )
    return tuple(ids)
