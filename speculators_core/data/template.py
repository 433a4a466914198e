"""The verifier's chat template, rendered as its engine renders it: transformers' tokenizer, no special tokens added."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from speculators_core.data.conversations import Message, template_messages
from speculators_core.errors import DataError, VerifierError, cause_of
from speculators_core.types import Json
from speculators_core.verifier.facts import read_config
from speculators_core.verifier.fingerprint import StoredTemplate, chat_templates
from speculators_core.verifier.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


class ChatTemplate:
    """Renders messages to text and token ids with the verifier's own template and tokenizer."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Json] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})

    @classmethod
    def load(cls, verifier_dir: Path, template_kwargs: Mapping[str, Json] | None = None) -> ChatTemplate:
        """Load the tokenizer of a local verifier.

        Raises:
            VerifierError: not a model directory, no tokenizer, no chat template, or one that is broken.
        """
        read_config(verifier_dir)
        templates = chat_templates(verifier_dir)
        if not templates:
            raise VerifierError(
                f"{verifier_dir} has no chat template",
                mend="use an instruct model, or put its template at chat_template.jinja in that directory",
            )
        for stored in templates.values():
            _require_compilable(stored, verifier_dir)
        return cls(load_tokenizer(verifier_dir), template_kwargs)

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """The template's text.

        Raises:
            DataError: the template refuses these messages (many insist on roles that take turns), or fails.
        """
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                self._spoken(template_messages(messages)),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
            rendered.encode()
        except Exception as error:  # a template is a program: it divides by zero and calls itself, too
            told = str(error) if isinstance(error, TemplateError) else cause_of(error)
            raise DataError(f"the chat template refuses the messages: {told}") from error
        return rendered

    def _spoken(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As vLLM: where the template knows no developer, that is the system, and one system message stands first."""
        template = str(self.tokenizer.chat_template)
        if all(message["role"] != "developer" for message in messages) or re.search("['\"]developer['\"]", template):
            return messages
        renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
        system = [message for message in renamed if message["role"] == "system"]
        if len(system) == 1 and renamed[0] is system[0]:
            return renamed
        content = "\n\n".join(message["content"] for message in system if message["content"])
        return [{"role": "system", "content": content}, *(m for m in renamed if m["role"] != "system")]

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered texts, in one call: fast tokenizers share the work between threads.

        Raises:
            VerifierError: the tokenizer is broken in a way that shows only at a text.
        """
        if not texts:
            return []
        try:
            encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        except Exception as error:  # of `tokenizers` a bare one
            raise VerifierError(
                f"the verifier's tokenizer fails at a conversation: {cause_of(error)}",
                mend="copy the verifier's tokenizer files again",
            ) from error
        return [list(ids) for ids in encoded["input_ids"]]

    def ids(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of rendered messages."""
        return self.tokenise([self.text(messages, tools=tools, add_generation_prompt=add_generation_prompt)])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def _require_compilable(stored: StoredTemplate, verifier_dir: Path) -> None:
    """VerifierError for a template that is wrong whatever it is to render."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=stored.text)
    except Exception as error:  # Python's compiler, to which jinja gives it, has limits and errors of its own
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise VerifierError(
            f"the chat template in {verifier_dir / stored.file} is broken{line}: {error}",
            mend="correct it there, or copy the verifier's file again",
        ) from error
