"""Acceptance beside the peer's: both trained on the same states, rows and order, both served by the same engine.

A line of JSON for each trained draft, written as soon as it is measured, so that hours of work survive a kill:
`--resume` skips the lines that are there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError

from speculators_core.bench.cases import Case, case
from speculators_core.bench.setup import BenchSettings, packed_rows
from speculators_core.bench.training import Pair
from speculators_core.data.rows import Prompt, RowSet
from speculators_core.evaluation.statistics import acceptance_length, compare_paired, ratio_interval
from speculators_core.types import StrictModel

if TYPE_CHECKING:
    from speculators_core.evaluation.records import Measurement

log = logging.getLogger(__name__)

VALIDATION = "validation"  # domain of the prompts that the walked acceptance length is held against
SIDES: tuple[Literal["ours", "peer"], ...] = ("ours", "peer")


class DraftRow(StrictModel):
    """One trained draft: what it cost, and what it is worth."""

    case: str = Field(description="algorithm, by its name in bench.cases")
    side: Literal["ours", "peer"]
    seed: int = Field(description="of weights and order")
    optimizer: str = Field(description="adamw or muon, the same for both sides")
    steps: int = Field(description="optimiser steps")
    tokens: int = Field(description="non-padding tokens trained on")
    tokens_per_s: float = Field(description="of training, loading included")
    peak_memory_mib: float = Field(description="peak anonymous memory of training above its level after imports")
    loss: float = Field(description="our validation loss of its weights")
    eal: float | None = Field(description="our walked acceptance length on all validation rows")
    al_validation: float = Field(description="served acceptance length on the prompts of the validation rows")
    k: int = Field(description="drafted tokens a step")
    al: float = Field(description="acceptance length, greedy")
    by: str = Field("engine", description="what counted it: the engine, or the reference loop")
    low: float = Field(description="lower end of its 95 % interval over prompts")
    high: float = Field(description="upper end")
    per_position: tuple[float, ...] = Field(description="share of drafts whose token at each position was accepted")
    prompts: int = Field(description="prompts that neither training nor validation saw")
    counts: tuple[tuple[int, int], ...] = Field(description="(drafts, accepted) of each prompt, for pairing")

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        """What makes a row the same row."""
        return self.case, self.side, self.seed, self.optimizer, self.steps


class PairRow(StrictModel):
    """Ours as a multiple of the peer's, for one seed."""

    case: str
    seed: int
    al_ratio: float = Field(description="AL of ours over the peer's, the same prompts")
    al_ratio_low: float = Field(description="lower one-sided 95 % bound, paired over prompts")
    al_ratio_high: float = Field(description="upper one-sided 95 % bound")
    speed_ratio: float = Field(description="our training tokens/s over the peer's")
    memory_ratio: float = Field(description="our peak memory over the peer's")


def bench_algorithms(
    cases: Sequence[str],
    seeds: Sequence[int],
    settings: BenchSettings,
    peer_python: Path,
    workspace: Path,
    measure: Callable[[Path, Case, Path], Measurement],
    *,
    epochs: int,
    rows_file: Path,
    resume: bool,
) -> Iterator[DraftRow]:
    """Train and measure each case and seed on both sides; yields each row as it is known, found ones first.

    Args:
        settings: as for `bench train`; steps, case and seed are set here.
        measure: (draft directory, case, output directory) -> what was counted.
        rows_file: JSON Lines that rows are appended to.
    """
    found = read_rows(rows_file) if resume else []
    if not resume:
        rows_file.unlink(missing_ok=True)
    for name in cases:
        for seed in seeds:
            told = settings.model_copy(update={"case": name, "seed": seed})
            told = told.model_copy(update={"steps": epochs * steps_per_epoch(told)})
            pair: Pair | None = None
            for side in SIDES:
                if side == "peer" and case(name).peer is None:
                    continue
                wanted = (name, side, seed, told.optimizer, told.steps)
                if known := [row for row in found if row.key == wanted]:
                    yield known[-1]
                    continue
                pair = pair or Pair.prepare(told, peer_python, workspace / f"{name}-{seed}")
                row = _train_and_measure(pair, side, measure)
                rows_file.parent.mkdir(parents=True, exist_ok=True)
                with rows_file.open("a") as stream:
                    stream.write(row.model_dump_json() + "\n")
                yield row


def validation_prompts(rows: RowSet) -> list[Prompt]:
    """The prompts of the single-turn validation rows: the verifier's reply to each is what the walk runs over."""
    prompts = []
    for index in rows.indices("validation"):
        row = rows.row(index)
        if len(rows.record(index).turns) == 1:
            first = int(row.loss_mask.nonzero()[0])
            ids = tuple(row.input_ids[:first].tolist())
            prompts.append(Prompt(id=f"{VALIDATION}/{row.id}", domain=VALIDATION, messages=(), prompt_token_ids=ids))
    return prompts


