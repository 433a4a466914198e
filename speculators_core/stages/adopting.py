"""A draft that somebody else trained: converted, and seen to be served, before it is measured like one of our own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_core.errors import ConfigError, FormatError
from speculators_core.run import Run, StageResult, produce
from speculators_core.stages.versions import VERSIONS
from speculators_core.store import emptied, input_digest
from speculators_core.types import ArtifactRef, Json

if TYPE_CHECKING:
    from speculators_core.convert.options import ConvertOptions


def convert(run: Run, source: str, options: ConvertOptions) -> StageResult:
    """A foreign checkpoint as a draft of this recipe's verifier.

    Args:
        source: directory or hub id.

    Raises:
        ConfigError: the draft is of another algorithm than the recipe; and as `convert.read_foreign`.
        FormatError: somebody wrote to it meanwhile.
    """
    from speculators_core.convert.fetch import fetch_source

    found = fetch_source(source, home=run.home, allow_bin=options.allow_bin)
    inputs = {"source": found.digest(), "verifier": run.fingerprint.digest}
    settings: dict[str, Json] = {
        "options": options.model_dump(mode="json", exclude={"allow_bin"}),
        "name": run.published_name,
    }
    key = input_digest("convert", VERSIONS["draft"], {**inputs, **settings})

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.convert import convert as write

        read = fetch_source(source, home=run.home, allow_bin=options.allow_bin)
        done = write(read, emptied(workspace), run.verifier, run.published_name, options)
        if read.digest() != inputs["source"]:
            raise FormatError(f"{source} changed while it was read", mend="run the same command again")
        told = done.model_dump(mode="json", include={"algorithm", "layout", "notes"})
        return {"verifier": run.published_name, **told}

    result = produce(run, "convert", "draft", key, inputs, build, settings=settings)
    kind, wanted = result.summary["algorithm"], run.recipe.algorithm["kind"]
    if kind != wanted:
        raise ConfigError(
            f"the draft is of {kind}, and the recipe's algorithm is {wanted}",
            mend=f"say so, since the version will bear it: --set 'algorithm={{kind: {kind}}}'",
        )
    return result


def preflight_draft(run: Run, draft: ArtifactRef) -> StageResult:
    """Serve a finished draft for a few tokens on the recipe's runtime. EngineError where it does not load it."""
    inputs = {"draft": draft.digest, "verifier": run.fingerprint.digest, "runtime": run.runtime.key}
    key = input_digest("preflight-draft", VERSIONS["preflight"], inputs)

    def build(workspace: Path) -> dict[str, Any]:
        from speculators_core.preflight import serve_briefly

        return serve_briefly(run.recipe, run.store.path(draft), run.verifier, run.home)

    return produce(run, "preflight", "preflight", key, inputs, build)
