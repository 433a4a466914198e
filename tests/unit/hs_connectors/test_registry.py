from __future__ import annotations

from pathlib import Path

import pytest

from hs_connectors import BACKENDS, open_backend, open_reader, open_writer
from hs_connectors.errors import SettingsError, UnknownName
from hs_connectors.registry import locate


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(UnknownName, match=r"carrier-pigeon[\s\S]*file, memory"):
        open_reader("carrier-pigeon", {})


def test_the_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        BACKENDS["file"] = BACKENDS["memory"]  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_an_option_that_nobody_reads_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="rooot"):
        open_backend(name, {"root": str(tmp_path), "space": "x", "rooot": "y"})


def test_an_unknown_codec_fails_before_the_first_record(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="zip"):
        open_writer("file", {"root": str(tmp_path)}, codec="zip")


def test_another_distribution_can_add_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[hs_connectors.backends]\ntheirs = their_backend:Theirs\nfile = their_backend:Theirs\nbroken = nowhere:X\n"
    )
    (tmp_path / "their_backend.py").write_text(
        "from hs_connectors.backends.memory import MemoryBackend\nclass Theirs(MemoryBackend):\n    name = 'theirs'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_backend("theirs", {"space": "x"}).name == "theirs"
    assert open_backend("file", {"root": str(tmp_path)}).name == "file"
    with pytest.raises(UnknownName, match="install theirs"):
        open_backend("broken", {})


@pytest.mark.parametrize(
    ("address", "name", "config"),
    [
        ("/records", "file", {"root": "/records"}),
        ("records", "file", {"root": "records"}),
        ("./a:b", "file", {"root": "./a:b"}),
        ("file:/records", "file", {"root": "/records"}),
        ("shm:space", "shm", {"space": "space"}),
        ("s3://bucket/prefix", "s3", {"root": "s3://bucket/prefix"}),
        ("mooncake:host:50051", "mooncake", {"master": "host:50051"}),
        ('mooncake:{"master": "h:1", "space": "x"}', "mooncake", {"master": "h:1", "space": "x"}),
        ('theirs:{"option": 1}', "theirs", {"option": 1}),
    ],
)
def test_an_address_says_which_store(address: str, name: str, config: dict[str, object]) -> None:
    assert locate(address) == (name, config)


@pytest.mark.parametrize(("address", "words"), [("pigeon:loft", "no backend"), ("shm:", "where"), ("shm:{x", "JSON")])
def test_an_address_of_nothing_is_refused(address: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        locate(address)
