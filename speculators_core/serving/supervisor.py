"""The supervisor: one version takes the traffic; a new one is let in beside it, observed, and kept or taken back.

    alias ─► admitted (its pair matches) ─► started ─► probed ─► takes over ─► window ─► proven
                   │ refused                   │ refused            │ rolled back: the displaced one serves again
                   ▼                           ▼                    ▼
                        what served goes on serving

The displaced engine stands by, idle, until the window is over: taking back is then a matter of moments. Where memory
holds only one engine, the old one is drained and ended first, and nothing answers until the new one is ready.
One thread: the proxy goes on serving while an engine is started.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from speculators_core.errors import DraftsmithError, EngineError, cause_of
from speculators_core.lifecycle.drift import CounterReading, note_window, window_between
from speculators_core.serving.config import ServeConfig
from speculators_core.serving.decisions import rollback_reason
from speculators_core.serving.economy import Advice, Economy
from speculators_core.serving.events import EventSink, Kind, ServeEvent
from speculators_core.serving.fleet import Fleet, Refused
from speculators_core.serving.signals import Signalled, interrupted_by_signals
from speculators_core.serving.version import Replica, ServedVersion

log = logging.getLogger(__name__)

_RETRY_S = 120.0
_RESTARTS = 3
_TROUBLE = (DraftsmithError, OSError, ValueError)
"""What a registry that is away, its tags, a version's files or a full disk raise: told, and what serves goes on."""


class VersionSource(Protocol):
    """Where a supervisor learns what is to be served.

    DraftsmithError, OSError or ValueError: the registry is away, or what it holds cannot be used; serving goes on.
    """

    def wanted(self) -> str:
        """The version that is to serve now, by the rules for moves by other hands."""
        ...

    def admit(self, version: str) -> ServedVersion:
        """Fetch and check a version; any DraftsmithError where it doesn't match what lies here, or isn't proven."""
        ...

    def take_back(self, version: str, why: str) -> None:
        """Move the alias from this version to the one before it; nothing happens where it names another by now."""
        ...


@dataclass
class Observed:
    """What a version in its window displaced, and until when it is observed (monotonic)."""

    displaced: Replica
    until: float


