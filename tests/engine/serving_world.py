"""A registry whose drafts say one token for ever, and traffic to which the verifier answers with one of these tokens.

After 24 dashes SmolLM2 goes on with dashes and nothing else (of thirty tokens tried, the only one that it never tires
of): a draft of dashes is always accepted (AL = K + 1), one of another token never (AL = 1).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from speculators_core.engine.runtime import Runtime, probe_runtime
from speculators_core.store import Store
from speculators_core.verifier.fingerprint import fingerprint
from tests.environment import ROOT

MODEL = "dashes"
DASH, RARE = 29, 40_000
"""Token ids of SmolLM2: the one that the traffic is made of, and one that is never written."""
KEPT = 1024
NAMES = ("DRAFTSMITH_STORE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "PREFECT_HOME", "PREFECT_API_URL")


DASHES: dict[str, object] = {"model": MODEL, "prompt": [DASH] * 24, "temperature": 0.0, "ignore_eos": True}
"""A request for dashes, but for its length."""


def always_say(token: int, draft: Path, *, salt: float = 1.0) -> None:
    """Make an exported draft of KEPT tokens one that says this token for ever."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"] = torch.zeros_like(tensors["norm.weight"])  # all logits equal: the first token wins
    tensors["fc.weight"] = salt * tensors["fc.weight"]
    kept = torch.arange(token, token + KEPT)
    tensors["d2t"] = kept - torch.arange(KEPT)
    tensors["t2d"] = torch.zeros_like(tensors["t2d"])
    tensors["t2d"][kept] = True
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})


@dataclass
class ServingWorld:
    """A state root with a registry, and drafts to register in it."""

    home: Path
    verifier: Path
    runtime: Runtime
    untrained: Path

    def register(self, token: int, *, outcome: str = "pass", salt: float = 1.0) -> str:
        """A version whose draft always says this token; `salt` makes other bytes of the same draft."""
        from tasks.adapters.registry import DraftRegistry, VersionFacts
        from tasks.observe import tracking

        store = Store(str(self.home / "store"), scratch=self.home / "scratch")
        key = f"{token:x}{int(1000 * salt):x}".rjust(64, "0")
        draft = store.workspace("draft", key)
        shutil.copytree(self.untrained, draft, dirs_exist_ok=True)
        always_say(token, draft, salt=salt)
        ref = store.publish(draft, "draft", key)
        path = store.path(ref)
        info, print_ = probe_runtime(self.runtime, home=self.home), fingerprint(self.verifier, home=self.home)
        facts = VersionFacts(
            draft_digest=ref.digest,
            verifier_name=self.verifier.name,
            verifier_uri=str(self.verifier),
            verifier_fingerprint=print_.digest,
            tokenizer_sha256=print_.parts["tokenizer"],
            chat_template_sha256=print_.parts["chat_template"],
            vllm_version=info.vllm,
            runtime_key=info.key,
            algorithm="eagle3",
            k=3,
            al=1.0,
            gate_outcome=outcome,
        )
        run = tracking().open_parent("9" * 64, name="recipe", tags={})
        manifest = path.parent / "manifest.json"
        return DraftRegistry(tracking()).register(MODEL, path, manifest, facts, run_id=run, retry_hint="again").version

    def promote(self, version: str, *, force: bool = False) -> None:
        from tasks.versions import promote_by_name

        key = probe_runtime(self.runtime, home=self.home).key
        promote_by_name(MODEL, version, key, force=force, why="the test wants it")

    def champion(self) -> str | None:
        from tasks.versions import open_aliases

        return open_aliases().get_alias(MODEL, "champion")

    def arguments(self, port: int, **settings: object) -> list[str]:
        """Options of `draftsmith serve` for a small engine on this port."""
        small = {
            "port": port,
            "poll_s": 0.5,
            "engines": "beside",
            "engine.kv_cache_gib": 0.25,
            "engine.max_model_len": 256,
            "engine.max_num_seqs": 8,
            "engine.startup_timeout_s": 900,
            "probe.prompts": 2,
            "probe.max_tokens": 12,
            "watch.min_drafts": 60,
        }
        sets = [f"serve.{name}={value}" for name, value in {**small, **settings}.items()]
        return ["--runtime", str(self.runtime.python), *(part for one in sets for part in ("--set", one))]


@contextmanager
def serving_world(root: Path, verifier: Path, runtime: Runtime) -> Iterator[ServingWorld]:
    """A fresh state root under `root` that `settings()` answers with, as long as the block lasts."""
    from speculators_core.drafts import export_untrained
    from speculators_core.formats.card import ModelCard
    from tasks.adapters.settings import settings
    from tasks.observe import tracking

    home = root / "home"
    if (asked := ROOT / ".draftsmith" / "runtimes").is_dir():  # asking a vLLM who it is takes half a minute
        shutil.copytree(asked, home / "runtimes")
    card = ModelCard(title="untrained")
    untrained = export_untrained({"kind": "eagle3"}, verifier, KEPT, str(verifier), root / "untrained", card)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_HOME", str(home))
        for name in NAMES:
            patch.delenv(name, raising=False)
        settings.cache_clear()
        tracking.cache_clear()
        yield ServingWorld(home, verifier, runtime, untrained)
    settings.cache_clear()
    tracking.cache_clear()


def ask_for_dashes(http: httpx.Client) -> str:
    """One streamed request whose reply is a row of dashes; it must end as a stream ends."""
    body = {**DASHES, "max_tokens": 16, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, f"{reply.status_code}: {reply.read().decode()}"
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return lines[0]
