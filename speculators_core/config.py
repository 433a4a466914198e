"""A recipe: everything that a run is made of, typed and strict.

Each section is declared beside the code that reads it; this module only joins them, loads the
YAML, applies `--set a.b=c`, and turns pydantic's complaints into sentences with the nearest right name.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from annotated_types import Le, Lt
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from speculators_core import registry
from speculators_core.data.config import DataConfig
from speculators_core.engine.runtime import Runtime
from speculators_core.errors import ConfigError, cause_of
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.lifecycle.budget import BudgetConfig
from speculators_core.lifecycle.changes import LifecycleConfig
from speculators_core.lifecycle.config import GateConfig
from speculators_core.serving.config import ServeConfig
from speculators_core.states.config import CaptureConfig, HiddenStatesConfig
from speculators_core.training.config import TrainingConfig
from speculators_core.types import MOST_TOKENS, StrictModel, may_hold_secret

NAME = r"^[a-z0-9][a-z0-9-]*$"
DEFAULT_RUNTIME = Runtime(python=".venv-vllm/bin/python")
"""Where `make setup` puts vLLM, seen from the project's root."""
_MOST_NEAR = 12  # files that a message names
_MAX_NAME = 128  # it becomes part of file names
_MOST = 2**31 - 1  # of a number without a bound of its own: what engines, torch and clocks still take
_MAX_VALUES = 100_000  # a recipe has dozens; anchors can be nested so that a few lines stand for billions


class VerifierConfig(StrictModel):
    """The model that is served, and that the draft must agree with."""

    path: str = Field(
        description="directory of the verifier (config.json, safetensors, tokenizer and chat template), hub id or URL"
    )
    revision: str | None = Field(None, description="revision of the model: branch, tag or commit of a hub id")
    publish_as: str | None = Field(
        None, description="hub id to write into the draft as its verifier; without it the draft names a local path"
    )
    license: str | None = Field(
        None, description="the verifier's licence, for the model card (a draft holds its embedding)"
    )
    trust_remote_code: bool = Field(False, description="allow code that the verifier's directory carries to run")

    @field_validator("path")
    @classmethod
    def _no_secret(cls, value: str) -> str:
        if may_hold_secret(value):
            raise ValueError(
                "may hold no secret: credentials of stores and hubs come from the environment (AWS_…, HF_TOKEN, …)"
            )
        return value


class ExportConfig(StrictModel):
    """What leaves the run: what the model card says beyond what the run knows, and what may be exported."""

    data_license: str | None = Field(None, description="licence of the training data, for the model card")
    allow_unservable: bool = Field(
        False, description="train and export what the runtime cannot serve; it is not measured on the engine then"
    )


