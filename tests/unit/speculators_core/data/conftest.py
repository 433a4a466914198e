"""A small real verifier directory: a byte-level BPE tokenizer with a chat template, and a Llama config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

CONVERSATIONS = Path(__file__).parents[3] / "fixtures" / "conversations"

# A default system message, tools and tool calls, reasoning kept in every turn: prefix-stable.
CHATML = """\
{%- if messages[0]['role'] != 'system' %}<|im_start|>system
{{ persona | default('You are helpful.') }}<|im_end|>
{% endif -%}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>{% endif -%}
{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}{% set function = call['function'] -%}
<call>{{ function['name'] }} {{ function['arguments']['city'] }}</call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
# Reasoning only in the last turn, as several reasoning models do: earlier turns are rewritten by later ones.
FORGETFUL = CHATML.replace(
    "{% if message['reasoning_content'] %}", "{% if message['reasoning_content'] and loop.last %}"
)
# The prompt opens the reasoning and the full rendering has none of it: no prefix, yet a clear boundary.
OPENING = CHATML.replace(
    "{%- if add_generation_prompt %}<|im_start|>assistant\n",
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
)


@pytest.fixture(scope="session")
def make_verifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [file.read_text(encoding="utf-8") for file in sorted(CONVERSATIONS.glob("*.jsonl"))]
    tokenizer.train_from_iterator(corpus, trainer)

    def make(template: str | None = CHATML, **config: object) -> Path:
        directory = tmp_path_factory.mktemp("verifier")
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
        )
        fast.save_pretrained(str(directory))
        facts = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 600,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048,
            "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": True, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(facts | config))
        return directory

    return make


@pytest.fixture(scope="session")
def verifier(make_verifier: Callable[..., Path]) -> Path:
    return make_verifier()
