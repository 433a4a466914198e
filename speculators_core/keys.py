"""Every key of a recipe as its declaration says it: type, default and meaning."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter
from pydantic.fields import FieldInfo

from speculators_core import registry
from speculators_core.config import Recipe, as_model
from speculators_core.errors import ConfigError
from speculators_core.types import StrictModel

ALGORITHM = "algorithm"
"""The one section whose keys depend on a value: on its `kind`."""
READ_BY = {
    "preflight": ("verifier", "runtime", "algorithm", "draft_vocabulary"),
    "prepare": ("verifier", "data"),
    "train": ("training", "hidden_states", "algorithm"),
    "evaluate": ("evaluation", "gate", "runtime"),
    "register": ("deployment",),
    "promote": ("deployment", "gate"),
}
"""What the stages read above all that have no section of their name."""


class Key(StrictModel):
    """One key of a recipe."""

    name: str = Field(description="dotted, as `--set` takes it")
    type: str = Field(description="in the words of a recipe, with its bounds")
    default: str | None = Field(description="as YAML; None where the key must be given")
    meaning: str = Field(description="what it is for")
    algorithm: str | None = Field(None, description="the `kind` that owns it, for a knob of an algorithm")
    within: str | None = Field(None, description="the section, which may be left out, that it must be given in")


def describe_keys(under: str | None = None) -> list[Key]:
    """All keys, or the key of that name and those below it.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    keys = [*_keys_of(Recipe, ""), *_knobs()]
    if under is None:
        return keys
    found = [key for key in keys if key.name == under or key.name.startswith(f"{under}.")]
    if not found:
        if under in READ_BY:
            raise ConfigError(
                f"{under!r} is a stage, and no section of a recipe",
                mend=f"it reads {', '.join(READ_BY[under])}: name one of these",
            )
        sections = {key.name.rpartition(".")[0] for key in keys} | {key.name for key in keys}
        near = difflib.get_close_matches(under, sections, n=3)
        raise ConfigError(
            f"no key of a recipe is called {under!r}",
            mend=f"did you mean {', '.join(near)}?" if near else "leave the name out to see all of them",
        )
    return found


def _keys_of(model: type[BaseModel], prefix: str, within: str | None = None) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = as_model(field.annotation)
        if section is None:
            key = _key(f"{prefix}{name}", field)
            yield key.model_copy(update={"within": within}) if field.is_required() else key
        else:
            may_lack = None if field.is_required() else f"{prefix}{name}"
            yield from _keys_of(section, f"{prefix}{name}.", may_lack or within)


def _knobs() -> Iterator[Key]:
    for algorithm in registry.names():
        for name, field in registry.resolve(algorithm).config.model_fields.items():
            if name != "kind":
                yield _key(f"{ALGORITHM}.{name}", field).model_copy(update={"algorithm": algorithm})


def _key(name: str, field: FieldInfo) -> Key:
    default = None if field.is_required() else _yaml(field.get_default(call_default_factory=True))
    return Key(name=name, type=_type(field), default=default, meaning=field.description or "")


def _yaml(value: Any) -> str:
    """A default as it would stand in a recipe: JSON is YAML."""
    plain = TypeAdapter(Any).dump_python(value, mode="json", exclude_defaults=True)
    return json.dumps(plain, ensure_ascii=False)


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(bound, attribute, None) is not None
    ]
    return ", ".join([_named(field.annotation), *bounds])


_NAMES: Mapping[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}


def _named(annotation: Any) -> str:
    """A type in the words of a recipe."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if origin is typing.Annotated:
        return _named(parts[0])
    if origin is typing.Literal:
        return " | ".join(str(part) for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_named(part) for part in parts))
    if origin in (tuple, list, set, frozenset):
        inner = dict.fromkeys(_named(part) for part in parts if part is not Ellipsis)
        return f"list of {' and '.join(inner)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section with keys of its own"
    return "section"
