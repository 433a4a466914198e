"""The verifier's chat template, rendered as its engine renders it: transformers' tokenizer, no special tokens added."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculators_core.data.conversations import Message, template_messages
from speculators_core.errors import DataError, VerifierError
from speculators_core.types import Json
from speculators_core.verifier.facts import read_config
from speculators_core.verifier.fingerprint import chat_templates

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
            VerifierError: not a model directory, no tokenizer, or no chat template.
        """
        read_config(verifier_dir)
        if not chat_templates(verifier_dir):
            raise VerifierError(
                f"{verifier_dir} has no chat template",
                mend="use an instruct model, or put its template at chat_template.jinja in that directory",
            )
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(verifier_dir), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise VerifierError(
                f"the tokenizer of {verifier_dir} cannot be loaded: {error}",
                mend="copy the tokenizer files beside config.json",
            ) from error
        return cls(tokenizer, template_kwargs)

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """The template's text.

        Raises:
            DataError: the template refuses these messages (many insist on roles that take turns).
        """
        import jinja2

        try:
            rendered = self.tokenizer.apply_chat_template(
                self._spoken(template_messages(messages)),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error
        return str(rendered)

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
        """Token ids of rendered texts, in one call: fast tokenizers share the work between threads."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def ids(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of rendered messages."""
        return self.tokenise([self.text(messages, tools=tools, add_generation_prompt=add_generation_prompt)])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
