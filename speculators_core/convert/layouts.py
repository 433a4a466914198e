"""Foreign layouts of drafts as data: how a checkpoint is told, what its names become, where that was read.

Names are matched as regular expressions, whole; the first rename that fits is taken. A tensor that no rename mentions
keeps its name, and one that the draft has no place for is an error later on: nothing is dropped that is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Citation(NamedTuple):
    """Where a fact stands: a public repository's file at a commit."""

    repository: str
    file: str
    commit: str


@dataclass(frozen=True)
class Layout:
    """One way to lay a draft out.

    holds        what kind of draft, for messages
    sources      files that write it or read it
    has, lacks   patterns of tensor names, of which each, or none, must be there
    keys         keys of config.json that must be there, or, with a `!` before them, must not
    renames      pattern -> our name, `\\1` for groups
    left_out     patterns of tensors that carry nothing: tables that every reader works out again
    refused      pattern of a name -> why such a draft has no counterpart
    """

    name: str
    holds: str
    sources: tuple[Citation, ...]
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = (r".*rotary_emb\..*",)
    refused: tuple[tuple[str, str], ...] = ()


SPECULATORS_KEY = "speculators_model_type"

_PLAIN = r"(?:model\.)?"
"""Beginning of every name where the draft is wrapped in a model (Automodel)."""
_GATED = (r".*\.self_attn\.g_proj\..*", "its attention is gated, and vLLM's loader of this format has no gate")
_EXPERTS = (r".*\.experts\..*", "its layers are mixtures of experts, and drafts here are dense")
_LATENT = (r".*\.kv_a_proj_with_mqa\..*", "its attention is latent (MLA), and drafts here have plain heads")

SAFEAI = Layout(
    name="safeai",
    holds="EAGLE-3",
    sources=(
        Citation("SafeAILab/EAGLE", "eagle/model/cnets.py", "148042c5fed07822194a49b027c897c9c5494b0e"),
        Citation("SafeAILab/EAGLE", "eagle/traineagle3/cnets.py", "9666a8182d9bed8b5b637fd4a126c90d9b9c3db2"),
        Citation(
            "sgl-project/SpecForge",
            "specforge/modeling/draft/llama3_eagle.py",
            "89241ea0299e4ac48a22d27d649182627d0e5e53",
        ),
        Citation("SafeAILab/EAGLE", "eagle/model/modeling_llama_kv.py", "f2f2366485f092f9d0ffb0bc0c6bd174e69083bf"),
        Citation(
            "sgl-project/SpecForge", "configs/qwen3-30B-A3B-eagle3.1.json", "581664ac7ae4a034c5d0327f321d47cecb0051f0"
        ),
        Citation(
            "sgl-project/sglang",
            "python/sglang/srt/models/llama_eagle3.py",
            "d737979cbd17c6162f39c1953cfa72d3d23cc0d0",
        ),
        Citation(
            "NVIDIA/Model-Optimizer",
            "modelopt/torch/export/plugins/hf_spec_export.py",
            "0371364980fb6f10b004bd9c356ecd6978014ee2",
        ),
        Citation(
            "Tencent/AngelSlim",
            "angelslim/compressor/speculative/train/models/draft/llama_eagle3.py",
            "b99215f8f88bb8c3a0990903ee37a1a7b6e7657e",
        ),
    ),
    has=(
        rf"{_PLAIN}fc\.weight",
        rf"{_PLAIN}(?:midlayer\.|layers\.)(?:0\.)?hidden_norm\.weight",
    ),
    lacks=(r"(?:model\.)?mask_hidden",),
    keys=(f"!{SPECULATORS_KEY}",),
    renames=(
        (rf"{_PLAIN}midlayer\.(\d+)\.(.*)", r"layers.\1.\2"),
        (rf"{_PLAIN}midlayer\.(.*)", r"layers.0.\1"),
        (rf"{_PLAIN}aux_norm_low\.(.*)", r"fc_norm.0.\1"),
        (rf"{_PLAIN}aux_norm_mid\.(.*)", r"fc_norm.1.\1"),
        (rf"{_PLAIN}aux_norm_high\.(.*)", r"fc_norm.2.\1"),
        (r"model\.(.*)", r"\1"),
    ),
    refused=(_LATENT, _EXPERTS, (r".*\.medusa_layers\..*", "it has Medusa heads beside its layer")),
)
"""EAGLE-3 as its authors write it, and with what others added: several layers, norms before fc, other features."""

