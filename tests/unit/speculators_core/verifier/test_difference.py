"""A difference names keys, lines, files and tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from speculators_core.errors import VerifierError
from speculators_core.verifier.difference import TensorChanges, difference, tensor_changes
from speculators_core.verifier.files import LocalFiles
from speculators_core.verifier.fingerprint import describe


@pytest.fixture
def other(verifier: Path, tmp_path: Path) -> Path:
    return shutil.copytree(verifier, tmp_path / "other")


def lines(before: Path, after: Path) -> dict[str, tuple[str, ...]]:
    found = difference(describe(LocalFiles(before, home=None)), describe(LocalFiles(after, home=None)))
    return {change.part: change.lines for change in found}


def tensors(before: Path, after: Path, *, values: bool = True) -> TensorChanges:
    one, two = LocalFiles(before, home=None), LocalFiles(after, home=None)
    return tensor_changes(one, describe(one), two, describe(two), values=values)


def test_equal_verifiers_differ_in_nothing(verifier: Path, other: Path) -> None:
    assert lines(verifier, other) == {}
    assert tensors(verifier, other) == TensorChanges(same=1, values_compared=True)


def test_keys_and_template_lines_are_named(verifier: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    del config["rms_norm_eps"]
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (verifier / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m }}\n{% endfor %}")
    (other / "chat_template.jinja").write_text("{% for m in messages %}\n<{{ m }}>\n{% endfor %}")
    found = lines(verifier, other)
    assert list(found) == ["config", "generation_config", "chat_template"]
    assert found["generation_config"] == ("eos_token_id: 2 → [2, 5]",)
    assert any(line.startswith("rms_norm_eps: ") and line.endswith("→ absent") for line in found["config"])
    assert any(line.startswith("rope_theta: ") and line.endswith("→ 5.0") for line in found["config"])
    assert found["chat_template"] == ("@@ -2 +2 @@", "-{{ m }}", "+<{{ m }}>")


def test_tensors_are_named_by_what_became_of_them(verifier: Path, other: Path) -> None:
    common = {"same": torch.ones(3), "tuned": torch.zeros(8), "cast": torch.zeros(2), "gone": torch.ones(1)}
    save_file(common, verifier / "model.safetensors")
    new = {"same": torch.ones(3), "tuned": torch.ones(8), "cast": torch.zeros(2).half(), "added": torch.ones(1)}
    save_file(new, other / "model.safetensors")
    (name,) = lines(verifier, other)["weights"]
    assert name.startswith("model.safetensors: sha256 ")
    assert tensors(verifier, other) == TensorChanges(
        added=("added",), removed=("gone",), reshaped=("cast",), changed=("tuned",), same=1, values_compared=True
    )
    told_by_headers = tensors(verifier, other, values=False)
    assert told_by_headers.changed == () and told_by_headers.same == 0 and not told_by_headers.values_compared


def test_a_torn_file_is_said(verifier: Path, other: Path) -> None:
    (other / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(VerifierError, match="not safetensors"):
        tensors(verifier, other)
