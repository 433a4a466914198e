"""Promotion over a real MLflow: races, other hands, a server that goes away, files and verifiers that change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.cli_registry import describe
from speculators_core.engine.runtime import Runtime, RuntimeInfo
from speculators_core.errors import ConfigError, RegistryError, VerifierError
from speculators_core.lifecycle.matrix import Cell, Pair
from speculators_core.lifecycle.promotion import CHAMPION, PREVIOUS, audit_log, promote, rollback, settle
from speculators_core.store import Store
from speculators_core.verifier.fingerprint import fingerprint
from tasks import versions
from tasks.adapters.aliases import MlflowAliases
from tasks.adapters.prefect_server import free_port
from tasks.adapters.registry import DraftRegistry, VersionFacts
from tasks.adapters.settings import read_settings, settings
from tasks.adapters.tracking import Tracking
from tasks.observe import tracking
from tasks.planning import explain_model
from tasks.serving import RegistrySource, sole_server
from tests.environment import child_environment

CHILDREN = Path(__file__).with_name("mlflow_children.py")
FINGERPRINT, RUNTIME = "f" * 64, "r" * 64
PROVEN = {"verifier.fingerprint": FINGERPRINT, "runtime.key": RUNTIME, "gate.outcome": "pass"}
PAIR = {"verifier_fingerprint": FINGERPRINT, "runtime_key": RUNTIME}
HERE = RuntimeInfo(vllm="0.32.0", build="b", device="cpu", model_runner="v1", torch="2", transformers="5")
ROUNDS = 50


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state root that `settings()` answers with; one for all tests, since MLflow's tables take seconds to make."""
    root = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_HOME", str(root))
        for name in ("MLFLOW_TRACKING_URI", "PREFECT_HOME"):
            patch.delenv(name, raising=False)
        settings.cache_clear()
        tracking.cache_clear()
        yield root
    settings.cache_clear()
    tracking.cache_clear()


@pytest.fixture
def chat(request: pytest.FixtureRequest) -> str:
    """A model of the test's own."""
    return str(request.node.name).replace("_", "-")[:80]


def make_versions(home: Path, model: str, *outcomes: str) -> MlflowAliases:
    """Versions without files, whose gate said this."""
    client = tracking().client
    client.create_registered_model(model)
    for outcome in outcomes:
        client.create_model_version(model, source=str(home), tags={**PROVEN, "gate.outcome": outcome})
    return MlflowAliases(tracking(), actor="test")


def test_of_two_promoters_exactly_one_wins_in_every_one_of_fifty_races(home: Path) -> None:
    for number in range(ROUNDS):
        aliases = make_versions(home, f"race-{number}", "pass", "pass")
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILDREN), "race", str(home), "race", version, str(ROUNDS)],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for version in ("1", "2")
    ]
    first, second = (json.loads(child.communicate(timeout=240)[0]) for child in children)
    assert [sorted(pair) for pair in zip(first, second, strict=True)] == [["lost", "won"]] * ROUNDS
    for number in range(ROUNDS):
        winner = "1" if first[number] == "won" else "2"
        assert aliases.aliases(f"race-{number}") == {CHAMPION: winner}
        moves = [(entry.to_version, entry.state) for entry in audit_log(home, f"race-{number}")]
        assert moves == [(winner, "intended"), (winner, "done")]


def test_a_champion_moved_in_mlflows_own_pages_is_followed_only_when_proven(home: Path, chat: str) -> None:
    client, aliases = tracking().client, make_versions(home, chat, "pass", "pass", "fail")
    promote(aliases, chat, "1", expected=None, who="t", why="first", home=home, **PAIR)

    client.set_registered_model_alias(chat, CHAMPION, "3")
    found = [settle(aliases, chat, fingerprint=FINGERPRINT, runtime_key=RUNTIME, home=home) for _ in range(2)]
    assert [(one.version, one.alias, one.news) for one in found] == [("1", "3", True), ("1", "3", False)]
    client.set_registered_model_alias(chat, CHAMPION, "2")
    assert settle(aliases, chat, fingerprint=FINGERPRINT, runtime_key=RUNTIME, home=home).version == "2"
    assert aliases.get_alias(chat, PREVIOUS) == "1"
    client.delete_model_version(chat, "2")  # MLflow takes its aliases with it
    gone = settle(aliases, chat, fingerprint=FINGERPRINT, runtime_key=RUNTIME, home=home)
    assert (gone.version, gone.alias, gone.news) == ("2", None, True)
    assert rollback(aliases, chat, expected=None, who="t", why="gone", home=home).version == "1"
    actions = [entry.action for entry in audit_log(home, chat) if entry.state == "done"]
    assert actions == ["promote", "refuse", "follow", "refuse", "rollback"]


