"""The two ways: a foreign checkpoint becomes a draft of ours, a draft of ours becomes a foreign checkpoint."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from speculators_core import registry
from speculators_core.convert.blocks import read_block_draft
from speculators_core.convert.features import read_feature_draft
from speculators_core.convert.foreign import to_foreign
from speculators_core.convert.layouts import LAYOUTS, NATIVE, SPECULATORS_KEY, Layout
from speculators_core.convert.options import Conversion, ConvertOptions
from speculators_core.convert.reading import Reading
from speculators_core.convert.source import Source
from speculators_core.convert.speculators import read_speculators
from speculators_core.errors import ConfigError, FormatError
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import CONFIG, WEIGHTS, write_draft
from speculators_core.formats.servable import check_servable
from speculators_core.store.files import write_directory
from speculators_core.types import ExportedDraft
from speculators_core.verifier.facts import read_facts

log = logging.getLogger(__name__)

OURS = "draftsmith"
"""Name of our own layout as a target: the speculators format, complete."""


def layout_names() -> tuple[str, ...]:
    """Layouts that can be read, by name."""
    return (*LAYOUTS, NATIVE)


def detect(source: Source) -> str:
    """Name of the one layout that fits the checkpoint's config and tensors.

    Raises:
        FormatError: none fits, or several do.
    """
    config, names = source.config, source.names
    fitting = [layout.name for layout in LAYOUTS.values() if _fits(layout, config, names)]
    if not fitting and (_native_algorithm() and any(_NATIVE_MARK.search(name) for name in names)):
        return NATIVE
    if len(fitting) == 1:
        return fitting[0]
    architectures = ", ".join(config.get("architectures") or ["none"])
    if fitting:
        raise FormatError(
            f"{source.directory} ({architectures}) fits several layouts: {', '.join(fitting)}",
            mend="say which it is: --from",
        )
    known = "; ".join(f"{layout.name} ({layout.holds})" for layout in LAYOUTS.values())
    raise FormatError(
        f"{source.directory} ({architectures}) fits no layout that is known: its tensors are "
        f"{', '.join(sorted(names)[:6])}{' …' if len(names) > 6 else ''}",
        mend=f"known are {known}; {NATIVE} (a verifier with a head of its own). EAGLE-1 and -2 draft from one feature, "
        "which no algorithm here does",
    )


def read_foreign(
    source: Source, verifier: Path | None, publish: str | None, options: ConvertOptions
) -> tuple[str, ExportedDraft, tuple[str, ...]]:
    """Layout, draft and notes of a checkpoint: complete, and as vLLM loads it.

    Args:
        verifier: directory of the verifier; most layouts need it.
        publish: name of the verifier as the draft shall state it.

    Raises:
        FormatError: unknown, missing or misshapen tensors, each of them listed; or what the layout cannot say.
        ConfigError: no such layout, or no verifier where one is needed.
        VerifierError: the verifier cannot be read.
    """
    name = options.layout if options.layout != "auto" else detect(source)
    if name == NATIVE:
        draft = _read_native(source, publish)
        return name, draft, ()
    if name not in LAYOUTS:
        raise ConfigError(f"--from {name!r} is not a layout", mend=f"choose auto or {', '.join(layout_names())}")
    reading = Reading(source, LAYOUTS[name], verifier, publish, options)
    draft = _READERS[name](reading)
    _require_complete(draft, reading)
    return name, draft, tuple(reading.notes)


def convert(
    source: Source, target: Path, verifier: Path | None, publish: str | None, options: ConvertOptions
) -> Conversion:
    """Write a foreign checkpoint as a draft of ours; see `read_foreign` for what is refused before that."""
    name, draft, notes = read_foreign(source, verifier, publish, options)
    kind = str(draft.config[SPECULATORS_KEY])
    card = ModelCard(title=f"{kind} draft, converted", facts={"converted from": f"the layout {name}"})
    write_directory(target, lambda partial: write_draft(partial, draft, card))
    for note in notes:
        log.info("converted: %s", note)
    return Conversion(
        layout=name, algorithm=kind, target=OURS, path=str(target), tensors=len(draft.tensors), notes=notes
    )


def convert_to(layout: str, source: Source, target: Path, verifier: Path | None, options: ConvertOptions) -> Conversion:
    """Write a draft, ours or foreign, in a foreign layout.

    Raises: as `read_foreign` and `to_foreign`; FormatError where the target exists.
    """
    from safetensors.torch import save_file

    if target.exists():
        raise FormatError(f"{target} exists already", mend="name a directory that does not exist yet")
    name, draft, notes = read_foreign(source, verifier, None, options)
    depth = None if verifier is None else read_facts(verifier).num_hidden_layers
    config, tensors = to_foreign(draft, layout, depth)

    def write(directory: Path) -> None:
        directory.mkdir()
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    write_directory(target, write)
    kind = str(draft.config[SPECULATORS_KEY])
    return Conversion(layout=name, algorithm=kind, target=layout, path=str(target), tensors=len(tensors), notes=notes)


_NATIVE_MARK = re.compile(r"(?:^|\.)(?:mtp(?:_layers)?\.|eh_proj\.)")
"""In the names of native heads, see the families of the algorithm that trains them."""


def _native_algorithm() -> str | None:
    """The algorithm whose drafts are served inside their verifier."""
    return next((name for name in registry.names() if registry.resolve(name).stitch is not None), None)


def _read_native(source: Source, publish: str | None) -> ExportedDraft:
    """The head of a verifier with its own weights, which is what that algorithm starts from."""
    kind = _native_algorithm()
    assert kind is not None, "an algorithm trains native heads"
    algorithm = registry.resolve(kind)
    config = algorithm.config()
    model = algorithm.build(config, source.directory, None, 0)
    return algorithm.export(config, model, publish or str(source.directory.absolute()))


def _fits(layout: Layout, config: Mapping[str, Any], names: frozenset[str]) -> bool:
    def written(key: str) -> bool:
        return key in config or key in (config.get("dflash_config") or {})

    if not all(written(key[1:]) is False if key.startswith("!") else written(key) for key in layout.keys):
        return False

    def found(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in names)

    return all(map(found, layout.has)) and not any(map(found, layout.lacks))


def _require_complete(draft: ExportedDraft, reading: Reading) -> None:
    """Every tensor that the config implies, in its shape, and no other; and all else that vLLM's loader would ask."""
    try:
        check_servable(draft)
    except FormatError as error:
        raise FormatError(
            f"{reading.source.directory}, read as {reading.layout.name}: {error.what}",
            mend="check that the copy is whole and of this layout (--from), and that the verifier is its own",
        ) from error


_READERS: dict[str, Callable[[Reading], ExportedDraft]] = {
    "speculators": read_speculators,
    "safeai": partial(read_feature_draft, "eagle3"),
    "peagle": partial(read_feature_draft, "peagle"),
    "zlab": read_block_draft,
    "deepspec": read_block_draft,
}
