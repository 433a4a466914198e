from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators_core.errors import ConfigError
from speculators_core.losses.closed_form import LOSSES, Distribution, Pair, Slope
from speculators_core.losses.terms import LOSS_NAMES, LossTerm, parse_loss

GOLDEN = json.loads((Path(__file__).parents[3] / "fixtures" / "numeric" / "elementwise_losses.json").read_text())


def plain(name: str, z_q: Tensor, z_p: Tensor) -> Tensor:
    """The definitions, as one writes them on paper, for autograd to differentiate."""
    log_q, log_p = z_q.log_softmax(-1), z_p.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(-1)
    log_m = ((p + q) / 2).log()
    kl = (p * (log_p - log_q)).sum(-1)
    table: dict[str, Callable[[], Tensor]] = {
        "kl_div": lambda: kl,
        "rkl": lambda: (q * (log_q - log_p)).sum(-1),
        "jsd": lambda: 0.5 * (p * (log_p - log_m)).sum(-1) + 0.5 * (q * (log_q - log_m)).sum(-1),
        "ce": lambda: -log_q.gather(1, z_p.argmax(-1, keepdim=True)).squeeze(1),
        "tv": lambda: 1 - alpha,
        "nla": lambda: -alpha.clamp_min(1e-5).log(),
        "lk_hybrid": lambda: torch.lerp(1 - alpha, kl, torch.exp(-3 * alpha.detach())),
    }
    return table[name]()


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_values_are_the_golden_ones(name: str) -> None:
    pair = Pair(Distribution(torch.tensor(GOLDEN["draft_logits"])), Distribution(torch.tensor(GOLDEN["target_logits"])))
    loss, _ = LOSSES[name](pair)
    torch.testing.assert_close(loss, torch.tensor(GOLDEN["losses"][name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
def test_gradients_are_those_of_the_definitions(name: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(5)
    z_q = torch.randn(16, 40, generator=generator, dtype=torch.float64) * spread
    z_p = torch.randn(16, 40, generator=generator, dtype=torch.float64) * spread
    pair = Pair(Distribution(z_q), Distribution(z_p))
    loss, slope = LOSSES[name](pair)
    gradient = slope.formed(pair)
    z_q.requires_grad_()
    expected = plain(name, z_q, z_p)
    torch.testing.assert_close(loss, expected.detach())
    (expected_gradient,) = torch.autograd.grad(expected.sum(), z_q)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def test_the_acceptance_loss_is_flat_without_overlap() -> None:
    apart = Pair(Distribution(torch.tensor([[50.0, -50.0]])), Distribution(torch.tensor([[-50.0, 50.0]])))
    loss, slope = LOSSES["nla"](apart)
    assert float(loss) == pytest.approx(-torch.tensor(1e-5).log().item())
    assert not slope.formed(apart).any()


def test_a_sum_of_losses_has_the_sum_of_their_gradients() -> None:
    generator = torch.Generator().manual_seed(6)
    z_q, z_p = (torch.randn(8, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    pair, weights = Pair(Distribution(z_q), Distribution(z_p)), torch.rand(8, generator=generator, dtype=torch.float64)
    slopes = [LOSSES[name](pair)[1] for name in LOSS_NAMES]
    whole = Slope()
    for number, slope in enumerate(slopes):
        whole = whole.plus(slope.times(number + 1.0).times(weights))
    apart = sum((slope.formed(pair) * (number + 1.0) * weights[:, None] for number, slope in enumerate(slopes)))
    torch.testing.assert_close(whole.formed(pair), apart)


def test_the_first_of_equal_logits_is_the_favourite() -> None:
    verifier = Distribution(torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [3.0, 3.0, 0.0]]))
    draft = Distribution(torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.1], [2.0, 2.0, 2.0]]))
    assert draft.agrees_N(verifier).tolist() == [True, False, True]


def test_every_name_has_a_formula() -> None:
    assert tuple(LOSSES) == LOSS_NAMES


@pytest.mark.parametrize(
    ("spec", "terms"),
    [
        ("tv", (LossTerm("tv", 1.0),)),
        ('{"kl_div": 0.5, "tv": 2}', (LossTerm("kl_div", 0.5), LossTerm("tv", 2.0))),
        ({"ce": 0.1}, (LossTerm("ce", 0.1),)),
    ],
)
def test_losses_are_read(spec: str | dict[str, float], terms: tuple[LossTerm, ...]) -> None:
    assert parse_loss(spec) == terms


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kl_dif", "kl_div"),
        ("{}", "no term"),
        ('{"tv": 0}', "positive"),
        ('{"tv": true}', "positive"),
        ("{oops", "JSON"),
    ],
)
def test_a_wrong_loss_is_named(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_loss(spec)
