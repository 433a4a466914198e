"""`draftsmith parity`: where a draft that trains well and serves badly goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_support import (
    NO_OVERRIDES,
    JsonOption,
    RecipeArgument,
    SetOption,
    by_name,
    load,
    prepare_environment,
    run_stages,
    show_table,
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(parity)


def parity(
    recipe: RecipeArgument,
    overrides: SetOption = NO_OVERRIDES,
    draft: Annotated[
        Path | None, typer.Option(help="a draft's directory; without it, the recipe's own, exported before")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="held-back prompts to answer")] = 8,
    dtype: Annotated[str, typer.Option(help="the engine's dtype; float32 shows smaller faults")] = "bfloat16",
    as_json: JsonOption = False,
) -> None:
    """Walk the parity ladder of a draft in a live engine, and name the first rung that breaks.

    Token ids, hidden states, draft logits, proposals, acceptance length: each is compared with what is computed here,
    from one run of the engine with the draft. Exit status 1 when a rung breaks.
    """
    from speculators_core.data.rows import RowSet
    from speculators_core.evaluation.parity import ParityConfig, walk_ladder

    if draft is None:
        results, run = run_stages(recipe, overrides, "export", as_json, show=False)
        draft, dataset = run.store.path(by_name(results, "export").ref), by_name(results, "prepare").ref
    else:
        from speculators_core import stages
        from speculators_core.run import Run

        run = Run(load(recipe, overrides), prepare_environment().home)
        dataset = stages.prepare(run).ref
    ladder = walk_ladder(
        draft,
        run.verifier,
        RowSet.open(run.store.path(dataset)),
        run.recipe.runtime,
        ParityConfig(prompts=prompts, dtype=dtype, kv_cache_gib=run.recipe.evaluation.kv_cache_gib),
        home=run.home,
        template_kwargs=run.recipe.data.template_kwargs,
        trust_remote_code=run.recipe.verifier.trust_remote_code,
    )
    if as_json:
        print(ladder.model_dump_json(indent=2))
    else:
        show_table(
            f"{ladder.algorithm} on vLLM {ladder.vllm}", [(f"{r.outcome:7} {r.name}", r.text) for r in ladder.rungs]
        )
        if (broken := ladder.broken) is not None:
            print(f"the first rung that breaks: {broken.name}")
    if ladder.broken is not None:
        raise typer.Exit(1)
