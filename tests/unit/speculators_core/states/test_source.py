"""Requests, records and retries: a stand-in for the client writes real records into a real backend, faults planted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_states import FACTS, ListOfRows, make_rows, record_for, states_for

from hs_connectors.contract import NORM_POINT, Handle, Record
from hs_connectors.registry import open_reader, open_writer
from speculators_core.engine.client import Generation, GenerationRequest, RequestError
from speculators_core.errors import CaptureError, EngineError
from speculators_core.states.collect import Collector
from speculators_core.states.config import CaptureConfig
from speculators_core.states.replies import match_handles
from speculators_core.states.sets import StateSet
from speculators_core.states.source import request_states

LENGTHS = [5, 9, 30, 4, 7, 3, 12, 8, 6]


def announced(**changes: object) -> dict[str, object]:
    """What an engine that fits says about itself."""
    facts = {"vllm": "1", "device": "cpu", "model_runner": "v1", "codec": "none", "max_model_len": 64}
    wanted = {"layer_ids": list(FACTS.layer_ids), "norm_point": NORM_POINT, "states_dtype": FACTS.dtype}
    return facts | wanted | {"verifier_fingerprint": FACTS.verifier_fingerprint} | changes


@dataclass
class StandIn:
    """Engine and client in one: answers as ours do, and leaves records as the connector does."""

    rows: ListOfRows
    root: Path
    fault: Callable[[int, int, Record], Record | str | None] = lambda row, attempt, record: record
    attempts: dict[int, int] = field(default_factory=dict)
    process: object = None
    base_url: str = "http://nowhere"

    def __post_init__(self) -> None:
        self.writer = open_writer("file", {"root": str(self.root), "fsync": False})
        self.writer.announce(announced())

    def check(self) -> None:
        pass

    def client(self) -> StandIn:
        return self

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, requests: Iterable[GenerationRequest], *, concurrency: int, on_error) -> Iterator[Generation]:
        for request in requests:
            row = int(request.id)
            self.attempts[row] = self.attempts.get(row, 0) + 1
            outcome = self.fault(row, self.attempts[row], record_for(self.rows.row(row)))
            key = f"r{row}-{self.attempts[row]}"
            answer: dict[str, object] = {"handle": {"backend": "file", "key": key}}
            if isinstance(outcome, Record):
                self.writer.put(key, outcome)
            elif outcome == "refused":
                on_error(RequestError("busy", request_id=request.id, status=500))
                continue
            elif outcome == "dead":
                raise EngineError("the vLLM server died (status 137)", mend="free memory")
            elif outcome == "no record":
                answer = {"error": "the store of hidden states takes no records: full"}
            elif outcome == "torn":
                self.writer.put(key, record_for(self.rows.row(row)))
                path = self.root / f"{key}.safetensors"
                raw = bytearray(path.read_bytes())
                raw[-3] ^= 1
                path.write_bytes(raw)
            elif isinstance(outcome, str):
                self.writer.fail(key, outcome)
            yield Generation(
                id=request.id,
                prompt_token_ids=request.prompt_token_ids or (),
                token_ids=(1,),
                text="",
                finish_reason="length",
                kv_transfer_params=answer,
            )


def run(tmp_path: Path, fault=None, **settings: object):
    rows = make_rows(LENGTHS)
    engine = StandIn(rows, tmp_path / "records", **({"fault": fault} if fault else {}))
    collector = Collector(rows, FACTS, tmp_path / "set", 20)
    config = CaptureConfig(concurrency=2, record_timeout_s=0.2, **settings)
    gate = SimpleNamespace(positions=[4, 7], offer=lambda index, states, token: None)
    reader = open_reader("file", {"root": str(tmp_path / "records")})
    return engine, collector, lambda: request_states(rows, collector, gate, engine, config, reader, None)


def test_all_rows_arrive_the_sampled_ones_first_and_records_are_deleted(tmp_path: Path):
    engine, collector, work = run(tmp_path)
    tally = work()
    assert list(engine.attempts) == [4, 7, 0, 1, 2, 3, 5, 6, 8]
    assert (tally.rows, tally.tokens, tally.retried) == (9, sum(LENGTHS), 0)
    collector.finish({})
    StateSet.open(tmp_path / "set").verify()
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["engine.json"]


@pytest.mark.parametrize("fault", ["refused", "no record", "torn", "the states could not be copied", None])
def test_a_row_that_fails_once_is_asked_for_again(tmp_path: Path, fault: str | None):
    engine, collector, work = run(tmp_path, lambda row, attempt, record: fault if row == 3 and attempt == 1 else record)
    assert work().retried == 1
    assert engine.attempts[3] == 2 and max(count for row, count in engine.attempts.items() if row != 3) == 1
    collector.finish({})


def test_a_row_that_fails_always_is_named_and_the_others_are_kept(tmp_path: Path):
    engine, _, work = run(tmp_path, lambda row, attempt, record: "not finite" if row == 8 else record)
    with pytest.raises(CaptureError, match=r"(?s)1 rows could not be captured in 3 tries \(rows 8\).*not finite.*mend"):
        work()
    assert engine.attempts[8] == 3 and len(list((tmp_path / "set").glob("shard-*"))) == 4


def test_a_capture_without_hope_ends_early(tmp_path: Path):
    engine, _, work = run(tmp_path, lambda row, attempt, record: "disk full")
    with pytest.raises(CaptureError, match=r"none of the first 8 rows was captured: .*disk full"):
        work()
    assert max(engine.attempts.values()) == 1


def test_a_dead_engine_says_how_to_go_on(tmp_path: Path):
    _, collector, work = run(tmp_path, lambda row, attempt, record: "dead" if row == 5 else record)
    with pytest.raises(CaptureError, match=r"(?s)engine failed after 6 of 9 rows: .*status 137.*free memory; then run"):
        work()
    assert len(collector.missing()) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_ids": (0, 2, 4)}, r"layers \[0, 2, 4\]"),
        ({"verifier_fingerprint": "0" * 64}, "captured from verifier 000000000000"),
        ({"token_ids": record_for(make_rows(LENGTHS).row(2)).token_ids + 1}, "row 2: token 0 of the record"),
    ],
)
def test_a_record_that_is_not_the_requested_one_ends_the_capture(tmp_path: Path, change, message: str):
    _, _, work = run(tmp_path, lambda row, attempt, record: replace(record, **change) if row == 2 else record)
    with pytest.raises(CaptureError, match=message):
        work()


@pytest.mark.parametrize(
    ("term", "value"),
    [
        ("layer_ids", [0, 4]),
        ("norm_point", "after the final norm"),
        ("states_dtype", "float32"),
        ("codec", "fp8"),
        ("verifier_fingerprint", "0" * 64),
        ("max_model_len", max(LENGTHS)),
    ],
)
def test_an_engine_of_other_settings_is_refused(tmp_path: Path, term: str, value: object):
    engine, _, work = run(tmp_path)
    engine.writer.announce(announced(**{term: value}))
    name = "context" if term == "max_model_len" else term
    with pytest.raises(CaptureError, match=rf"(?s)than is wanted: {name}\n.*≠ +{name}") as raised:
        work()
    assert str(raised.value).count("≠") == 1 and str(value) in str(raised.value)
    assert engine.attempts == {}


def test_a_remote_engine_without_announcement_is_refused(tmp_path: Path):
    engine, _, work = run(tmp_path)
    (tmp_path / "records" / "engine.json").unlink()
    with pytest.raises(CaptureError, match=r"published no engine\.json"):
        work()
    assert engine.attempts == {}


def test_handles_are_found_by_token_ids():
    rows = make_rows([6, 4, 5])
    ids = [row.input_ids.tolist() for row in rows.content]
    turns = [
        {"prompt_token_ids": ids[0][:2], "token_ids": ids[0][2:], "kv_transfer_params": {"handle": _handle("a")}},
        {"prompt_token_ids": ids[1][:1], "token_ids": ids[1][1:]},
        {"prompt_token_ids": ids[2][:1], "token_ids": ids[2][1:-1], "kv_transfer_params": {"handle": _handle("c")}},
    ]
    assert match_handles(rows, [{"turns": turns}, {}]) == {0: Handle("file", "a")}
    assert states_for(rows.row(0)).shape[0] == 6


def _handle(key: str) -> dict[str, str]:
    return {"backend": "file", "key": key}
