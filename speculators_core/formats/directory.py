"""Writing a draft's directory, and reading it back. Nothing is ever unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speculators_core.errors import FormatError
from speculators_core.formats.card import ModelCard, render_card
from speculators_core.formats.servable import check_servable
from speculators_core.formats.stated import check_types
from speculators_core.types import ExportedDraft

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
MASK_EMBEDDING = "mask_embedding.pt"
"""vLLM reads a mask's own embedding from this file alone. It is written and never read: the weights hold it too."""


def write_draft(directory: Path, draft: ExportedDraft, card: ModelCard) -> Path:
    """Write config.json, model.safetensors and README.md (and a mask's own embedding), nothing else; the config last.

    Raises:
        FormatError: vLLM would not serve it, or the directory holds something foreign.
    """
    from safetensors.torch import save_file

    check_servable(draft)
    directory.mkdir(parents=True, exist_ok=True)
    ours = (CONFIG, WEIGHTS, CARD, MASK_EMBEDDING)
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in ours)
    if foreign:
        raise FormatError(
            f"{directory} already holds {', '.join(foreign[:4])}", mend="export into a directory of its own"
        )
    (directory / CONFIG).unlink(missing_ok=True)
    tensors = {name: _own(tensor) for name, tensor in sorted(draft.tensors.items())}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / MASK_EMBEDDING).unlink(missing_ok=True)
    if "mask_embedding" in tensors:
        import torch

        content = {"embedding": tensors["mask_embedding"], "mask_token_id": draft.config["mask_token_id"]}
        torch.save(content, directory / MASK_EMBEDDING)
    (directory / CARD).write_text(render_card(card, draft.config), encoding="utf-8")
    text = json.dumps(draft.config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a draft; FormatError where there is none, or keys have wrong types."""
    path = directory / CONFIG
    if not path.is_file():
        raise FormatError(f"{directory} holds no {CONFIG}", mend="name a draft's directory")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{directory} holds no readable {CONFIG}: {error}", mend="name a draft's directory"
        ) from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not a JSON object", mend="name a draft's directory")
    check_types(content, str(path))
    return content


def read_draft(directory: Path) -> ExportedDraft:
    """A draft's config and tensors, our own or the peer's; FormatError when they cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(directory)
    path = directory / WEIGHTS
    try:
        return ExportedDraft(config, load_file(path))
    except (OSError, SafetensorError) as error:
        raise FormatError(f"{path} cannot be read: {error}", mend="copy or export the draft again") from error


def _own(tensor: Any) -> Any:
    """Safetensors refuses tensors that share storage (a tied head), so each gets its own."""
    return tensor.detach().cpu().contiguous().clone()


__all__ = ["read_config", "read_draft", "write_draft"]
