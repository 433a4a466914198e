from __future__ import annotations

import pytest
import yaml

from speculators_core import registry
from speculators_core.config import load_recipe
from speculators_core.errors import ConfigError
from speculators_core.keys import READ_BY, describe_keys
from speculators_core.stages import ORDER
from tests.environment import ROOT


def test_every_key_says_what_it_is_for_and_its_default_is_yaml() -> None:
    for key in describe_keys():
        assert key.meaning and key.type, key
        if key.default is not None:
            yaml.safe_load(key.default)


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "deployments" / "recipes").glob("*.yaml")))
def test_every_key_of_our_recipes_is_described(recipe: str) -> None:
    path = ROOT / "deployments" / "recipes" / recipe
    kind = load_recipe(path).algorithm["kind"]
    known = {key.name for key in describe_keys() if key.algorithm in (None, kind)} | {"algorithm.kind"}
    pending = [("", yaml.safe_load(path.read_text()))]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict) and name not in known - {"algorithm"}:
            pending += [(f"{name}.{key}".lstrip("."), part) for key, part in value.items()]
        else:
            assert name in known


def test_a_section_has_its_own_keys_and_knobs_name_their_algorithm() -> None:
    assert {key.name.partition(".")[0] for key in describe_keys("training")} == {"training"}
    assert {key.algorithm for key in describe_keys("algorithm.layers")} <= set(registry.names())
    assert {key.algorithm for key in describe_keys("algorithm")} == {None, *registry.names()}
    (one,) = describe_keys("training.epochs")
    assert one.name == "training.epochs" and "whole number" in one.type


def test_a_key_of_a_section_that_may_be_left_out_must_be_given_only_there() -> None:
    within = {key.name: key.within for key in describe_keys() if key.default is None and key.algorithm is None}
    assert within["runtime.store.config"] == "runtime.store"
    assert within["capture.runtime.store.config"] == "capture.runtime.store"
    assert within["serve.engine.sample.directory"] == "serve.engine.sample"
    always = {name for name, section in within.items() if section is None}
    assert always == {"name", "deployment", "verifier.path", "data.sources", "algorithm"}


def test_a_default_of_sections_is_one_of_sections() -> None:
    (engines,) = describe_keys("hidden_states.engines")
    assert engines.default == "[{}]"


def test_every_stage_is_a_section_or_says_which_it_reads() -> None:
    for stage in (*ORDER, "register", "promote"):
        try:
            assert describe_keys(stage)
        except ConfigError as error:
            assert "is a stage" in error.what and all(describe_keys(section) for section in READ_BY[stage])


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'trainig\.epoch'.*\n.*training\.epochs"):
        describe_keys("trainig.epoch")
