"""What MLflow lists in pages is read to the last."""

from __future__ import annotations

from pathlib import Path

from mlflow.store.entities import PagedList

from tasks.adapters.aliases import MlflowAliases
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