def steps_per_epoch(settings: BenchSettings) -> int:
    """Packed rows of one epoch."""
    return len(packed_rows(settings).epoch_plan(settings.seed, 0).rows)


def compare_sides(rows: Sequence[DraftRow]) -> list[PairRow]:
    """Ours against the peer's wherever both are there."""
    by_key = {(row.case, row.seed, row.side): row for row in rows}
    pairs = []
    for (name, seed, side), ours in by_key.items():
        peer = by_key.get((name, seed, "peer"))
        if side != "ours" or peer is None:
            continue
        columns = [tuple(zip(*row.counts, strict=True)) for row in (ours, peer)]
        found = compare_paired(
            (columns[0][0], columns[0][1]), (columns[1][0], columns[1][1]),
            margin=0.03, confidence=0.95, resamples=10_000, seed=0,
        )  # fmt: skip
        pairs.append(
            PairRow(
                case=name,
                seed=seed,
                al_ratio=round(found.ratio, 4),
                al_ratio_low=round(found.lower, 4),
                al_ratio_high=round(found.upper, 4),
                speed_ratio=round(ours.tokens_per_s / peer.tokens_per_s, 3),
                memory_ratio=round(ours.peak_memory_mib / peer.peak_memory_mib, 3),
            )
        )
    return pairs


def read_rows(file: Path) -> list[DraftRow]:
    """Rows of an earlier run; a line cut off by a kill, or of another make of this bench, is left out."""
    if not file.is_file():
        return []
    rows = []
    for number, line in enumerate(file.read_text().split("\n")[:-1], 1):
        try:
            rows.append(DraftRow.model_validate_json(line))
        except ValidationError:
            log.warning("line %d of %s is no row of this bench: what it measured is measured again", number, file)
    return rows


def table(rows: Sequence[DraftRow], pairs: Sequence[PairRow]) -> str:
    """The rows for people, with the ratios below."""
    worth = f"{'loss':>9}{'EAL':>7}{'val. AL':>9}{'AL':>8}  95 %"
    lines = [f"{'':10}{'side':6}{'seed':>5}{'tokens':>10}{'tok/s':>8}{'MiB':>7}{worth}"]
    for row in rows:
        eal = "-" if row.eal is None else f"{row.eal:.3f}"
        cost = f"{row.tokens:>10,}{row.tokens_per_s:>8.0f}{row.peak_memory_mib:>7.0f}"
        worth = f"{row.loss:>9.4f}{eal:>7}{row.al_validation:>9.3f}{row.al:>8.3f}  [{row.low:.3f}, {row.high:.3f}]"
        lines.append(
            f"{row.case:10}{row.side:6}{row.seed:>5}{cost}{worth}  K = {row.k}, {row.prompts} prompts, {row.by}"
        )
    for pair in pairs:
        lines.append(
            f"{pair.case:10}ours / peer, seed {pair.seed}: AL {pair.al_ratio:.3f} "
            f"[{pair.al_ratio_low:.3f}, {pair.al_ratio_high:.3f}], tokens/s {pair.speed_ratio:.2f}x, "
            f"memory {pair.memory_ratio:.2f}x"
        )
    return "\n".join(lines)


def _train_and_measure(
    pair: Pair, side: Literal["ours", "peer"], measure: Callable[[Path, Case, Path], Measurement]
) -> DraftRow:
    settings = pair.settings
    log.info("bench case=%s seed=%d side=%s steps=%d", settings.case, settings.seed, side, settings.steps)
    run = pair.run(side, timeout_s=6 * 3600)
    trained = pair.side(side, [run])
    served = measure(pair.draft(side), case(settings.case), pair.workspace / f"{side}-measured")
    k = served.k
    unseen = [prompt for prompt in served.per_prompt if prompt.domain != VALIDATION]
    validation = [prompt for prompt in served.per_prompt if prompt.domain == VALIDATION]
    drafts, accepted = [prompt.drafts for prompt in unseen], [prompt.accepted for prompt in unseen]
    interval = ratio_interval(drafts, accepted, confidence=0.95, resamples=10_000, seed=0)
    return DraftRow(
        case=settings.case,
        side=side,
        seed=settings.seed,
        optimizer=settings.optimizer,
        steps=settings.steps,
        tokens=sum(pair.tokens),
        tokens_per_s=trained.tokens_per_s,
        peak_memory_mib=trained.peak_memory_mib,
        loss=trained.loss,
        eal=trained.eal,
        k=k,
        al_validation=acceptance_length(
            [prompt.drafts for prompt in validation], [prompt.accepted for prompt in validation]
        ),
        al=acceptance_length(drafts, accepted),
        by=served.measured_by,
        low=interval.low,
        high=interval.high,
        per_position=tuple(
            round(sum(prompt.accepted_per_position[i] for prompt in unseen) / sum(drafts), 4) for i in range(k)
        ),
        prompts=len(unseen),
        counts=tuple(zip(drafts, accepted, strict=True)),
    )
