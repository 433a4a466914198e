"""Served acceptance against the registered one: the part of a watch that looks at traffic."""

from __future__ import annotations

import logging
import os
import time

import httpx
from pydantic import ValidationError

from speculators_core.engine.metrics import read_spec_decode
from speculators_core.errors import EngineError
from speculators_core.lifecycle.drift import (
    CounterReading,
    DriftVerdict,
    Registered,
    follow,
    judge,
    note_incident,
    note_window,
    read_incident,
    read_windows,
    window_between,
    windows_path,
)
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, RUNTIME_TAG, cell_of, number_of
from speculators_core.store import write_atomic
from tasks.adapters.redaction import redact
from tasks.events import TrafficDrifted
from tasks.planning import Situation
from tasks.site import is_variable

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


def watch_traffic(situation: Situation, recipe: str, metrics: str | None) -> DriftVerdict | None:
    """Take a reading where an address is given, judge what was counted, and tell once when acceptance has fallen.

    Returns the verdict; None where nothing serves, or what serves was never measured.

    Raises:
        EngineError: the engine's counters cannot be read.
    """
    version, run = situation.serving, situation.run
    if version is None or (expected := registered(situation, version)) is None:
        return None
    home, model, now = run.home, run.recipe.deployment, time.time()
    if metrics is not None:
        take_reading(situation, version, metrics, now)
    verdict = judge(read_windows(home, model), expected, version, now=now, config=run.recipe.lifecycle.drift)
    before = read_incident(home, model, version)
    after = follow(before, verdict, version, now=now)
    note_incident(home, model, after)
    log.info("traffic of %s version %s: %s, %s", model, version, verdict.state, verdict.reason)
    if after is not None and before is None:
        assert verdict.al is not None
        TrafficDrifted(
            deployment=model,
            version=version,
            recipe=recipe,
            reasons=(verdict.reason,),
            al=verdict.al,
            limit=verdict.limit,
        ).emit(f"version {version} since {after.since}")
    return verdict


def registered(situation: Situation, version: str) -> Registered | None:
    """The acceptance length that is expected of a version on the verifier and runtime that are there now."""
    tags, world = situation.view.tags[version], situation.world
    cell = cell_of(tags, verifier_fingerprint=world.verifier.digest, runtime_key=world.runtime_key)
    if cell.al is None:
        return None
    first = (tags.get(FINGERPRINT_TAG), tags.get(RUNTIME_TAG)) == cell.pair.key
    return Registered(al=cell.al, al_low=number_of(tags.get("al.low")) if first else None)


def take_reading(situation: Situation, version: str, address: str, now: float) -> None:
    """Read an engine's counters, and note what they counted since the last reading as a window of this version.

    Raises:
        EngineError: it does not answer, or nothing says where it is.
    """
    home, model = situation.run.home, situation.run.recipe.deployment
    if is_variable(address):
        name, address = address, os.environ.get(address, "")
        if not address:
            raise EngineError(
                f"the counters of {model} cannot be read: {name}, which should hold their address, is not set",
                mend=f"export {name}=… where the workers run",
            )
    try:
        text = httpx.get(address, timeout=_TIMEOUT_S).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(
            f"the counters of {model} cannot be read at {redact(address)}: {type(error).__name__}",
            mend="see that its engine runs, or put the address right in the site's file (watch.metrics)",
        ) from error
    counted = read_spec_decode(text)
    after = CounterReading(version=version, time=now, drafts=counted.drafts, accepted=counted.accepted)
    path = windows_path(home, model).with_suffix(".reading.json")
    try:
        before = CounterReading.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        before = None
    if (window := window_between(before, after)) is not None:
        note_window(home, model, window)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda part: part.write_text(after.model_dump_json()))
