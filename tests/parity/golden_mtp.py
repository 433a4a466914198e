"""Runs one golden case through our native-head training in `compat` mode, in float32."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.families import FAMILIES, layer_config
from speculators_core.algorithms.mtp.model import MTPHead
from speculators_core.algorithms.mtp.objective import MTPObjective
from speculators_core.types import Batch, StepResult
from tests.parity import golden_features as features
from tests.parity.golden import GoldenCase

PREFIX = "mtp_layers.0."
GENERIC = replace(FAMILIES[0], name="qwen3", model_types=("qwen3",), modeling="qwen3.modeling_qwen3", prefix="Qwen3")
"""The cases' layers are plain Qwen3 ones, of which no verifier has a native head."""


def ours(name: str) -> str:
    bare = name.removeprefix(PREFIX)
    joint = bare.split(".")[0] in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return bare if joint else f"layer.{bare}"


def run_mtp(case: GoldenCase) -> tuple[StepResult, dict[str, Tensor]]:
    tensors = case.tensors()
    dims, call = case.dims(tensors), case.summary["call"]
    config = MTPConfig(
        num_speculative_steps=call.get("num_speculative_steps", 3),
        step_weight_beta=call.get("step_weight_beta", 0.6),
        compat=True,
        loss_chunk=7,
    )
    names = (
        "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps",
    )  # fmt: skip
    text = {name: dims[name] for name in names} | {
        "model_type": case.summary["case"]["arch"],
        "num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": dims["rope_theta"],
            "partial_rotary_factor": dims.get("partial_rotary_factor", 1.0),
        },
    }
    head = MTPHead(config, GENERIC, layer_config(GENERIC, text))
    weights = features.weights(tensors)
    head.borrow(weights["embed_tokens.weight"], weights["lm_head.weight"])
    head.load_state_dict({ours(name): w for name, w in weights.items() if name.startswith(PREFIX)}, strict=False)
    assert {ours(name) for name in weights if name.startswith(PREFIX)} == set(head.head_tensors())
    whole = features.batch(tensors | {"in.hidden_states": tensors["in.verifier_last_hidden_states"]})
    # the peer pairs a state with the token after it inside its forward pass; ours is given such pairs
    batch = Batch(
        input_ids=whole.input_ids[1:],
        loss_mask=whole.loss_mask[1:],
        position_ids=whole.position_ids[:-1],
        document_ids=whole.document_ids[:-1],
        aux_TAH=whole.aux_TAH[:-1],
        last_TH=whole.last_TH[1:],
    )
    objective = MTPObjective(config)
    result = objective.step(head, batch, objective.denominators(batch))
    result.loss.backward()  # type: ignore[no-untyped-call]
    theirs = {ours(name): name for name in weights if name.startswith(PREFIX)}
    return result, {theirs[name]: gradient for name, gradient in features.gradients(head).items()}
