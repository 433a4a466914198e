"""What a machine lacks stops set-up only where nothing works without it."""

from __future__ import annotations

import pytest

from infra import setup


@pytest.mark.parametrize(("lacks", "stops"), [("haproxy", False), ("libnuma1", True)])
def test_packages_of_one_feature_are_told_and_those_of_all_are_a_must(
    lacks: str, stops: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failing apt cannot be provoked where it works: its answer is planted."""

    def refuse(command: list[str], what: str, env: dict[str, str] | None = None) -> str:
        raise setup.SetupError(f"{what} failed")

    monkeypatch.setattr(setup.shutil, "which", lambda name: name)
    monkeypatch.setattr(setup, "is_installed", lambda package: package != lacks)
    monkeypatch.setattr(setup, "run", refuse)
    if stops:
        with pytest.raises(setup.SetupError):
            setup.install_debian_packages()
    else:
        setup.install_debian_packages()
        assert "goes on without" in capsys.readouterr().out
