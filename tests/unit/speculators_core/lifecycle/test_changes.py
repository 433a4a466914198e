"""Each kind of change is told apart, and asks for what the table says."""

from __future__ import annotations

import pytest

from speculators_core.engine.runtime import RuntimeInfo
from speculators_core.errors import ConfigError
from speculators_core.lifecycle.changes import (
    ACTIONS,
    MEANING,
    OnChange,
    Proven,
    World,
    changes_of,
    decide_action,
    tags_of,
)
from speculators_core.lifecycle.drift import Incident
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, RUNTIME_TAG, Cell, Pair
from speculators_core.verifier.fingerprint import PARTS, Fingerprint

SHAPE = {"hidden_size": 64, "vocab_size": 100}


def world(*changed: str, shape: dict[str, int] = SHAPE, vllm: str = "0.32.0", device: str = "cpu") -> World:
    parts = {part: f"new-{part}" if part in changed else f"old-{part}" for part in PARTS}
    info = RuntimeInfo(vllm=vllm, build="b", device=device, model_runner="v1", torch="2", transformers="5")
    digest = ",".join(parts.values())
    return World(
        verifier=Fingerprint(digest=digest, parts=parts), shape=shape, runtime_key=f"{vllm} {device}", runtime=info
    )


def tags(of: World) -> dict[str, str]:
    return {FINGERPRINT_TAG: of.verifier.digest, RUNTIME_TAG: of.runtime_key, **tags_of(of)} | {
        "vllm.version": of.runtime.vllm
    }


CHAMPION = Proven.of_tags("7", tags(world()))

CASES = [
    (world(), (), "nothing"),
    (world("weights"), ("weights",), "retrain"),
    (world("config"), ("config",), "retrain"),
    (world("adapters"), ("adapters",), "retrain"),
    (world("chat_template"), ("chat_template",), "re-evaluate"),
    (world("generation_config"), ("generation_config",), "re-evaluate"),
    (world("chat_template", "generation_config"), ("chat_template", "generation_config"), "re-evaluate"),
    (world("weights", "chat_template"), ("weights", "chat_template"), "retrain"),
    (world("tokenizer"), ("tokenizer",), "retrain-new-head"),
    (world("tokenizer", "weights"), ("weights", "tokenizer"), "retrain-new-head"),
    (world("config", "weights", shape={"hidden_size": 128, "vocab_size": 100}), ("shape", "weights"), "retrain-afresh"),
    (world("quantisation", "weights", "config"), ("quantised",), "re-evaluate"),
    (world("quantisation", "weights", "tokenizer"), ("quantised", "tokenizer"), "retrain-new-head"),
    (world(vllm="0.33.0"), ("runtime",), "re-evaluate"),
    (world("weights", vllm="0.33.0"), ("weights", "runtime"), "retrain"),
]


@pytest.mark.parametrize(("now", "changes", "action"), CASES, ids=[" ".join(c[1]) or "nothing" for c in CASES])
def test_a_change_is_named_and_asks_for_its_action(now: World, changes: tuple[str, ...], action: str) -> None:
    found = decide_action(CHAMPION, now, OnChange(), margin=0.03)
    assert (found.changes, found.action) == (changes, action)
    assert len(found.reasons) == len(changes) and all(found.reasons)


def test_a_recipe_may_ask_for_something_else() -> None:
    table = OnChange(weights="re-evaluate", runtime="nothing")
    assert decide_action(CHAMPION, world("weights"), table, margin=0.03).action == "re-evaluate"
    assert decide_action(CHAMPION, world(vllm="0.33.0"), table, margin=0.03).action == "nothing"
    with pytest.raises(ValueError, match="shape"):
        OnChange(shape="retrain")  # type: ignore[arg-type]


def test_every_action_has_a_meaning_and_every_change_a_field() -> None:
    assert set(MEANING) == set(ACTIONS)
    assert all(field.description for field in OnChange.model_fields.values())


def test_what_changed_is_said_with_its_values() -> None:
    bigger = world("config", shape={"hidden_size": 128, "vocab_size": 100})
    assert decide_action(CHAMPION, bigger, OnChange(), margin=0.03).reasons == (
        "the verifier's shape changed: hidden_size 64 → 128",
    )
    other = decide_action(CHAMPION, world(vllm="0.33.0"), OnChange(), margin=0.03).reasons
    assert other == ("the runtime changed: vLLM 0.32.0 → 0.33.0",)
    gpu = decide_action(CHAMPION, world(device="cuda:H200"), OnChange(), margin=0.03).reasons
    assert gpu == ("the runtime changed: device cpu → cuda:H200",)


