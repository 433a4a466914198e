"""What MLflow lists in pages is read to the last; and its own pages are served without telling where its store is."""

from __future__ import annotations

from pathlib import Path

from mlflow.store.entities import PagedList

from infra.ui import mlflow_experiments, start_mlflow, wait
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.prefect_server import answers, free_port
from tasks.adapters.settings import read_settings
from tasks.adapters.tracking import Tracking, every


def test_every_page_is_asked_for() -> None:
    pages: dict[str | None, PagedList[int]] = {
        None: PagedList([1, 2], "a"),
        "a": PagedList([], "b"),
        "b": PagedList([3], None),
    }
    assert every(pages.__getitem__) == [1, 2, 3]


def test_more_models_than_a_page_holds(tmp_path: Path) -> None:
    tracking = Tracking(read_settings({"DRAFTSMITH_HOME": str(tmp_path)}))
    names = [f"model-{number:03}" for number in range(101)]
    for name in names:
        tracking.client.create_registered_model(name)
    assert MlflowAliases(tracking, actor="test").models() == names


def test_the_address_of_its_store_which_may_hold_a_password_is_in_no_command_line(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'other.db'}?timeout=17"
    found, port = read_settings({"DRAFTSMITH_HOME": str(tmp_path), "MLFLOW_TRACKING_URI": uri}), free_port()
    with start_mlflow(found, port) as server:
        wait(lambda: answers(f"http://127.0.0.1:{port}/health"), [server], "MLflow")
        assert mlflow_experiments(f"http://127.0.0.1:{port}") == 2, "Default and ours: it is the store of that address"
        lines = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
        ours = [line for line in lines.values() if str(port).encode() in line]
        assert ours and not any(b"timeout=17" in line for line in lines.values())
    assert "timeout=17" not in server.log.read_text()
