from __future__ import annotations

import pytest

from speculators_core.errors import RegistryError
from tasks.verifier_tags import TEMPLATE_TAG, template_kwargs_of


def test_what_the_tag_holds_is_read_and_none_is_nothing() -> None:
    assert template_kwargs_of({TEMPLATE_TAG: '{"enable_thinking": false}'}, "chat", "1") == {"enable_thinking": False}
    assert template_kwargs_of({}, "chat", "1") == template_kwargs_of({TEMPLATE_TAG: ""}, "chat", "1") == {}


@pytest.mark.parametrize("text", ["{", "[1]", "null", "true", "[" * 100_000], ids=lambda text: text[:4])
def test_what_somebody_else_wrote_there_is_refused_by_name(text: str) -> None:
    with pytest.raises(RegistryError, match=r"verifier\.template_kwargs of chat version 1 is no JSON object"):
        template_kwargs_of({TEMPLATE_TAG: text}, "chat", "1")
