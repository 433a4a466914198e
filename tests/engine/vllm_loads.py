"""Run by the runtime's interpreter: `vllm_loads.py job.json`. What vLLM's loaders make of drafts, without an engine.

job.json: loads [{name, verifier, draft, method, tokens}], result. The result holds, for each name, the sha256 of every
tensor of vLLM's module after its loader has read the draft's directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main(job_file: str) -> None:
    """Load each draft in vLLM's model class and write what it holds."""
    job = json.loads(Path(job_file).read_text())
    config_module, parallel = import_module("vllm.config"), import_module("vllm.distributed")
    engine_args = import_module("vllm.engine.arg_utils").EngineArgs
    get_model = import_module("vllm.model_executor.model_loader").get_model
    accelerator = import_module("torch").accelerator  # the loader asks one for its memory, also where there is none
    accelerator.empty_cache, accelerator.max_memory_allocated = lambda: None, lambda *args: 0
    accelerator.reset_peak_memory_stats = lambda *args: None
    # what its model runner lacks here is no matter of what it loads
    config_module.VllmConfig._get_v1_model_runner_unsupported_features = lambda self: []
    # nor is how a layer packs what it was given
    loader: Any = import_module("vllm.model_executor.model_loader.base_loader")
    loader.process_weights_after_loading = lambda *args: None
    found: dict[str, dict[str, str]] = {}
    for task in job["loads"]:
        told = {"model": task["draft"], "method": task["method"], "num_speculative_tokens": task["tokens"]}
        if task["parallel"]:
            told["parallel_drafting"] = True
        arguments = engine_args(
            model=task["verifier"], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            max_model_len=256, speculative_config=told,
        )  # fmt: skip
        config = arguments.create_engine_config()
        with config_module.set_current_vllm_config(config):
            if not found:
                where = f"file://{Path(job_file).absolute()}.rendezvous"
                parallel.init_distributed_environment(1, 0, where, 0, "gloo")
                parallel.initialize_model_parallel(1, 1)
            model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        found[task["name"]] = {name: digest(tensor) for name, tensor in tensors_of(model).items()}
    Path(job["result"]).write_text(json.dumps(found))


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def digest(tensor: Any) -> str:
    """sha256 of shape and bytes."""
    torch = import_module("torch")
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + flat).hexdigest()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main(sys.argv[1])
