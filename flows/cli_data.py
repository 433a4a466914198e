"""`draftsmith data …`: look at rows, and let the verifier write prompts or replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    prepare_environment,
    run_stages,
    show_model,
)

if TYPE_CHECKING:
    from speculators_core.config import Recipe
    from speculators_core.engine.server import Engine

app = typer.Typer(no_args_is_help=True, help="Look at token rows, let the verifier write prompts or replies.")

OutputOption = Annotated[Path, typer.Option("--output", "-o", help="JSON Lines file of conversations to write")]


@app.command()
def sample(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    rows: Annotated[int, typer.Option(help="rows to show")] = 3,
) -> None:
    """Show prepared rows in colour: what is supervised and what is not."""
    results, run = run_stages(recipe, overrides, "prepare", as_json=False)
    from rich.console import Console

    from speculators_core.data.preview import render_row
    from speculators_core.data.rows import RowSet
    from speculators_core.data.template import ChatTemplate

    template = ChatTemplate.load(run.verifier, run.recipe.data.template_kwargs)
    found, console = RowSet.open(run.store.path(results[-1].ref)), Console()
    for index in range(min(rows, found.num_rows)):
        console.print(render_row(found.row(index), template))


@app.command()
def synthesise(
    recipe: RecipeArgument,
    output: OutputOption,
    overrides: SetOption = NO_OVERRIDES,
    prompts: Annotated[int, typer.Option(min=1, help="distinct prompts wanted")] = 1000,
    seed: Annotated[int, typer.Option(help="seed of the draws")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Let the verifier write its own user turns: prompts for users who have none."""
    home = prepare_environment().home
    loaded = load(recipe, overrides)
    from speculators_core.data.config import SynthesisConfig
    from speculators_core.data.synthesise import synthesise as write
    from speculators_core.data.template import ChatTemplate

    kwargs = loaded.data.template_kwargs
    template = ChatTemplate.load(Path(loaded.verifier.path), kwargs)
    config = SynthesisConfig(prompts=prompts, seed=seed, template_kwargs=kwargs)
    with verifier_engine(loaded, home) as engine, engine.client() as client:
        report = write(client, template, config, output, progress=ProgressLine())
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
    """Let the verifier answer the recipe's conversations anew; goes on where it was cut off."""
    home = prepare_environment().home
    loaded = load(recipe, overrides)
    from collections import Counter

    from speculators_core.data.config import RegenerationConfig
    from speculators_core.data.conversations import read_conversations
    from speculators_core.data.regenerate import regenerate as answer
    from speculators_core.data.template import ChatTemplate
    from speculators_core.verifier.facts import read_facts
    from speculators_core.verifier.fingerprint import fingerprint

    verifier, kwargs = Path(loaded.verifier.path), loaded.data.template_kwargs
    config = RegenerationConfig(temperature=temperature, max_new_tokens=max_new_tokens, template_kwargs=kwargs)
    dropped: Counter[str] = Counter()
    with verifier_engine(loaded, home) as engine, engine.client() as client:
        report = answer(
            read_conversations(loaded.data.sources, dropped),
            client,
            ChatTemplate.load(verifier, kwargs),
            read_facts(verifier),
            config,
            output,
            producer=fingerprint(verifier, home=home, template_kwargs=kwargs).digest,
            progress=ProgressLine(),
        )
    show_model(report, as_json)


@contextmanager
def verifier_engine(recipe: Recipe, home: Path) -> Iterator[Engine]:
    """The recipe's verifier, served alone."""
    from speculators_core.engine.config import ServerSpec
    from speculators_core.engine.server import serve

    spec = ServerSpec(
        model=str(Path(recipe.verifier.path).absolute()),
        dtype=recipe.evaluation.dtype,
        max_num_seqs=64,
        kv_cache_gib=recipe.evaluation.kv_cache_gib,
        trust_remote_code=recipe.verifier.trust_remote_code,
    )
    with serve(recipe.runtime, spec, home=home) as engine:
        yield engine
