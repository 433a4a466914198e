from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators_core.errors import RegistryError
from speculators_core.lifecycle.promotion import CHALLENGER, CHAMPION, PREVIOUS, promote, rollback
from speculators_core.store import Store
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.registry import MODEL_ID_TAG, DraftRegistry, RegisteredDraft, VersionFacts
from tasks.adapters.settings import read_settings
from tasks.adapters.tracking import Tracking
from tests.environment import child_environment

CHILDREN = Path(__file__).with_name("mlflow_children.py")
FINGERPRINT, RUNTIME = "f" * 64, "r" * 64
HINT = "draftsmith register recipe.yaml"


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    return Tracking(read_settings({"DRAFTSMITH_HOME": str(tmp_path_factory.mktemp("home"))}))


@pytest.fixture(scope="module")
def run_id(tracking: Tracking) -> str:
    return tracking.open_parent("9" * 64, name="recipe", tags={})


@pytest.fixture
def deployment(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("_", "-")


class Draft:
    """A draft in a real artifact store."""

    def __init__(self, root: Path, content: bytes = b"weights") -> None:
        store = Store(str(root / "store"), scratch=root / "scratch")
        key = content.hex()
        workspace = store.workspace("draft", key)
        (workspace / "config.json").write_text('{"architectures": ["X"]}')
        (workspace / "model.safetensors").write_bytes(content)
        (workspace / "README.md").write_text("# card\n")
        self.ref = store.publish(workspace, "draft", key, {}, producer={})
        self.path = store.path(self.ref)
        self.manifest = self.path.parent / "manifest.json"

    def facts(self, **changes: object) -> VersionFacts:
        values: dict[str, object] = {
            "draft_digest": self.ref.digest,
            "verifier_name": "org/verifier",
            "verifier_uri": "file:///verifiers/x",
            "verifier_fingerprint": FINGERPRINT,
            "tokenizer_sha256": "t" * 64,
            "chat_template_sha256": "c" * 64,
            "vllm_version": "0.32.0",
            "runtime_key": RUNTIME,
            "algorithm": "any",
            "k": 3,
            "gate_outcome": "pass",
        }
        return VersionFacts.model_validate({**values, **changes})

    def register(self, tracking: Tracking, deployment: str, run_id: str, **changes: object) -> RegisteredDraft:
        return DraftRegistry(tracking).register(
            deployment, self.path, self.manifest, self.facts(**changes), run_id=run_id, retry_hint=HINT
        )


def uploads(tracking: Tracking, draft: Draft) -> list[tuple[str, str]]:
    found = tracking.client.search_logged_models(
        [tracking.experiment_id], filter_string=f"tags.`draft.digest` = '{draft.ref.digest}'"
    )
    return [(model.model_id, str(model.status)) for model in found]


def uploaded_files(tracking: Tracking, model_id: str) -> Path:
    return Path(tracking.client.get_logged_model(model_id).artifact_location.removeprefix("file://"))


def test_a_draft_is_registered_once_with_its_facts(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path
) -> None:
    draft = Draft(tmp_path, b"once")
    first = draft.register(tracking, deployment, run_id, prefect_flow_run_id="flow-1")
    again = draft.register(tracking, deployment, run_id, prefect_flow_run_id="flow-2", al=1.5)
    assert (first.version, first.created) == ("1", True)
    assert again == first.model_copy(update={"created": False})

    version = tracking.client.get_model_version(deployment, "1")
    assert version.tags["verifier.fingerprint"] == FINGERPRINT
    assert version.tags["k"] == "3" and version.tags["vllm.version"] == "0.32.0"
    assert version.tags["al"] == "1.5000", "tags are merged"
    assert version.tags["prefect.flow_run_id"] == "flow-1", "who made it, not who looked last"
    assert len(version.tags["manifest.sha256"]) == 64
    assert uploads(tracking, draft) == [(first.model_id, "READY")]
    stored = {path.name for path in uploaded_files(tracking, first.model_id).iterdir()}
    assert stored == {"config.json", "model.safetensors", "README.md", "manifest.json"}
    outputs = tracking.client.get_run(run_id).outputs.model_outputs
    assert first.model_id in {output.model_id for output in outputs}


def test_a_registry_stays_its_own_where_the_process_opens_another_one(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path
) -> None:
    """MLflow itself looks `models:/…` up at the address that was set last."""
    draft = Draft(tmp_path, b"two registries")
    Tracking(read_settings({"DRAFTSMITH_HOME": str(tmp_path / "other")}))
    version = draft.register(tracking, deployment, run_id).version
    Tracking(read_settings({"DRAFTSMITH_HOME": str(tmp_path / "another")}))
    fetched = DraftRegistry(tracking).download(deployment, version, tmp_path / "fetched")
    assert (fetched / "model.safetensors").read_bytes() == (draft.path / "model.safetensors").read_bytes()


def test_another_verifier_or_runtime_is_another_version_of_the_same_upload(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path
) -> None:
    draft = Draft(tmp_path, b"pairs")
    first = draft.register(tracking, deployment, run_id)
    second = draft.register(tracking, deployment, run_id, verifier_fingerprint="e" * 64)
    third = draft.register(tracking, deployment, run_id, runtime_key="q" * 64)
    assert [first.version, second.version, third.version] == ["1", "2", "3"]
    assert len({first.model_id, second.model_id, third.model_id}) == 1
    assert draft.register(tracking, deployment, run_id, runtime_key="q" * 64).version == "3"


def test_a_torn_draft_is_not_uploaded(tracking: Tracking, run_id: str, deployment: str, tmp_path: Path) -> None:
    draft = Draft(tmp_path, b"flipped bit")
    (draft.path / "model.safetensors").chmod(0o644)
    (draft.path / "model.safetensors").write_bytes(b"flipped bi\x75")
    with pytest.raises(RegistryError, match=r"model\.safetensors does not match"):
        draft.register(tracking, deployment, run_id)
    assert uploads(tracking, draft) == []
    assert MlflowAliases(tracking, actor="test").versions(deployment) == []


def test_an_upload_that_was_not_finished_is_never_registered(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path
) -> None:
    draft = Draft(tmp_path, b"unfinished")
    dead = tracking.client.create_logged_model(
        tracking.experiment_id, name="draft-any", source_run_id=run_id, tags={"draft.digest": draft.ref.digest}
    )
    tracking.client.log_model_artifacts(dead.model_id, str(draft.path))
    registered = draft.register(tracking, deployment, run_id)
    assert registered.model_id != dead.model_id
    assert dict(uploads(tracking, draft)) == {dead.model_id: "FAILED", registered.model_id: "READY"}


def test_an_upload_that_lost_bytes_is_made_anew(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path
) -> None:
    draft = Draft(tmp_path, b"lost")
    first = draft.register(tracking, deployment, run_id)
    (uploaded_files(tracking, first.model_id) / "model.safetensors").write_bytes(b"los")
    second = draft.register(tracking, deployment, run_id, runtime_key="q" * 64)
    assert second.model_id != first.model_id
    registry = DraftRegistry(tracking)
    assert (registry.download(deployment, "2", tmp_path / "two") / "model.safetensors").read_bytes() == b"lost"
    with pytest.raises(RegistryError, match="does not match its manifest"):
        registry.download(deployment, "1", tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_an_upload_that_fails_leaves_no_version(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path
) -> None:
    draft = Draft(tmp_path, b"no room")
    artifacts = tracking.settings.mlflow_artifacts
    moved = artifacts.with_name("moved")
    artifacts.mkdir(exist_ok=True)
    artifacts.rename(moved)
    artifacts.write_text("a file where a directory should be")
    try:
        with pytest.raises(RegistryError, match="register") as caught:
            draft.register(tracking, deployment, run_id)
    finally:
        artifacts.unlink()
        moved.rename(artifacts)
    assert str(draft.path) in str(caught.value) and HINT in str(caught.value)
    assert [status for _, status in uploads(tracking, draft)] == ["FAILED"]
    assert MlflowAliases(tracking, actor="test").versions(deployment) == []
    assert draft.register(tracking, deployment, run_id).version == "1"


def test_a_download_is_whole_and_repeatable(tracking: Tracking, run_id: str, deployment: str, tmp_path: Path) -> None:
    draft = Draft(tmp_path, b"fetched")
    draft.register(tracking, deployment, run_id)
    registry = DraftRegistry(tracking)
    target = tmp_path / "drafts" / "one"
    for _ in range(2):
        assert registry.download(deployment, "1", target) == target
        assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert [path.name for path in target.parent.iterdir()] == ["one"], "no scratch is left"
    (target / "model.safetensors").write_bytes(b"tampered")
    with pytest.raises(RegistryError, match="does not match"):
        registry.download(deployment, "1", target)
    with pytest.raises(RegistryError, match="version 7"):
        registry.download(deployment, "7", tmp_path / "seven")


def test_of_two_that_fetch_a_draft_at_once_both_have_it(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Draft(tmp_path, b"wanted by two").register(tracking, deployment, run_id)
    target, registry, replace = tmp_path / "drafts" / "one", DraftRegistry(tracking), Path.replace

    def after_another(draft: Path, place: Path) -> Path:
        monkeypatch.undo()
        registry.download(deployment, "1", target)
        return replace(draft, place)

    monkeypatch.setattr(Path, "replace", after_another)
    assert registry.download(deployment, "1", target) == target
    assert [path.name for path in target.parent.iterdir()] == ["one"]


def test_promotion_and_rollback_over_mlflow(tracking: Tracking, run_id: str, deployment: str, tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        Draft(tmp_path, content).register(tracking, deployment, run_id)
    aliases = MlflowAliases(tracking, actor="tester")
    assert aliases.get_alias("no-such-model", CHAMPION) is None
    assert aliases.get_alias(deployment, CHAMPION) is None
    aliases.set_alias(deployment, CHALLENGER, "2")
    pair = {"verifier_fingerprint": FINGERPRINT, "runtime_key": RUNTIME}
    promote(aliases, deployment, "1", expected=None, who="t", why="first", home=tmp_path, **pair)
    promote(aliases, deployment, "2", expected="1", who="t", why="better", home=tmp_path, **pair)
    assert aliases.aliases(deployment) == {CHAMPION: "2", PREVIOUS: "1"}
    assert aliases.tags(deployment, "2")["alias.champion"].endswith("by tester")
    with pytest.raises(RegistryError, match="not version 1"):
        promote(aliases, deployment, "1", expected="1", who="t", why="late", home=tmp_path, **pair)
    rollback(aliases, deployment, expected="2", who="t", why="worse", home=tmp_path)
    assert aliases.aliases(deployment) == {CHAMPION: "1"}
    with pytest.raises(RegistryError, match="version 9"):
        aliases.tags(deployment, "9")


def test_of_two_promoters_at_once_one_wins(tracking: Tracking, run_id: str, deployment: str, tmp_path: Path) -> None:
    for content in (b"left", b"right"):
        Draft(tmp_path, content).register(tracking, deployment, run_id)
    home = tracking.settings.home
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILDREN), "promote", str(home), deployment, version],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for version in ("1", "2")
    ]
    deadline = time.monotonic() + 60
    while not all((home / f"ready-{version}").exists() for version in ("1", "2")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (home / "go").touch()
    outcomes = [child.communicate(timeout=60)[0].strip() for child in children]
    assert sorted(outcomes) == ["lost", "won"]
    winner = "1" if outcomes[0] == "won" else "2"
    assert MlflowAliases(tracking, actor="test").aliases(deployment) == {CHAMPION: winner}
    audit = [json.loads(line) for line in (home / "promotions.jsonl").read_text().splitlines()]
    assert [(entry["to_version"], entry["state"]) for entry in audit if entry["model"] == deployment] == [
        (winner, "intended"),
        (winner, "done"),
    ]


def test_mlflow_away_at_registration_keeps_the_draft_and_says_how_to_go_on(
    tracking: Tracking, run_id: str, deployment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Draft(tmp_path, b"kept")
    for name, value in (("MAX_RETRIES", "1"), ("BACKOFF_FACTOR", "1"), ("TIMEOUT", "5")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    away = Tracking.__new__(Tracking)  # opened while the server was up
    away.settings = tracking.settings.model_copy(update={"tracking_uri": "http://127.0.0.1:9"})
    away.uri = away.settings.tracking_uri
    away.client = type(tracking.client)(away.uri, away.uri)
    away.experiment_id = tracking.experiment_id
    started = time.monotonic()
    with pytest.raises(RegistryError) as caught:
        draft.register(away, deployment, run_id)
    assert time.monotonic() - started < 20
    assert f"the draft is kept in {draft.path}" in str(caught.value)
    assert f"`{HINT}`" in str(caught.value)
    assert (draft.path / "model.safetensors").read_bytes() == b"kept"
    assert draft.register(tracking, deployment, run_id).created, "registration alone can be retried"


def test_a_version_made_by_other_hands_is_not_served(tracking: Tracking, deployment: str, tmp_path: Path) -> None:
    tracking.client.create_registered_model(deployment)
    tracking.client.create_model_version(deployment, source=str(tmp_path))
    with pytest.raises(RegistryError, match="not registered by draftsmith"):
        DraftRegistry(tracking).download(deployment, "1", tmp_path / "x")
    assert MODEL_ID_TAG not in MlflowAliases(tracking, actor="test").tags(deployment, "1")
