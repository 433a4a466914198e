"""Whether engines and trainer fit into the memory of one host beside each other, before either is started.

Rough on purpose: what is known (weights, the engines' caches, the window) is most of it; the rest is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_core.errors import ConfigError
from speculators_core.run import Run

if TYPE_CHECKING:
    from speculators_core.states.keeper import Station

_GIB = 2.0**30
_ENGINE_GIB, _TRAINER_GIB = 1.5, 1.0
"""Interpreter, libraries and activations of a small model."""


def require_memory(run: Run, stations: Sequence[Station], lent: int = 0) -> None:
    """Refuse what cannot fit. Servers that somebody else runs are theirs to count.

    Args:
        lent: bytes of memory that the run's own store of records takes.

    Raises:
        ConfigError: with what each part needs, what is free, and what to lower.
    """
    free, parts = free_memory(run.capture_runtime.device), planned(run, stations, lent)
    needed = sum(parts.values())
    if free is not None and needed > free:
        table = "\n".join(f"    {size / _GIB:7.2f} GiB  {name}" for name, size in parts.items())
        raise ConfigError(
            f"engines and trainer need about {needed / _GIB:.2f} GiB of memory together, and {free / _GIB:.2f} are "
            f"free:\n{table}",
            mend="lower capture.kv_cache_gib, hidden_states.window_tokens or the number of hidden_states.engines, give "
            "an engine a runtime on another host, or capture first: hidden_states.mode=offline",
        )


def planned(run: Run, stations: Sequence[Station], lent: int = 0) -> dict[str, float]:
    """Bytes of each part, by name."""
    facts, training = run.facts, run.recipe.training
    weights = sum(path.stat().st_size for path in run.verifier.glob("*.safetensors"))
    parts: dict[str, float] = {}
    for number, station in enumerate(stations):
        if station.runtime.url is None:
            parts[f"engine {number}: weights"] = weights
            parts[f"engine {number}: cache (capture.kv_cache_gib)"] = station.spec.kv_cache_gib * _GIB
            parts[f"engine {number}: the rest"] = _ENGINE_GIB * _GIB
    if lent:
        parts["store of records (capture.concurrency, longest row)"] = lent
    per_token = len(run.layer_ids) * facts.hidden_size * 4
    ahead = training.row_tokens * training.gradient_accumulation * (training.prefetch_steps + 2)
    window = run.recipe.hidden_states.window_tokens
    parts["states asked for ahead (hidden_states.window_tokens)"] = window * per_token / 2
    parts["batches of the trainer"] = training.processes * ahead * per_token
    parts["embedding and head"] = training.processes * 2 * facts.vocab_size * facts.hidden_size * 4
    parts["trainer: the rest"] = training.processes * _TRAINER_GIB * _GIB
    return parts


def free_memory(device: str) -> float | None:
    """Bytes that the engines' device can still give, of a host without swapping; None where it does not say."""
    if device != "cpu":
        import torch

        return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
