"""Speed with and without a draft, with alternating arms: for where speed decides.

A machine's speed drifts (clocks, neighbours, caches), so two engines are up at once and take turns, one idle while
the other works: each round times both, and the rounds are compared as pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from speculators_core.engine.config import NO_PREFIX_CACHING
from speculators_core.evaluation.records import SpeedMeasurement
from speculators_core.evaluation.report import Speed, write_text
from speculators_core.evaluation.runs import Conditions, generation_requests, run_prompts, warm_up
from speculators_core.evaluation.served import draft_digest, drafted_tokens, served_directory

# Later rounds must not find the first one in the prefix cache; and each engine gets half a GPU (the size of the KV
# cache is given, so the share only tells vLLM how much memory must be free when it starts).
_BESIDE_ANOTHER = (NO_PREFIX_CACHING, "--gpu-memory-utilization", "0.45")


def measure_speed(draft_dir: Path, conditions: Conditions, output: Path) -> SpeedMeasurement:
    """Tokens per second of both arms, alternating, at each of `config.speed`'s concurrencies; speed.json in `output`.

    Needs memory for two engines: the verifier twice, and twice `config.kv_cache_gib`.

    Raises:
        EngineError: an engine did not start, or died.
        EvaluationError: prompts as in `measure_baseline`.
    """
    config, settings = conditions.config, conditions.config.speed
    chosen = conditions.choose(settings.max_prompts)
    requests = generation_requests(chosen, config)
    concurrencies = config.speed_concurrencies()
    beside = {"extra_args": _BESIDE_ANOTHER, "max_num_seqs": max(concurrencies)}
    k = config.k or drafted_tokens(draft_dir)
    found: list[Speed] = []
    with served_directory(draft_dir, conditions.verifier_dir, conditions.home / "scratch") as served:
        alone = conditions.spec(conditions.verifier_dir, chosen).model_copy(update=beside)
        drafting = conditions.spec(served, chosen, k=k).model_copy(update=beside)
        with conditions.serving(alone) as (_, without), conditions.serving(drafting) as (_, with_draft):
            arms = {"without": without, "with": with_draft}
            for client in arms.values():
                warm_up(client, requests, config)
            for index, concurrency in enumerate(concurrencies):
                rounds: list[tuple[float, float]] = []
                for number in range(settings.rounds):
                    rate: dict[str, float] = {}
                    for name in sorted(arms, reverse=number % 2 == 1):  # neither arm always goes first
                        run = run_prompts(arms[name], requests, concurrency)
                        rate[name] = run.tokens / run.seconds
                    rounds.append((rate["with"], rate["without"]))
                    if conditions.progress is not None:
                        done = index * settings.rounds + number + 1
                        conditions.progress(done, len(concurrencies) * settings.rounds)
                found.append(speed_of_rounds(rounds, concurrency))
    identity = conditions.identity(draft_digest(draft_dir), chosen)
    measured = SpeedMeasurement(identity=identity, speeds=tuple(found))
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "speed.json", measured.model_dump_json(indent=2) + "\n")
    return measured


def speed_of_rounds(rounds: Sequence[tuple[float, float]], concurrency: int) -> Speed:
    """Medians of the arms and of the rounds' ratios; `rounds` holds tokens/s (with the draft, without)."""
    return Speed(
        with_=median(with_ for with_, _ in rounds),
        without=median(without for _, without in rounds),
        ratio=median(with_ / without for with_, without in rounds),
        concurrency=concurrency,
        arms=f"median of {len(rounds)} alternating rounds",
        rounds=tuple(rounds),
    )