class Recipe(StrictModel):
    """A complete, named run configuration."""

    name: str = Field(
        pattern=NAME, max_length=_MAX_NAME, description="name of the recipe; results go to <home>/<name>/"
    )
    deployment: str = Field(
        pattern=NAME, max_length=_MAX_NAME, description="what is served: one registered model for each deployment"
    )
    verifier: VerifierConfig
    runtime: Runtime = Field(default=DEFAULT_RUNTIME, description="the vLLM to capture and to measure with")
    data: DataConfig
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    hidden_states: HiddenStatesConfig = Field(default_factory=HiddenStatesConfig)
    algorithm: dict[str, Any] = Field(description="`kind`, and that algorithm's own knobs")
    draft_vocabulary: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="size of the draft's vocabulary; null keeps the verifier's"
    )
    draft_vocabulary_from: str | None = Field(
        None,
        description="exported draft, or file of d2t and t2d tables, that names these tokens; null: the most frequent",
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    lifecycle: LifecycleConfig = Field(default_factory=LifecycleConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)

    @model_validator(mode="after")
    def _priced(self) -> Recipe:
        if self.budget.cost is not None and self.lifecycle.price_per_hour is None:
            raise ValueError("budget.cost needs lifecycle.price_per_hour: without a price nothing costs anything")
        return self

    @model_validator(mode="after")
    def _tokens_have_a_number(self) -> Recipe:
        if self.draft_vocabulary_from is not None and self.draft_vocabulary is None:
            raise ValueError("draft_vocabulary_from needs draft_vocabulary: say how many tokens it names")
        return self

    @model_validator(mode="after")
    def _enough_is_evaluated(self) -> Recipe:
        evaluated, needed = self.evaluation.max_prompts, self.gate.min_prompts
        if evaluated < needed:
            raise ValueError(
                f"evaluation.max_prompts is {evaluated}, but gate.min_prompts asks for {needed}: no draft could pass; "
                "raise the one or lower the other"
            )
        return self

    @field_validator("algorithm")
    @classmethod
    def _known_algorithm(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "kind" not in value:
            raise ValueError(f"needs `kind`: one of {', '.join(sorted(registry.names()))}")
        return value

    def algorithm_config(self) -> StrictModel:
        """The algorithm's own typed config; ConfigError names the field that is wrong."""
        algorithm = registry.resolve(str(self.algorithm["kind"]))
        for key in self.algorithm.keys() - algorithm.config.model_fields.keys():
            owners = [name for name in registry.names() if key in registry.resolve(name).config.model_fields]
            if owners:
                raise ConfigError(
                    f"algorithm.{key} is a knob of {', '.join(owners)}, not of {algorithm.name}",
                    mend=f"leave it out, or set algorithm.kind to {owners[0]}",
                )
        return validate(algorithm.config, self.algorithm, where="algorithm")

    def digest(self) -> str:
        """sha256 of the resolved recipe but what changes nothing that is made: names the parent run in MLflow."""
        made_of = self.model_dump(mode="json", exclude={"budget", "serve"})
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `a.b=c` overrides (values are YAML).

    Raises:
        ConfigError: not a file, not YAML, an unknown key, a wrong type or value.
    """
    if not path.is_file():
        raise _no_recipe(path)
    content = read_yaml(path)
    if not isinstance(content, dict):
        required = [name for name, field in Recipe.model_fields.items() if field.is_required()]
        raise ConfigError(
            f"{path} must be a mapping with the sections of a recipe",
            mend=f"give it {', '.join(required)}; `draftsmith keys` explains them",
        )
    for override in overrides:
        apply_override(content, override)
    recipe = validate(Recipe, content, where=str(path))
    try:
        recipe.algorithm_config()  # its knobs are checked now, not when training starts
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.what}", mend=error.mend) from None
    return recipe


def _no_recipe(path: Path) -> ConfigError:
    """What lies at the path instead, and which files may have been meant."""
    if path.is_dir():
        near = [file.relative_to(path) for pattern in ("*.yaml", "*/*.yaml") for file in sorted(path.glob(pattern))]
        told = ", ".join(map(str, near[:_MOST_NEAR]))
        return ConfigError(f"{path} is a directory, no recipe", mend=f"files there: {told}" if near else None)
    if path.suffix not in (".yaml", ".yml") and path.name == str(path):
        return ConfigError(
            f"no recipe at {path}",
            mend=f"name a recipe's file; `draftsmith history {path}` takes the name of a registered model",
        )
    names = sorted(file.name for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    near_names = difflib.get_close_matches(path.name, names, n=_MOST_NEAR, cutoff=0.0)
    return ConfigError(f"no recipe at {path}", mend=f"files there: {', '.join(near_names)}" if names else None)


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; the value is parsed as YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"--set {override!r} is not of the form section.key=value",
            mend=f"write --set {key or 'section.key'}=VALUE",
        )
    *parents, last = key.split(".")
    node = content
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} holds a value, not a section")
        node = child
    node[last] = parse_yaml(text, where=f"--set {_shortened(override)}")


def read_yaml(path: Path) -> Any:
    """Content of a YAML file; ConfigError as `parse_yaml`, and where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", mend="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", mend="check the name and its rights") from error
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str) -> Any:
    """Plain values of a YAML text: what a hand or a merge tool got wrong is refused, not guessed at.

    Raises:
        ConfigError: not YAML, a key given twice, endless nesting or anchors, a number that is not finite or does not
            fit 64 bits, a null character or half of a surrogate pair.
    """
    try:
        content = yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{where} is not valid YAML: it is nested too deeply", mend="write it out plainly") from None
    except Exception as error:  # PyYAML lets through whatever its scanner and its constructors run into
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        told = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(
            f"{where} is not valid YAML: {line}{_shortened(told)}",
            mend="write `key: value` with a blank behind the colon, indent what belongs together alike and by blanks, "
            "close what is opened, and put texts with special signs in quotes",
        ) from error
    _check_plain(content, where)
    return content


class _Loader(yaml.SafeLoader):
    """A SafeLoader to which a key that is given twice is an error: YAML says so, PyYAML keeps the last one.

    A value that is none of its type has a line, too.
    """

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            told = f"{str(node.value)[:60]!r} is no {node.tag.rpartition(':')[2]}: {cause_of(error)}"
            raise yaml.constructor.ConstructorError(None, None, told, node.start_mark) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == "tag:yaml.org,2002:str" and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is given twice", key.start_mark)
            seen.add(str(key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _check_plain(content: Any, where: str) -> None:
    pending, seen = [content], 0
    while pending:
        value = pending.pop()
        seen += 1
        if seen > _MAX_VALUES:
            raise ConfigError(
                f"{where} stands for more than {_MAX_VALUES} values", mend="write out what its anchors (&, *) repeat"
            )
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            pending += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{where} holds a number that is not finite: {value}",
                mend="write a number, or null where none is meant",
            )
        elif isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(
                f"{where} holds a number that does not fit 64 bits: {Decimal(value):.3e}", mend="write a smaller one"
            )
        elif isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ConfigError(
                f"{where} holds a null character or half of a surrogate pair in {_shortened(value)!a}", mend="delete it"
            )


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


Model = typing.TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], content: Mapping[str, Any], *, where: str) -> Model:
    """Build a model, or raise a ConfigError with one line for each thing that is wrong."""
    try:
        made = model.model_validate(content)
    except ValidationError as error:
        problems = error.errors()
        above = {problem["loc"][:end] for problem in problems for end in range(len(problem["loc"]))}
        problems = [problem for problem in problems if problem["loc"] not in above]
        lines = [describe(model, problem) for problem in problems]
        mends = [mend for problem in problems if (mend := _mend(model, problem))]
        raise ConfigError(f"{where}: " + "; ".join(lines), mend="; ".join(mends) or None) from None
    if absurd := [describe(model, problem) for problem in _absurd_numbers(made)]:
        raise ConfigError(f"{where}: " + "; ".join(absurd))
    return made


