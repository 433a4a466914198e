"""`draftsmith parity`: where a draft that trains well and serves badly goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_support import NO_OVERRIDES, JsonOption, RecipeArgument, SetOption, by_name, run_stages, show_table


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
    last = "export" if draft is None else "prepare"
    results, run = run_stages(recipe, overrides, last, as_json, show=False)
    from speculators_core.data.rows import RowSet
    from speculators_core.evaluation.parity import ParityConfig, walk_ladder

    ladder = walk_ladder(
        draft or run.store.path(results[-1].ref),
        run.verifier,
        RowSet.open(run.store.path(by_name(results, "prepare").ref)),
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
