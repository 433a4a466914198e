"""Recipes are strict, and say what is wrong in words that help."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, PositiveInt

from speculators_core.config import Recipe, apply_override, as_model, load_recipe
from speculators_core.errors import ConfigError
from speculators_core.registry import names, resolve

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))
DEMO = ROOT / "deployments" / "recipes" / "demo.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_loads_and_bears_its_file_name(path: Path) -> None:
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("draft_vocabulery=1", ["`draft_vocabulery`", "did you mean `draft_vocabulary`"]),
        ("training.epoch=1", ["`training.epoch`", "did you mean `epochs`"]),
        ("training.optimizer.learning_rat=1", ["did you mean `learning_rate`"]),
        (
            "training.epochs=none",
            ['`training.epochs` must be a whole number, not "none"', "passes over the training rows"],
        ),
        ("training.epochs=0", ["demo.yaml: `training.epochs` must be at least 1, not 0 (passes over"]),
        ("algorithm.kind=eagel3", ["eagel3", "eagle3"]),
        ("algorithm={kind: eagle}", ["did you mean 'eagle3'?"]),  # not peagle
        ("budget.cost=40", ["demo.yaml: budget.cost needs lifecycle.price_per_hour"]),
        ("algorithm.ttt_step=4", ["demo.yaml", "`ttt_step`", "did you mean `ttt_steps`"]),
        ("algorithm.markov_rank=4", ["a knob of dspark, not of eagle3", "algorithm.kind to dspark"]),
        ("algorithm={}", ["kind"]),
        ("deployment=Has Spaces", ["`deployment` must match"]),
        ("runtime.url=http://127.0.0.1:1", ["exactly one of"]),
        ("verifier=nothing", ["`verifier` must be a section"]),
        ("training.optimizer.kind=adam", ["must be 'adamw' or 'muon', not \"adam\""]),
        ("data.sources=[]", ["`data.sources` must have at least 1 entries"]),
        ("training.optimizer.betas=1", ["`training.optimizer.betas` must be a list"]),
        ("data.validation_share=0.5", ["must be less than 0.5"]),
        ("training.optimizer.betas=[1, 2, 3]", ["`training.optimizer.betas` must have at most 2 entries"]),
        ("serve.host=''", ["`serve.host` must have at least 1 characters"]),
        (
            "lifecycle.price_per_hour=dear",
            ['`lifecycle.price_per_hour` must be a number, not "dear" (price of an hour'],
        ),
        ("hidden_states.engines=[{core: [1]}]", ["demo.yaml: `hidden_states.engines.0.core`", "did you mean `cores`?"]),
        ("draft_vocabulary=99999999999999", ["`draft_vocabulary` must be at most 16777216, not 99999999999999"]),
        ("data.max_length=1e10", ["`data.max_length` must be a whole number"]),
        ("data.max_length=10000000000.0", ["`data.max_length` must be at most 16777216"]),
        ("no-equals-sign", ["section.key=value"]),
        ("name.x=1", ["holds a value, not a section"]),
        ("training={a: [}", ["not valid YAML"]),
        ("training.max_steps=2001-99-99", ["not valid YAML", "month"]),
        ("draft_vocabulary=!!int many", ["not valid YAML"]),
        ("draft_vocabulary=!!timestamp now", ["not valid YAML"]),
        ("budget={hours: !!int ''}", ["not valid YAML", "line 1: '' is no int"]),
        ("budget={hours: !!float ''}", ["not valid YAML", "'' is no float"]),
        ("export.allow_unservable=!!bool maybe", ["not valid YAML", "'maybe' is no bool"]),
        (f"budget.hours=1{':10' * 250}.5", ["not valid YAML", "is no float"]),
        ('name="\\UFFFFFFFF"', ["not valid YAML"]),
        (f"name={'[' * 900}{']' * 900}", ["name"]),
        ("draft_vocabulary=99999999999999999999", ["64 bits: 1.000e+20"]),
        (f"budget.hours={'9' * 400}", ["64 bits: 1.000e+400"]),
        (f"budget.hours=0x{'f' * 9000}", ["64 bits"]),
        ('data.template_kwargs={a: "\\ud800"}', ["surrogate"]),
        ("gate.al_floor=.inf", ["not finite"]),
        ("lifecycle.price_per_hour=.nan", ["not finite"]),
        ('verifier.path="a\\0b"', ["null character"]),
        ("training={epochs: 1, epochs: 2}", ["`epochs` is given twice"]),
        (f"name={'a' * 300}", ["`name`", "128"]),
        (f"data.template_kwargs={'[' * 3000}", ["nested too deeply"]),
    ],
)
def test_what_is_wrong_is_named_with_the_mend(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(DEMO, [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "path", ["https://me:hunter2@host/model", "https://me:hunt/er2@host/model", "s3://b/m?sig=hunter2"]
)
def test_a_verifiers_address_holds_no_secret(path: str) -> None:
    with pytest.raises(ConfigError, match=r"`verifier.path`: may hold no secret: credentials .* environment") as caught:
        load_recipe(DEMO, [f"verifier.path='{path}'"])
    assert "hunt" not in str(caught.value)


@pytest.mark.parametrize("path", ["s3://bucket/a@b/c", "https://host:8080/a@b", "org/model@main", "what?/model"])
def test_an_address_that_holds_none_is_let_through(path: str) -> None:
    assert load_recipe(DEMO, [f"verifier.path='{path}'"]).verifier.path == path


def test_overrides_are_typed_as_yaml_and_change_the_digest() -> None:
    plain = load_recipe(DEMO)
    changed = load_recipe(DEMO, ["training.epochs=7", "verifier.publish_as=org/model", "draft_vocabulary=null"])
    assert (changed.training.epochs, changed.verifier.publish_as, changed.draft_vocabulary) == (7, "org/model", None)
    assert plain.digest() != changed.digest()
    assert plain.digest() == load_recipe(DEMO, ["training.epochs=" + str(plain.training.epochs)]).digest()


def test_an_override_makes_missing_sections() -> None:
    content: dict[str, object] = {}
    apply_override(content, "a.b.c=[1, x]")
    assert content == {"a": {"b": {"c": [1, "x"]}}}


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe at .*nothing\.yaml"):
        load_recipe(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=r"demo\.yaml"):  # what is there is listed
        load_recipe(DEMO.parent / "dmo.yaml")
    with pytest.raises(ConfigError, match=r"is a directory, no recipe\n.*site\.yaml, recipes/demo\.yaml"):
        load_recipe(DEMO.parents[1])
    with pytest.raises(ConfigError, match=r"no recipe at support-bot\n.*history support-bot"):
        load_recipe(Path("support-bot"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_recipe(tmp_path / "torn.yaml")
    for text, told in (
        ("name: x\ndata:\n  sources: [a\nb: 1\n", r"line 4: expected ',' or '\]'"),
        ("name: x\n\tdata: 1\n", r"line 2: found character '\\t'"),
        ("training:\n  epochs: 1\n  epochs: 2\n", "line 3: `epochs` is given twice"),
        ("name: \x07\n", "special characters are not allowed"),
    ):
        (tmp_path / "torn.yaml").write_text(text)
        with pytest.raises(ConfigError, match=rf"torn\.yaml is not valid YAML: .*{told}[^\n]*\n  mend: write"):
            load_recipe(tmp_path / "torn.yaml")


def test_a_recipe_survives_json() -> None:
    recipe = load_recipe(DEMO)
    assert Recipe.model_validate_json(recipe.model_dump_json()).digest() == recipe.digest()


def test_a_section_given_twice_is_an_error_and_not_the_last_one(tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yaml"
    recipe.write_text(f"{DEMO.read_text()}\ntraining:\n  epochs: 9\n")
    with pytest.raises(ConfigError, match="`training` is given twice"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    "kwargs",
    [
        "&z {a: *z}",
        "{a: &a [x,x,x,x,x,x,x,x], "
        + ", ".join(
            f"{name}: &{name} [{','.join([f'*{before}'] * 8)}]"
            for before, name in zip("abcdefgh", "bcdefghi", strict=True)
        )
        + "}",
    ],
    ids=["itself", "billions"],
)
def test_anchors_that_stand_for_endless_values_are_refused_before_they_are_written_out(
    tmp_path: Path, kwargs: str
) -> None:
    recipe = tmp_path / "bomb.yaml"
    recipe.write_text(DEMO.read_text().replace("data:\n", f"data:\n  template_kwargs: {kwargs}\n"))
    with pytest.raises(ConfigError, match="more than 100000 values"):
        load_recipe(recipe)


def numeric_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all numbers of a section, those of sections in it included."""
    for name, field in model.model_fields.items():
        if section := as_model(field.annotation):
            yield from numeric_fields(section, f"{prefix}{name}.")
        elif {int, float, PositiveInt} & {field.annotation, *typing.get_args(field.annotation)}:
            yield prefix + name


