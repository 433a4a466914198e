from __future__ import annotations

from pathlib import Path

import pytest

from tasks.adapters.settings import apply_environment, read_settings


def test_everything_lies_below_the_state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_settings({})
    home = tmp_path / ".draftsmith"
    assert found.home == home
    assert found.tracking_uri == f"sqlite:///{home}/mlflow.db"
    assert found.sqlite_file == home / "mlflow.db"
    assert found.prefect_home == home / "prefect"
    assert found.store == str(home / "store")
    assert found.prefect_api_url is None
    assert list(tmp_path.iterdir()) == [], "reading makes nothing"


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    mine = {
        "DRAFTSMITH_HOME": str(tmp_path / "state"),
        "DRAFTSMITH_STORE": "s3://bucket/store",
        "MLFLOW_TRACKING_URI": "https://mlflow.example",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "7",
        "PREFECT_HOME": str(tmp_path / "prefect-of-mine"),
        "PREFECT_API_URL": "http://prefect.example/api",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "compressed/json",
    }
    environ = dict(mine)
    found = apply_environment(environ)
    assert {name: environ[name] for name in mine} == mine
    assert (found.store, found.tracking_uri, found.sqlite_file) == (
        "s3://bucket/store",
        "https://mlflow.example",
        None,
    )
    assert found.prefect_home == tmp_path / "prefect-of-mine"
    assert environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false", "what is unset is filled in"


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:////data/mlflow.db", "/data/mlflow.db"),
        ("sqlite:////data/mlflow.db?timeout=30", "/data/mlflow.db"),
        ("sqlite+pysqlite:////data/my%20flow.db", "/data/my flow.db"),
        ("sqlite:///file:/data/mlflow.db?mode=rwc&uri=true", "/data/mlflow.db"),
        ("sqlite:///mlflow.db", "{cwd}/mlflow.db"),
        ("sqlite:///:memory:", None),
        ("sqlite://", None),
        ("postgresql:///mlflow", None),
    ],
)
def test_the_registrys_file_is_the_one_that_mlflow_opens(
    uri: str, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_settings({"MLFLOW_TRACKING_URI": uri}).sqlite_file
    assert found == (None if file is None else Path(file.format(cwd=tmp_path)))


def test_a_state_root_with_all_of_its_own_is_self_contained(tmp_path: Path) -> None:
    home = {"DRAFTSMITH_HOME": str(tmp_path / "home")}
    assert read_settings(home).self_contained
    for elsewhere in (
        {"DRAFTSMITH_STORE": "s3://bucket/store"},
        {"DRAFTSMITH_STORE": str(tmp_path / "store")},
        {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"},
        {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
    ):
        assert not read_settings(home | elsewhere).self_contained
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "store").symlink_to(tmp_path)
    assert not read_settings(home).self_contained


def test_applying_twice_follows_a_changed_home(tmp_path: Path) -> None:
    environ = {"DRAFTSMITH_HOME": str(tmp_path / "a")}
    apply_environment(environ)
    environ["DRAFTSMITH_HOME"] = str(tmp_path / "b")
    assert apply_environment(environ).tracking_uri == f"sqlite:///{tmp_path}/b/mlflow.db"