def _absurd_numbers(value: object, location: tuple[str | int, ...] = ()) -> Iterator[dict[str, Any]]:
    """Numbers beyond every machine, such as \"inf\" as a text, as pydantic would tell of them."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            if not any(isinstance(bound, Le | Lt) for bound in field.metadata):
                yield from _absurd_numbers(getattr(value, name), (*location, name))
    elif isinstance(value, dict):  # whole numbers in it may be bytes of somebody's buffer
        for key, part in value.items():
            yield from () if isinstance(part, int) else _absurd_numbers(part, (*location, str(key)))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _absurd_numbers(part, (*location, index))
    elif isinstance(value, int | float) and not abs(value) <= _MOST:
        yield {"type": "less_than_equal", "loc": location, "input": value, "ctx": {"le": _MOST}}


def describe(model: type[BaseModel], problem: Any) -> str:
    """One pydantic error as a sentence; unknown keys get the nearest right name."""
    places = _without_types(model, problem["loc"])
    location = [part for part in places if isinstance(part, str)]
    dotted = ".".join(str(part) for part in places)
    if problem["type"] != "extra_forbidden":
        says = _SAYS.get(problem["type"])
        if says is None:
            told = str(problem["msg"]).removeprefix("Value error, ")
            return f"`{dotted}`: {told}" if dotted else told  # of the recipe as a whole: it names its keys
        given = "" if problem["type"] == "missing" else f", not {_shortened(json.dumps(problem['input'], default=str))}"
        return f"`{dotted}` {says.format_map(problem.get('ctx', {}))}{given}{_meaning(model, location)}"
    parent = section_of(model, location[:-1])
    names = sorted(parent.model_fields) if parent else []
    near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
    known = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(names)}"
    return f"`{dotted}` is no key that is known here; {known}"


def _mend(model: type[BaseModel], problem: Any) -> str | None:
    """What to write for a key that is missing, or whose value is of another form."""
    if problem["type"] not in ("missing", "dict_type", "model_type", "tuple_type"):
        return None
    location = _without_types(model, problem["loc"])
    parent = section_of(model, [part for part in location[:-1] if isinstance(part, str)])
    field = parent.model_fields.get(str(location[-1])) if parent and location else None
    if field is None:
        return None
    given = problem["input"]
    value = str(given) if isinstance(given, str | int | float) else "…"
    form = f"{{kind: {value}}}" if location == ["algorithm"] else _in_form(field.annotation, value)
    return f"write `{location[-1]}: {form}`"


def _in_form(annotation: Any, value: str) -> str:
    """A value as a key wants it: as it is, the entry of a list, or under the key of a section that takes it."""
    if any(typing.get_origin(option) is tuple for option in _options(annotation)):
        return f"[{value}]"
    section = as_model(annotation)
    if section is None:
        return f"{{KEY: {value}}}" if typing.get_origin(annotation) is dict else value
    for name, field in section.model_fields.items():
        if field.is_required() or value in typing.get_args(field.annotation):
            return f"{{{name}: {_in_form(field.annotation, value)}}}"
    return f"{{KEY: {value}}}"


def _without_types(model: type[BaseModel], location: Sequence[str | int]) -> list[str | int]:
    """Where a problem is, without the type that pydantic puts behind a key that may be of several."""
    found: list[str | int] = []
    names: list[str] = []
    parts = iter(location)
    for part in parts:
        found.append(part)
        parent = section_of(model, names)
        if isinstance(part, str):
            names.append(part)
            field = parent.model_fields.get(part) if parent else None
            if field is not None and len(_options(field.annotation) - {types.NoneType}) > 1:
                next(parts, None)
    return found


_SAYS = {  # pydantic's kinds of error, in words of a recipe; {…} is pydantic's own context
    "missing": "is missing",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "string_unicode": "must be a text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "literal_error": "must be {expected}",
    "tuple_type": "must be a list",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "dict_type": "must be a section with keys of its own",
    "model_type": "must be a section with keys of its own",
}


def _meaning(model: type[BaseModel], location: Sequence[str]) -> str:
    """What the key is for, in brackets: its description."""
    parent = section_of(model, location[:-1])
    field = parent.model_fields.get(location[-1]) if parent and location else None
    return f" ({field.description})" if field and field.description else ""


def section_of(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    """The model class that a dotted location leads to, of a list that of its entries."""
    current: type[BaseModel] | None = model
    for part in location:
        field = current.model_fields.get(part) if current else None
        annotation = field.annotation if field else None
        current = as_model(typing.get_args(annotation)[0] if typing.get_origin(annotation) is tuple else annotation)
    return current


def as_model(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model in an annotation, through `X | None`."""
    options = (option for option in _options(annotation) if isinstance(option, type))
    return next((option for option in options if issubclass(option, BaseModel)), None)


def _options(annotation: Any) -> set[Any]:
    """What a key may be: the parts of a union."""
    united = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return set(typing.get_args(annotation)) if united else {annotation}
