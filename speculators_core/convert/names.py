"""Foreign tensors by our names: renamed by a layout's table, fused matrices taken apart, vocabulary tables in our form.

Values are never touched, but for the form of d2t, the order of the head's rows where a table was not ascending, and
the dtype in which drafts are served.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from speculators_core.algorithms._blocks.geometry import LayerGeometry
from speculators_core.convert.layouts import Layout
from speculators_core.data.vocabulary import kept_ids
from speculators_core.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY_ROWS = ("lm_head.weight", "markov_head.markov_w2.weight", "refiner_head.readout.weight")
"""Tensors with a row for each token that the draft can propose."""


def renamed(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our name -> tensor.

    Raises:
        FormatError: the layout says why such a draft has no counterpart, or two tensors would bear one name.
    """
    for name in sorted(tensors):
        for pattern, reason in layout.refused:
            if re.fullmatch(pattern, name):
                raise FormatError(
                    f"{name}: {reason}", mend="serve the draft as it is, where the engine has a loader for it"
                )
    found: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if any(re.fullmatch(pattern, name) for pattern in layout.left_out):
            continue
        ours = our_name(layout, name)
        if ours in found:
            raise FormatError(f"two tensors of the checkpoint are {ours} to us, one of them {name}")
        found[ours] = tensor
    return found


def our_name(layout: Layout, name: str) -> str:
    """What the first rename that fits makes of a name; itself where none does."""
    for pattern, replacement in layout.renames:
        if found := re.fullmatch(pattern, name):
            return found.expand(replacement)
    return name


def unfused(tensors: Mapping[str, Tensor], geometry: LayerGeometry) -> dict[str, Tensor]:
    """`qkv_proj` and `gate_up_proj` as the matrices that they are made of.

    Raises:
        FormatError: the rows do not add up, or a part is there beside the whole.
    """
    import torch

    queries = geometry.num_attention_heads * geometry.head_dim
    keys = geometry.num_key_value_heads * geometry.head_dim
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts: dict[str, int] = {}
        if ".self_attn.qkv_proj." in name:
            parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        elif ".mlp.gate_up_proj." in name:
            parts = dict.fromkeys(("gate_proj", "up_proj"), sum(tensor.shape[:1]) // 2)
        if not parts or not tensor.ndim:
            found[name] = tensor
            continue
        fused = name.split(".")[-2]
        names = [name.replace(fused, part) for part in parts]
        if beside := [part for part in names if part in tensors]:
            raise FormatError(f"{name} stands beside {', '.join(beside)}: which of them is used?")
        rows = list(parts.values())
        if sum(rows) != tensor.shape[0]:
            raise FormatError(f"{name} has {tensor.shape[0]} rows; config.json implies {' + '.join(map(str, rows))}")
        found |= dict(zip(names, torch.split(tensor, rows), strict=True))
    return found


def with_our_vocabulary(tensors: Mapping[str, Tensor], verifier_size: int, draft_size: int) -> dict[str, Tensor]:
    """d2t as int64 distances and t2d as truth values, both ascending, or neither where the vocabulary is whole.

    d2t may hold distances (verifier id − draft id) or ids; t2d, where it is there, tells which. Rows of the head follow
    their tokens where the table is not ascending.

    Raises:
        FormatError: there are no tables, or they are not of the draft's size.
        DataError: see `kept_ids`.
    """
    import torch

    found = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if draft_size == verifier_size:
        _require_identity(tensors, verifier_size)
        return found
    if not {"d2t", "t2d"} & tensors.keys():
        raise FormatError(
            f"the draft proposes {draft_size} of {verifier_size} tokens, and has no d2t or t2d that say which"
        )
    ids = kept_ids(tensors.get("d2t"), tensors.get("t2d"), verifier_size)
    if ids.numel() != draft_size:
        raise FormatError(f"d2t and t2d tell of {ids.numel()} tokens, config.json of {draft_size}")
    order = ids.argsort()
    for name in VOCABULARY_ROWS:
        if name in found and found[name].shape[:1] == (draft_size,):
            found[name] = found[name][order]
    ids = ids[order]
    t2d = torch.zeros(verifier_size, dtype=torch.bool)
    t2d[ids] = True
    return found | {"d2t": ids - torch.arange(draft_size), "t2d": t2d}


def _require_identity(tensors: Mapping[str, Tensor], verifier_size: int) -> None:
    import torch

    for name, wanted in (
        ("d2t", (torch.zeros(verifier_size, dtype=torch.int64), torch.arange(verifier_size))),
        ("t2d", (torch.ones(verifier_size, dtype=torch.bool),)),
    ):
        table = tensors.get(name)
        if table is not None and not any(torch.equal(table.to(one.dtype), one) for one in wanted):
            raise FormatError(f"the draft proposes every token of the verifier, but its {name} says otherwise")
