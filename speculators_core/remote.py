"""A recipe's servers that somebody else runs: how they are started, and whether they fit before anything expensive."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core import registry
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.remote import CaptureTerms, greet
from speculators_core.errors import ConfigError
from speculators_core.evaluation.served import draft_digest, drafted_tokens, served_name
from speculators_core.formats.directory import read_config
from speculators_core.states.capture import capture_server
from speculators_core.states.handshake import at_store, server_command, shake_hands

if TYPE_CHECKING:
    from speculators_core.engine.runtime import Runtime
    from speculators_core.run import Run

log = logging.getLogger(__name__)


def capture_runtime(run: Run) -> Runtime:
    """The vLLM that captures."""
    return run.recipe.capture.runtime or run.recipe.runtime


def greet_servers(run: Run) -> None:
    """Ask every server of the recipe that somebody else runs; agree with the one that is to capture.

    Raises:
        ConfigError: it has no store.
        CaptureError: it says nothing, or captures something else.
        EngineError: one does not answer.
    """
    remote = run.recipe.runtime
    if remote.url is not None and run.recipe.capture.runtime is not None:
        log.info("the server at %s is vLLM %s", remote.url, greet(remote.url, remote.store).version)
    capturing = capture_runtime(run)
    if capturing.url is not None and run.recipe.capture.source == "engine":
        terms = CaptureTerms(
            layer_ids=run.layer_ids,
            states_dtype=run.recipe.capture.dtype,
            codec=run.recipe.capture.codec,
            verifier_fingerprint=run.fingerprint.digest,
        )
        shake_hands(capturing, terms, capture_command(run))


def capture_command(run: Run, *, model: str | None = None) -> list[str]:
    """The command that starts the server which captures for this recipe.

    Args:
        model: the verifier, where the server's host has it somewhere else.

    Raises:
        ConfigError: the recipe names no such server, or nothing says where its records go.
    """
    runtime, recipe = capture_runtime(run), run.recipe
    if runtime.url is None:
        raise ConfigError(
            "the recipe names no server of somebody else to capture with",
            mend="say where it will be reached and where it puts its records, e.g. --set 'capture.runtime="
            '{url: "http://gpu:8000", store: {config: {root: /shared/records}}}\'',
        )
    config = at_store(recipe.capture, runtime)
    spec = capture_server(
        config,
        run.verifier,
        run.layer_ids,
        run.fingerprint.digest,
        run.home / "records",
        max_model_len=min(recipe.data.max_length + 9, run.facts.max_position_embeddings),
        device="unknown",
        trust_remote_code=recipe.verifier.trust_remote_code,
    )
    if model is not None:
        spec = spec.model_copy(update={"model": model})
    return server_command(spec, runtime.url)


def draft_command(run: Run, draft: Path, *, model: str | None = None) -> list[str]:
    """The command that serves a draft for an evaluation.

    Args:
        model: the draft, where the server's host has it somewhere else.

    Raises:
        FormatError: it is no draft.
        ConfigError: such a draft is not served by its own directory.
    """
    config, kind = run.recipe.evaluation, str(read_config(draft).get("speculators_model_type"))
    if kind in registry.names() and registry.resolve(kind).stitch is not None:
        raise ConfigError(
            f"a draft of {kind} is served inside its verifier, which no command line does",
            mend="measure it with an engine of ours: give `runtime` an interpreter",
        )
    spec = ServerSpec(
        model=model or str(draft.absolute()),
        dtype=config.dtype,
        max_num_seqs=config.concurrency,
        kv_cache_gib=config.kv_cache_gib,
        enforce_eager=config.enforce_eager,
        speculative={"num_speculative_tokens": config.k or drafted_tokens(draft)},
        per_request_metrics=True,
        extra_args=("--served-model-name", served_name(draft_digest(draft))),
        trust_remote_code=run.recipe.verifier.trust_remote_code,
    )
    return server_command(spec, run.recipe.runtime.url)
