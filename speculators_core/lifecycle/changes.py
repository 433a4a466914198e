"""What a change means: from what a draft was proven on, and what is there now, to one action.

`OnChange` is the table: one field for each kind of change, its default the action that the change asks for. A recipe
overrides it under `lifecycle.on_change`. Where several things changed, the action that redoes most is taken. Whatever
it is, the incumbent is measured on what is there now: sometimes doing nothing is still best.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, ValidationError

from speculators_core.engine.runtime import RuntimeInfo
from speculators_core.lifecycle.drift import DriftConfig, Incident
from speculators_core.lifecycle.matrix import FINGERPRINT_TAG, RUNTIME_TAG, Cell, cells
from speculators_core.types import StrictModel
from speculators_core.verifier.fingerprint import PARTS, Fingerprint

PARTS_TAG, SHAPE_TAG, RUNTIME_INFO_TAG = "verifier.parts", "verifier.shape", "runtime.info"
TOKENIZER_TAG, TEMPLATE_TAG, VLLM_TAG = "tokenizer.sha256", "chat_template.sha256", "vllm.version"

Action = Literal["nothing", "re-evaluate", "retrain", "retrain-new-head", "retrain-afresh"]
ACTIONS: tuple[Action, ...] = ("nothing", "re-evaluate", "retrain", "retrain-new-head", "retrain-afresh")
"""From what redoes least to what redoes most."""

MEANING: dict[Action, str] = {
    "nothing": "the champion stays as it is",
    "re-evaluate": "render the prompts anew where that changed and measure the champion; train, starting from its "
    "weights, only if the gate fails it",
    "retrain": "capture anew and train, starting from the champion's weights",
    "retrain-new-head": "choose the draft's vocabulary anew, capture, and train, starting from the champion's layers "
    "but not its head",
    "retrain-afresh": "capture anew and train from random weights",
}


class OnChange(StrictModel):
    """The table: what each kind of change asks for."""

    weights: Action = Field("retrain", description="the verifier's weights changed")
    config: Action = Field("retrain", description="its config.json changed in how it computes, not in its shape")
    adapters: Action = Field("retrain", description="an adapter was added, changed or removed")
    tokenizer: Literal["nothing", "retrain-new-head", "retrain-afresh"] = Field(
        "retrain-new-head", description="token ids mean something else: the old head and vocabulary map are void"
    )
    shape: Literal["nothing", "retrain-afresh"] = Field(
        "retrain-afresh", description="hidden size, layers, heads or vocabulary size changed: no old weight fits"
    )
    chat_template: Action = Field("re-evaluate", description="the chat template or its settings changed, nothing else")
    generation_config: Action = Field("re-evaluate", description="the generation config changed, nothing else")
    quantised: Action = Field("re-evaluate", description="another quantisation of a model of the same shape")
    runtime: Action = Field("re-evaluate", description="another vLLM, build, device or model runner")
    traffic: Action = Field(
        "re-evaluate",
        description="the acceptance length that real requests get fell; see `lifecycle.drift`. Data sources that are "
        "sampled from traffic make this measure on, and train for, what is asked now",
    )
    unrecorded: Action = Field(
        "retrain-afresh", description="the verifier changed, and the version does not say what it was proven on"
    )


Change = Literal[
    "weights", "config", "adapters", "tokenizer", "shape", "chat_template", "generation_config", "quantised", "runtime",
    "traffic", "unrecorded",
]  # fmt: skip


_MEASURING = ("measure", "baseline", "speed", "ngram")


class LifecycleConfig(StrictModel):
    """What happens when the verifier or the runtime changes, and what it costs."""

    on_change: OnChange = Field(default_factory=OnChange, description="action for each kind of change")
    drift: DriftConfig = Field(default_factory=DriftConfig, description="when served acceptance counts as fallen")
    price_per_hour: NonNegativeFloat | dict[str, NonNegativeFloat] | None = Field(
        None, description="price of an hour of the machine, or of each stage's: {capture: 4.5, train: 2.0, other: 0.4}"
    )

    def price(self, stage: str, seconds: float | None) -> float | None:
        """Price of a stage's time; None where price or time is not known. Measuring is priced as `evaluate`."""
        table = self.price_per_hour
        named = "evaluate" if stage in _MEASURING else stage
        hourly = table.get(named, table.get("other")) if isinstance(table, dict) else table
        return None if hourly is None or seconds is None else round(hourly * seconds / 3600, 4)


