"""Engines beside a training that asks them for states: started, checked, kept alive, and gone with it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.data.rows import RowSet
from speculators_core.engine.remote import CaptureTerms, RecordStore
from speculators_core.engine.runtime import probe_runtime
from speculators_core.errors import ConfigError
from speculators_core.run import Run
from speculators_core.stages.states import answers_of, require_same_rendering
from speculators_core.states.config import CaptureConfig, OnlineRequest, Seat
from speculators_core.types import ArtifactRef

if TYPE_CHECKING:
    from speculators_core.states.keeper import Station

log = logging.getLogger(__name__)
PLACE = ".online"


@contextmanager
def streaming(run: Run, dataset: ArtifactRef, workspace: Path) -> Iterator[OnlineRequest]:
    """Keep the recipe's engines for the length of a `with` block; what training is told of them.

    Rows that are kept stay in the workspace for a run that goes on; records do not.

    Raises:
        ConfigError: such states cannot be streamed, or engines and trainer do not fit into memory.
        DiskSpaceError: the rows that are kept do not fit on the disk.
        EngineError, CaptureError, DataError: an engine or its store does not start, it captures something else, or
            renders other ids.
    """
    from speculators_core.stages.memory import require_memory
    from speculators_core.states.book import AddressBook
    from speculators_core.states.capture import bytes_per_token, context_for, require_disk
    from speculators_core.states.handshake import server_command
    from speculators_core.states.keeper import keep_engines
    from speculators_core.states.kept import bytes_to_keep
    from speculators_core.states.online import keep_answers
    from speculators_core.states.stores import provided_store, room_of

    recipe, config, place = run.recipe, run.recipe.hidden_states, workspace / PLACE
    if recipe.capture.source != "engine":
        raise ConfigError(
            f"hidden_states.mode is {config.mode}, but capture.source is {recipe.capture.source}: only engines stream",
            mend="set hidden_states.mode to offline",
        )
    rows = RowSet.open(run.store.path(dataset))
    lengths = [rows.length(number) for number in range(rows.num_rows)]
    longest = max(lengths)
    context = context_for(longest, run.facts)
    book, kept = AddressBook(place / "engines.json"), place / "kept"
    per_token = bytes_per_token(run.facts, run.layer_ids, recipe.capture.dtype)
    to_keep = bytes_to_keep(kept, lengths, rows.splits, per_token, config.cache_gib * 2**30)
    require_disk(place, to_keep, lower="lower hidden_states.cache_gib, or take fewer rows (data.max_rows)")

    def stations_of(capture: CaptureConfig) -> list[Station]:
        return [
            station(run, capture, seat, place / f"engine-{number}", context)
            for number, seat in enumerate(config.engines)
        ]

    lent = room_of(recipe.capture, longest, per_token, len(config.engines))
    require_memory(run, stations_of(recipe.capture), lent)
    with provided_store(recipe.capture, longest, per_token, run.home, len(config.engines)) as capture:
        stations = stations_of(capture)
        request = OnlineRequest(
            dataset=str(rows.path),
            dataset_digest=dataset.digest,
            terms=CaptureTerms(
                layer_ids=run.layer_ids,
                states_dtype=capture.dtype,
                codec=capture.codec,
                verifier_fingerprint=run.fingerprint.digest,
                context=longest + 1,
            ),
            command=tuple(server_command(stations[0].spec, stations[0].runtime.url)),
            hidden_size=run.facts.hidden_size,
            book=str(book.path),
            cache=str(kept),
            capture=capture,
            states=config,
            ranks=recipe.training.processes,
            without_last=recipe.data.replies == "regenerate",
        )
        if request.without_last and (number := keep_answers(rows, answers_of(run), request)):
            log.info("%d rows have the states that their replies left", number)
        try:
            with keep_engines(
                stations,
                book,
                home=run.home,
                check=lambda engine: require_same_rendering(run, rows, engine),
                restarts=config.restarts,
            ):
                yield request
        finally:
            for number in range(len(stations)):
                shutil.rmtree(place / f"engine-{number}", ignore_errors=True)


def station(run: Run, capture: CaptureConfig, seat: Seat, directory: Path, context: int) -> Station:
    """How the engine of a seat is started, and where its records go: `capture` names the store of our own engines.

    Raises:
        ConfigError: its runtime is another vLLM than the one that the states are kept under.
    """
    from speculators_core.states.capture import capture_server, records_config
    from speculators_core.states.handshake import at_store
    from speculators_core.states.keeper import Station

    runtime = seat.runtime or run.recipe.capture.runtime or run.recipe.runtime
    config = capture if runtime.url is None else at_store(run.recipe.capture, runtime)
    found, wanted = probe_runtime(runtime, home=run.home), run.capture_runtime
    if found.key != wanted.key:
        raise ConfigError(
            f"hidden_states.engines: the runtime {runtime.name!r} of an engine is {found.describe()}, but states count "
            f"as captured by {wanted.describe()}: one set would mix what both compute",
            mend="give each engine a runtime of that version, build, device and model runner, or name this one as "
            "capture.runtime",
        )
    spec = capture_server(
        config,
        run.verifier,
        run.layer_ids,
        run.fingerprint.digest,
        directory,
        max_model_len=context,
        device=found.device,
        trust_remote_code=run.recipe.verifier.trust_remote_code,
    )
    store = runtime.store or RecordStore(backend=config.backend, config=records_config(config, directory))
    return Station(runtime, store, spec.model_copy(update={"cores": seat.cores}))
