from __future__ import annotations

import pytest
import torch

from hs_connectors.vllm.staging import Stager

BLOCKS, LAYERS, SIZE, HIDDEN = 6, 3, 4, 5


@pytest.mark.parametrize("tokens_together", [True, False], ids=["LBNHC", "LBHNC"])
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 12])
def test_tokens_come_out_in_the_order_of_their_blocks(tokens_together: bool, num_tokens: int) -> None:
    pages = torch.arange(BLOCKS * SIZE * LAYERS * HIDDEN).float().reshape(BLOCKS, SIZE, LAYERS, HIDDEN)
    cache = pages.transpose(1, 2) if tokens_together else pages.transpose(1, 2).contiguous()
    blocks = [5, 0, 3]
    copy = Stager(cache).copy(blocks, num_tokens)
    copy.wait()
    expected = [pages[blocks[t // SIZE], t % SIZE] for t in range(num_tokens)]
    assert torch.equal(copy.states, torch.stack(expected)) and copy.done()


def test_a_copy_is_independent_of_the_cache() -> None:
    cache = torch.ones(BLOCKS, LAYERS, SIZE, HIDDEN)
    copy = Stager(cache).copy([1, 2], 6)
    cache.zero_()
    assert bool((copy.states == 1).all())


def test_the_bytes_of_a_copy_are_known_before_it_is_made() -> None:
    stager = Stager(torch.zeros(BLOCKS, LAYERS, SIZE, HIDDEN, dtype=torch.bfloat16))
    assert stager.num_bytes(7) == 7 * LAYERS * HIDDEN * 2 == stager.copy([0, 1], 7).states.nbytes