class World(StrictModel):
    """What a draft depends on, as it is now."""

    verifier: Fingerprint
    shape: dict[str, Any] = Field(description="keys of config.json that decide tensor shapes")
    runtime_key: str
    runtime: RuntimeInfo


class Proven(StrictModel):
    """What a registered version was proven on, from its tags; None where it does not say."""

    version: str
    fingerprint: str | None
    parts: dict[str, str] = Field(description="digest of each recorded part of the fingerprint")
    shape: dict[str, Any] | None
    runtime_key: str | None
    vllm: str | None
    runtime: RuntimeInfo | None = None
    cells: tuple[Cell, ...] = Field((), description="every pair of verifier and runtime that it was measured on")

    def holds(self, now: World, margin: float) -> tuple[bool | None, str]:
        """Whether it was measured here since and is good enough, with a sentence; None: it was not measured here."""
        here = (now.verifier.digest, now.runtime_key)
        cell = next((cell for cell in self.cells if cell.pair.key == here), None)
        if cell is None or cell.outcome is None:
            return None, ""
        if cell.state != "proven":
            return False, f"the gate's outcome for the champion here is {cell.outcome}"
        first = self.cells[0].al
        if first is not None and cell.al is not None and cell.al < (1 - margin) * first:
            return False, f"the champion's acceptance length fell from {first:.3f} to {cell.al:.3f} here"
        return True, "the gate has passed the champion on this verifier and runtime since"

    @classmethod
    def of_tags(cls, version: str, tags: Mapping[str, str]) -> Proven:
        """Read a version's tags; unreadable ones count as missing."""
        parts = _json_object(tags.get(PARTS_TAG)) or {}
        for part, tag in (("tokenizer", TOKENIZER_TAG), ("chat_template", TEMPLATE_TAG)):
            if tag in tags:
                parts.setdefault(part, tags[tag])
        try:
            runtime = RuntimeInfo.model_validate_json(tags.get(RUNTIME_INFO_TAG, ""))
        except ValidationError:
            runtime = None
        return cls(
            version=version,
            fingerprint=tags.get(FINGERPRINT_TAG),
            parts={part: str(digest) for part, digest in parts.items()},
            shape=_json_object(tags.get(SHAPE_TAG)),
            runtime_key=tags.get(RUNTIME_TAG),
            vllm=tags.get(VLLM_TAG),
            runtime=runtime,
            cells=cells(tags),
        )


class Decision(StrictModel):
    """What changed since a version was proven, and the action that follows."""

    changes: tuple[Change, ...]
    parts: tuple[str, ...] = Field(description="parts of the fingerprint that differ, as far as they are recorded")
    action: Action
    reasons: tuple[str, ...] = Field(description="one sentence for each change")


def tags_of(world: World) -> dict[str, str]:
    """Tags by which a version says later what it was proven on; what `Proven.of_tags` reads beside the digests."""
    return {
        PARTS_TAG: json.dumps(world.verifier.parts, sort_keys=True),
        SHAPE_TAG: json.dumps(world.shape, sort_keys=True),
        RUNTIME_INFO_TAG: world.runtime.model_dump_json(),
    }


