"""Chains of drafted tokens along a packed row: which of them are learned, and which serving would accept.

After alignment row j holds token x_{j+1} and the features of x_j; link s of the chain that starts at row j is asked for
x_{j+2+s}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from speculators_core.losses.best import best_index
from speculators_core.types import Aligned, Sample

COMPAT_EPSILON = 1e-5
"""What speculators 0.9 adds to the number of positions that it divides a loss by."""
ROUNDING, TARGET_ROUNDING = 64, 32
"""Multiples that the numbers of drafting rows and of targets are rounded up to."""


def align_shifted(sample: Sample) -> Aligned:
    """Pair each token with the features of the token before it, as vLLM's proposer does.

    The loss mask stays the token's own. Positions are those of the features (as served); only differences of
    positions matter to the draft.
    """
    return Aligned(
        input_ids=sample.input_ids[1:],
        loss_mask=sample.loss_mask[1:],
        position_ids=sample.position_ids[:-1],
        aux_TAH=sample.hidden_states[:-1, :-1].flatten(1),
        last_TH=sample.hidden_states[1:, -1],
    )


def counted_links(mask_T: Tensor, document_ids_T: Tensor, links: int) -> Tensor:
    """bool [S, T]: links whose every token so far was written by the verifier and lies in the row's document.

    So the first token of a reply is learned, and nothing is learned past its end. Link s + 1 counts only where link s
    does.
    """
    counted = torch.zeros(links, mask_T.numel(), dtype=torch.bool, device=mask_T.device)
    alive = document_ids_T >= 0
    for link in range(links):
        ahead = link + 1
        alive = alive.clone()
        alive[-ahead:] = False
        alive[:-ahead] &= mask_T[ahead:] & (document_ids_T[ahead:] == document_ids_T[:-ahead])
        counted[link] = alive
    return counted


def rounded_up(wanted_T: Tensor, document_ids_T: Tensor, *, multiple: int = ROUNDING) -> Tensor:
    """Rows [R] that are wanted, ascending, with others to make R such a multiple.

    Matrix libraries compile a kernel for each new shape and keep it: with a different R in every batch that takes as
    long as the products themselves, and the memory of a thousand kernels. Real tokens fill up before padding does.
    """
    rows_R = wanted_T.nonzero().squeeze(1)
    if rows_R.numel() == 0:
        return rows_R
    others = (~wanted_T).nonzero().squeeze(1)
    others = others[torch.argsort(document_ids_T[others] < 0, stable=True)]
    return torch.cat([rows_R, others[: -rows_R.numel() % multiple]]).sort().values


def pair_targets(rows_R: Tensor, asked_SR: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Targets [U] that a row is asked for at some step, and for each step the row asked ([S, U], −1 for none).

    U is rounded up, for the same reason as R, with targets that nobody is asked for.
    """
    steps, device = asked_SR.shape[0], rows_R.device
    row_of_ST = torch.full((steps, length + steps), -1, dtype=torch.int64, device=device)
    numbers_R = torch.arange(rows_R.numel(), device=device)
    for step in range(steps):
        row_of_ST[step, rows_R + step] = torch.where(asked_SR[step], numbers_R, -1)
    row_of_ST = row_of_ST[:, :length]
    targets_U = (row_of_ST >= 0).any(dim=0).nonzero().squeeze(1)
    missing = -targets_U.numel() % TARGET_ROUNDING
    rows_SU = functional.pad(row_of_ST[:, targets_U], (0, missing), value=-1)
    return functional.pad(targets_U, (0, missing)), rows_SU


def at_targets(values_SR: Tensor, rows_SU: Tensor) -> Tensor:
    """[S, R] to [S, U], anything where a target has no row."""
    return values_SR.gather(1, rows_SU.clamp_min(0))


def by_row(values_SU: Tensor, rows_SU: Tensor, count: int) -> Tensor:
    """[S, U] to [S, R]; rows without a target get zero."""
    out = torch.zeros(values_SU.shape[0], count + 1, dtype=values_SU.dtype, device=values_SU.device)
    out.scatter_(1, torch.where(rows_SU >= 0, rows_SU, count), values_SU)
    return out[:, :count]


