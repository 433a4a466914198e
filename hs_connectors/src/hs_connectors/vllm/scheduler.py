"""A scheduler for engines that capture: nothing is drafted, so nothing is verified.

`extract_hidden_states` is a speculative method that proposes the token just sampled, which only a stutter would follow.
Each reply would be two tokens wide in every step: a fifth of a CPU's speed when it generates. A GPU, which waits for
memory there, hardly notices, and schedules ahead of its own draft tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds


class CapturingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler without asynchronous scheduling, as it is on a CPU; proposed tokens are dropped."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Forget them: the next step is one token wide."""
