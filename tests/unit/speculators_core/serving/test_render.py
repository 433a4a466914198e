"""What others are given to start a version: the same pair, the same flags, paths that exist inside and outside."""

from __future__ import annotations

import itertools
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from speculators_core.serving.config import ServeConfig
from speculators_core.serving.render import Form, render, settled_directory
from speculators_core.serving.version import ServedVersion

CONFIG = ServeConfig.model_validate({"port": 9001, "engine": {"k": 4, "kv_cache_gib": 1, "max_model_len": 2048}})


FORMS: tuple[Form, ...] = ("compose", "kubernetes")


@pytest.fixture
def version(tmp_path: Path) -> ServedVersion:
    verifier, draft = tmp_path / "verifier", tmp_path / "draft"
    for directory in (verifier, draft):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights")
    config = {"speculators_config": {"verifier": {"name_or_path": "org/verifier"}}, "speculators_model_type": "any"}
    (draft / "config.json").write_text(json.dumps(config))
    return ServedVersion(
        model="chat", version="7", verifier=verifier, verifier_fingerprint="f" * 64, draft=draft, draft_files={}
    )


def rendered(form: Form, version: ServedVersion, device: str = "cpu") -> tuple[str, Path]:
    model = settled_directory(version, version.draft.parent / "serving")
    return render(form, version, CONFIG, model, python="python", vllm="0.32.0+cpu", device=device), model


def flags(words: list[str]) -> dict[str, str]:
    return {word: value for word, value in itertools.pairwise(words) if word.startswith("--")}


def test_a_settled_draft_names_the_verifier_where_it_lies_and_shares_its_bytes(version: ServedVersion) -> None:
    _, model = rendered("command", version)
    config = json.loads((model / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(version.verifier)
    assert (model / "model.safetensors").samefile(version.draft / "model.safetensors")
    assert rendered("command", version)[1] == model, "it is made anew in its place"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system to try it on")
def test_a_store_on_another_file_system_is_copied_from(version: ServedVersion) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        model = settled_directory(version, Path(elsewhere))
        assert (model / "model.safetensors").read_bytes() == b"weights"


def test_the_command_serves_the_draft_on_loopback_by_the_model_s_name(version: ServedVersion) -> None:
    text, model = rendered("command", version)
    words = shlex.split(text)
    found = flags(words)
    assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert found | {
        "--model": str(model), "--served-model-name": "chat", "--host": "127.0.0.1", "--port": "9001",
        "--max-model-len": "2048", "--speculative-config": '{"num_speculative_tokens": 4}',
    } == found  # fmt: skip


def test_an_image_for_gpus_says_so_where_the_version_was_proven_on_a_cpu(version: ServedVersion) -> None:
    for form in FORMS:
        assert "on which nothing is proven" in rendered(form, version)[0]
        assert "on which nothing is proven" not in rendered(form, version, "cuda:NVIDIA H100")[0]
    assert "#" not in rendered("command", version)[0]


def test_compose_mounts_the_pair_where_it_lies_and_publishes_on_loopback(version: ServedVersion) -> None:
    text, model = rendered("compose", version)
    service: dict[str, Any] = yaml.safe_load(text)["services"]["chat"]
    assert service["image"] == "vllm/vllm-openai:v0.32.0"
    assert service["volumes"] == [f"{path}:{path}:ro" for path in sorted((str(version.verifier), str(model)))]
    assert service["ports"] == ["127.0.0.1:9001:8000"]
    assert flags(service["entrypoint"])["--model"] == str(model)
    assert service["labels"]["draftsmith/verifier-fingerprint"] == "f" * 64


def test_kubernetes_rolls_without_a_gap(version: ServedVersion) -> None:
    text, model = rendered("kubernetes", version)
    assert "&id" not in text
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert flags(container["command"])["--model"] == str(model)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    assert set(mounts.values()) == {str(version.verifier), str(model)}
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert deployment["metadata"]["annotations"]["draftsmith/version"] == "7"