NUMBERS = [("eagle3", name) for name in numeric_fields(Recipe)] + [
    (kind, name) for kind in names() for name in numeric_fields(resolve(kind).config, "algorithm.")
]


SECTIONS = {"serve.engine.sample.": "serve.engine.sample={directory: served, rate: 0.1}"}
"""What is off by default, turned on."""


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_no_number_of_a_recipe_may_be_absurd(kind: str, name: str) -> None:
    for value in ("999999999999999999", '"inf"', "-999999999999999999"):
        with pytest.raises(ConfigError) as caught:
            on = [section for prefix, section in SECTIONS.items() if name.startswith(prefix)]
            load_recipe(DEMO, [f"algorithm={{kind: {kind}}}", *on, f"{name}={value}"])
        assert name.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "hidden_states.engines=1000000000",
        "hidden_states.trainer_cores=[-1]",
        "lifecycle.price_per_hour={capture: -3}",
        'lifecycle.price_per_hour={capture: "inf"}',
        "training.optimizer.betas=[2, -1]",
        "evaluation.speed.concurrencies=[0]",
        "evaluation.dtype=bf8",
        "serve.host=''",
    ],
)
def test_lists_and_texts_that_no_machine_would_take(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_recipe(DEMO, [override])


def test_what_is_counted_in_bytes_may_be_large() -> None:
    recipe = load_recipe(DEMO, ["budget.tokens=5000000000", "capture.backend_config={capacity: 99999999999}"])
    assert recipe.budget.tokens == 5_000_000_000
