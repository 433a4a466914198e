from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.adapters.redaction import is_secret_name, redact, scrub, scrubbed_file


@pytest.mark.parametrize(
    "name", ["password", "HF_TOKEN", "hf_token", "api_key", "AWS_SECRET_ACCESS_KEY", "token", "Authorization"]
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("pad_token", "eos_token_id", "max_new_tokens", "tokenizer", "runtime.key", "capture_key", "token_ids", "key"),
        "api_key_variable",
    ],
)
def test_names_that_only_sound_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:hunter2@db/mlflow", "postgresql://[redacted]@db/mlflow"),
        ("Authorization: Bearer abcdefgh.ijkl", "Authorization: Bearer [redacted]"),
        ("use hf_abcdefghijklmnopqrst now", "use [redacted] now"),
        ("https://s3/x?X-Amz-Signature=0123abc&y=1", "https://s3/x?X-Amz-Signature=[redacted]&y=1"),
        ("the value from-the-vault-1 leaks", "the value [redacted] leaks"),
        ("http://127.0.0.1:5000/api is fine", "http://127.0.0.1:5000/api is fine"),
        ("redis://:hunter2@cache/0", "redis://[redacted]@cache/0"),
        ("https://abc123@host/x", "https://[redacted]@host/x"),
        ("postgresql://me:p@ss@db/mlflow", "postgresql://[redacted]@db/mlflow"),
        ("postgresql://me:p/w@d@db/mlflow", "postgresql://[redacted]@db/mlflow"),
        ("https://host/x?a=1&access_token=abc&b=2", "https://host/x?a=1&access_token=[redacted]&b=2"),
        ("https://x.blob/y?sv=1&sig=a%2Fb%3D", "https://x.blob/y?sv=1&sig=[redacted]"),
        ('href="https://x/y?sv=1&amp;sig=abc"', 'href="https://x/y?sv=1&amp;sig=[redacted]"'),
        ("vllm serve --api-key abc --port 1", "vllm serve --api-key [redacted] --port 1"),
        ("vllm serve --api-key=abc --hf-token 'a b'", "vllm serve --api-key=[redacted] --hf-token [redacted]"),
        ("['serve', '--api-key', 'abc', '--port', '1']", "['serve', '--api-key', '[redacted]', '--port', '1']"),
        ("post to https://hooks.slack.com/services/T0/B0/xyz.", "post to https://hooks.slack.com/[redacted]"),
        ("https://discord.com/api/webhooks/12/ab-c", "https://discord.com/api/webhooks/[redacted]"),
        ("https://me.webhook.office.com/webhookb2/a@b", "https://me.webhook.office.com/[redacted]"),
        ("https://api.telegram.org/bot12:abc/sendMessage", "https://api.telegram.org/bot[redacted]"),
        ("https://me:pw@chat.me.org/hooks/abc", "https://[redacted]@chat.me.org/hooks/[redacted]"),
        ("slack://TokenA/TokenB/TokenC/#chan", "slack://[redacted]"),
        ("jsons://host/secret/path", "jsons://[redacted]"),
        ("s3://bucket/prefix hf://org/model@main", "s3://bucket/prefix hf://org/model@main"),
        ("https://host:8443/org/model@main chat@champion", "https://host:8443/org/model@main chat@champion"),
        ("--max-num-batched-tokens 8192 --tokenizer x", "--max-num-batched-tokens 8192 --tokenizer x"),
    ],
)
def test_secret_values(text: str, expected: str) -> None:
    assert redact(text, {"DB_PASSWORD": "from-the-vault-1", "HOME": "is fine"}) == expected


def test_what_is_masked_stays_masked() -> None:
    text = "postgresql://me:p@ss@db/x https://h/?sig=abc --api-key abc slack://a/b Bearer abcdefgh"
    assert redact(redact(text, {}), {}) == redact(text, {})


def test_the_argument_behind_a_secret_flag_is_masked() -> None:
    value = {"extra_args": ["--api-key", "abc", "--port", "1", "--api-key=abc", "last"]}
    assert scrub(value, allow_text=True)["extra_args"] == [
        *("--api-key", "[redacted]", "--port", "1", "--api-key=[redacted]", "last")
    ]


def test_conversation_text_becomes_its_length_and_digest() -> None:
    value = {"id": "a", "messages": [{"role": "user", "content": "hello"}], "text": "bye", "counts": [1, 2]}
    found = scrub(value, allow_text=False)
    assert (found["id"], found["counts"]) == ("a", [1, 2])
    assert found["text"]["characters"] == 3 and len(found["text"]["sha256"]) == 64
    assert "hello" not in json.dumps(found) and "bye" not in json.dumps(found)
    assert scrub(value, allow_text=True) == value


def test_numbers_under_a_text_key_stay() -> None:
    assert scrub({"prompt": 128, "text": "", "replies": [1, 2]}, allow_text=False) == {
        "prompt": 128,
        "text": "",
        "replies": [1, 2],
    }


def test_binary_files_go_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(b"\x89PNG")
    assert scrubbed_file(tmp_path / "plot.png", allow_text=False) is None
