from __future__ import annotations

from pathlib import Path

import pytest

from flows.doctor import examine, look, told_once
from speculators_core.config import load_recipe
from speculators_core.errors import RegistryError
from speculators_core.serving import proxy
from tasks.adapters.settings import read_settings
from tests.environment import ROOT


def test_the_doctor_names_environment_and_runtime_and_what_one_feature_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no runtime lies
    monkeypatch.setattr(proxy.shutil, "which", lambda *_, **__: None)
    found = {finding.name: finding for finding in examine(read_settings({"DRAFTSMITH_HOME": str(tmp_path)}), None)}
    assert "torch" in found["environment"].text and found["environment"].ok
    assert found["for serve"].ok and "no haproxy" in found["for serve"].text
    assert not found["runtime"].ok and ".venv-vllm" in found["runtime"].text


def test_no_finding_shows_a_password() -> None:
    address = "postgresql://me:hunter2@db/mlflow"

    def away() -> str:
        raise RegistryError(f"MLflow at {address} does not answer")

    for finding in (look("mlflow", lambda: address), look("mlflow", away)):
        assert "hunter2" not in finding.model_dump_json() and "@db/mlflow" in finding.text


def test_a_fault_is_told_once_and_a_store_that_is_not_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    store = "capture={backend: s3, backend_config: {root: 's3://no/p', endpoint_url: 'http://127.0.0.1:9'}}"
    overrides = [f"verifier.path={tmp_path / 'none'}", f"runtime.python={tmp_path / 'python'}", store]
    loaded = load_recipe(ROOT / "deployments" / "recipes" / "demo.yaml", overrides)
    found = {f.name: f for f in examine(read_settings({"DRAFTSMITH_HOME": str(tmp_path)}), loaded)}
    assert found["verifier"].ok is False and "does not exist" in found["verifier"].text
    for name in ("fingerprint", "recipe"):
        assert found[name].ok is None and found[name].text == "not looked at: see verifier"
    assert found["capture store"].ok is False and "s3://no/p cannot be listed" in found["capture store"].text
    assert [f.ok for f in told_once([look("a", lambda: "same"), look("b", lambda: "same")])] == [True, True]
