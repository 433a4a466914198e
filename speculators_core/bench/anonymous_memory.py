"""Peak anonymous memory of the running process, sampled. Standard library only: the peer's interpreter runs it too."""

from __future__ import annotations

import threading
from pathlib import Path


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process now (Linux: RssAnon): heap and tensors, not mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


class PeakAnonymousMemory:
    """Samples from construction on; `rise` is the peak above the level at construction (after the imports)."""

    def __init__(self, every_seconds: float = 0.02) -> None:
        self.level = anonymous_bytes()
        self.peak = self.level
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(every_seconds,), daemon=True)
        self._thread.start()

    def _sample(self, every_seconds: float) -> None:
        while not self._stop.wait(every_seconds):
            self.peak = max(self.peak, anonymous_bytes())

    @property
    def rise(self) -> int:
        """Bytes."""
        return self.peak - self.level

    def stop(self) -> None:
        """End the sampling."""
        self._stop.set()
        self._thread.join()
