"""Hidden states by a Hugging Face forward: the second source of captures, and the reference for the first.

States are taken by hooks: the input of decoder layer i for id i, the output of the last layer for id N. The library's
own `output_hidden_states` is not used: its last entry is after the final norm.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speculators_core.errors import CaptureError, VerifierError
from speculators_core.verifier.facts import read_config

logger = logging.getLogger(__name__)


class StateCatcher:
    """Hooks on a loaded verifier that keep what chosen layers made of the latest forward.

    Args:
        layer_ids: ascending ids 0 … N.

    Raises:
        VerifierError: its decoder layers cannot be found.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        # The text model's own: a vision tower may have a list of as many layers.
        layers = decoder_layers(model.get_decoder(), int(model.config.get_text_config().num_hidden_layers))
        self._layer_ids = tuple(layer_ids)
        self._caught: dict[int, Tensor] = {}
        for layer_id in self._layer_ids:
            if layer_id < len(layers):
                layers[layer_id].register_forward_pre_hook(self._before(layer_id), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(self._after(layer_id))

    def take(self) -> Tensor:
        """States [T, K, H] of the forward's one sequence, in its dtype; then nothing is kept.

        Raises:
            CaptureError: a layer was not reached.
        """
        missing = [layer for layer in self._layer_ids if layer not in self._caught]
        if missing:
            raise CaptureError(f"the forward never reached layers {missing}")
        states = torch.stack([self._caught[layer][0] for layer in self._layer_ids], dim=1)
        self._caught.clear()
        return states

    def _before(self, layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._caught[layer_id] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def _after(self, layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._caught[layer_id] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook


class HiddenStateForward:
    """A verifier in memory that hands out hidden states of chosen layers.

    Args:
        layer_ids: ascending ids 0 … N.
        dtype: torch name; the forward runs in it.

    Raises:
        VerifierError: transformers cannot load the directory, or its decoder layers cannot be found.
    """

    def __init__(
        self, verifier_dir: Path, layer_ids: Sequence[int], dtype: str, *, trust_remote_code: bool = False
    ) -> None:
        model = load_verifier(verifier_dir, dtype, trust_remote_code=trust_remote_code)
        # Without the head: logits of a long row would be larger than everything else together.
        self._model: nn.Module = model.base_model
        self._catcher = StateCatcher(model, layer_ids)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """States [T, K, H] of one sequence (int64 [T]), in the dtype of the forward.

        Raises:
            CaptureError: a layer was not reached.
        """
        with torch.inference_mode():
            self._model(input_ids=input_ids.to(torch.int64).unsqueeze(0), use_cache=False)
        return self._catcher.take()


def load_verifier(verifier_dir: Path, dtype: str, *, trust_remote_code: bool = False) -> Any:
    """The whole verifier as transformers runs it, frozen; a multimodal one with its towers.

    Args:
        dtype: torch name, or auto: as the files have it.

    Raises:
        VerifierError: transformers cannot load the directory.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    multimodal = read_config(verifier_dir).get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    try:
        with _no_progress_bar():
            model = kind.from_pretrained(
                verifier_dir,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
            )
    except (OSError, ValueError, ImportError) as error:
        raise VerifierError(
            f"transformers cannot load {verifier_dir}: {error}",
            mend="check that it is a model directory whose model type the installed transformers knows",
        ) from error
    return model.eval().requires_grad_(False)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one for every load; ours is the only one on the terminal."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers: the outermost ModuleList called `layers` or `h` of that many entries.

    Raises:
        VerifierError: there is none.
    """
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and name.split(".")[-1] in ("layers", "h", "blocks")
        ):
            return module
    raise VerifierError(
        f"no list of {count} decoder layers in {type(model).__name__}",
        mend="its hidden states cannot be taken by a Hugging Face forward; use capture.source=engine",
    )


def parameter_count(verifier_dir: Path) -> int:
    """Elements of all weights, from the safetensors headers alone; packed (quantised) weights count as stored."""
    total = 0
    for path in verifier_dir.glob("*.safetensors"):
        with path.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                size = 1
                for dimension in entry["shape"]:
                    size *= dimension
                total += size
    return total


def reference_dtype(verifier_dir: Path, memory_gib: float) -> str | None:
    """float32 where the verifier fits into `memory_gib` so, else bfloat16, else None: too large to load here."""
    budget = min(memory_gib * (1 << 30), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.5)
    count = parameter_count(verifier_dir)
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        if count * width <= budget:
            return dtype
    return None


def reference_states(
    verifier_dir: Path,
    rows: Sequence[tuple[int, Tensor]],
    layer_ids: Sequence[int],
    dtype: str,
    *,
    trust_remote_code: bool = False,
) -> dict[int, Tensor]:
    """States of a few (row index, input_ids int64 [T]) by a Hugging Face forward; the model is freed at the end."""
    forward = HiddenStateForward(verifier_dir, layer_ids, dtype, trust_remote_code=trust_remote_code)
    return {index: forward(input_ids) for index, input_ids in rows}
