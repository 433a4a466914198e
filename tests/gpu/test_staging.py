"""The asynchronous copy out of a GPU's cache equals the plain one."""

from __future__ import annotations

import pytest
import torch

from hs_connectors.vllm import staging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("chunk_bytes", [1, 10_000, 64 << 20])
def test_the_copy_is_right_whatever_the_engine_does_meanwhile(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_CHUNK_BYTES", chunk_bytes)
    cache = torch.randn(64, 16, 5, 32, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    plain = cache.cpu()
    stager, host = staging.Stager(cache), staging.Stager(plain)
    copies = []
    for start in range(8):
        blocks = list(range(start, 64, 8))
        cache[blocks] += 1  # the engine's own stream: the copy must come after it
        plain[blocks] = cache[blocks].cpu()
        copies.append((stager.copy(blocks, 8 * 16 - start), host.copy(blocks, 8 * 16 - start)))
    for copy, expected in copies:
        copy.wait()
        assert copy.done() and copy.states.is_pinned()
        assert torch.equal(copy.states, expected.states)
