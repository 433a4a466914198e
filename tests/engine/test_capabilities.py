"""What the real runtime says that it can serve."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from speculators_core.engine.capabilities import probe_capabilities
from speculators_core.engine.runtime import Runtime

pytestmark = [pytest.mark.engine, pytest.mark.trial]  # it loads every model class of vLLM


def test_the_runtimes_own_registries_are_asked_once(runtime: Runtime, tmp_path: Path) -> None:
    found = probe_capabilities(runtime, home=tmp_path)
    assert {"eagle3", "ngram", "mtp"} <= set(found.methods)
    assert all(draft.asked for draft in found.drafts.values()), found.drafts
    assert found.drafts["eagle3"].refusal is None
    assert found.verifiers["LlamaForCausalLM"].aux_states
    assert not found.verifiers["LlamaForCausalLM"].latent_attention
    assert found.verifiers["DeepseekV3ForCausalLM"].latent_attention
    assert found.verifiers["GPT2LMHeadModel"].aux_states is False
    started = time.monotonic()
    assert probe_capabilities(runtime, home=tmp_path) == found
    assert time.monotonic() - started < 1
