"""Golden cases of the peer: reading them, whatever directory they come from."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class GoldenCase:
    name: str
    directory: Path
    summary: dict[str, Any]

    @property
    def algorithm(self) -> str:
        return str(self.summary["case"]["alg"])

    def tensors(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        tensors: dict[str, Any] = load_file(self.directory / f"{self.name}.safetensors")
        return tensors

    def dims(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The case's own sizes; the oldest directory has none and is described by its README."""
        if "dims" in self.summary:
            return dict(self.summary["dims"])
        hidden = tensors["w.embed_tokens.weight"].shape[1]
        head_dim = 16
        return {
            "hidden_size": hidden,
            "intermediate_size": tensors["w.layers.0.mlp.up_proj.weight"].shape[0],
            "vocab_size": tensors["w.embed_tokens.weight"].shape[0],
            "num_attention_heads": tensors["w.layers.0.self_attn.q_proj.weight"].shape[0] // head_dim,
            "num_key_value_heads": tensors["w.layers.0.self_attn.k_proj.weight"].shape[0] // head_dim,
            "head_dim": head_dim,
            "num_aux": tensors["in.hidden_states"].shape[-1] // hidden,
            "mask_token_id": tensors["w.embed_tokens.weight"].shape[0] - 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
        }


def cases() -> list[GoldenCase]:
    named = os.environ.get("GOLDEN_DIR")
    directories = [FIXTURES / "numeric", FIXTURES / "numeric2"]
    if named:
        directories = [Path(directory) for directory in named.split(os.pathsep) if directory]
    found = []
    for directory in directories:
        summary = json.loads((directory / "summary.json").read_text())
        found += [GoldenCase(name, directory, case) for name, case in summary.items()]
    return found
