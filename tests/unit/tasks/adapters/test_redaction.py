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
    ["pad_token", "eos_token_id", "max_new_tokens", "tokenizer", "runtime.key", "capture_key", "token_ids", "key"],
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
    ],
)
def test_secret_values(text: str, expected: str) -> None:
    assert redact(text, {"DB_PASSWORD": "from-the-vault-1", "HOME": "is fine"}) == expected


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
