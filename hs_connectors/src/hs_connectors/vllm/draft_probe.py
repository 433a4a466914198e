"""Records what vLLM's drafter is fed and what it answers; see `hs_connectors.probe` for the files.

Methods of the base of all model-based drafters are wrapped, and only when the probe is turned on: `propose` (one call a
step; its arguments are the verifier's tokens, positions and hidden states before the draft touches them),
`_sample_draft_tokens` (one call for each drafted token, or one for all of a parallel draft), where the logits are
computed once more, and `__init__`, which alone sees the runner that knows the requests. An engine that is not probed
runs vLLM's own code.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hs_connectors.backends.file import FileBackend
from hs_connectors.errors import SettingsError
from hs_connectors.probe import ProbedBatch, ProbeSettings, has_recording, step_name
from hs_connectors.vllm import compat

log = logging.getLogger(__name__)


def install(settings: ProbeSettings) -> None:
    """Wrap the drafter of every engine in this process; does nothing the second time.

    Raises:
        SettingsError: the directory holds an earlier recording.
    """
    proposer = compat.proposer_class()
    if getattr(proposer, "_draftsmith_probed", False):
        return
    if has_recording(Path(settings.directory)):
        raise SettingsError(
            f"{settings.directory} holds the recording of another engine", mend="name a fresh directory"
        )
    make, propose, sample = proposer.__init__, proposer.propose, proposer._sample_draft_tokens

    @wraps(make)
    def recorded_init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._draftsmith_recorder = _Recorder(settings, self, compat.runner_of(make, self, args, kwargs))

    @wraps(propose)
    def recorded_propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._draftsmith_recorder.observe(propose, args, kwargs)

    @wraps(sample)
    def recorded_sample(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._draftsmith_recorder.look(hidden_states)
        return sample(self, hidden_states, *args, **kwargs)

    proposer.__init__, proposer.propose, proposer._sample_draft_tokens = (
        recorded_init,
        recorded_propose,
        recorded_sample,
    )
    proposer._draftsmith_probed = True
    log.info("draft probe directory=%s steps=%d", settings.directory, settings.steps)


class _Recorder:
    """Writes one file a step until it has enough."""

    def __init__(self, settings: ProbeSettings, proposer: Any, runner: Any) -> None:
        self._proposer, self._runner = proposer, runner
        self._left, self._number = settings.steps, 0
        self._observing = False
        self._logits: list[Tensor] = []
        self._backend: FileBackend | None = None
        if compat.tensor_parallel_rank() == 0:
            self._backend = FileBackend({"root": settings.directory, "fsync": False})
            self._backend.prepare()
            self._backend.announce(compat.engine_facts(proposer.vllm_config) | compat.drafter_facts(proposer))

    def observe(self, propose: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Let the drafter work, and write down what went in and out."""
        if not self._left:
            return propose(self._proposer, *args, **kwargs)
        given = inspect.signature(propose).bind(self._proposer, *args, **kwargs).arguments
        inputs = compat.drafter_inputs(given, self._runner)
        self._observing, self._logits = True, []
        try:
            drafted = propose(self._proposer, *args, **kwargs)
        finally:
            self._observing = False
        if drafted.shape[1]:  # none asked for: the engine only keeps the draft's cache in step
            self._write(inputs, drafted)
        return drafted

    def look(self, hidden_states: Tensor) -> None:
        """Keep the logits of what is about to be drafted (every rank computes them: they are gathered)."""
        if self._observing:
            self._logits.append(self._proposer.model.compute_logits(hidden_states).detach().clone())

    def _write(self, inputs: dict[str, Any], drafted: Tensor) -> None:
        self._left -= 1
        requests, length = drafted.shape
        # a sequential draft was asked K times for B rows, a parallel one once for B·K
        logits = torch.stack(self._logits, dim=1) if len(self._logits) == length else self._logits[0]
        batch = ProbedBatch(
            **inputs, drafted=drafted.to("cpu", torch.int64), logits=logits.view(requests, length, -1).cpu()
        )
        if self._backend is not None:
            self._backend.publish(step_name(self._number), batch.pack())
        self._number += 1
