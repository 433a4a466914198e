from __future__ import annotations

import pytest
import torch

from hs_connectors.codecs import CODECS
from hs_connectors.errors import RecordError, RecordNotFinite

FP8 = CODECS["fp8"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def states(dtype: torch.dtype, spread: float = 3.0) -> torch.Tensor:
    """[T, K, H] with rows of very different sizes, and outliers within rows, as verifiers have them."""
    generator = torch.Generator().manual_seed(0)
    rows_TK1 = torch.exp(spread * torch.randn(64, 4, 1, generator=generator))
    found_TKH = rows_TK1 * torch.randn(64, 4, 96, generator=generator)
    found_TKH[:, :, 7] *= 300
    return found_TKH.clamp(-60000, 60000).to(dtype)


def there_and_back(given: torch.Tensor) -> torch.Tensor:
    return FP8.decode(FP8.encode(given), given.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_keeps_three_bits_of_mantissa(dtype: torch.dtype) -> None:
    given, got = states(dtype), there_and_back(states(dtype))
    assert got.dtype == dtype and got.shape == given.shape
    scales_TK1 = FP8.encode(given)["scales"]
    allowed = torch.maximum(given.float().abs() / 16, scales_TK1 * 2.0**-10)
    assert bool(((got.float() - given.float()).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_loses_once_and_never_again(dtype: torch.dtype) -> None:
    once = there_and_back(states(dtype))
    assert torch.equal(there_and_back(once), once)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_fp8_can_say_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    """All finite codes in a row, times any power of two that the dtype holds exactly."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    row = codes[torch.isfinite(codes.float())].to(torch.float32)
    exponents = torch.arange(-6.0, 7.0) if dtype == torch.float16 else torch.arange(-100.0, 100.0)
    given = (row * torch.exp2(exponents)[:, None, None]).to(dtype)
    assert torch.equal(there_and_back(given), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_states_stay_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    given = torch.tensor([[[info.max, -info.max, 1.0]], [[info.tiny, 0.0, -info.tiny]], [[0.0, 0.0, 0.0]]]).to(dtype)
    got = there_and_back(given)
    assert bool(torch.isfinite(got).all()) and bool((got[2] == 0).all())
    assert torch.allclose(got[0, 0, :2].float(), given[0, 0, :2].float(), rtol=1 / 16)


def test_scales_are_per_token_and_layer_and_exact_powers_of_two() -> None:
    encoded = FP8.encode(states(torch.bfloat16))
    assert encoded["hidden_states"].dtype == torch.float8_e4m3fn and encoded["scales"].shape == (64, 4, 1)
    mantissa, _ = torch.frexp(encoded["scales"])
    assert bool((mantissa == 0.5).all())
    assert bool((encoded["hidden_states"].float().abs().amax(-1) > 216).all()), "a row leaves a bit of its range unused"
    numbers = sum(tensor.nbytes for tensor in encoded.values())
    assert numbers <= states(torch.bfloat16).nbytes * (0.5 + 4 / 96)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_fp8_has_no_word_for_what_is_not_finite(value: float) -> None:
    given = states(torch.bfloat16)
    given[5, 2, 9] = value
    with pytest.raises(RecordNotFinite):
        FP8.encode(given)


def test_a_record_that_lacks_its_scales_is_refused() -> None:
    encoded = FP8.encode(states(torch.bfloat16))
    del encoded["scales"]
    with pytest.raises(RecordError, match="scales"):
        FP8.decode(encoded, torch.bfloat16)
    with pytest.raises(RecordError):
        CODECS["none"].decode({"hidden_states": encoded["hidden_states"]}, torch.bfloat16)


def test_no_tokens_are_states_as_well() -> None:
    for codec in CODECS.values():
        empty = torch.empty(0, 4, 96, dtype=torch.bfloat16)
        assert codec.decode(codec.encode(empty), torch.bfloat16).shape == (0, 4, 96)
