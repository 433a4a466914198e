"""Speed with and without a draft, with alternating arms: for where speed decides.

A machine's speed drifts (clocks, neighbours, caches), so two engines are up at once and take turns, one idle while
the other works; each arm's speed is its median over the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import serve
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.records import EvaluationPrompt
from speculators_core.evaluation.report import Speed
from speculators_core.evaluation.runs import choose, generation_requests, run_prompts, server_spec, warm_up
from speculators_core.evaluation.served import drafted_tokens, served_directory
from speculators_core.types import ProgressCallback


def measure_speed(
    draft_dir: Path,
    verifier_dir: Path,
    prompts: Sequence[EvaluationPrompt],
    runtime: Runtime,
    config: EvaluationConfig,
    *,
    home: Path,
    rounds: int = 3,
    progress: ProgressCallback | None = None,
) -> Speed:
    """Tokens per second of both arms at `config.concurrency`, alternating over `rounds` rounds.

    Needs memory for two engines: the verifier twice, and twice `config.kv_cache_gib`.

    Raises:
        EngineError: an engine did not start, or died.
        EvaluationError: prompts as in `measure_baseline`.
    """
    chosen = choose(prompts, verifier_dir, config)
    requests = generation_requests(chosen, config)
    k = config.k or drafted_tokens(draft_dir)
    # later rounds must not find the first one in the prefix cache
    fresh = ("--no-enable-prefix-caching",)
    alone = server_spec(str(verifier_dir.resolve()), chosen, config).model_copy(update={"extra_args": fresh})
    speeds: dict[str, list[float]] = {"with": [], "without": []}
    with served_directory(draft_dir, verifier_dir, home / "scratch") as served:
        drafting = server_spec(str(served.resolve()), chosen, config, k=k).model_copy(update={"extra_args": fresh})
        with (
            serve(runtime, alone, home=home, startup_timeout_s=config.startup_timeout_s) as first,
            serve(runtime, drafting, home=home, startup_timeout_s=config.startup_timeout_s) as second,
            first.client(timeout_s=config.request_timeout_s) as without,
            second.client(timeout_s=config.request_timeout_s) as with_draft,
        ):
            arms = {"without": without, "with": with_draft}
            for client in arms.values():
                warm_up(client, requests, config)
            for done in range(rounds):
                for name in sorted(arms, reverse=done % 2 == 1):  # neither arm always goes first
                    run = run_prompts(arms[name], requests, config)
                    speeds[name].append(run.tokens / run.seconds)
                if progress is not None:
                    progress(done + 1, rounds)
    with_, without_ = median(speeds["with"]), median(speeds["without"])
    return Speed(
        with_=with_,
        without=without_,
        ratio=with_ / without_,
        concurrency=config.concurrency,
        arms=f"median of {rounds} alternating rounds",
    )
