"""gc over a real store and a real registry: what is referred to stays, and without the registry's word nothing goes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from speculators_core.errors import ConfigError, RegistryError, StoreError
from speculators_core.lifecycle.plan import MADE_OF, MadeOf
from speculators_core.lifecycle.promotion import CHAMPION, promote
from speculators_core.lifecycle.retention import Plan
from speculators_core.store import Store
from speculators_core.types import ArtifactRef
from tasks import retention
from tasks.adapters import fetched
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.registry import DraftRegistry, VersionFacts
from tasks.adapters.settings import settings
from tasks.observe import tracking
from tasks.versions import fetch_draft
from tests.full_disk import full_disk

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


def test_what_is_pinned_or_registered_after_the_plan_was_made_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {kind: publish(kind, f"late-{kind}") for kind in ("states", "draft", "evaluation")}
    publish("training", "late-training")
    grow_old(home)
    before, planned = names(home), retention.plan_gc
    plans: list[Plan] = []

    def plan(*, keep_days: float, quota_bytes: int | None = None) -> Plan:
        plans.append(planned(keep_days=keep_days, quota_bytes=quota_bytes))
        if len(plans) == 1:
            retention.pin("states/late-states")
            register("late", kept["draft"], kept["evaluation"])
            grow_old(home)
        return plans[-1]

    monkeypatch.setattr(retention, "plan_gc", plan)
    monkeypatch.setattr(retention, "_LOOK_AGAIN_S", 0.0)
    done = retention.collect(keep_days=KEEP_DAYS)
    late = {line.name.split("/")[-1] for line in plans[0].deletions if "late" in line.name}
    assert late == {"late-states", "late-draft", "late-evaluation", "late-training"}
    assert before - names(home) == {name.split("/")[-1] for name in done.deleted}
    assert {name.split("/")[-1] for name in done.left} >= {f"late-{kind}" for kind in kept}
    assert "training/late-training" in done.deleted
    retention.unpin("states/late-states")


def test_a_full_disk_can_be_swept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("states", "draft"):
        publish(kind, f"heavy-{kind}")
    retention.open_store(settings()).workspace("states", "heavy-left")
    grow_old(home)
    shutil.rmtree(home / "store" / ".work" / ".trash", ignore_errors=True)
    for lock in [*(home / "locks").glob("*"), *(home / "store" / ".locks").glob("*heavy*")]:
        lock.unlink()
    with full_disk(monkeypatch):
        done = retention.collect(keep_days=KEEP_DAYS)
    assert {"states/heavy-states", "draft/heavy-draft", "work/states/heavy-left"} <= set(done.deleted)
    assert not [name for name in names(home) if "heavy" in name]


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


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Another environment, as another shell has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it itself
        for name, value in variables.items():
            patch.setenv(name, value)
        settings.cache_clear()
        tracking.cache_clear()
        try:
            yield
        finally:
            settings.cache_clear()
            tracking.cache_clear()


def test_without_the_registrys_word_nothing_goes(home: Path) -> None:
    publish("states", "unknown-states")
    grow_old(home)
    before = names(home)
    quick = {"MAX_RETRIES": "1", "BACKOFF_FACTOR": "1", "TIMEOUT": "5"}
    away = {f"MLFLOW_HTTP_REQUEST_{name}": value for name, value in quick.items()}
    with environment(MLFLOW_TRACKING_URI="http://127.0.0.1:9", **away), pytest.raises(RegistryError):
        retention.collect(keep_days=KEEP_DAYS)
    assert names(home) == before


def test_options_of_the_registrys_address_are_none_of_its_path(home: Path) -> None:
    def reasons() -> dict[str, str]:
        return {line.name: line.reason for line in retention.plan_gc(keep_days=KEEP_DAYS).lines}

    expected = reasons()
    assert any("chat version 1" in reason for reason in expected.values())
    with environment(MLFLOW_TRACKING_URI=f"sqlite:///{home}/mlflow.db?timeout=30"):
        assert reasons() == expected


@pytest.mark.parametrize("elsewhere", ["a relative address", "another state root", "a registry without models"])
def test_a_registry_that_is_not_there_says_nothing_of_what_others_registered(
    home: Path, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow_old(home)
    before = names(home)
    environ = {
        "a relative address": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"},
        "another state root": {"DRAFTSMITH_HOME": str(tmp_path), "DRAFTSMITH_STORE": str(home / "store")},
        "a registry without models": {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/other.db"},
    }[elsewhere]
    monkeypatch.chdir(tmp_path)
    with environment(**environ):
        if "without" in elsewhere:
            tracking()
        with pytest.raises(RegistryError, match=r"(no registry at|nothing is registered at) sqlite:.*[\s\S]*mend: set"):
            retention.collect(keep_days=KEEP_DAYS)
    assert names(home) == before


def test_a_state_root_of_its_own_needs_no_registry_until_a_draft_came_from_one(tmp_path: Path) -> None:
    with environment(DRAFTSMITH_HOME=str(tmp_path)):
        publish("states", "failed-states")
        grow_old(tmp_path)
        assert [line.name for line in retention.plan_gc(keep_days=KEEP_DAYS).deletions] == ["states/failed-states"]
        assert not (tmp_path / "mlflow.db").exists()
        (tmp_path / "drafts" / "d").mkdir(parents=True)
        with pytest.raises(RegistryError, match="no registry"):
            retention.plan_gc(keep_days=KEEP_DAYS)


def test_what_serves_stays_where_other_hands_moved_the_alias(home: Path) -> None:
    serving, unproven = make_loop("serving"), make_loop("unproven")
    aliases = MlflowAliases(tracking(), actor="test")
    *_, first, second = aliases.versions("chat")
    pair = {"verifier_fingerprint": "f" * 64, "runtime_key": "r" * 64}
    promote(aliases, "chat", first, expected=None, **pair, who="test", why="by force", home=home, force=True)
    aliases.set_alias("chat", CHAMPION, second)  # by hand: it is not followed, and the first goes on serving
    fetched = DraftRegistry(tracking()).download("chat", first, home / "drafts" / serving["draft"].digest)
    grow_old(home)
    reasons = {line.digest: line.reason for line in retention.plan_gc(keep_days=KEEP_DAYS).lines if line.fate == "keep"}
    for made in (*serving.values(), *unproven.values()):
        assert made.digest in reasons
    assert reasons[f"drafts/{fetched.name}"] == reasons[serving["states"].digest] == f"serves: chat version {first}"


def test_a_fetched_draft_stays_while_it_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_loop("fetched")
    aliases = MlflowAliases(tracking(), actor="test")
    version = aliases.versions("chat")[-1]

    def fetch() -> Path:
        return fetch_draft(settings(), aliases.tags("chat", version), "chat", version)[0]

    def reason() -> str:
        lines = retention.plan_gc(keep_days=KEEP_DAYS).lines
        return next(line.reason for line in lines if line.name == f"drafts/{made['draft'].digest}")

    path = fetch()
    grow_old(home)
    assert reason() == "in use just now"
    fetched._uses.cache_clear()  # as if this process had ended
    assert "not used for 90 days" in reason()
    planned = retention.plan_gc(keep_days=KEEP_DAYS)
    monkeypatch.setattr(retention, "plan_gc", lambda **_: planned)
    fetch()
    assert f"drafts/{path.name}" in retention.collect(keep_days=KEEP_DAYS).left, "its use began after the plan was made"
    monkeypatch.undo()
    fetched._uses.cache_clear()
    assert path.is_dir() and reason() == "used within 14 days"
    grow_old(home)
    retention.collect(keep_days=KEEP_DAYS)
    assert not path.exists()


def test_states_that_came_with_replies_go_when_no_stage_runs(home: Path) -> None:
    records = home / "records" / "0123-2-15-27"
    records.mkdir(parents=True)
    (records / "a.safetensors").write_bytes(b"x" * 100)
    then = time.time() - 90 * 86_400
    for path in (records / "a.safetensors", records):
        os.utime(path, (then, then))
    store = retention.open_store(settings())
    store.workspace("states", "made-just-now")
    with store.single_flight("states", "made-just-now"):
        retention.collect(keep_days=KEEP_DAYS)
        assert records.is_dir(), "it may be made of them"
    assert "records/0123-2-15-27" in retention.collect(keep_days=KEEP_DAYS).deleted
    assert not records.exists()
