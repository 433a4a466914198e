"""The gate with planted rates: what passes, what fails, and what nobody can tell yet."""

from __future__ import annotations

import numpy as np
import pytest

from speculators_core.errors import EvaluationError
from speculators_core.evaluation.report import EvaluationReport, PromptCounts
from speculators_core.lifecycle import gate
from speculators_core.lifecycle.config import GateConfig
from speculators_core.lifecycle.gate import GateDecision, decide
from tests.unit.speculators_core.evaluation.planted import expected_al, planted_report, prompt_rates

CONFIG = GateConfig(resamples=1000)


def report(count: int = 200, mean: float = 0.5, seed: int = 0, **settings: object) -> EvaluationReport:
    generator = np.random.default_rng(seed)
    return planted_report(prompt_rates(count, mean, generator), generator, **settings)  # type: ignore[arg-type]


def pair(count: int, loss: float, seed: int) -> tuple[EvaluationReport, EvaluationReport]:
    """(candidate, incumbent): the candidate's rates are the incumbent's, scaled so that AL falls by about `loss`."""
    generator = np.random.default_rng(seed)
    rates = prompt_rates(count, 0.5, generator)
    incumbent = planted_report(rates, generator)
    target = expected_al(rates) * (1 - loss)
    low, high = 0.5, 1.0
    for _ in range(30):  # the loss in AL is what is planted, not the loss in rates
        scale = (low + high) / 2
        low, high = (low, scale) if expected_al(rates * scale) > target else (scale, high)
    return planted_report(rates * scale, generator), incumbent


def checks(decision: GateDecision) -> dict[str, str]:
    return {check.name: check.outcome for check in decision.checks}


def test_first_draft_needs_floor_lossless_and_speed():
    decision = decide(report(), None, GateConfig(al_floor=1.3))
    assert decision.passed
    assert checks(decision) == {"prompts": "pass", "floor": "pass", "lossless": "pass", "speed at 8": "pass"}
    assert decision.numbers["al"] > 1.3


@pytest.mark.parametrize(
    ("settings", "config", "name", "outcome"),
    [
        ({"mean": 0.02}, {"al_floor": 1.3}, "floor", "fail"),
        ({"count": 60}, {}, "prompts", "inconclusive"),
        ({"identical": 150, "gap": 3.0}, {}, "lossless", "fail"),
        ({"speed": 0.7}, {}, "speed at 8", "fail"),
        ({"speed": 1.3}, {"min_speed_ratio": 1.5}, "speed at 8", "fail"),
        ({"speed": 1.3, "rounds": 4}, {}, "speed at 8", "inconclusive"),
        ({"rounds": 0}, {}, "speed", "inconclusive"),
        ({}, {"al_floor_low": 1.2}, "floor_low", "pass"),
        ({}, {"al_floor_low": 3.9}, "floor_low", "fail"),
    ],
)
def test_each_rule_decides_by_itself(settings, config, name, outcome):
    decision = decide(report(**settings), None, GateConfig(**config))
    assert checks(decision)[name] == outcome
    assert decision.outcome == outcome
    assert decision.reasons[0].startswith(outcome)


def test_a_floor_inside_the_interval_is_inconclusive_and_asks_for_more_prompts():
    found = report(count=120)
    middle = found.acceptance.al
    decision = decide(found, None, GateConfig(al_floor_low=middle))
    assert decision.outcome == "inconclusive"
    assert decision.next_prompts == 240


def test_what_was_never_served_does_not_pass_and_more_prompts_do_not_help():
    found = report(count=120).model_copy(update={"measured_by": "reference"})
    decision = decide(found, None, GateConfig(al_floor=1.3))
    assert checks(decision)["served"] == decision.outcome == "inconclusive"
    assert "by the reference loop" in decision.reasons[0] and decision.next_prompts is None


def test_unmeasured_rules_are_inconclusive_and_more_prompts_do_not_help():
    found = report(rounds=0).model_copy(update={"lossless": None})
    decision = decide(found, None, GateConfig())
    assert checks(decision)["lossless"] == checks(decision)["speed"] == "inconclusive"
    assert decision.next_prompts is None


def test_reported_rules_do_not_fail_but_are_told():
    decision = decide(report(rounds=0), None, GateConfig(speed="report"))
    assert decision.passed
    assert any("0.90× (one run each)" in line for line in decision.reported), "the cheap figure, and that it is that"


