"""What an interrupted run leaves is taken over only when it fits; an output is one process's, and nobody's before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from speculators_core.data.unfinished import keep, part_of, publish, reserved, resume
from speculators_core.errors import ConfigError


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_resuming(tmp_path: Path) -> None:
    part = part_of(tmp_path / "replies.jsonl")
    assert resume(part, "digest") == {} and lines(part) == [json.dumps({"settings": "digest"})]
    with part.open("a") as stream:
        keep(stream, "a", {"id": "a"})
        stream.write('{"key": "b", "rec')
    assert resume(part, "digest") == {"a": {"id": "a"}}
    assert len(lines(part)) == 2, "the torn line is cut off before anything is appended to it"
    assert resume(part, "digest") == {"a": {"id": "a"}}
    assert resume(part, "other") == {} and lines(part) == [json.dumps({"settings": "other"})]
    part.write_bytes(b"\xff\xfe not ours")
    assert resume(part, "digest") == {}


def test_an_output_is_held_by_one_process_until_it_is_written(tmp_path: Path) -> None:
    output = tmp_path / "made" / "out.jsonl"
    told = pytest.raises(ConfigError, match=f"process {os.getpid()} is writing .*out.jsonl\n  mend: wait")
    with reserved(output):
        resume(part_of(output), "digest")
        with told, reserved(output):
            pytest.fail("two hold it")
        publish(output, [{"id": "a"}])
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]
    with pytest.raises(ConfigError, match=r"out\.jsonl exists already"), reserved(output):
        pytest.fail("it would be replaced")
    assert lines(output) == ['{"id": "a"}']


def test_what_an_interrupted_run_left_is_no_obstacle(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), reserved(output):
        resume(part_of(output), "digest")
        raise KeyboardInterrupt
    (tmp_path / ".out.jsonl.lock").write_text("1")  # as a killed one leaves it
    with reserved(output):
        assert part_of(output).is_file()


@pytest.mark.parametrize("place", ["", "a file/out.jsonl", "x" * 300])
def test_a_place_where_nothing_can_be_made_is_told_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written|exists already") as caught, reserved(tmp_path / place):
        pytest.fail("nothing can be written there")
    assert caught.value.mend
