"""A candidate's report as one HTML page that needs nothing else: styles and charts are in it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.evaluation.candidate import (
    Arm,
    CandidateReport,
    cost_rows,
    domain_rows,
    number,
    part_rows,
    span,
    speed_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEMPLATE = Path(__file__).with_name("page.html.j2")
_COLOURS = {"candidate": "#2563a8", "incumbent": "#b26a00", "n-gram": "#6b7785", "no speculation": "#6b7785"}


def to_html(report: CandidateReport) -> str:
    """The page. Every text of the report is escaped; the charts are inline SVG."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        r=report,
        arm_rows=[
            (arm.label, number(arm.al), span(arm.interval), number(arm.tokens_per_step),
             number(arm.tokens_per_second, 0), arm.note)
            for arm in report.arms
        ],
        domain_head=["domain", *(arm.label for arm in report.arms if arm.domains)],
        domain_rows=domain_rows(report),
        speed_rows=speed_rows(report),
        part_rows=part_rows(report),
        cost_rows=cost_rows(report),
        charts={name: Markup(svg) for name, svg in charts(report).items()},  # made by us, of numbers
    )  # fmt: skip


def charts(report: CandidateReport) -> dict[str, str]:
    """Name → inline SVG; empty where there is nothing to draw."""
    drawn: dict[str, tuple[bool, Callable[[Figure], None]]] = {
        "domains": (any(arm.domains for arm in report.arms), lambda figure: _domains(figure.add_subplot(), report)),
        "positions": (
            any(arm.per_position for arm in report.arms), lambda figure: _positions(figure.add_subplot(), report)
        ),
        "speed": (bool(report.speeds), lambda figure: _speed(figure.add_subplot(), report)),
        "training": (bool(report.curves), lambda figure: _training(figure, report)),
    }  # fmt: skip
    return {name: _svg(name, draw) if there else "" for name, (there, draw) in drawn.items()}


def _svg(name: str, draw: Callable[[Figure], None]) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.StringIO()
    # text stays text, and ids do not depend on the time: the same report is the same page
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "draftsmith", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # several charts share the page: each keeps its ids to itself
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)


def _domains(axes: Axes, report: CandidateReport) -> None:
    arms = [arm for arm in report.arms if arm.domains]
    names = sorted({group.name for arm in arms for group in arm.domains})
    counts = {group.name: group.prompts for arm in arms for group in arm.domains}
    for index, arm in enumerate(arms):
        groups = {group.name: group for group in arm.domains}
        for row, name in enumerate(names):
            if (group := groups.get(name)) is None:
                continue
            ends = group.interval
            error = [[0.0], [0.0]] if ends is None else [[group.al - ends.low], [ends.high - group.al]]
            place = row + 0.18 * (index - (len(arms) - 1) / 2)
            axes.errorbar(
                [group.al], [place], xerr=error, marker="o", capsize=3, color=_COLOURS[arm.name],
                label=arm.label if row == 0 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(names)), [f"{name} ({counts[name]})" for name in names])
    axes.set(xlabel="acceptance length", ylim=(-0.6, len(names) - 0.4))
    axes.legend(frameon=False)


def _positions(axes: Axes, report: CandidateReport) -> None:
    arms: list[Arm] = [arm for arm in report.arms if arm.per_position]
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        places = [i + 1 + width * (index - (len(arms) - 1) / 2) for i in range(len(arm.per_position))]
        bars = axes.bar(places, arm.per_position, width, color=_COLOURS[arm.name], label=arm.label)
        axes.bar_label(bars, [f"{rate:.0%}" for rate in arm.per_position], fontsize=8)
    axes.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1))
    axes.set_xticks(range(1, max(len(arm.per_position) for arm in arms) + 1))
    axes.legend(frameon=False)


def _speed(axes: Axes, report: CandidateReport) -> None:
    places = range(len(report.speeds))
    for shift, values, label, colour in (
        (-0.2, [s.with_ for s in report.speeds], "with the draft", _COLOURS["candidate"]),
        (0.2, [s.without for s in report.speeds], "without", _COLOURS["no speculation"]),
    ):
        bars = axes.bar([place + shift for place in places], values, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], fontsize=8)
    axes.set_xticks(list(places), [str(s.concurrency) for s in report.speeds])
    axes.set(xlabel="requests at once", ylabel="tokens/s")
    axes.legend(frameon=False)


def _training(figure: Figure, report: CandidateReport) -> None:
    for index, curve in enumerate(report.curves):
        axes = figure.add_subplot(1, len(report.curves), index + 1)
        steps, values = zip(*curve.points, strict=True)
        axes.plot(steps, values, color=_COLOURS["candidate"], marker="o" if len(steps) < 10 else None)
        axes.set(xlabel="step", title=curve.name)
