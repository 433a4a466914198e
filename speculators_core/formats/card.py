"""The model card: what the draft is, what it is for, and whose licences it carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from speculators_core.types import StrictModel


class ModelCard(StrictModel):
    """What a card says beyond config.json. A draft holds copies of the verifier's embedding and head."""

    title: str = Field(description="headline of the card")
    verifier_license: str | None = Field(default=None, description="licence of the verifier, which the draft inherits")
    data_license: str | None = Field(default=None, description="licence of the conversations it was trained on")
    verifier_fingerprint: str | None = Field(default=None, description="digest of what makes the draft stale")
    facts: Mapping[str, str] = Field(default_factory=dict, description="further rows of the table")


def render_card(card: ModelCard, config: Mapping[str, Any]) -> str:
    """Markdown with the YAML header that model hubs read."""
    section = config["speculators_config"]
    verifier = section["verifier"]["name_or_path"]
    local = verifier.startswith(("/", "."))
    header = ["---", "library_name: vllm", "tags:", "- speculative-decoding", f"- {section['algorithm']}"]
    header.append(f"license: {card.verifier_license or 'other'}")
    if not local:
        header += ["base_model:", f"- {verifier}", "base_model_relation: adapter"]
    header.append("---")
    rows = {
        "algorithm": section["algorithm"],
        "verifier": f"`{verifier}`",
        "verifier fingerprint": f"`{card.verifier_fingerprint}`" if card.verifier_fingerprint else "not recorded",
        "tokens drafted at a time": str(section["proposal_methods"][0]["speculative_tokens"]),
        **({"draft vocabulary": str(config["draft_vocab_size"])} if "draft_vocab_size" in config else {}),
        **card.facts,
    }
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    portable = (
        "The verifier is named by a path of the machine that made this draft: pass your own copy when you serve it."
        if local
        else "vLLM finds the verifier by its name in `config.json`."
    )
    licences = [
        f"- The verifier's licence: **{card.verifier_license or 'not stated'}**. `embed_tokens` and `lm_head` are "
        "copies of the verifier's weights, so its licence applies to this draft.",
        f"- The training data's licence: **{card.data_license or 'not stated'}**.",
    ]
    lines = [
        *header, "", f"# {card.title}", "",
        "A draft model for speculative decoding. It proposes tokens that the verifier checks, so the output is the",
        "verifier's own; it is of no use without exactly that verifier.", "",
        "## Serving", "", "```", "vllm serve <this directory>", "```", "", portable, "",
        "## Facts", "", *table, "",
        "## Licences", "", *licences, "",
    ]  # fmt: skip
    return "\n".join(lines)
