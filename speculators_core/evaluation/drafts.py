"""A draft's directory in the algorithm's own module: what the parity ladder and the reference loop draft with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from speculators_core import registry
from speculators_core.errors import EvaluationError, FormatError
from speculators_core.formats.directory import read_draft
from speculators_core.types import Algorithm, ExportedDraft, Proposer, StrictModel


@dataclass(frozen=True)
class ServedDraft:
    """A draft with the algorithm whose module drafts as it does when it is served."""

    exported: ExportedDraft
    algorithm: Algorithm
    proposer: Proposer
    verifier_dir: Path

    @classmethod
    def open(cls, draft_dir: Path, verifier_dir: Path) -> ServedDraft:
        """Read a draft, ours to believe as it lies there; `verifier_dir` gives the frozen parts.

        Raises:
            FormatError: it cannot be read, or names no algorithm of ours.
            EvaluationError: its algorithm has no proposer yet.
        """
        exported = read_draft(draft_dir)
        name = exported.config.get("speculators_model_type")
        if name not in registry.names():
            raise FormatError(f"{draft_dir}/config.json names the algorithm {name!r}", mend="name a draft's directory")
        algorithm = registry.resolve(str(name))
        if algorithm.proposer is None:
            raise EvaluationError(f"nothing here drafts as {name} does when it is served")
        return cls(exported, algorithm, algorithm.proposer, verifier_dir)

    @property
    def name(self) -> str:
        """The algorithm's."""
        return self.algorithm.name

    @cached_property
    def config(self) -> StrictModel:
        """The knobs that the draft states. FormatError where it is none of ours."""
        return self.proposer.config(self.exported)

    def module(self, *, turned: str | None = None) -> nn.Module:
        """The module that is trained, with the draft's tensors in it, in float32.

        Args:
            turned: a boolean knob to turn the other way; tensors that only one of the two ways has are left alone.

        Raises:
            FormatError: tensors are missing, unknown, or of another shape.
        """
        config = self.config
        if turned is not None:
            config = type(config).model_validate(config.model_dump() | {turned: not getattr(config, turned)})
        tensors = self.algorithm.names(config, self.exported.tensors)
        vocabulary = None
        if "d2t" in tensors:
            from speculators_core.data.vocabulary import DraftVocabulary

            vocabulary = DraftVocabulary(d2t=tensors["d2t"], t2d=tensors["t2d"])
        model = self.algorithm.build(config, self.verifier_dir, vocabulary, 0).eval()
        mine = {name: value for name, value in model.state_dict().items() if not name.startswith("teacher.")}
        shared = sorted(mine.keys() & tensors.keys())
        odd = [f"{n}: {list(tensors[n].shape)}" for n in shared if tensors[n].shape != mine[n].shape]
        if turned is None:
            # what is frozen may be left out: the engine takes the verifier's, as `build` did
            trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
            odd += [f"{name} is missing" for name in sorted(trained - tensors.keys())]
            odd += [f"{name} is unknown" for name in sorted(tensors.keys() - mine.keys())]
        if odd:
            raise FormatError(
                f"the draft's tensors are not those of its config.json: {'; '.join(odd[:4])}",
                mend="export the draft again",
            )
        with torch.no_grad():
            for name in shared:
                mine[name].copy_(tensors[name])
        return model.float()
