"""`draftsmith serve`: a deployment's champion behind a proxy, followed, observed, taken back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli_registry import DEFAULT_RUNTIME, as_runtime
from flows.cli_support import NO_OVERRIDES, JsonOption, SetOption, load, prepare_environment
from speculators_core.errors import ConfigError

if TYPE_CHECKING:
    from speculators_core.config import Recipe
    from speculators_core.engine.runtime import Runtime, RuntimeInfo
    from speculators_core.serving.config import ServeConfig
    from speculators_core.serving.events import ServeEvent
    from tasks.serving import RegistrySource


def serve(
    target: Annotated[
        str, typer.Argument(metavar="NAME|RECIPE[@ALIAS]", help="registered model, or a recipe of it; alias: champion")
    ],
    recipe: Annotated[Path | None, typer.Option(metavar="RECIPE", help="whose `serve` and `runtime` sections")] = None,
    overrides: SetOption = NO_OVERRIDES,
    runtime: Annotated[str | None, typer.Option(help="interpreter of the vLLM that serves, not the recipe's")] = None,
    verifier: Annotated[str | None, typer.Option(help="where the verifier lies now, if not where it was")] = None,
    print_as: Annotated[
        Literal["command", "compose", "kubernetes"] | None,
        typer.Option("--print", help="serve nothing: print how others start this version"),
    ] = None,
    events: Annotated[
        Path | None, typer.Option(help="also append each event to this file, a JSON object a line")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve what the alias names, follow it without a failed request, and take back what disappoints.

    A version takes traffic only when its files are those that were registered, its verifier lies unchanged where it
    says, its cell of the matrix is proven for this vLLM, and a started engine is lossless with the acceptance that was
    measured. For a window after that the displaced engine stands by: a fall of acceptance, failed requests or slower
    tokens bring it back at once, in the registry too. Clients ask at http://127.0.0.1:8000 for the model NAME
    (`serve.host`, `serve.port`). SIGTERM to this process or its group lets requests in flight end (systemd, which
    signals every process: KillMode=mixed).
    """
    home = prepare_environment().home
    if events is not None:
        from speculators_core.store import storage_errors

        with storage_errors(events, "opening the file of events"), events.open("ab"):
            pass
    name, _, alias = target.partition("@")
    named = Path(name) if Path(name).suffix in (".yaml", ".yml") else recipe
    loaded = None if named is None else load(named, overrides)
    config = _alone(overrides) if loaded is None else loaded.serve
    chosen = _runtime(runtime, loaded)
    model = loaded.deployment if loaded is not None and named is not recipe else name
    from speculators_core.engine.runtime import probe_runtime
    from tasks.serving import RegistrySource, serve_model

    info = probe_runtime(chosen, home=home)
    source = RegistrySource(
        model,
        alias or "champion",
        info,
        verifier=verifier,
        trust_remote_code=loaded is not None and loaded.verifier.trust_remote_code,
    )
    if print_as is not None:
        print(_rendered(print_as, source, config, str(chosen.python), info, home), end="")
        return

    def tell(event: ServeEvent) -> None:
        say(event.model_dump_json(exclude_none=True) if as_json else _line(event))
        if events is not None:
            from speculators_core.serving.events import append_event

            append_event(events, event)

    serve_model(source, model, config, chosen, tell)


def say(line: str) -> None:
    """Print a line; where its reader has left (a pipe to `tee` and Ctrl-C), this and all that follows is dropped."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _alone(overrides: list[str]) -> ServeConfig:
    """Settings where no recipe is named: the defaults, and `--set serve.…`."""
    from speculators_core.config import apply_override, validate
    from speculators_core.serving.config import ServeConfig

    content: dict[str, dict[str, object]] = {}
    for override in overrides:
        if not override.startswith("serve."):
            raise ConfigError(f"--set {override} needs a recipe", mend="name one with --recipe; without, only serve.…")
        apply_override(content, override)
    return validate(ServeConfig, content.get("serve", {}), where="--set serve")


def _runtime(text: str | None, recipe: Recipe | None) -> Runtime:
    chosen = as_runtime(text or DEFAULT_RUNTIME) if text or recipe is None else recipe.runtime
    if chosen.python is None:
        raise ConfigError(
            "`serve` starts its engines itself, and this runtime is a server of somebody else",
            mend="give --runtime an interpreter with vLLM; `--print command` prints what that somebody has to start",
        )
    return chosen


def _rendered(
    form: Literal["command", "compose", "kubernetes"],
    source: RegistrySource,
    config: ServeConfig,
    python: str,
    runtime: RuntimeInfo,
    home: Path,
) -> str:
    from speculators_core.serving.render import render, settled_directory

    version = source.admit(source.wanted())
    model = settled_directory(version, home / "serving")
    return render(form, version, config, model, python=python, vllm=runtime.vllm, device=runtime.device)


def _line(event: ServeEvent) -> str:
    """An event for a reader."""
    import time

    parts = [time.strftime("%H:%M:%S", time.localtime(event.time)), event.model, event.event.replace("_", " ")]
    parts += [f"version {event.version}"] if event.version else []
    parts += [f"at {event.address}"] if event.address else []
    parts += [f"({event.seconds:.1f} s)"] if event.seconds is not None else []
    return " ".join(parts) + (f": {event.reason}" if event.reason else "")


def add_to(app: typer.Typer) -> None:
    """Make it a command of `draftsmith`."""
    app.command()(serve)
