"""The engines behind the proxy: which one takes the traffic, which stands by, which only finishes what it began."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.errors import EngineError, EvaluationError, cause_of
from speculators_core.serving.config import ServeConfig
from speculators_core.serving.decisions import fits_beside
from speculators_core.serving.probe import probe, refusal
from speculators_core.serving.proxy import SLOTS, Proxy
from speculators_core.serving.traffic import read_traffic
from speculators_core.serving.version import Replica, ServedVersion, start_replica

log = logging.getLogger(__name__)

_STEP_S = 0.1
_HUNG_S = 120.0


class Refused(EvaluationError):
    """A started engine did not show what it must before it takes traffic."""


class Fleet:
    """At most three engines: live, standing by, and draining. Not thread-safe; everything ends with `stop`."""

    def __init__(self, config: ServeConfig, runtime: Runtime, home: Path, directory: Path) -> None:
        """Start the proxy, with no engine yet. Raises as `Proxy` does.

        Args:
            directory: the proxy's files · home: state root.
        """
        self._config, self._runtime, self._home, self._directory = config, runtime, home, directory
        self.live: Replica | None = None
        self.standby: Replica | None = None
        self._draining: list[tuple[Replica, float]] = []
        self._answered = time.monotonic()
        self._proxy = self._start_proxy()

    @property
    def address(self) -> str:
        """Base URL for clients."""
        return self._proxy.address

    def start(self, version: ServedVersion, *, speculate: bool = True) -> Replica:
        """An engine of the version that has shown what it must; it has no traffic yet.

        Raises:
            Refused: it answers, but not as it must. EngineError: it does not start, or dies.
        """
        replica = start_replica(version, self._config.engine, self._runtime, self._home, speculate=speculate)
        try:
            with replica.engine.client(timeout_s=self._config.request_timeout_s) as client:
                found = probe(client, self._config.probe)
            log.info("version %s: %s", version.version, found)
            reason = refusal(found, self._config.probe, speculates=speculate, registered_al=version.al)
            if reason is not None:
                raise Refused(reason)
        except BaseException:
            replica.stop()
            raise
        return replica

    def has_room_for(self, version: ServedVersion) -> bool:
        """Whether its engine can be up beside the one that serves."""
        if self._config.engines != "auto":
            return self._config.engines == "beside"
        if probe_runtime(self._runtime, home=self._home).device != "cpu":
            return False
        kv_cache = int(self._config.engine.kv_cache_gib * 2**30)
        return fits_beside(psutil.virtual_memory().available, version.weights_bytes(), kv_cache)

    def let_in(self, replica: Replica) -> None:
        """Send it all new requests. What served before stands by, drained; what stood by before is retired.

        Raises: EngineError: the proxy does not take it. It is ended then, or stands by as before.
        """
        is_new = replica is not self.standby
        try:
            self._revive_proxy()
            if is_new:
                self.retire_standby()
                replica.slot = self._free_slot()
            self._proxy.open(replica.slot, replica.engine.base_url)
        except BaseException:
            if is_new:
                self._end(replica)  # nobody else knows of it
            raise
        if self.live is not None:
            self.count()  # all that it did until now is what its successor is held against
        self.standby, self.live = self.live, replica
        if self.standby is not None:
            self._proxy.drain(self.standby.slot)
        self._answered = time.monotonic()
        self.count()
        replica.begun = replica.now

    def retire_standby(self) -> None:
        """Let what stands by finish what it began; `close_drained` ends it then."""
        if self.standby is not None:
            self._draining.append((self.standby, time.monotonic() + self._config.drain_timeout_s))
        self.standby = None

    def clear(self) -> None:
        """End everything but the live engine, once it has finished what it began."""
        self.retire_standby()
        while self._draining:
            self.close_drained()
            time.sleep(_STEP_S)

    def vacate(self) -> None:
        """Drain and end the live engine, so that its memory is free; nothing answers from the first moment on."""
        if (gone := self.live) is not None:
            self.count()
            self._proxy.drain(gone.slot)
            self._draining.append((gone, time.monotonic() + self._config.drain_timeout_s))
            self.live = None
        self.clear()

    def close_drained(self) -> None:
        """End the engines that have finished what they began, and those whose time is over."""
        for replica, deadline in tuple(self._draining):
            if self._is_idle(replica) or time.monotonic() > deadline:
                self._draining.remove((replica, deadline))
                self._end(replica)

    def count(self) -> None:
        """Read the live engine's counters; an engine that does not answer, or no numbers, keeps its last ones."""
        live = self.live
        assert live is not None
        try:
            live.now = read_traffic(live.client.metrics(), self._proxy.counts(live.slot), live.now)
        except (EngineError, ValueError, OverflowError) as error:
            log.warning("the counters could not be read: %s", cause_of(error))

    def dead(self) -> bool:
        """Whether the live engine has ended, or is silent for two minutes; a proxy that ended is started anew."""
        self._revive_proxy()
        live = self.live
        assert live is not None
        if live.healthy():
            self._answered = time.monotonic()
            return False
        return not live.running() or time.monotonic() > self._answered + _HUNG_S

    def bury(self) -> Replica:
        """Take the dead live engine out; returns it."""
        gone, self.live = self.live, None
        assert gone is not None
        self._end(gone)
        return gone

    def finish(self) -> None:
        """Take no new request, let those in flight end (`drain_timeout_s`); a proxy that is gone has cut them."""
        try:
            self._proxy.refuse_clients()
            self.vacate()
        except EngineError as error:
            log.warning("requests in flight cannot be awaited: %s", error.what)

    def stop(self) -> None:
        """End everything, whatever is in flight."""
        for replica in self._replicas():
            replica.stop()
        self._proxy.stop()

    def _revive_proxy(self) -> None:
        if self._proxy.alive():
            return
        log.error("HAProxy has ended; starting it again")
        self._proxy = self._start_proxy()
        for replica in self._replicas():
            self._proxy.open(replica.slot, replica.engine.base_url)
            if replica is not self.live:
                self._proxy.drain(replica.slot)
        if self.live is not None:
            self.count()
            self.live.begun = self.live.now  # its counts began anew

    def _is_idle(self, replica: Replica) -> bool:
        try:
            return self._proxy.in_flight(replica.slot) == 0
        except EngineError as error:  # a proxy that hangs says so later
            log.warning("requests in flight could not be counted: %s", error.what)
            return False

    def _end(self, replica: Replica) -> None:
        try:
            self._proxy.close(replica.slot)
        except EngineError as error:  # its place leads nowhere from now on
            log.warning("version %s ends, and its place could not be closed: %s", replica.version.version, error.what)
        replica.stop()

    def _replicas(self) -> Iterator[Replica]:
        yield from (one for one in (self.live, self.standby) if one is not None)
        yield from (one for one, _ in self._draining)

    def _free_slot(self) -> str:
        while not (free := set(SLOTS) - {replica.slot for replica in self._replicas()}):
            self.close_drained()
            time.sleep(_STEP_S)
        return min(free)

    def _start_proxy(self) -> Proxy:
        config = self._config
        return Proxy(self._directory, self._home, config.host, config.port, request_timeout_s=config.request_timeout_s)