def decide_action(
    proven: Proven | None,
    now: World,
    table: OnChange,
    *,
    margin: float,
    tried: str | None = None,
    incident: Incident | None = None,
) -> Decision:
    """Name what changed and look up what it asks for; without a champion everything is to be done.

    Args:
        margin: relative loss of acceptance length that the gate tolerates; held against what the champion was
            registered with when it was measured here since.
        tried: another version that was trained for this verifier and runtime, and judged: it is not done again.
        incident: a fall of served acceptance, which neither an earlier measurement nor an earlier training answers.
    """
    if proven is None:
        return Decision(changes=(), parts=(), action="retrain-afresh", reasons=("nothing serves yet",))
    parts = changed_parts(proven, now)
    changes = changes_of(proven, now, parts)
    reasons = [_sentence(change, proven, now) for change in changes]
    if incident is not None:
        changes, tried = (*changes, "traffic"), None
        reasons.append(incident.reason)
    actions: list[Action] = [getattr(table, change) for change in changes]
    action = max(actions, key=ACTIONS.index, default="nothing")
    if action == "re-evaluate" and incident is None:
        held, why = proven.holds(now, margin)
        action = action if held is None else "nothing" if held else "retrain"
        reasons += [why] if why else []
    if action not in ("nothing", "re-evaluate") and tried is not None:
        action = "nothing"
        reasons.append(f"version {tried} was trained for this verifier and runtime, and the gate has judged it")
    return Decision(changes=changes, parts=parts, action=action, reasons=tuple(reasons))


def changed_parts(proven: Proven, now: World) -> tuple[str, ...]:
    """Recorded parts of the fingerprint that differ now, in the order of PARTS."""
    if proven.fingerprint == now.verifier.digest:
        return ()
    return tuple(part for part in PARTS if part in proven.parts and proven.parts[part] != now.verifier.parts.get(part))


def changes_of(proven: Proven, now: World, parts: tuple[str, ...]) -> tuple[Change, ...]:
    """The kinds of change behind the parts that differ, those of the verifier first."""
    found: list[Change] = []
    if proven.fingerprint != now.verifier.digest:
        found += _verifier_changes(proven, now, set(parts))
    if proven.runtime_key != now.runtime_key:
        found.append("runtime")
    return tuple(found)


def _verifier_changes(proven: Proven, now: World, parts: set[str]) -> list[Change]:
    if proven.parts.keys() < set(PARTS) or not parts:
        # some part differs, and which one was never written down
        return ["tokenizer", "unrecorded"] if "tokenizer" in parts else ["unrecorded"]
    found: list[Change] = []
    if "config" in parts and (proven.shape is None or proven.shape != now.shape):
        found.append("shape" if proven.shape is not None else "unrecorded")
        parts -= {"config"}
    if "quantisation" in parts:
        # quantising rewrites the weights, and often the dtype in config.json: one change, which the gate judges
        found.append("quantised")
        parts -= {"quantisation", "weights", "config"}
    order: tuple[Change, ...] = ("weights", "config", "tokenizer", "chat_template", "generation_config", "adapters")
    return found + [part for part in order if part in parts]


def _sentence(change: Change, proven: Proven, now: World) -> str:
    if change == "runtime":
        return f"the runtime changed: {runtime_words(proven, now)}"
    if change == "shape" and proven.shape is not None:
        keys = sorted(
            key for key in proven.shape.keys() | now.shape.keys() if proven.shape.get(key) != now.shape.get(key)
        )
        moved = ", ".join(f"{key} {proven.shape.get(key)} → {now.shape.get(key)}" for key in keys)
        return f"the verifier's shape changed: {moved}"
    described = OnChange.model_fields[change].description
    assert described is not None
    return described


def runtime_words(proven: Proven, now: World) -> str:
    """What differs between two runtimes: versions where they differ, else build, device or model runner."""
    new = now.runtime
    if proven.vllm is not None and proven.vllm != new.vllm:
        return f"vLLM {proven.vllm} → {new.vllm}"
    old = proven.runtime
    names = ("build", "device", "model_runner")
    moved = [f"{name} {getattr(old, name)} → {getattr(new, name)}" for name in names if old is not None
             and getattr(old, name) != getattr(new, name)]  # fmt: skip
    return ", ".join(moved) or f"another build of vLLM {new.vllm}, or another device"


def _json_object(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
