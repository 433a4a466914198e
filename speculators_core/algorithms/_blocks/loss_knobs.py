"""The knob that every draft has which learns the verifier's distributions."""

from __future__ import annotations

from pydantic import Field, field_validator

from speculators_core.errors import ConfigError
from speculators_core.losses.terms import LossTerm, parse_loss
from speculators_core.types import StrictModel


class LossKnobs(StrictModel):
    """How far a draft's distribution is from the verifier's."""

    loss: str | dict[str, float] = Field(
        default="kl_div", description="kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, or a mapping of them to weights"
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        try:
            parse_loss(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The loss as a weighted sum."""
        return parse_loss(self.loss)
