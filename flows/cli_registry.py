"""`draftsmith promote`, `rollback`, `history`, `matrix`, `support`: what is registered, what serves, what is proven."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli_support import (
    NO_OVERRIDES,
    JsonOption,
    SetOption,
    by_name,
    evaluated,
    model_of,
    prepare_environment,
    print_table,
    run_stages,
    show_model,
    show_table,
)
from speculators_core.errors import ConfigError

if TYPE_CHECKING:
    from speculators_core.engine.runtime import Runtime
    from speculators_core.lifecycle.matrix import Cell
    from tasks.versions import Moved

DEFAULT_RUNTIME = ".venv-vllm/bin/python"

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL|RECIPE", help="registered model (a recipe's `deployment`), or the recipe")
]
WhyOption = Annotated[str, typer.Option("--why", help="reason, for the audit log")]
RuntimeOption = Annotated[str, typer.Option("--runtime", help="the vLLM that will serve: an interpreter, or a URL")]


def promote(
    target: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="a recipe file, or a registered model")],
    version: Annotated[str | None, typer.Argument(help="with MODEL: the version that shall serve")] = None,
    overrides: SetOption = NO_OVERRIDES,
    force: Annotated[bool, typer.Option("--force", help="with MODEL: even if the gate did not pass it")] = False,
    why: WhyOption = "",
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    verifier: Annotated[str | None, typer.Option(help="with MODEL: where its verifier lies now")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the gate, and move the alias `champion` when it passes; or make a registered version the champion.

    `promote RECIPE` holds the recipe's evaluated draft against what serves. `promote MODEL VERSION` measures nothing:
    the version must be proven for its verifier, as that lies on disk now, and for the runtime, and what serves must
    still be what the gate compared it with. `--force` waives the gate, is written to the audit log, and needs a reason.
    """
    if version is None:
        if force or verifier or not Path(target).suffix:
            raise ConfigError(
                f"promote {target} names neither a recipe nor a version",
                mend="draftsmith promote RECIPE.yaml, or draftsmith promote MODEL VERSION [--force --why REASON]",
            )
        _promote_recipe(Path(target), overrides, as_json)
        return
    if overrides:
        raise ConfigError("--set belongs to `promote RECIPE`")
    if force and not why:
        raise ConfigError("--force needs a reason", mend="add --why REASON: it is written to the audit log")
    home = prepare_environment().home
    from speculators_core.engine.runtime import probe_runtime
    from tasks.versions import promote_by_name

    key = probe_runtime(as_runtime(runtime), home=home).key
    moved = promote_by_name(target, version, key, force=force, why=why, verifier=verifier)
    show_model(moved, as_json, describe(moved))


def _promote_recipe(recipe: Path, overrides: list[str], as_json: bool) -> None:
    results, run = evaluated(recipe, overrides)
    from tasks.release import promote_version, register_draft

    draft = by_name(results, "export").ref
    registered = register_draft(run, draft, by_name(results, "evaluate").ref)
    outcome = promote_version(run, registered, draft, by_name(results, "prepare").ref)
    text = f"{outcome.outcome}: {'; '.join(outcome.reasons)}"
    if outcome.awaits_approval:
        text += f"\nwaits for approval: draftsmith promote {outcome.model} {outcome.version}"
    show_model(outcome, as_json, text)


def rollback(
    model: ModelArgument,
    why: WhyOption = "",
    check: Annotated[bool, typer.Option(help="see that draft and verifier are whole before anything moves")] = True,
    as_json: JsonOption = False,
) -> None:
    """Undo the last move of the champion: the verifier and draft that served before serve again."""
    prepare_environment()
    from tasks.versions import rollback_model

    moved = rollback_model(model_of(model), why=why, check=check)
    show_model(moved, as_json, describe(moved))


