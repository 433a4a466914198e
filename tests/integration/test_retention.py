"""gc over a real store and a real registry: what is referred to stays, and without the registry's word nothing goes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculators_core.errors import ConfigError, RegistryError, StoreError
from speculators_core.lifecycle.plan import MADE_OF, MadeOf
from speculators_core.lifecycle.promotion import CHAMPION, promote
from speculators_core.store import Store
from speculators_core.types import ArtifactRef
from tasks import retention
from tasks.adapters.registry import DraftRegistry, VersionFacts
from tasks.adapters.settings import settings
from tasks.observe import tracking

KEEP_DAYS = 14.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_HOME", str(root))
        for name in ("MLFLOW_TRACKING_URI", "PREFECT_HOME", "DRAFTSMITH_STORE"):
            patch.delenv(name, raising=False)
        settings.cache_clear()
        tracking.cache_clear()
        yield root
    settings.cache_clear()
    tracking.cache_clear()


def publish(kind: str, name: str, **inputs: str) -> ArtifactRef:
    store = retention.open_store(settings())
    workspace = store.workspace(kind, name)
    (workspace / "config.json").write_text("{}")
    (workspace / "data.bin").write_bytes(name.encode() * 100)
    made_of = MadeOf(stage=kind, inputs=inputs, settings={}).model_dump(mode="json")
    return store.publish(workspace, kind, name, {MADE_OF: made_of})


def grow_old(home: Path, days: float = 90) -> None:
    """Everything in the store was last used long ago."""
    then = time.time() - days * 86_400
    for path in [
        *(home / "drafts").rglob("*"),
        *(home / "store").rglob("*"),
        *(home / "store" / ".locks").glob("*.use.lock"),
    ]:
        os.utime(path, (then, then))


def register(name: str, draft: ArtifactRef, evaluation: ArtifactRef) -> str:
    path = retention.open_store(settings()).path(draft)
    facts = VersionFacts(
        draft_digest=draft.digest,
        verifier_name="org/v",
        verifier_uri="org/v",
        verifier_fingerprint="f" * 64,
        tokenizer_sha256="t" * 64,
        chat_template_sha256="c" * 64,
        vllm_version="0.32.0",
        runtime_key="r" * 64,
        algorithm="any",
        k=3,
        extra={"evaluation.digest": evaluation.digest},
    )
    run_id = tracking().open_parent("9" * 64, name="recipe", tags={})
    done = DraftRegistry(tracking()).register(
        "chat", path, path.parent / "manifest.json", facts, run_id=run_id, retry_hint=name
    )
    return done.version


def make_loop(name: str) -> dict[str, ArtifactRef]:
    """States, training, draft and evaluation, each made of the one before; registered."""
    made = {"states": publish("states", f"{name}-states", verifier="f" * 64)}
    made["training"] = publish("training", f"{name}-training", states=made["states"].digest)
    made["draft"] = publish("draft", f"{name}-draft", training=made["training"].digest)
    made["evaluation"] = publish("evaluation", f"{name}-evaluation", draft=made["draft"].digest)
    register(name, made["draft"], made["evaluation"])
    return made


def names(home: Path) -> set[str]:
    return {ref.uri.rsplit("/", 1)[-1] for ref in Store(str(home / "store"), scratch=home / "scratch").artifacts()}


def test_gc_keeps_what_is_referred_to_and_deletes_the_rest(home: Path) -> None:
    champion = make_loop("champion")
    tracking().client.set_registered_model_alias("chat", CHAMPION, "1")
    failed = make_loop("failed")
    fetched = [home / "drafts" / made["draft"].digest for made in (champion, failed)]
    for version, path in zip(("1", "2"), fetched, strict=True):
        DraftRegistry(tracking()).download("chat", version, path)
    publish("states", "pinned-states")
    publish("states", "orphan-states")
    left = retention.open_store(settings()).workspace("states", "left")
    (left / "shard").write_bytes(b"x" * 10)
    grow_old(home)
    pin = retention.pin("states/pinned", why="to train on again")
    publish("states", "young-states")
    everything = names(home)

    shown = retention.plan_gc(keep_days=KEEP_DAYS)
    going = {line.name.split("/")[-1] for line in shown.deletions}
    assert going == {"failed-states", "failed-training", "orphan-states", "left", failed["draft"].digest}
    reasons = {line.name.split("/")[-1]: line.reason for line in shown.lines}
    assert reasons["champion-states"] == "champion: chat version 1"
    assert reasons["failed-draft"] == "registered: chat version 2"
    assert reasons["pinned-states"] == "pinned: to train on again"
    assert names(home) == everything, "a plan deletes nothing"

    reader = retention.open_store(settings())
    orphan = next(ref for ref in reader.artifacts() if ref.uri.endswith("orphan-states"))
    reader.path(orphan)
    done = retention.collect(keep_days=KEEP_DAYS)
    assert names(home) == everything - {"failed-states", "failed-training"}, "what is read just now stays"
    assert not left.exists()
    assert len(done.deleted) == 4 and done.left == ()
    assert [path.exists() for path in fetched] == [True, False], "what may be fetched again goes, what serves stays"
    del reader
    grow_old(home)
    assert retention.unpin(pin.digest[:10]) == pin
    retention.collect(keep_days=KEEP_DAYS)
    assert names(home) == {
        *(f"champion-{kind}" for kind in ("states", "training", "draft", "evaluation")),
        "failed-draft",
        "failed-evaluation",
    }


def test_a_lineage_that_cannot_be_read_to_its_end_stops_the_sweep(home: Path) -> None:
    publish("states", "torn-states")
    manifest = home / "store" / "states" / "torn-states" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"schema_version": 1', '"schema_version": 2'))
    grow_old(home)
    before = names(home)
    with pytest.raises(StoreError, match=r"states/torn-states cannot be read.*schema 2"):
        retention.collect(keep_days=KEEP_DAYS)
    assert names(home) == before
    manifest.write_text(whole)


def test_pins_name_one_artifact(home: Path) -> None:
    for name in ("twin-a", "twin-b"):
        publish("dataset", name)
    with pytest.raises(ConfigError, match="names 2 artifacts"):
        retention.pin("dataset/twin")
    with pytest.raises(ConfigError, match="names no artifacts"):
        retention.pin("nothing")
    with pytest.raises(ConfigError, match="names no pinned"):
        retention.unpin("dataset/twin-a")
    assert retention.pin("dataset/twin-a").name == "dataset/twin-a"
    assert retention.pin("dataset/twin-a", why="again").why == "again"
    assert [pin.name for pin in retention.read_pins(home)].count("dataset/twin-a") == 1


def test_without_the_registrys_word_nothing_goes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish("states", "unknown-states")
    grow_old(home)
    before = names(home)
    for name, value in (("MAX_RETRIES", "1"), ("BACKOFF_FACTOR", "1"), ("TIMEOUT", "5")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    settings.cache_clear()
    tracking.cache_clear()
    try:
        with pytest.raises(RegistryError):
            retention.collect(keep_days=KEEP_DAYS)
    finally:
        monkeypatch.undo()
        settings.cache_clear()
        tracking.cache_clear()
    assert names(home) == before