class Server:
    """A real MLflow server that can be stopped and started again."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.home / "server.log").open("ab")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
                *("--backend-store-uri", f"sqlite:///{self.home / 'mlflow.db'}", "--workers", "1"),
            ],
            env=child_environment(),
            stdout=log,
            stderr=log,
            cwd=self.home,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{self.uri}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert self.process.poll() is None and time.monotonic() < deadline, (self.home / "server.log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        """Kill the whole session: uvicorn's worker is a child."""
        import os
        import signal

        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(home: Path) -> Iterator[Server]:
    running = Server(home)
    running.start()
    yield running
    running.stop()


@pytest.mark.trial  # three starts of MLflow's server
def test_a_server_that_goes_away_in_the_middle_leaves_nothing_half_promoted(
    server: Server, home: Path, chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions(home, chat, "pass", "pass")
    for name, value in (("MAX_RETRIES", "1"), ("BACKOFF_FACTOR", "1"), ("TIMEOUT", "5")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    over_http = Tracking(read_settings({"DRAFTSMITH_HOME": str(home), "MLFLOW_TRACKING_URI": server.uri}))

    class Cut(MlflowAliases):
        """The server dies just before, or just after, the alias moves."""

        when = "never"

        def set_alias(self, model: str, alias: str, version: str) -> None:
            if self.when == "before":
                server.stop()
            super().set_alias(model, alias, version)
            if self.when == "after":
                server.stop()

    aliases = Cut(over_http, actor="test")
    promote(aliases, chat, "1", expected=None, who="t", why="first", home=home, **PAIR)
    for when, champion in (("before", "1"), ("after", "2")):
        aliases.when = when
        started = time.monotonic()
        with pytest.raises(RegistryError, match="failed to"):
            promote(aliases, chat, "2", expected="1", who="t", why="better", home=home, **PAIR)
        assert time.monotonic() - started < 30
        aliases.when = "never"
        server.start()
        assert aliases.get_alias(chat, CHAMPION) == champion
    promote(aliases, chat, "2", expected="1", who="t", why="better", home=home, **PAIR)
    assert aliases.aliases(chat) == {CHAMPION: "2", PREVIOUS: "1"}
    assert audit_log(home, chat)[-1].state == "done"


# ---------------------------------------------------------------------------------------------- by name, with files


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    directory = tmp_path / "verifier"
    directory.mkdir()
    save_file({"model.norm.weight": np.ones(4, dtype=np.float32)}, directory / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 8, "intermediate_size": 8, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def register(home: Path, verifier: Path, model: str, content: bytes, **changes: object) -> str:
    """A draft in a real store becomes a version of the model; its number."""
    store = Store(str(home / "store"), scratch=home / "scratch")
    key = (model + content.decode()).encode().hex()[-100:]
    content = f"{model} {content.decode()}".encode()
    workspace = store.workspace("draft", key)
    (workspace / "config.json").write_text("{}")
    (workspace / "model.safetensors").write_bytes(content)
    ref = store.publish(workspace, "draft", key)
    values: dict[str, object] = {
        "draft_digest": ref.digest,
        "verifier_name": "org/verifier",
        "verifier_uri": str(verifier),
        "verifier_fingerprint": fingerprint(verifier, home=home).digest,
        "tokenizer_sha256": "t" * 64,
        "chat_template_sha256": "c" * 64,
        "vllm_version": "0.32.0",
        "runtime_key": RUNTIME,
        "algorithm": "any",
        "k": 3,
        "gate_outcome": "pass",
    }
    path = store.path(ref)
    done = DraftRegistry(tracking()).register(
        model,
        path,
        path.parent / "manifest.json",
        VersionFacts.model_validate({**values, **changes}),
        run_id=tracking().open_parent("9" * 64, name="recipe", tags={}),
        retry_hint="again",
    )
    return done.version


def uploaded(model: str, version: str) -> Path:
    model_id = versions.open_aliases().tags(model, version)["model.id"]
    return Path(tracking().client.get_logged_model(model_id).artifact_location.removeprefix("file://"))


def test_promotion_and_rollback_by_name_restore_the_pair(home: Path, verifier: Path, chat: str) -> None:
    one, two = register(home, verifier, chat, b"one"), register(home, verifier, chat, b"two")
    assert versions.history(chat).standing_moves() == (), "nothing was moved yet"
    assert versions.promote_by_name(chat, one, RUNTIME).changed
    moved = versions.promote_by_name(chat, two, RUNTIME, why="better")
    assert (moved.displaced, moved.verifier) == (one, str(verifier))
    assert not versions.promote_by_name(chat, two, RUNTIME).changed
    back = versions.rollback_model(chat, why="worse")
    assert (back.version, back.displaced, back.verifier) == (one, two, str(verifier))
    assert back.verifier_fingerprint == fingerprint(verifier, home=home).digest
    assert back.seconds < 60

    told = versions.history(chat)
    assert (told.champion, [line.version for line in told.versions]) == (one, [one, two])
    assert [(move.action, move.to_version) for move in told.standing_moves()] == [
        ("promote", one),
        ("promote", two),
        ("rollback", one),
    ]
    with pytest.raises(RegistryError, match="no previous"):
        versions.rollback_model(chat)


def test_a_version_that_the_gate_failed_stays_in_the_history_and_serves_only_by_force(
    home: Path, verifier: Path, chat: str
) -> None:
    version = register(home, verifier, chat, b"bad", gate_outcome="fail")
    with pytest.raises(RegistryError, match="outcome on this verifier and runtime is fail"):
        versions.promote_by_name(chat, version, RUNTIME)
    assert versions.history(chat).versions[0].outcome == "fail"
    assert versions.promote_by_name(chat, version, RUNTIME, force=True, why="to see it fail").changed
    entry = audit_log(home, chat)[-1]
    assert entry.forced and "to see it fail" in entry.why and entry.who == versions.actor()


def test_an_untested_runtime_is_refused_until_its_cell_is_proven(home: Path, verifier: Path, chat: str) -> None:
    version = register(home, verifier, chat, b"one")
    with pytest.raises(RegistryError, match="untested on this runtime"):
        versions.promote_by_name(chat, version, "n" * 64)
    pair = Pair(verifier_fingerprint=fingerprint(verifier, home=home).digest, runtime_key="n" * 64, vllm="0.33.0")
    cell = Cell(pair=pair, outcome="pass", al=1.5)
    versions.open_aliases().set_tags(chat, version, {cell.tag: cell.model_dump_json()})
    assert versions.promote_by_name(chat, version, "n" * 64).changed
    matrix = versions.compatibility(chat)
    assert [cell.state for cell in matrix.rows[0].cells] == ["proven", "proven"]


def test_what_the_gate_compared_with_must_still_serve(home: Path, verifier: Path, chat: str) -> None:
    one, two, three = (register(home, verifier, chat, content) for content in (b"one", b"two", b"three"))
    aliases = versions.open_aliases()
    aliases.set_tags(chat, one, {versions.INCUMBENT_TAG: versions.NO_INCUMBENT})
    aliases.set_tags(chat, two, {versions.INCUMBENT_TAG: one})
    aliases.set_tags(chat, three, {versions.INCUMBENT_TAG: one})
    versions.promote_by_name(chat, one, RUNTIME)
    versions.promote_by_name(chat, two, RUNTIME)
    with pytest.raises(RegistryError, match="is version 2, not version 1 as the gate saw it"):
        versions.promote_by_name(chat, three, RUNTIME)


def test_changed_files_and_changed_or_missing_verifiers_move_nothing(home: Path, verifier: Path, chat: str) -> None:
    one, two = register(home, verifier, chat, b"one"), register(home, verifier, chat, b"two")
    versions.promote_by_name(chat, one, RUNTIME)
    whole = (uploaded(chat, two) / "model.safetensors").read_bytes()
    (uploaded(chat, two) / "model.safetensors").write_bytes(whole.replace(b"two", b"tw0"))
    with pytest.raises(RegistryError, match=r"model\.safetensors does not match"):
        versions.promote_by_name(chat, two, RUNTIME, force=True, why="never mind")
    (uploaded(chat, two) / "model.safetensors").write_bytes(whole)
    versions.promote_by_name(chat, two, RUNTIME)

    template = verifier / "chat_template.jinja"
    template.write_text("{{ other }}")
    with pytest.raises(VerifierError, match=f"is not the one of {chat} version 1"):
        versions.rollback_model(chat)
    template.unlink()
    verifier.rename(verifier.with_name("moved"))
    with pytest.raises(VerifierError, match="cannot be used"):
        versions.rollback_model(chat)
    assert versions.open_aliases().get_alias(chat, CHAMPION) == two
    assert versions.rollback_model(chat, check=False).version == one


def source(chat: str, **changes: str) -> RegistrySource:
    return RegistrySource(chat, CHAMPION, HERE.model_copy(update=changes))


def test_serving_admits_a_proven_pair_with_what_it_pins(home: Path, verifier: Path, chat: str) -> None:
    one = register(home, verifier, chat, b"one", runtime_key=HERE.key, al=1.6)
    with pytest.raises(RegistryError, match=r"nothing of .* serves yet"):
        source(chat).wanted()
    versions.promote_by_name(chat, one, HERE.key)
    admitted = source(chat).admit(source(chat).wanted())
    assert (admitted.version, admitted.verifier, admitted.al, admitted.forced_by) == (one, verifier, 1.6, None)
    assert sorted(admitted.draft_files) == ["config.json", "model.safetensors"]
    admitted.require_unchanged(home)
    (admitted.draft / "model.safetensors").write_bytes(b"0ne")
    with pytest.raises(RegistryError, match=r"model\.safetensors .* was changed since"):
        admitted.require_unchanged(home)
    with pytest.raises(RegistryError, match=r"model\.safetensors does not match its manifest"):
        source(chat).admit(one)


def test_serving_admits_nothing_that_does_not_match(home: Path, verifier: Path, chat: str) -> None:
    one, bad = (
        register(home, verifier, chat, content, runtime_key=HERE.key, gate_outcome=outcome)
        for content, outcome in ((b"one", "pass"), (b"bad", "fail"))
    )
    versions.promote_by_name(chat, one, HERE.key)
    with pytest.raises(RegistryError, match="outcome on this verifier and runtime is fail"):
        source(chat).admit(bad)
    with pytest.raises(RegistryError, match=r"may not serve on vLLM 0\.31\.0: .*measured on vLLM 0\.32\.0"):
        source(chat, vllm="0.31.0").admit(one)
    versions.promote_by_name(chat, bad, HERE.key, force=True, why="to see it fail")
    assert source(chat).admit(bad).forced_by == versions.actor(), "force waives the gate"
    (verifier / "chat_template.jinja").write_text("{{ other }}")
    for version in (one, bad):  # never the pair
        with pytest.raises(VerifierError, match=f"is not the one of {chat} version {version}"):
            source(chat).admit(version)
    verifier.rename(verifier.with_name("moved"))
    with pytest.raises(VerifierError, match="cannot be used"):
        source(chat).admit(one)


def test_a_rollback_onto_what_was_promoted_by_force_serves_and_one_onto_a_failure_is_refused(
    home: Path, verifier: Path, chat: str
) -> None:
    one, bad, two = (
        register(home, verifier, chat, content, runtime_key=HERE.key, gate_outcome=outcome)
        for content, outcome in ((b"one", "pass"), (b"bad", "fail"), (b"two", "pass"))
    )
    versions.promote_by_name(chat, one, HERE.key)
    versions.promote_by_name(chat, bad, HERE.key, force=True, why="to see it fail")
    versions.promote_by_name(chat, two, HERE.key)
    assert versions.rollback_model(chat).version == bad
    assert source(chat).admit(source(chat).wanted()).forced_by == versions.actor()

    versions.promote_by_name(chat, two, HERE.key)
    aliases = versions.open_aliases()
    versions.promote_by_name(chat, one, HERE.key)
    aliases.set_tags(chat, two, {"gate.outcome": "fail"})  # measured again since
    with pytest.raises(RegistryError, match=f"version {two} of {chat}, which served before, may not serve"):
        versions.rollback_model(chat)
    assert aliases.get_alias(chat, CHAMPION) == one
    moved = versions.promote_by_name(chat, one, "n" * 64, force=True, why="a new vLLM")
    assert not moved.changed and "serves already; that it may by force is in the audit log" in describe(moved)
    assert describe(versions.promote_by_name(chat, one, HERE.key)).endswith("serves already")
    assert source(chat, vllm="0.31.0").admit(one).forced_by == versions.actor(), "said again where it serves already"


def test_serving_follows_other_hands_into_proven_cells_only(home: Path, verifier: Path, chat: str) -> None:
    one, two = (register(home, verifier, chat, content, runtime_key=HERE.key) for content in (b"one", b"two"))
    bad = register(home, verifier, chat, b"bad", runtime_key=HERE.key, gate_outcome="fail")
    versions.promote_by_name(chat, one, HERE.key)
    asked = source(chat)
    assert asked.wanted() == one
    client = tracking().client
    client.set_registered_model_alias(chat, CHAMPION, bad)
    assert asked.wanted() == one
    client.set_registered_model_alias(chat, CHAMPION, two)
    assert asked.wanted() == two
    client.delete_model_version(chat, two)
    with pytest.raises(ConfigError, match="has no version 2"):
        asked.admit(asked.wanted())


def test_a_name_that_nobody_registered_is_wrong_input_and_told(home: Path, verifier: Path, chat: str) -> None:
    register(home, verifier, chat, b"one", runtime_key=HERE.key)
    for ask in (
        versions.history,
        versions.compatibility,
        versions.rollback_model,
        lambda model: versions.promote_by_name(model, "1", HERE.key),
        source,
        lambda model: explain_model(model, Runtime(python="unused")),
    ):
        with pytest.raises(ConfigError, match="no model 'nobody' is registered"):
            ask("nobody")
    with pytest.raises(ConfigError, match=rf"registered models: .*{chat}"):
        versions.history("nobody")
    with pytest.raises(ConfigError, match=r"has no version 7\n  mend: its versions: 1"):
        versions.promote_by_name(chat, "7", HERE.key)
    with pytest.raises(ConfigError, match="has no alias night"):
        RegistrySource(chat, "night", HERE).wanted()


def test_where_nothing_is_registered_yet_the_address_is_told_without_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = read_settings({"MLFLOW_TRACKING_URI": "postgresql://draftsmith:hunt-er2@db/mlflow"})
    monkeypatch.setattr(versions, "settings", lambda: elsewhere)
    empty = MlflowAliases(Tracking(read_settings({"DRAFTSMITH_HOME": str(tmp_path)})), actor="test")
    told = str(versions.no_such(empty, "chat"))
    assert "nothing is, yet, at postgresql://" in told and "hunt-er2" not in told
    assert "draftsmith retrain RECIPE" in told and "MLFLOW_TRACKING_URI" in told


def test_what_serving_takes_back_moves_only_where_it_still_is_the_champion(
    home: Path, verifier: Path, chat: str
) -> None:
    one, two, three = (
        register(home, verifier, chat, content, runtime_key=HERE.key) for content in (b"one", b"two", b"three")
    )
    for version in (one, two, three):
        versions.promote_by_name(chat, version, HERE.key)
    asked = source(chat)
    asked.take_back(two, "it fell")
    assert asked.wanted() == three
    asked.take_back(three, "it fell")
    assert asked.wanted() == two
    entry = audit_log(home, chat)[-1]
    assert (entry.action, entry.who, entry.why) == ("rollback", "draftsmith serve", "it fell")
    RegistrySource(chat, PREVIOUS, HERE).take_back(two, "not ours to move")
    assert asked.wanted() == two


def test_a_name_is_served_once(home: Path, chat: str) -> None:
    served = pytest.raises(ConfigError, match=f"{chat} is served already, by process {os.getpid()}")
    with sole_server(chat), sole_server(f"{chat}-2"), served, sole_server(chat):
        pass
    with sole_server(chat):
        pass
