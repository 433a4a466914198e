from __future__ import annotations

import pytest

from speculators_core.errors import ConfigError
from speculators_core.registry import names, resolve


@pytest.mark.parametrize(
    ("name", "meant"),
    [("eagle4", "eagle3"), ("eagle", "eagle3"), ("Eagle-3", "eagle3"), ("eagel3", "eagle3"), ("peagl", "peagle"),
     ("dflash3", "dflash"), ("dspak", "dspark"), ("medusa", None), ("", None)],
)  # fmt: skip
def test_an_unknown_algorithm_names_the_one_that_begins_alike_and_all_there_are(name: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    hint = "" if meant is None else f"did you mean {meant!r}? "
    assert caught.value.mend == f"{hint}kinds: {', '.join(names())}"
