"""`draftsmith data …`: look at rows, and let the verifier write prompts or replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli_support import (
    NO_OVERRIDES,
    JsonOption,
    ProgressLine,
    RecipeArgument,
    SetOption,
    load,
    numbers,
    prepare_environment,
    show_model,
    show_table,
)

if TYPE_CHECKING:
    from speculators_core.data.coverage import Coverage
    from speculators_core.run import Run

app = typer.Typer(no_args_is_help=True, help="Look at token rows, let the verifier write prompts or replies.")

OutputOption = Annotated[
    Path, typer.Option("--output", "-o", help="JSON Lines file of conversations to write; it must not exist yet")
]


@app.command()
def sample(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    rows: Annotated[int, typer.Option(help="rows to show")] = 3,
) -> None:
    """Show prepared rows, what is supervised in colour or ⟦marked⟧, and what was left out of the data, and why."""
    run = open_run(recipe, overrides)
    from rich.console import Console

    from speculators_core import stages
    from speculators_core.data.preview import render_row
    from speculators_core.data.report import summed_up
    from speculators_core.data.rows import RowSet
    from speculators_core.data.template import ChatTemplate

    template = ChatTemplate.load(run.verifier, run.recipe.data.template_kwargs)
    prepared, console = stages.prepare(run), Console()
    found = RowSet.open(run.store.path(prepared.ref))
    coloured = console.color_system is not None and not console.no_color
    for index in range(min(rows, found.num_rows)):
        console.print(render_row(found.row(index), template, coloured=coloured))
    print(summed_up(prepared.summary))


@app.command()
def synthesise(
    recipe: RecipeArgument,
    output: OutputOption,
    overrides: SetOption = NO_OVERRIDES,
    prompts: Annotated[int, typer.Option(min=1, help="distinct prompts wanted")] = 1000,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Let the verifier write its own user turns: prompts for users who have none; goes on where it was cut off."""
    run = open_run(recipe, overrides)
    from speculators_core.data.config import SynthesisConfig
    from speculators_core.data.synthesise import synthesise as write
    from speculators_core.data.template import ChatTemplate
    from speculators_core.data.unfinished import reserved
    from speculators_core.engine.config import ServerSpec
    from speculators_core.engine.server import serve

    kwargs = run.recipe.data.template_kwargs
    config = SynthesisConfig(prompts=prompts, seed=seed, template_kwargs=kwargs)
    with reserved(output):
        spec = ServerSpec(
            model=str(run.verifier),
            dtype=run.recipe.capture.dtype,
            max_num_seqs=config.concurrency,
            kv_cache_gib=run.recipe.capture.kv_cache_gib,
            trust_remote_code=run.recipe.verifier.trust_remote_code,
        )
        with serve(run.recipe.runtime, spec, home=run.home) as engine, engine.client() as client:
            template, producer = ChatTemplate.load(run.verifier, kwargs), run.fingerprint.digest
            report = write(client, template, config, output, producer=producer, progress=run.progress)
    show_model(report, as_json)


@app.command()
def regenerate(
    recipe: RecipeArgument,
    output: OutputOption,
    overrides: SetOption = NO_OVERRIDES,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest reply in tokens")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Let the verifier answer the recipe's conversations anew; goes on where it was cut off.

    `data.replies: regenerate` in a recipe does this within the loop, and captures in the same requests.
    """
    run = open_run(recipe, overrides)
    from speculators_core.data.config import RegenerationConfig
    from speculators_core.data.conversations import read_conversations
    from speculators_core.data.unfinished import reserved
    from speculators_core.states.replies import answer

    data = run.recipe.data
    with reserved(output):
        report = answer(
            list(read_conversations(data.sources)),
            run.recipe.runtime,
            run.layer_ids,
            run.fingerprint.digest,
            run.recipe.capture,
            RegenerationConfig(temperature=temperature, max_new_tokens=max_new_tokens),
            output,
            records=None,
            verifier_dir=run.verifier,
            home=run.home,
            template_kwargs=data.template_kwargs,
            trust_remote_code=run.recipe.verifier.trust_remote_code,
            progress=run.progress,
        )
    show_model(report, as_json)


@app.command()
def vocabulary(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    sizes: Annotated[str | None, typer.Option(help="sizes to look at, e.g. 8192,16000; default: powers of two")] = None,
    enough: Annotated[
        float,
        typer.Option(min=0, max=1, help="share of the tokens of unseen replies that a draft shall be able to say"),
    ] = 0.995,
    plot: Annotated[Path | None, typer.Option(help="PNG file to write")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much of the data a draft vocabulary of each size covers, and suggest one.

    A smaller vocabulary makes each drafted token cheaper; a token that it lacks always ends a draft.
    """
    run = open_run(recipe, overrides)
    from speculators_core import stages
    from speculators_core.data.coverage import plot as draw
    from speculators_core.data.coverage import tabulate
    from speculators_core.data.rows import RowSet
    from speculators_core.store.files import require_place

    if plot is not None:
        require_place(plot)
    rows = RowSet.open(run.store.path(stages.prepare(run).ref))
    chosen = () if sizes is None else numbers("--sizes", sizes)
    table = tabulate(rows, run.facts.vocab_size, chosen, enough=enough, given=run.given_vocabulary)
    if plot is not None:
        draw(table, plot)
    if as_json:
        show_model(table, as_json)
        return
    lines = [(f"{row.size:,}", shares(row)) for row in table.sizes]
    if table.given is not None:
        lines.append((f"given: {table.given.size:,}", shares(table.given)))
    show_table("share of supervised tokens", lines)
    if table.suggested < table.verifier_size:
        print(f"suggested: draft_vocabulary: {table.suggested}  (the smallest here that says {enough:.1%})")
    else:
        print(f"suggested: draft_vocabulary: null  (all: no smaller one says {enough:.1%}; --enough asks for less)")
    if table.caution is not None:
        print(f"caution: {table.caution}")
    if plot is not None:
        print(f"plot: {plot}")


def shares(row: Coverage) -> str:
    """A size's coverage as one cell."""
    unseen = "" if row.unseen is None else f", unseen {row.unseen:.2%}"
    domains = ", ".join(f"{name} {share:.2%}" for name, share in row.by_domain.items())
    return f"training {row.train:.2%}{unseen}" + (f"  ({domains})" if len(row.by_domain) > 1 else "")


def open_run(recipe: Path, overrides: Sequence[str]) -> Run:
    """The recipe with its surroundings, for work that is no stage of the loop."""
    home = prepare_environment().home
    from speculators_core.run import Run

    return Run(load(recipe, overrides), home, progress=ProgressLine())