def test_a_planted_speed_is_decided_as_often_as_promised_however_the_machine_drifts():
    """Rounds vary by 3 %, the machine by a factor of two: a clear gain passes, a clear loss fails, a wash neither."""
    trials = 100
    outcomes = {
        ratio: [
            decide(report(count=2, speed=ratio, noise=0.03, seed=seed), None, CONFIG).checks[-1].outcome
            for seed in range(trials)
        ]
        for ratio in (0.8, 1.0, 1.25)
    }
    assert outcomes[1.25].count("pass") == outcomes[0.8].count("fail") == trials
    assert outcomes[1.0].count("pass") <= 0.07 * trials
    assert outcomes[1.0].count("fail") <= 0.07 * trials


def test_a_draft_must_pay_at_each_concurrency_that_is_served():
    found = report()
    (fast,) = found.alternating
    slow = fast.model_copy(update={"concurrency": 64, "rounds": tuple((a * 0.5, b) for a, b in fast.rounds)})
    decision = decide(found.model_copy(update={"alternating": (fast, slow)}), None, GateConfig())
    assert (checks(decision)["speed at 8"], checks(decision)["speed at 64"]) == ("pass", "fail")
    assert decision.outcome == "fail"


def test_the_same_draft_passes_against_itself():
    found = report()
    assert decide(found, found, CONFIG).passed


def test_planted_losses_are_decided_as_often_as_promised():
    """On 500 prompts: no loss passes, 8 % fails; a loss at the margin passes rarely (5 % nominal)."""
    trials = 20
    outcomes = {
        loss: [decide(*pair(500, loss, seed), CONFIG).outcome for seed in range(trials)] for loss in (0.0, 0.03, 0.08)
    }
    assert outcomes[0.0].count("pass") >= 0.9 * trials
    assert outcomes[0.08].count("fail") >= 0.9 * trials
    assert outcomes[0.03].count("pass") <= 0.15 * trials
    assert outcomes[0.03].count("fail") <= 0.15 * trials


def test_a_loss_at_the_margin_on_few_prompts_asks_for_more_up_to_the_limit():
    candidate, incumbent = pair(110, 0.03, seed=3)
    decision = decide(candidate, incumbent, CONFIG)
    assert decision.outcome == "inconclusive"
    assert decision.next_prompts is not None
    assert 110 < decision.next_prompts <= CONFIG.max_prompts
    limit = GateConfig(resamples=1000, max_prompts=110)
    assert decide(candidate, incumbent, limit).next_prompts is None


def test_a_loss_in_one_large_domain_fails_and_in_a_small_one_is_only_reported():
    generator = np.random.default_rng(11)

    def both(small: int) -> tuple[EvaluationReport, EvaluationReport]:
        rates = prompt_rates(300, 0.5, generator)
        domains = ("code",) * small + ("chat",) * (300 - small)
        hurt = rates.copy()
        hurt[:small] *= 0.5
        return planted_report(hurt, generator, domains=domains), planted_report(rates, generator, domains=domains)

    decision = decide(*both(100), CONFIG)
    assert checks(decision)["domain code"] == "fail"
    assert decision.outcome == "fail"
    decision = decide(*both(20), CONFIG)
    assert "domain code" not in checks(decision)
    assert any("code" in line and "20 prompts" in line for line in decision.reported)


def test_holm_asks_more_of_each_domain_the_more_there_are():
    """A domain whose uncorrected p-value would decide it stays undecided among ten equal ones."""
    candidate, incumbent = pair(60, 0.0, seed=12)

    def copies(source: EvaluationReport, count: int) -> tuple[PromptCounts, ...]:
        return tuple(
            row.model_copy(update={"id": f"{row.id}-{n}", "domain": f"d{n}"})
            for n in range(count)
            for row in source.per_prompt
        )

    few, _ = gate._check_domains(copies(candidate, 2), copies(incumbent, 2), CONFIG)
    many, _ = gate._check_domains(copies(candidate, 10), copies(incumbent, 10), CONFIG)
    single = gate._compare(candidate.per_prompt, incumbent.per_prompt, CONFIG)
    assert single.p_inferior * 2 <= 0.05 < single.p_inferior * 10
    assert {check.outcome for check in few} == {"pass"}
    assert {check.outcome for check in many} == {"inconclusive"}


def test_reports_of_other_prompts_verifiers_or_runtimes_do_not_compare():
    found = report()
    for field in ("prompts", "verifier_fingerprint", "runtime_key"):
        identity = found.identity.model_copy(update={field: "another"})
        with pytest.raises(EvaluationError, match="different"):
            decide(found, found.model_copy(update={"identity": identity}), CONFIG)
    with pytest.raises(EvaluationError, match="pair up"):
        decide(found.model_copy(update={"per_prompt": ()}), found, CONFIG)


def test_a_decision_is_json_and_comes_back():
    decision = decide(report(), report(), CONFIG)
    assert GateDecision.model_validate_json(decision.model_dump_json()) == decision
