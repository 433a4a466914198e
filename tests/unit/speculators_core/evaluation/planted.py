"""Prompts whose acceptance rates are known: what the statistics and the gate are tested on."""

from __future__ import annotations

import numpy as np

from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.report import (
    Acceptance,
    EvaluationReport,
    Group,
    Identity,
    Lossless,
    PromptCounts,
    Speed,
)
from speculators_core.evaluation.speed import speed_of_rounds
from speculators_core.evaluation.statistics import acceptance_length, al_by_k, ratio_interval

K = 3


def planted_counts(
    rates: np.ndarray, generator: np.random.Generator, tokens: int = 128, k: int = K
) -> tuple[np.ndarray, np.ndarray]:
    """(drafts int [N], accepted_NK int): each draft of prompt n accepts position by position with chance rates[n]."""
    runs_NTK = np.cumprod(generator.random((len(rates), tokens, k)) < rates[:, None, None], axis=2)
    ends_NT = np.cumsum(runs_NTK.sum(axis=2) + 1, axis=1)
    drafts = (ends_NT < tokens).sum(axis=1) + 1
    used_NT = np.arange(tokens) < drafts[:, None]
    accepted = (runs_NTK * used_NT[:, :, None]).sum(axis=1)
    return drafts, accepted


def prompt_rates(count: int, mean: float, generator: np.random.Generator) -> np.ndarray:
    """Rates that differ between prompts as they do in serving (a Beta distribution around `mean`)."""
    return generator.beta(mean * 12, (1 - mean) * 12, size=count)


def expected_al(rates: np.ndarray, k: int = K) -> float:
    """The ratio of expectations over prompts of one length, which AL estimates."""
    per_draft = sum(rates**i for i in range(1, k + 1))
    drafts = 1.0 / (1.0 + per_draft)
    return float(1.0 + (drafts * per_draft).sum() / drafts.sum())


def planted_speed(ratio: float, noise: float, rounds: int, generator: np.random.Generator) -> Speed:
    """Rounds on a drifting machine: each arm's rate varies by `noise`, and both by the machine's drift."""
    drift = generator.uniform(0.5, 1.0, rounds)
    arms = np.exp(generator.normal(0.0, noise, (rounds, 2))) * drift[:, None] * np.array([100.0 * ratio, 100.0])
    return speed_of_rounds([(float(with_), float(without)) for with_, without in arms], concurrency=8)


def planted_report(
    rates: np.ndarray,
    generator: np.random.Generator,
    *,
    domains: tuple[str, ...] | None = None,
    identical: int | None = None,
    gap: float = 0.1,
    speed: float = 1.5,
    noise: float = 0.0,
    rounds: int = 5,
    prompts_digest: str = "p",
) -> EvaluationReport:
    """A report as the engine would have given it for these rates."""
    drafts, accepted = planted_counts(rates, generator)
    count = len(rates)
    domains = domains or ("all",) * count
    identical = count if identical is None else identical
    config = EvaluationConfig(k=K, resamples=200)
    interval = ratio_interval(drafts, accepted.sum(1), confidence=0.95, resamples=200, seed=0)
    al = acceptance_length(drafts, accepted.sum(1))
    group = Group(
        name="all", prompts=count, drafts=int(drafts.sum()), accepted=int(accepted.sum()), al=al, interval=interval
    )
    lossless = Lossless(
        prompts=count,
        identical=identical,
        baseline_prompts=count,
        baseline_identical=count,
        shortfall_p=1.0,
        tie_gap=0.5,
        divergences=(),
        baseline_divergences=(),
        holds=identical == count or gap <= 0.5,
    )
    return EvaluationReport(
        identity=Identity(draft="d", verifier_fingerprint="f", runtime_key="r", vllm="0.32.0", prompts=prompts_digest),
        acceptance=Acceptance(
            k=K,
            al=al,
            interval=interval,
            per_position=tuple(float(x) for x in accepted.sum(0) / drafts.sum()),
            drafts=int(drafts.sum()),
            accepted=int(accepted.sum()),
            prompts=count,
            tokens=128 * count,
            by_k=al_by_k(drafts, accepted),
            by_domain=(group,),
            loops=0,
            without_loops=group.model_copy(update={"name": "without loops"}),
        ),
        lossless=lossless,
        speed=Speed(with_=90.0, without=100.0, ratio=0.9, concurrency=8, arms="one run each"),
        alternating=() if not rounds else (planted_speed(speed, noise, rounds, generator.spawn(1)[0]),),
        config=config,
        seconds=1.0,
        per_prompt=tuple(
            PromptCounts(
                id=f"prompt-{n}",
                domain=domains[n],
                tokens=128,
                drafts=int(drafts[n]),
                accepted=int(accepted[n].sum()),
                accepted_per_position=tuple(int(x) for x in accepted[n]),
                repeated_share=0.0,
                identical=n < identical,
            )
            for n in range(count)
        ),
    )
