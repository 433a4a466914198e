from __future__ import annotations

from pathlib import Path

import pytest

from hs_connectors.errors import SettingsError
from hs_connectors.vllm.plugin import refuse_shadowing


def test_our_own_distribution_is_no_shadow() -> None:
    refuse_shadowing()


@pytest.mark.parametrize("spelling", ["hs_connectors", "hs-connectors", "HS.Connectors"])
def test_another_distribution_of_the_same_import_name_is_refused(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / f"{spelling.replace('-', '_')}-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {spelling}\nVersion: 0.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match=r"0\.9\.0[\s\S]*pip uninstall hs-connectors"):
        refuse_shadowing()
