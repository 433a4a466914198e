"""What became of the data: what was used, and what was left out, by cause, with the first of each and its mend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from speculators_core.types import StrictModel

EXAMPLE = (
    'write one record a line, as {"conversations": [{"role": "user", "content": "…"}, {"role": "assistant", '
    '"content": "…"}]}; `messages` for `conversations`, and `from`/`value` for `role`/`content`, are read as well'
)
MENDS = {
    "invalid_json": "write each record as one whole line of JSON",
    "invalid_text": "write the records as UTF-8",
    "not_an_object": EXAMPLE,
    "no_messages": EXAMPLE,
    "unknown_role": EXAMPLE,
    "malformed_message": EXAMPLE,
    "multimodal": "bring conversations of text alone",
    "invalid_tools": "write `tools` as a list of functions in OpenAI's form",
    "no_assistant_turn": "let the verifier answer the prompts: set data.replies to regenerate",
    "duplicate": "bring more varied conversations",
    "beyond_max_rows": "raise data.max_rows",
    "near_duplicate_of_evaluation": "what resembles a held-back prompt is left out, so that evaluation stays unseen: "
    "bring more varied conversations, or hold back fewer (data.evaluation_prompts)",
    "refused_by_template": "bring conversations whose turns the verifier's chat template takes, or correct that "
    "template or data.template_kwargs",
    "no_boundary": "bring conversations in which the chat template leaves the replies as they are",
    "overlong": "raise data.max_length, or set data.overlong to truncate",
    "overlong_prompt": "raise data.max_length",
    "too_few_supervised_tokens": "lower data.min_supervised_tokens, or bring longer replies",
}


class PreparationReport(StrictModel):
    """What became of the data; holds no text, and nothing that differs between equal runs."""

    records: int = Field(description="Records read.")
    used: int = Field(description="Records of which a row or a prompt was made.")
    conversations: int = Field(description="Usable conversations read.")
    rows: int = Field(description="Rows written, both splits.")
    tokens: int = Field(description="Tokens of all rows.")
    supervised_tokens: int = Field(description="Tokens that the verifier wrote, of all rows.")
    splits: dict[str, int] = Field(description="Rows of each split; `evaluation` counts prompts.")
    domains: dict[str, int] = Field(description="Rows and prompts of each domain.")
    dropped: dict[str, int] = Field(description="What was left out, by cause: records, conversations, turns or rows.")
    first_dropped: dict[str, str] = Field(description="Where the first of each cause lies: FILE:LINE.")
    truncated: int = Field(description="Rows cut at `max_length`.")
    exact_turns: int = Field(description="Replies whose ids came from an engine as they are.")
    realigned_turns: int = Field(description="Replies whose start was found by common prefix.")
    shared_rows: int = Field(description="Rows that supervise several replies.")
    fanned_out: int = Field(description="Conversations that became several rows: the template rewrites its history.")
    near_duplicates: int = Field(description="Conversations whose first user turn repeats an earlier one.")
    longest_row: int = Field(description="Tokens of the longest row.")


class First(NamedTuple):
    """The first that was left out for a cause: where it lies, and what is wrong with it (may be empty)."""

    where: str
    what: str


class Dropped(Counter[str]):
    """Counts by cause, and the first of each cause."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, First] = {}

    def add(self, cause: str, where: str, what: str = "") -> None:
        """Count one more, at `where`; `what` goes on after it: "has the keys …"."""
        self[cause] += 1
        self.first.setdefault(cause, First(where, what))

    def in_words(self) -> str:
        """All causes with counts, and the first of each with what is wrong with it."""
        return _listed(self, {cause: f"{first.where} {first.what}".strip() for cause, first in self.first.items()})

    def mend(self) -> str | None:
        """What mends the counted causes, the most frequent first; None where nothing does."""
        return "; ".join(dict.fromkeys(MENDS[cause] for cause, _ in self.most_common() if cause in MENDS)) or None


def summed_up(report: Mapping[str, Any]) -> str:
    """One line about a `PreparationReport`: read, used, left out by cause. Older reports lack some of it."""
    line = f"read {report.get('records', '?')}, used {report.get('used', '?')}"
    causes = _listed(report["dropped"], report.get("first_dropped", {}))
    return f"{line}, left out: {causes}" if causes else line


def _listed(counts: Mapping[str, int], first: Mapping[str, str]) -> str:
    return ", ".join(
        f"{cause} {count}" + (f" (first at {first[cause]})" if cause in first else "")
        for cause, count in sorted(counts.items())
        if count
    )
