from __future__ import annotations

import pytest
import torch

from speculators_core.losses.best import RUN, best_index


@pytest.mark.parametrize("count", [RUN, 3 * RUN, 3 * RUN + 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_largest_is_found(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(0, 9, (5, 40, count), generator=generator).to(dtype)  # full of ties
    logits[0, 0] = float("-inf")
    logits[0, 1, -1] = float("nan")
    assert torch.equal(best_index(logits), logits.argmax(dim=-1))
    assert best_index(logits[:0]).shape == (0, 40)
