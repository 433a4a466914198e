"""First rung of the parity ladder: our token ids are those that the engine makes of the same messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pydantic import Field

from speculators_core.data.rows import RowSet
from speculators_core.engine.client import EngineClient
from speculators_core.errors import DataError
from speculators_core.types import Json, StrictModel

log = logging.getLogger(__name__)

_END = -1  # closes a sequence, so that comparing a beginning compares the length too


class RenderDifference(StrictModel):
    """Where our ids and the engine's part."""

    row: str = Field(description="Id of the row or prompt.")
    position: int = Field(description="First index at which the ids differ.")
    ours: tuple[int, ...] = Field(description="Our ids from there on, at most eight.")
    engine: tuple[int, ...] = Field(description="The engine's ids from there on, at most eight.")


class RenderCheck(StrictModel):
    """Outcome of comparing renderings."""

    checked: int = Field(description="Renderings compared.")
    agreed: int = Field(description="Renderings with equal ids.")
    first: RenderDifference | None = Field(description="The first difference, if any.")

    def require(self) -> None:
        """Raise a DataError unless every rendering agreed."""
        if self.first is None:
            return
        raise DataError(
            f"the engine renders other token ids than we do: {self.checked - self.agreed} of {self.checked} differ, "
            f"{self.first.row} from index {self.first.position} on "
            f"(ours {list(self.first.ours)}, engine {list(self.first.engine)})",
            mend="serve the same tokenizer, chat template and template kwargs as the recipe names, "
            "and pin one transformers in both environments",
        )


def check_against_engine(
    rows: RowSet, client: EngineClient, *, sample: int = 16, template_kwargs: dict[str, Json] | None = None
) -> RenderCheck:
    """Compare at most `sample` rows and `sample` held-back prompts with the engine's rendering.

    Of a row, the prompt of its last reply and (unless the reply's ids came from an engine) the whole are compared, as
    far as the row goes: rows end at the verifier's last token, and may be truncated.

    Raises:
        EngineError: the engine is away, or was started without its rendering endpoint.
    """
    checked = agreed = 0
    first: RenderDifference | None = None

    def compare(name: str, ours: Sequence[int], engine: Sequence[int]) -> None:
        nonlocal checked, agreed, first
        checked += 1
        if list(ours) == list(engine[: len(ours)]):
            agreed += 1
        elif first is None:
            at = next((i for i, (a, b) in enumerate(zip(ours, engine, strict=False)) if a != b), len(engine))
            first = RenderDifference(
                row=name, position=at, ours=tuple(ours[at : at + 8]), engine=tuple(engine[at : at + 8])
            )

    for item in rows.samples()[:sample]:
        row = rows.row(item.row)
        ids, messages = row.input_ids.tolist(), list(item.messages)
        if item.prompt_length is not None:
            rendered = client.render(
                messages[:-1], tools=item.tools, template_kwargs=template_kwargs, add_generation_prompt=True
            )
            if item.prompt_length <= len(ids):
                compare(f"{row.id} (prompt)", [*ids[: item.prompt_length], _END], [*rendered, _END])
            else:
                compare(f"{row.id} (prompt, truncated)", ids, rendered)
        if not item.exact:
            compare(row.id, ids, client.render(messages, tools=item.tools, template_kwargs=template_kwargs))
    for prompt in rows.prompts()[:sample]:
        rendered = client.render(
            list(prompt.messages), tools=prompt.tools, template_kwargs=template_kwargs, add_generation_prompt=True
        )
        compare(prompt.id, [*prompt.prompt_token_ids, _END], [*rendered, _END])
    log.info("renderings: %d of %d agree with the engine's", agreed, checked)
    return RenderCheck(checked=checked, agreed=agreed, first=first)