def history(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Every version with what the gate said of it, failed ones too, and every move of the champion."""
    prepare_environment()
    from tasks.versions import history as read

    model = model_of(model)
    found = read(model)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    show_table(
        f"{model}: versions",
        [
            (
                f"{line.version}  {', '.join(line.aliases)}".rstrip(),
                f"{line.created}  {line.algorithm}  {line.verifier}  vLLM {line.vllm}  "
                f"AL {'-' if line.al is None else f'{line.al:.3f}'}  gate {line.outcome}"
                + "".join(f"\n{text}" for text in (line.reasons, line.approval, line.report) if text),
            )
            for line in found.versions
        ],
    )
    from datetime import UTC, datetime

    show_table(
        f"{model}: moves",
        [
            (
                datetime.fromtimestamp(move.time, UTC).isoformat(timespec="seconds"),
                f"{move.action} {move.from_version or '-'} → {move.to_version or '-'} by {move.who}"
                + (" FORCED" if move.forced else "")
                + (" (cut off)" if move.state == "intended" else "")
                + f"\n{move.why}",
            )
            for move in found.standing_moves()
        ],
    )


def matrix(
    model: ModelArgument,
    test: Annotated[str | None, typer.Option("--test", metavar="VERSION", help="measure this version first")] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="with --test: whose verifier, runtime and prompts")
    ] = None,
    overrides: SetOption = NO_OVERRIDES,
    as_json: JsonOption = False,
) -> None:
    """Draft version × verifier × vLLM: proven, failed or untested. `--test VERSION --recipe RECIPE` fills a cell."""
    if (test is None) != (recipe is None):
        raise ConfigError("--test and --recipe go together", mend="name both the version and the recipe to test it by")
    model = model_of(model)
    if test is not None and recipe is not None:
        results, run = run_stages(recipe, overrides, "prepare", as_json, show=False)
        from tasks.judging import measure_version

        measure_version(run, model, test, results[-1].ref)
    else:
        prepare_environment()
    from tasks.versions import compatibility

    found = compatibility(model)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    from rich.table import Table

    table = Table("version", title=f"{model}: draft × verifier × vLLM", title_justify="left")
    for pair in found.pairs:
        verifier = f"{pair.verifier or 'verifier'} {pair.verifier_fingerprint[:12]}"
        table.add_column(f"{verifier}\nvLLM {pair.vllm or '?'} {pair.runtime_key[:12]}")
    for row in found.rows:
        table.add_row(f"{row.version}  {', '.join(row.aliases)}", *(cell_text(cell) for cell in row.cells))
    print_table(table)


def support(
    architecture: Annotated[
        str | None, typer.Argument(help="one architecture of config.json, e.g. LlamaForCausalLM; without it, all")
    ] = None,
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    as_json: JsonOption = False,
) -> None:
    """Which verifiers each algorithm accepts, to train and to serve, asked of the code and of this vLLM."""
    home = prepare_environment().home
    from speculators_core.engine.capabilities import probe_capabilities
    from speculators_core.engine.runtime import probe_runtime
    from speculators_core.lifecycle.support import build_table, hf_model_types, only

    chosen = as_runtime(runtime)
    found = probe_capabilities(chosen, home=home)
    table = build_table(found, hf_model_types(), vllm=probe_runtime(chosen, home=home).vllm)
    if architecture is not None:
        known = set(found.verifiers) | {name for one in table.algorithms for name in one.train}
        if architecture not in known:
            near = difflib.get_close_matches(architecture, known, n=3)
            raise ConfigError(
                f"neither vLLM {table.vllm} nor transformers knows {architecture}",
                mend=f"did you mean {', '.join(near)}?" if near else "`draftsmith support` lists all",
            )
        lines = only(table, architecture)
        if as_json:
            print(json.dumps({name: {"train": t, "serve": s} for name, (t, s) in lines.items()}, indent=2))
        else:
            show_table(
                f"{architecture}, vLLM {table.vllm}",
                [(name, f"train: {train}\nserve: {serve}") for name, (train, serve) in lines.items()],
            )
        return
    if as_json:
        print(table.model_dump_json(indent=2))
        return
    for one in table.algorithms:
        by_engine = [name for name, road in one.train.items() if road == "engine"]
        by_hf = [name for name, road in one.train.items() if road == "hf"]
        show_table(
            f"{one.algorithm}{': ' if one.note else ''}{one.note}",
            [
                (f"train ({len(by_engine)})", f"captured by vLLM: {', '.join(by_engine)}"),
                (f"train ({len(by_hf)})", f"captured by a Hugging Face forward: {', '.join(by_hf)}"),
                (f"serve ({len(one.serve)})", f"no: {one.refused}" if one.refused else ", ".join(one.serve)),
            ],
        )
    show_table(
        "how verifiers end",
        [(family.name, f"{family.ending}\n{', '.join(family.architectures)}") for family in table.families],
    )
    show_table(f"not loadable by this vLLM {table.vllm}", list(table.unloadable.items()))


def cell_text(cell: Cell) -> str:
    """A cell in one line: the state, the outcome where that says more, and the acceptance length."""
    said = f" ({cell.outcome})" if cell.state == "untested" and cell.outcome else ""
    return f"{cell.state}{said}" + ("" if cell.al is None else f"  AL {cell.al:.3f}")


def as_runtime(text: str) -> Runtime:
    """A runtime from an interpreter's path or a server's URL."""
    from speculators_core.engine.runtime import Runtime

    return Runtime(url=text) if "://" in text else Runtime(python=text)


def describe(moved: Moved) -> str:
    """What a move did, in a sentence."""
    if not moved.changed:
        noted = "; that it may by force is in the audit log now, with your reason" if moved.noted else ""
        return f"version {moved.version} of {moved.model} serves already{noted}"
    return (
        f"{moved.model}: version {moved.version} serves, after {moved.displaced or '-'} ({moved.seconds:.1f} s)\n"
        f"its verifier: {moved.verifier} ({moved.verifier_fingerprint[:12]}), its runtime: vLLM {moved.vllm}"
    )


def add_to(app: typer.Typer) -> None:
    """Make these commands of `draftsmith`."""
    for command in (promote, rollback, history, matrix, support):
        app.command()(command)