PEAGLE = Layout(
    name="peagle",
    holds="P-EAGLE",
    sources=(
        Citation(
            "sgl-project/SpecForge", "specforge/modeling/draft/peagle.py", "1cfba9707edb55fa594e09be3d2b3c394ffd5cc6"
        ),
        Citation("sgl-project/SpecForge", "configs/qwen3-8b-peagle.json", "a6a07bc47470fcee6441562726b0576cf10b8fe1"),
        Citation(
            "NVIDIA-NeMo/Automodel",
            "nemo_automodel/components/speculative/eagle/draft_llama_peagle.py",
            "57873e3689ee78c02119f671ee17763b583a090c",
        ),
    ),
    has=(rf"{_PLAIN}fc\.weight", rf"{_PLAIN}mask_hidden"),
    keys=(f"!{SPECULATORS_KEY}",),
    renames=SAFEAI.renames,
    refused=SAFEAI.refused,
)
"""Parallel EAGLE: the tensors of EAGLE-3, and the features that stand in a masked row."""

ZLAB = Layout(
    name="zlab",
    holds="DFlash and DFlash2",
    sources=(
        Citation("z-lab/dflash", "dflash/model.py", "10129599dffb338ff38cfd235a53ca6d3667b4dd"),
        Citation("z-lab/dflash", "tests/fixtures/dflash2-config.json", "0a7587c04af47b56024ef80f44c0926e795a540b"),
        Citation(
            "z-lab/dflash",
            "tests/fixtures/dflash2-safetensors-header.json",
            "0698f537b270b11fa19f7a2690cb3a6d632e9588",
        ),
        Citation("sgl-project/SpecForge", "configs/qwen3-4b-dflash.json", "9d63ee8e10973a8145e1276343787c341e7caa5e"),
        Citation(
            "NVIDIA/Model-Optimizer",
            "modelopt/torch/export/plugins/hf_spec_export.py",
            "0371364980fb6f10b004bd9c356ecd6978014ee2",
        ),
        Citation("vllm-project/vllm", "vllm/model_executor/models/qwen3_dflash.py", "v0.32.0"),
        Citation("vllm-project/vllm", "vllm/model_executor/models/laguna_dflash.py", "v0.32.0"),
    ),
    has=(r"(?:encoder\.)?fc\.weight", r"(?:encoder\.output_norm_enc|hidden_norm)\.weight"),
    lacks=(r"markov_head\..*", r"mask_hidden"),
    keys=(f"!{SPECULATORS_KEY}", "!markov_rank"),
    renames=(
        (r"encoder\.fc\.(.*)", r"fc.\1"),
        (r"encoder\.output_norm_enc\.(.*)", r"hidden_norm.\1"),
        (r"midlayer\.(.*)", r"layers.0.\1"),
    ),
    refused=(
        _GATED,
        _EXPERTS,
        (r"aux_hidden_norms\..*", "it norms every feature by itself, which this format has no place for"),
    ),
)
"""Anchored blocks as z-lab writes them; layer ids count outputs, so that 1 stands for our 2."""

DEEPSPEC = Layout(
    name="deepspec",
    holds="DSpark",
    sources=(
        Citation(
            "deepseek-ai/DeepSpec",
            "deepspec/modeling/dspark/qwen3/modeling.py",
            "5905deb7611cae6aaa0519cd3d048589af101144",
        ),
        Citation(
            "deepseek-ai/DeepSpec",
            "deepspec/modeling/dspark/qwen3/config.py",
            "041b6523e1b0dcaa1f86145790c26ca50acac3f2",
        ),
        Citation(
            "deepseek-ai/DeepSpec", "deepspec/modeling/dspark/common.py", "3bc8dc7452b5f17401a46af8aaa2370fa5408343"
        ),
        Citation(
            "curnane-lab/DeepSpec",
            "deepspec/modeling/dspark/markov_head.py",
            "bec2c8a5c6391c3948508df49cfb89fee5e2a5ff",
        ),
        Citation(
            "sgl-project/SpecForge", "specforge/modeling/draft/dspark.py", "1c2c647c7674dc65e56d1f853e50f9ec657af422"
        ),
        Citation("sgl-project/SpecForge", "configs/qwen3-8b-dspark.json", "4e3f455544d496df5d425001090913eed1bd0619"),
    ),
    has=(r"fc\.weight", r"hidden_norm\.weight", r"markov_head\.markov_w1\.weight"),
    keys=(f"!{SPECULATORS_KEY}",),
    refused=(_EXPERTS, _LATENT),
)
"""Corrected blocks as DeepSeek writes them; SpecForge keeps the same tensors, and its knobs in `dflash_config`."""

SPECULATORS = Layout(
    name="speculators",
    holds="any algorithm",
    sources=(
        Citation("vllm-project/speculators", "src/speculators/config.py", "v0.9.0"),
        Citation("vllm-project/vllm", "vllm/transformers_utils/configs/speculators/algos.py", "v0.32.0"),
    ),
    keys=(SPECULATORS_KEY,),
)
"""The format that vLLM loads by itself, from whoever wrote it."""

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (SPECULATORS, SAFEAI, PEAGLE, ZLAB, DEEPSPEC)}
"""By name. A verifier's own head is a layout, too, but one that the algorithm itself knows: see `NATIVE`."""

NATIVE = "native"
"""Name of the layout of a verifier with a head of its own."""
