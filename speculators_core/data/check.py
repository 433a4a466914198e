"""First rung of the parity ladder: our token ids are those that the engine makes of the same messages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pydantic import Field

from speculators_core.data.conversations import Conversation, Message, engine_messages
from speculators_core.data.rows import RowSet
from speculators_core.data.template import ChatTemplate
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
    found = _Comparison()
    for item in rows.samples()[:sample]:
        row = rows.row(item.row)
        ids, messages = row.input_ids.tolist(), list(item.messages)
        if item.prompt_length is not None:
            rendered = client.render(
                messages[:-1], tools=item.tools, template_kwargs=template_kwargs, add_generation_prompt=True
            )
            if item.prompt_length <= len(ids):
                found.add(f"{row.id} (prompt)", [*ids[: item.prompt_length], _END], [*rendered, _END])
            else:
                found.add(f"{row.id} (prompt, truncated)", ids, rendered)
        if not item.exact:
            found.add(row.id, ids, client.render(messages, tools=item.tools, template_kwargs=template_kwargs))
    for prompt in rows.prompts()[:sample]:
        rendered = client.render(
            list(prompt.messages), tools=prompt.tools, template_kwargs=template_kwargs, add_generation_prompt=True
        )
        found.add(prompt.id, [*prompt.prompt_token_ids, _END], [*rendered, _END])
    return found.outcome()


def check_prompts(
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    client: EngineClient,
    *,
    sample: int = 16,
    template_kwargs: dict[str, Json] | None = None,
) -> RenderCheck:
    """The same for conversations that are about to be answered: their first `sample` opening prompts.

    Raises:
        EngineError: as above.
    """
    found = _Comparison()
    for conversation in islice(conversations, sample):
        if (opening := _opening(conversation, template)) is None:
            continue
        messages, ours = opening
        rendered = client.render(
            engine_messages(messages),
            tools=list(conversation.tools) if conversation.tools else None,
            template_kwargs=template_kwargs,
            add_generation_prompt=True,
        )
        found.add(conversation.id, [*ours, _END], [*rendered, _END])
    return found.outcome()


def opening_prompts(conversations: Iterable[Conversation], template: ChatTemplate) -> Iterator[list[int]]:
    """Token ids of what each conversation is asked first; those that the template refuses are left out."""
    for conversation in conversations:
        if (opening := _opening(conversation, template)) is not None:
            yield opening[1]


def _opening(conversation: Conversation, template: ChatTemplate) -> tuple[list[Message], list[int]] | None:
    """Messages up to the first of the user, and their ids; None where there is none, or the template refuses them."""
    roles = [message["role"] for message in conversation.messages]
    if "user" not in roles:
        return None
    messages = list(conversation.messages[: roles.index("user") + 1])
    try:
        return messages, template.ids(messages, tools=conversation.tools, add_generation_prompt=True)
    except DataError:
        return None


class _Comparison:
    """Renderings so far, ours and the engine's, and the first that differ."""

    def __init__(self) -> None:
        self.checked = self.agreed = 0
        self.first: RenderDifference | None = None

    def add(self, name: str, ours: Sequence[int], engine: Sequence[int]) -> None:
        """Ours must be how the engine's begins."""
        self.checked += 1
        if list(ours) == list(engine[: len(ours)]):
            self.agreed += 1
        elif self.first is None:
            at = next((i for i, (a, b) in enumerate(zip(ours, engine, strict=False)) if a != b), len(engine))
            self.first = RenderDifference(
                row=name, position=at, ours=tuple(ours[at : at + 8]), engine=tuple(engine[at : at + 8])
            )

    def outcome(self) -> RenderCheck:
        """All of it."""
        log.info("renderings: %d of %d agree with the engine's", self.agreed, self.checked)
        return RenderCheck(checked=self.checked, agreed=self.agreed, first=self.first)
