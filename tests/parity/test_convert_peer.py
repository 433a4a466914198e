"""Key maps checked by a third party: the peer's converters make the same tensors of the same foreign checkpoints.

And both read each other's drafts: what the peer's loader holds of ours is ours bit for bit, and the other way round.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators_core import registry
from speculators_core.convert import ConvertOptions, convert, read_foreign
from speculators_core.convert.source import Source
from speculators_core.formats.card import ModelCard
from speculators_core.formats.directory import write_draft
from tests.environment import ROOT, child_environment
from tests.unit.speculators_core.algorithms.native_heads import write_native_verifier
from tests.unit.speculators_core.algorithms.tiny import HIDDEN, VOCAB, vocabulary, write_verifier
from tests.unit.speculators_core.convert import foreign_drafts as foreign

PEER = ROOT / ".venv-peer" / "bin" / "python"
WHOLE = ("dflash2", "mtp")
"""Algorithms that propose from the whole vocabulary."""
FROM_VERIFIER = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
"""What the peer's loader takes from the verifier, whatever the draft holds."""

pytestmark = pytest.mark.skipif(not PEER.is_file(), reason="no .venv-peer: there is no peer to compare with")


def ours(source: Path, verifier: Path | None) -> dict[str, Tensor]:
    return dict(read_foreign(Source(source), verifier, None, ConvertOptions())[1].tensors)


class Peer:
    """What the peer made of everything, in one run of its interpreter."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.verifier = write_verifier(root / "verifier")
        self.native = {name: write_native_verifier(root / name, name) for name in ("qwen3_5", "qwen3_next")}
        self.foreign = self._foreign()
        self.drafts = {name: self._exported(name) for name in registry.names()}
        job = {
            "convert": [
                {
                    "model": str(source),
                    "verifier": str(verifier),
                    "algorithm": kind,
                    "output_path": str(self.made(name)),
                }
                for name, (source, verifier, kind) in self.foreign.items()
            ],
            "load": [
                {"draft": str(draft), "state": str(root / f"{name}.state"), "saved": str(root / f"{name}.saved")}
                for name, draft in self.drafts.items()
            ],
        }
        (root / "job.json").write_text(json.dumps(job))
        subprocess.run(
            [str(PEER), str(Path(__file__).with_name("peer_checkpoints.py")), str(root / "job.json")],
            # of the peer alone: it has another package of the name hs_connectors
            env={**child_environment(), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            check=True,
            timeout=600,
        )

    def made(self, name: str) -> Path:
        return self.root / f"{name}.converted"

    def _foreign(self) -> dict[str, tuple[Path, Path, str]]:
        """Name -> (checkpoint, verifier, what the peer calls the algorithm)."""
        reduced = {**foreign.filled(foreign.eagle3_shapes()), **foreign.tables()}
        whole = {**foreign.filled(foreign.eagle3_shapes()), **foreign.filled({"lm_head.weight": (VOCAB, HIDDEN)}, 1)}
        embedded = {**reduced, **foreign.filled({"embed_tokens.weight": (VOCAB, HIDDEN)}, 2)}
        plain = foreign.filled(foreign.block_shapes())
        fused = {
            name: tensor
            for name, tensor in plain.items()
            if "_proj" not in name or "self_attn.o" in name or "mlp" in name
        }
        for index in range(2):
            parts = [plain[f"layers.{index}.self_attn.{name}_proj.weight"] for name in "qkv"]
            fused[f"layers.{index}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        eagle3, block = foreign.eagle3_config() | {"torch_dtype": "bfloat16"}, foreign.block_config()
        made = {
            "eagle3": (eagle3, reduced),
            "eagle3-whole": (eagle3 | {"draft_vocab_size": VOCAB}, whole),
            "eagle3-embedded": (eagle3, embedded),
            "blocks": (block, plain),
            "blocks-fused": (block, fused),
        }
        found = {
            name: (foreign.write(self.root / "foreign" / name, *content), self.verifier, name.split("-")[0])
            for name, content in made.items()
        }
        found = {
            name: (path, verifier, kind.replace("blocks", "dflash")) for name, (path, verifier, kind) in found.items()
        }
        return found | {name: (path, path, "mtp") for name, path in self.native.items()}

    def _exported(self, name: str) -> Path:
        """A draft of ours with every parameter drawn, so that none could stand in for another."""
        algorithm = registry.resolve(name)
        verifier = self.native["qwen3_5"] if algorithm.stitch is not None else self.verifier
        config = algorithm.config()
        model = algorithm.build(config, verifier, None if name in WHOLE else vocabulary(), 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return write_draft(
            self.root / "drafts" / name, algorithm.export(config, model, str(verifier)), ModelCard(title=name)
        )


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer(tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3-whole", "eagle3-embedded", "blocks", "blocks-fused", "qwen3_5", "qwen3_next"]
)
def test_the_peers_converter_makes_the_same_tensors(peer: Peer, name: str) -> None:
    source, verifier, _ = peer.foreign[name]
    theirs, mine = load_file(peer.made(name) / "model.safetensors"), ours(source, verifier)
    assert theirs.keys() - FROM_VERIFIER == mine.keys() - FROM_VERIFIER
    for key in theirs.keys() & mine.keys():
        assert torch.equal(theirs[key].to(mine[key].dtype), mine[key]), key
    config = json.loads((peer.made(name) / "config.json").read_text())
    aux = config.get("aux_hidden_state_layer_ids")
    if aux is not None:
        draft = read_foreign(Source(source), verifier, None, ConvertOptions())[1]
        assert draft.config["aux_hidden_state_layer_ids"] == aux and draft.config["block_size"] == config["block_size"]


@pytest.mark.parametrize("name", registry.names())
def test_the_peer_loads_ours_and_we_load_the_peers(peer: Peer, name: str, tmp_path: Path) -> None:
    mine = load_file(peer.drafts[name] / "model.safetensors")
    held = load_file(peer.root / f"{name}.state")
    lost = mine.keys() - held.keys()
    assert not lost - {"mask_embedding"}, lost
    for key in (mine.keys() & held.keys()) - (FROM_VERIFIER if name in ("dflash", "dspark", "xpress") else set()):
        assert torch.equal(held[key].to(mine[key].dtype), mine[key]), key
    saved = peer.root / f"{name}.saved"
    done = convert(Source(saved), tmp_path / "back", None, None, ConvertOptions())
    assert done.layout == "speculators" and done.algorithm == name
    back, theirs = load_file(tmp_path / "back" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], theirs[key].to(back[key].dtype)) for key in back)
    config, again = (json.loads((path / "config.json").read_text()) for path in (peer.drafts[name], tmp_path / "back"))
    different = {key for key in config if config[key] != again.get(key)}
    assert not different - {"transformer_layer_config", "transformers_version", "speculators_version"}, different