Propose = Callable[[Aligned, Tensor, Tensor], Sequence[Tensor]]
"""(row padded to a multiple of ROUNDING, document ids, drafting rows [R]) -> for each link something of [R] rows."""


def walk_reply(aligned: Aligned, k: int, states: Propose, d2t: Tensor | None, head_DH: Tensor, chunk: int) -> list[int]:
    """`walk_chains` for drafts that propose the best token of their vocabulary head.

    Args:
        states: gives for each link the normalised hidden states [R, H].
        d2t: of a reduced vocabulary.
        head_DH: the draft's vocabulary head.
        chunk: rows that go through it at a time.
    """

    def propose(row: Aligned, documents_T: Tensor, rows_R: Tensor) -> Sequence[Tensor]:
        return [best_tokens(hidden, head_DH, d2t, chunk) for hidden in states(row, documents_T, rows_R)]

    return walk_chains(aligned, k, propose)


def best_tokens(hidden_RH: Tensor, head_DH: Tensor, d2t: Tensor | None, chunk: int) -> Tensor:
    """Verifier ids [R] of the largest logits, the first ones on ties."""
    head_DH = head_DH.to(hidden_RH.dtype)
    best_R = torch.cat([best_index(part @ head_DH.T) for part in torch.split(hidden_RH, chunk)])
    return best_R if d2t is None else best_R + d2t[best_R]


@torch.no_grad()
def walk_chains(aligned: Aligned, k: int, propose: Propose) -> list[int]:
    """Draft as vLLM does along one greedy reply: at row i, accept L ≤ k, go on at row i + L + 1.

    A chain only matters up to its first rejection, and until then the tokens that precede its links are the reply's:
    so one teacher-forced pass over all rows gives every acceptance length, and the walk picks those that serving would
    land on. Accepted means that the draft's proposal is the reply's token; each run of reply tokens is one reply.
    Serving first drafts after the reply's first token, which comes with the prompt, and not after its last.

    Args:
        propose: gives for each link the proposed verifier ids [R].

    Returns:
        L at each drafting point, in order.
    """
    fill = -aligned.input_ids.numel() % ROUNDING  # replies differ in length
    tokens = functional.pad(aligned.input_ids, (0, fill))
    mask = functional.pad(aligned.loss_mask.bool(), (0, fill))
    documents = functional.pad(torch.zeros_like(aligned.input_ids), (0, fill), value=-1)
    drafts_T = mask & mask.roll(-1)  # the last row of a reply is no drafting point
    drafts_T[-1] = False
    rows_R = rounded_up(drafts_T, documents)
    if rows_R.numel() == 0:
        return []
    padded = Aligned(
        input_ids=tokens,
        loss_mask=mask,
        position_ids=functional.pad(aligned.position_ids, (0, fill)),
        aux_TAH=functional.pad(aligned.aux_TAH, (0, 0, 0, fill)),
        last_TH=functional.pad(aligned.last_TH, (0, 0, 0, fill)),
    )
    reply_TP = functional.pad(torch.where(mask, tokens, -1), (0, k + 1), value=-1)
    alive_R = torch.ones_like(rows_R, dtype=torch.bool)
    accepted_R = torch.zeros_like(rows_R)
    for link, proposed_R in enumerate(propose(padded, documents, rows_R)):
        wanted_R = reply_TP[rows_R + 1 + link]
        if link:  # a reply's end is the end of its chain: the next run is another reply
            alive_R = alive_R & (reply_TP[rows_R + link] >= 0)
        alive_R = alive_R & (proposed_R == wanted_R)
        accepted_R += alive_R
    points_R = drafts_T[rows_R]
    return landed(rows_R[points_R].tolist(), accepted_R[points_R].tolist())


def landed(rows: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Acceptance lengths at the rows that serving lands on, from those at all rows (ascending)."""
    lengths: list[int] = []
    due = -1
    for row, count in zip(rows, accepted, strict=True):
        if row < due:
            continue
        lengths.append(count)
        due = row + count + 1
    return lengths
