"""Which token stands for "to be drafted" in a parallel draft: if there is one, an id that no conversation holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from speculators_core.errors import ConfigError
from speculators_core.verifier.facts import VerifierFacts, read_facts
from speculators_core.verifier.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Masked(Protocol):
    """Knobs of a draft with a mask token."""

    @property
    def mask_token_id(self) -> int | None:
        """The one asked for."""
        ...


@dataclass(frozen=True)
class _Tokens:
    """What the tokenizer knows: ordinary ids, idle special ids (no template writes them), and ids with a role."""

    size: int
    ordinary: frozenset[int]
    written: dict[int, str]
    idle: tuple[int, ...]
    mask: int | None
    roles: tuple[tuple[str, int], ...]


def resolve_mask_token(verifier_dir: Path, facts: VerifierFacts, asked: int | None, *, trusted: bool = False) -> int:
    """The mask token's id in the verifier's vocabulary.

    In this order: the one asked for; the tokenizer's own mask token; the first id that the vocabulary has room for but
    the tokenizer does not use; a special token that neither has a role nor is written by the chat template; the
    tokenizer's padding, unknown or end token, with a warning, since conversations may hold those.

    Args:
        asked: `algorithm.mask_token_id`, or None.
        trusted: take an id inside the vocabulary as it is: it was checked before, or an existing draft has it.

    Raises:
        ConfigError: the id asked for lies outside the vocabulary, or is a token that text is made of; or none is left.
        VerifierError: the tokenizer cannot be loaded.
    """
    if asked is not None:
        _require_inside(asked, facts.vocab_size)
        if trusted:
            return asked
    tokens = _read_tokens(verifier_dir, facts)
    if asked is not None:
        _require_unused(asked, tokens)
        return asked
    if tokens.mask is not None:
        return tokens.mask
    if 0 < tokens.size < facts.vocab_size:
        return tokens.size
    if tokens.idle:
        return tokens.idle[0]
    for role, token in tokens.roles:
        log.warning("the mask token is the %s token (%d), which conversations may hold", role, token)
        return token
    raise ConfigError(
        f"{verifier_dir} leaves no token that could be the mask",
        mend="name one that your data never holds: algorithm.mask_token_id",
    )


def mask_token(knobs: Masked, verifier_dir: Path) -> int:
    """The mask token of a draft with these knobs; errors as in `resolve_mask_token`."""
    return resolve_mask_token(verifier_dir, read_facts(verifier_dir), knobs.mask_token_id)


def _require_inside(asked: int, vocab_size: int) -> None:
    if not 0 <= asked < vocab_size:
        raise ConfigError(
            f"algorithm.mask_token_id is {asked}, outside the verifier's vocabulary of {vocab_size} tokens",
            mend="leave it out to have one chosen",
        )


def _require_unused(asked: int, tokens: _Tokens) -> None:
    if asked in tokens.ordinary or asked in tokens.written:
        text = tokens.written.get(asked)
        what = "is a token that text is made of" if text is None else f"({text}) is written by the chat template"
        raise ConfigError(
            f"algorithm.mask_token_id {asked} {what}: the draft could not tell it from a real one",
            mend="leave it out to have one chosen, or name a reserved special token",
        )


def _read_tokens(verifier_dir: Path, facts: VerifierFacts) -> _Tokens:
    pad = () if facts.pad_token_id is None else (("padding", facts.pad_token_id),)
    roles = (*pad, *(("end", token) for token in facts.eos_token_id))
    if not any((verifier_dir / name).is_file() for name in _TOKENIZER_FILES):
        return _Tokens(0, frozenset(), {}, (), None, roles)
    tokenizer = load_tokenizer(verifier_dir)
    special = {token: str(added.content) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    template = str(tokenizer.chat_template or "")
    written = {token: text for token, text in special.items() if text in template}
    named = (
        ("padding", tokenizer.pad_token_id),
        ("unknown", tokenizer.unk_token_id),
        ("end", tokenizer.eos_token_id),
    )
    with_role = {token for _, token in named} | {tokenizer.bos_token_id, *facts.eos_token_id}
    return _Tokens(
        size=len(tokenizer),
        ordinary=frozenset(tokenizer.get_vocab().values()) - special.keys(),
        written=written,
        idle=tuple(token for token in sorted(special) if token not in written and token not in with_role),
        mask=tokenizer.mask_token_id,
        roles=tuple((role, token) for role, token in named if token is not None) or roles,
    )