class Supervisor:
    """Serves one model until it is interrupted. See the module's docstring for what it does and why."""

    def __init__(
        self, model: str, source: VersionSource, config: ServeConfig, fleet: Fleet, home: Path, tell: EventSink
    ) -> None:
        self._model, self._source, self._config, self._fleet, self._home = model, source, config, fleet, home
        self._sink = tell
        self._observed: Observed | None = None
        self._acted_on: str | None = None
        self._retry_at = math.inf
        self._to_take_back: tuple[str, str] | None = None
        self._away = False
        self._deaths: list[float] = []
        self._noted: CounterReading | None = None
        self._refusal = "", ""
        self._warned: dict[str, str] = {}
        self._begin_economy()

    def run(self) -> None:
        """Start the wanted version, then follow the alias, until a signal raises Interrupted.

        Requests in flight then end, at most `drain_timeout_s`; a second signal cuts them.

        Raises:
            DraftsmithError: the first version may not serve or doesn't start; an engine died, or was ended for another,
                and could not be started again.
            Interrupted: a signal came.
        """
        with interrupted_by_signals():
            try:
                self.begin()
                while True:
                    time.sleep(self._config.poll_s)
                    self.look()
            except Signalled:
                self._tell("stopping", self._version())
                self._fleet.finish()
                raise
            finally:
                self._fleet.stop()
                self._tell("stopped")

    def look(self) -> None:
        """One round: keep an engine alive, count, judge, follow."""
        if self._fleet.dead():
            self._mend()
        self._fleet.close_drained()
        self._fleet.count()
        self._note()
        self._judge()
        self._weigh()
        self._tell_registry()
        self._follow()

    def begin(self) -> None:
        """Start the wanted version, give it the traffic. DraftsmithError where it may not serve or does not start."""
        wanted = self._acted_on = self._source.wanted()
        version = self._source.admit(wanted)
        self._tell("starting", wanted, forced_note(version))
        started = time.monotonic()
        self._fleet.let_in(self._fleet.start(version))
        self._tell("ready", wanted, address=self._fleet.address, seconds=time.monotonic() - started)

    # following the alias

    def _follow(self) -> None:
        serving = self._version()
        try:
            wanted = self._source.wanted()
        except _TROUBLE as error:
            if not self._away:
                self._tell("registry_away", serving, f"{cause_of(error)}; what is proven goes on serving")
            self._away = True
            return
        if self._away:
            self._tell("registry_back", serving)
        self._away = False
        if wanted == serving:
            self._acted_on = wanted
        elif wanted != self._acted_on or time.monotonic() > self._retry_at:
            self._acted_on, self._retry_at = wanted, math.inf
            self._roll(wanted)

    def _roll(self, wanted: str) -> None:
        """Let a version in; whatever prevents it, what serves goes on."""
        started = time.monotonic()
        try:
            version = self._source.admit(wanted)
            self._tell("rolling", wanted, forced_note(version))
            standby = self._fleet.standby
            back = standby is not None and standby.version == version
            away = self._change_to(version)
        except Refused as error:
            self._refuse(wanted, error.what)
            self._give_back(wanted, error.what, started)
        except _TROUBLE as error:
            reason = self._unless_down(error)
            self._retry_at = time.monotonic() + _RETRY_S  # what was missing may be there later
            self._refuse(wanted, reason)
        else:
            self._tell("rolled", wanted, "" if away is None else f"nothing answered for {away:.1f} s",
                       seconds=time.monotonic() - started if away is None else away)  # fmt: skip
            if back:
                self._conclude()

    def _refuse(self, version: str, reason: str) -> None:
        if self._refusal != (version, reason):  # one event an incident
            self._tell("refused", version, reason)
        self._refusal = version, reason

    def _change_to(self, version: ServedVersion) -> float | None:
        """Make the version live and begin its window; seconds without an engine, None where there were none.

        Raises: as `_put`.
        """
        displaced = self._live()
        away = self._put(version)
        self._observed = Observed(displaced, time.monotonic() + self._config.watch.window_s)
        self._begin_economy()
        return away

    def _put(self, version: ServedVersion, *, speculate: bool = True) -> float | None:
        """Send the traffic to an engine of the version: the one that stands by, one started beside, or one in place.

        Raises: as `Fleet.start`; what served before serves again then. EngineError: it does not start either.
        """
        fleet, before, standby = self._fleet, self._live(), self._fleet.standby
        if standby is not None and standby.running() and (standby.version, standby.speculates) == (version, speculate):
            fleet.let_in(standby)
            return None
        if self._has_room_for(version):
            fleet.let_in(fleet.start(version, speculate=speculate))
            return None
        for needed in (before.version, version):
            needed.require_unchanged(self._home)  # an engine that could not be started again is not given up
        gone = time.monotonic()
        try:
            fleet.vacate()
            fleet.let_in(fleet.start(version, speculate=speculate))
        except _TROUBLE as error:
            if fleet.live is None:
                self._restart(before, error)
            raise
        return time.monotonic() - gone

    def _restart(self, before: Replica, why: Exception) -> None:
        """Start again what was ended for another. EngineError, with both causes, where nothing serves now."""
        try:
            self._fleet.let_in(self._fleet.start(before.version, speculate=before.speculates))
        except _TROUBLE as error:
            raise EngineError(
                f"nothing serves: {cause_of(why)}; and version {before.version.version}, which was ended for that, "
                f"does not start again: {cause_of(error)}",
                mend="see the engines' logs, then start `draftsmith serve` again",
            ) from error

    def _unless_down(self, error: Exception) -> str:
        """Why something was not done; the error itself goes on where nothing serves any more."""
        if self._fleet.live is None:
            raise error
        return cause_of(error)

    def _has_room_for(self, version: ServedVersion) -> bool:
        self._fleet.clear()  # what stands by gives its memory up first
        return self._fleet.has_room_for(version)

    # judging what took over

    def _judge(self) -> None:
        observed, live = self._observed, self._live()
        if observed is None:
            return
        before, after = observed.displaced.version, live.version
        same = before.verifier_fingerprint == after.verifier_fingerprint
        reason = rollback_reason(
            live.traffic,
            observed.displaced.traffic,
            self._config.watch,
            same_verifier=same,
            registered_al=before.al if same and before.al is not None else after.al,
        )
        if reason is not None:
            self._roll_back(reason)
        elif time.monotonic() > observed.until:
            self._tell("proven", live.version.version)
            self._conclude()

    def _conclude(self) -> None:
        """The window is over: what stood by is not needed any more."""
        self._observed = None
        self._fleet.retire_standby()

    def _roll_back(self, reason: str) -> None:
        """Traffic first, then the alias."""
        observed, bad, started = self._observed, self._live(), time.monotonic()
        assert observed is not None
        target = observed.displaced.version
        try:
            self._change_to(target)
        except _TROUBLE as error:
            # what disappoints still answers; what was displaced no longer does
            but = self._unless_down(error)
            self._conclude()
            self._tell("refused", target.version, f"version {bad.version.version} disappoints ({reason}), but {but}")
            return
        self._conclude()
        self._give_back(bad.version.version, reason, started)

    def _give_back(self, bad: str, reason: str, started: float) -> None:
        why = f"version {bad}: {reason}"
        self._tell("rolled_back", self._version(), why, seconds=time.monotonic() - started)
        self._to_take_back = (bad, reason)
        self._tell_registry()

    def _tell_registry(self) -> None:
        """Move the alias away from what was taken back; again at the next look where that fails."""
        if self._to_take_back is None:
            return
        try:
            self._source.take_back(*self._to_take_back)
        except _TROUBLE as error:
            self._warn("the alias could not be moved back yet", error)
            return
        self._to_take_back = None

    # with drafts or without

    def _begin_economy(self) -> None:
        self._economy = Economy(self._config.auto_disable, self._config.watch.min_requests)

    def _weigh(self) -> None:
        """Turn speculation off, or on again, where that is faster; not while a version is observed."""
        live = self._live()
        if self._observed is not None:
            return
        advice = self._economy.look(live.now, speculates=live.speculates, now=time.monotonic())
        if advice is None:
            return
        try:
            self._heed(advice)
        except _TROUBLE as error:
            log.warning("speculation stays as it is: %s", self._unless_down(error))

    def _heed(self, advice: Advice) -> None:
        """Do what is advised. Raises: as `_put`, and what keeps us from telling whether there is room."""
        live, fleet = self._live(), self._fleet
        if advice.do == "report" or (advice.do == "alone" and not self._has_room_for(live.version)):
            self._tell("speculation_doubtful", live.version.version, advice.reason)  # a trial is worth no pause
        elif advice.do == "keep":
            fleet.retire_standby()
        else:
            drafting = advice.do == "drafting"
            self._put(live.version, speculate=drafting)
            if drafting:
                fleet.retire_standby()
            self._tell("speculation_on" if drafting else "speculation_off", live.version.version, advice.reason)

    # keeping alive and counting

    def _mend(self) -> None:
        """Replace a dead engine: by what stands by, where its version is in its window, else by a new one."""
        dead = self._fleet.bury()
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if at > now - 3600] + [now]
        self._tell("engine_died", dead.version.version)
        standby = self._fleet.standby
        if standby is not None and standby.running():
            self._fleet.let_in(standby)
            self._observed = None
            if standby.version.version == dead.version.version:  # it had only been tried without its draft
                self._tell("restarted", dead.version.version)
            else:
                self._give_back(dead.version.version, "its engine died", now)
            return
        if len(self._deaths) > _RESTARTS:
            raise EngineError(f"the engine of version {dead.version.version} died {len(self._deaths)} times in an hour")
        self._fleet.let_in(self._fleet.start(dead.version, speculate=dead.speculates))
        self._tell("restarted", dead.version.version)

    def _note(self) -> None:
        """Leave what was counted where the watch for drift looks; what can't be written is part of the next window."""
        live = self._live()
        reading = CounterReading(
            version=live.version.version, time=time.time(), drafts=live.now.spec.drafts, accepted=live.now.spec.accepted
        )
        if self._noted is not None and reading.version == self._noted.version:
            if reading.time < self._noted.time + self._config.watch.note_every_s:
                return
            window = window_between(self._noted, reading)
            if window is not None and window.drafts:
                try:
                    note_window(self._home, self._model, window)
                except _TROUBLE as error:
                    self._warn("what was counted could not be noted", error)
                    return
        self._noted = reading

    def _live(self) -> Replica:
        assert self._fleet.live is not None
        return self._fleet.live

    def _version(self) -> str | None:
        return None if self._fleet.live is None else self._fleet.live.version.version

    def _tell(
        self,
        kind: Kind,
        version: str | None = None,
        reason: str = "",
        *,
        address: str | None = None,
        seconds: float | None = None,
    ) -> None:
        seconds = None if seconds is None else round(seconds, 2)
        event = ServeEvent(
            event=kind, model=self._model, version=version, reason=reason, address=address, seconds=seconds
        )
        try:
            self._sink(event)
        except _TROUBLE as error:
            self._warn(f"the event {kind} could not be told", error)

    def _warn(self, what: str, error: Exception) -> None:
        """Log a failure once, until its cause is another."""
        if self._warned.get(what) != cause_of(error):
            log.warning("%s: %s", what, cause_of(error))
        self._warned[what] = cause_of(error)


def forced_note(version: ServedVersion) -> str:
    """Who promoted it against the gate, where somebody did."""
    return "" if version.forced_by is None else f"promoted against the gate by {version.forced_by}"