def test_without_a_champion_everything_is_to_be_done() -> None:
    assert decide_action(None, world(), OnChange(), margin=0.03).action == "retrain-afresh"


def test_an_old_version_that_recorded_little_is_trained_afresh_when_it_must_be() -> None:
    old = {
        name: value for name, value in tags(world()).items() if not name.startswith(("verifier.parts", "verifier.s"))
    }
    old |= {"tokenizer.sha256": "old-tokenizer", "chat_template.sha256": "old-chat_template"}
    proven = Proven.of_tags("1", old)
    assert decide_action(proven, world(), OnChange(), margin=0.03).action == "nothing"
    found = decide_action(proven, world("weights"), OnChange(), margin=0.03)
    assert (found.changes, found.action) == (("unrecorded",), "retrain-afresh")
    assert decide_action(proven, world("tokenizer"), OnChange(), margin=0.03).changes == ("tokenizer", "unrecorded")
    no_shape = CHAMPION.model_copy(update={"shape": None})
    assert changes_of(no_shape, world("config"), ("config",)) == ("unrecorded",)


def test_tags_that_cannot_be_read_count_as_missing() -> None:
    broken = tags(world()) | {"verifier.parts": "{torn", "verifier.shape": "[]", "runtime.info": "?"}
    proven = Proven.of_tags("1", broken)
    assert (proven.parts, proven.shape, proven.runtime) == ({}, None, None)


@pytest.mark.parametrize(
    ("outcome", "al", "now", "action"),
    [
        ("pass", 1.60, world("chat_template"), "nothing"),
        ("pass", 1.56, world("chat_template"), "nothing"),
        ("pass", 1.54, world("chat_template"), "retrain"),
        ("fail", 1.60, world("chat_template"), "retrain"),
        ("inconclusive", 1.60, world("chat_template"), "retrain"),
        ("pass", 1.60, world("weights"), "retrain"),
        ("fail", 1.60, world("tokenizer"), "retrain-new-head"),
    ],
)
def test_a_champion_that_was_measured_here_since_is_judged_by_that(
    outcome: str, al: float, now: World, action: str
) -> None:
    pair = Pair(verifier_fingerprint=now.verifier.digest, runtime_key=now.runtime_key)
    cell = Cell(pair=pair, outcome=outcome, al=al)
    proven = Proven.of_tags(
        "7", tags(world()) | {"al": "1.60", "gate.outcome": "pass", cell.tag: cell.model_dump_json()}
    )
    found = decide_action(proven, now, OnChange(), margin=0.03)
    assert found.action == action
    tried = decide_action(proven, now, OnChange(), margin=0.03, tried="9")
    assert tried.action == "nothing" and (action == "nothing" or "version 9 was trained" in tried.reasons[-1])


def test_a_fall_of_served_acceptance_is_answered_anew() -> None:
    now = world()
    cell = Cell(
        pair=Pair(verifier_fingerprint=now.verifier.digest, runtime_key=now.runtime_key), outcome="pass", al=1.6
    )
    proven = Proven.of_tags("7", tags(now) | {"al": "1.60", cell.tag: cell.model_dump_json()})
    incident = Incident(version="7", since=1.0, reason="served acceptance length 1.2")
    found = decide_action(proven, now, OnChange(), margin=0.03, tried="9", incident=incident)
    assert (found.changes, found.action) == (("traffic",), "re-evaluate")
    assert found.reasons == ("served acceptance length 1.2",)
    told = OnChange(traffic="retrain")
    assert decide_action(proven, now, told, margin=0.03, tried="9", incident=incident).action == "retrain"
    assert decide_action(proven, world("tokenizer"), told, margin=0.03, incident=incident).action == "retrain-new-head"
    assert decide_action(proven, now, OnChange(traffic="nothing"), margin=0.03, incident=incident).action == "nothing"


def test_the_recipe_names_a_wrong_action() -> None:
    from speculators_core.config import validate
    from speculators_core.lifecycle.changes import LifecycleConfig

    with pytest.raises(ConfigError, match=r"on_change\.weights"):
        validate(LifecycleConfig, {"on_change": {"weights": "pray"}}, where="recipe")
