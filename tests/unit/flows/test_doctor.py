from __future__ import annotations

from pathlib import Path

import pytest

from flows.doctor import examine, look
from speculators_core.errors import RegistryError
from speculators_core.serving import proxy
from tasks.adapters.settings import read_settings


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
