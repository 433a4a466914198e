"""Which tokens the verifier wrote, found by rendering and never by pattern.

For the reply at message j:  prompt = render(messages[:j], generation prompt on),  full = render(messages[:j + 1]).
The reply is what `full` has beyond `prompt`, up to and with the end-of-turn id; what the template puts behind that id
was never generated. Successive turns share one row exactly when each prompt begins with all that came before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from speculators_core.data.conversations import Conversation
from speculators_core.data.template import ChatTemplate


@dataclass(frozen=True)
class Turn:
    """One reply with what it answered. `aligned`: the prompt is, id for id, what `full` begins with."""

    message: int
    prompt: Sequence[int]
    reply: Sequence[int]
    aligned: bool = True
    exact: bool = False


@dataclass
class TokenRow:
    """input ids with a mask of the supervised ones; `turns` are the replies that it supervises, in order."""

    input_ids: list[int]
    loss_mask: list[int]
    turns: list[Turn] = field(default_factory=list)

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(self.loss_mask)


@dataclass(frozen=True)
class Renderings:
    """The texts that locate one reply: prompt, full, and full without the reply (`base`)."""

    conversation: Conversation
    message: int
    prompt: str
    full: str


def renderings(conversation: Conversation, template: ChatTemplate) -> list[Renderings]:
    """Texts of every assistant turn; DataError where the template refuses the messages."""
    messages, tools = conversation.messages, conversation.tools
    return [
        Renderings(
            conversation,
            j,
            prompt=template.text(messages[:j], tools=tools, add_generation_prompt=True),
            full=template.text(messages[: j + 1], tools=tools),
        )
        for j in conversation.assistant_turns()
    ]


def turn_of(
    rendered: Renderings,
    prompt: Sequence[int],
    full: Sequence[int],
    template: ChatTemplate,
    end_ids: frozenset[int],
) -> Turn | None:
    """Locate the reply in the ids of `full`, or None where the template leaves no boundary to find.

    When `full` does not begin with `prompt` (templates that rewrite the reply's opening, or a tokenizer that merges
    across the boundary), the reply begins where the two part, provided that lies beyond all earlier messages.
    """
    boundary = common_prefix(prompt, full)
    aligned = boundary == len(prompt)
    if not aligned:
        conversation, j = rendered.conversation, rendered.message
        base = template.ids(conversation.messages[:j], tools=conversation.tools)
        if common_prefix(base, full) < len(base) or boundary < len(base):
            return None
    reply = list(full[boundary:])
    ends = [position for position, token in enumerate(reply) if token in end_ids]
    if ends:
        reply = reply[: ends[-1] + 1]
    return Turn(rendered.message, list(full[:boundary]), reply, aligned=aligned) if reply else None


def merge(turns: Iterable[Turn]) -> list[TokenRow]:
    """Rows from the turns of one conversation: a turn joins the row whose ids its prompt continues, else opens one."""
    rows: list[TokenRow] = []
    for turn in turns:
        row = rows[-1] if rows else None
        if row is not None and list(turn.prompt[: len(row.input_ids)]) == row.input_ids:
            context = list(turn.prompt[len(row.input_ids) :])
        else:
            row, context = TokenRow([], []), list(turn.prompt)
            rows.append(row)
        row.input_ids += [*context, *turn.reply]
        row.loss_mask += [0] * len(context) + [1] * len(turn.reply)
        row.turns.append(turn)
    return rows


def clip(row: TokenRow, length: int) -> TokenRow:
    """The first `length` ids, then without a tail that supervises nothing."""
    mask = row.loss_mask[:length]
    while mask and not mask[-1]:
        mask.pop()
    kept, seen = [], 0
    for turn in row.turns:
        seen = len(turn.prompt)
        if seen < len(mask):
            kept.append(turn)
    return TokenRow(row.input_ids[: len(mask)], mask, kept)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    limit = min(len(a), len(b))
    if list(a[:limit]) == list(b[:limit]):
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
