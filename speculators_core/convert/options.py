"""What a user can say about a conversion, and what is said about it afterwards."""

from __future__ import annotations

from pydantic import Field

from speculators_core.types import StrictModel


class ConvertOptions(StrictModel):
    """What a foreign checkpoint may leave open."""

    layout: str = Field("auto", description="name of the layout, or auto")
    aux_layers: tuple[int, ...] | None = Field(
        None, description="verifier layers that feed the draft, counted as here: i is the state after i layers"
    )
    mask_token_id: int | None = Field(None, ge=0, description="token of masked rows or slots")
    speculative_tokens: int | None = Field(None, ge=1, description="tokens that the draft proposes at a time")
    allow_bin: bool = Field(False, description="open pickled weights with torch's restricted unpickler")


class Conversion(StrictModel):
    """What was converted into what."""

    layout: str = Field(description="layout of the source")
    algorithm: str = Field(description="the draft's algorithm")
    target: str = Field(description="layout written")
    path: str = Field(description="directory written")
    tensors: int = Field(description="tensors written")
    notes: tuple[str, ...] = Field((), description="what was filled in, rounded or left open")
