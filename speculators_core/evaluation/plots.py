"""PNG plots of a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.evaluation.report import EvaluationReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTS = ("per_position.png", "by_k.png", "by_domain.png")


def write_plots(report: EvaluationReport, output: Path) -> None:
    """Write acceptance per position, AL by K, and AL by domain with intervals into `output`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    output.mkdir(parents=True, exist_ok=True)
    for name, draw in zip(PLOTS, (_per_position, _by_k, _by_domain), strict=True):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        FigureCanvasAgg(figure)  # no pyplot: it keeps global state and is not safe in threads
        axes = figure.add_subplot()
        draw(axes, report)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(output / name, dpi=120)


def _per_position(axes: Axes, report: EvaluationReport) -> None:
    rates = report.acceptance.per_position
    bars = axes.bar(range(1, len(rates) + 1), rates)
    axes.bar_label(bars, [f"{rate:.0%}" for rate in rates])
    axes.set(xlabel="draft position", ylabel="share of drafts accepted", ylim=(0, 1), title="Acceptance by position")
    axes.set_xticks(range(1, len(rates) + 1))


def _by_k(axes: Axes, report: EvaluationReport) -> None:
    lengths = report.acceptance.by_k
    axes.plot(range(1, len(lengths) + 1), lengths, marker="o")
    axes.set(
        xlabel="K (drafted tokens a step)", ylabel="acceptance length", title="Acceptance length by K, from one run"
    )
    axes.set_xticks(range(1, len(lengths) + 1))
    axes.set_ylim(bottom=1)


def _by_domain(axes: Axes, report: EvaluationReport) -> None:
    groups = report.acceptance.by_domain
    positions = range(len(groups))
    for position, group in zip(positions, groups, strict=True):
        interval = group.interval
        ends = [[0.0], [0.0]] if interval is None else [[group.al - interval.low], [interval.high - group.al]]
        axes.errorbar([group.al], [position], xerr=ends, marker="o", capsize=3, color="C0")
    axes.set_yticks(list(positions), [f"{group.name} ({group.prompts})" for group in groups])
    axes.axvline(report.acceptance.al, linestyle=":", color="grey", label="all prompts")
    axes.set(xlabel="acceptance length", title="Acceptance length by domain", ylim=(-0.5, len(groups) - 0.5))
    axes.legend()
