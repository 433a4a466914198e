"""From files to rows: what is kept, what is dropped and why, and bad input that ends before the first token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hs_connectors.contract import Handle
from speculators_core.data.config import DataConfig
from speculators_core.data.prepare import check_content, prepare
from speculators_core.data.report import summed_up
from speculators_core.data.rows import RowSet
from speculators_core.data.template import ChatTemplate
from speculators_core.errors import DataError, DraftsmithError, VerifierError
from speculators_core.states.replies import match_handles, read_regenerated

from .conftest import CHATML, CONVERSATIONS, FORGETFUL

ALL = tuple(str(CONVERSATIONS / f"{name}.jsonl") for name in ("multi_turn", "sharegpt", "tools", "reasoning"))


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"c{i}",
            "domain": "even" if i % 2 == 0 else "odd",
            "messages": [
                {"role": "user", "content": f"Tell me about {'xyzw'[i % 4]}{i * 7919 % 1013} and {i * 104729 % 2003}"},
                {"role": "assistant", "content": f"It is number {i}."},
            ],
        }
        for i in range(count)
    ]


def settings(*sources: str, **more: Any) -> DataConfig:
    return DataConfig(sources=sources, **({"evaluation_prompts": 0, "validation_share": 0.0} | more))


def test_all_kinds_of_conversations_become_rows(verifier: Path, tmp_path: Path) -> None:
    report = prepare(settings(*ALL), verifier, tmp_path)
    rows = RowSet.open(tmp_path)
    assert report.rows == rows.num_rows == 6 and report.shared_rows == 5 and report.fanned_out == 0
    assert report.dropped == {} and report.domains == {"all": 2, "hobby": 2, "mathematics": 1, "tools": 1}
    template = ChatTemplate.load(verifier)
    row = rows.row(0)
    assert row.id == "garden" and row.domain == "hobby" and row.split == "train"
    assert row.input_ids.dtype.is_floating_point is False and str(row.loss_mask.dtype) == "torch.bool"
    assert "five centimetres" in template.decode(row.input_ids[row.loss_mask].tolist())
    assert rows.num_tokens == report.tokens == sum(rows.length(i) for i in range(rows.num_rows))
    assert int(rows.token_counts(600).sum()) == report.supervised_tokens


def test_a_template_that_rewrites_history_fans_out(make_verifier: Callable[..., Path], tmp_path: Path) -> None:
    report = prepare(settings(ALL[3]), make_verifier(FORGETFUL), tmp_path)
    rows = RowSet.open(tmp_path)
    assert report.rows == 2 and report.fanned_out == 1
    assert [rows.row(i).id for i in range(2)] == ["sums#0", "sums#1"]


def test_splits_evaluation_prompts_and_determinism(verifier: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "chats.jsonl", chats(200))
    config = DataConfig(sources=(source,), evaluation_prompts=20, validation_share=0.1)
    seen: list[tuple[int, int]] = []
    report = prepare(config, verifier, tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    prepare(config, verifier, tmp_path / "b")
    for name in ("rows.safetensors", "rows.jsonl", "evaluation.jsonl", "samples.jsonl", "report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert seen[-1] == (200, 200) and len(seen) > 1
    rows = RowSet.open(tmp_path / "a")
    assert report.splits == {"train": 162, "validation": 18, "evaluation": 20}
    assert len(rows.indices("train")) == 162 and len(rows.indices("validation")) == 18
    trained = {rows.row(i).id for i in range(rows.num_rows)}
    prompts = rows.prompts()
    assert len(prompts) == 20 and not trained & {prompt.id for prompt in prompts}
    assert {prompt.domain for prompt in prompts} == {"even", "odd"}
    template = ChatTemplate.load(verifier)
    for prompt in prompts:
        assert list(prompt.prompt_token_ids) == template.ids(prompt.messages, add_generation_prompt=True)
        assert prompt.reference_token_ids and prompt.reference_token_ids[-1] == 2


def test_what_is_dropped_is_counted(verifier: Path, tmp_path: Path) -> None:
    report = prepare(settings(str(CONVERSATIONS / "broken.jsonl")), verifier, tmp_path)
    assert report.rows == 1
    assert report.dropped["no_assistant_turn"] == 1 and report.dropped["duplicate"] == 1
    assert sum(report.dropped.values()) == 9


def test_every_loss_is_said_with_its_count_and_the_first_of_it(
    verifier: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user = chats(1)[0]["messages"][0]
    lines = [json.dumps(record) for record in [*chats(5), {"prompt": "a", "completion": "b"}, {"messages": [user]}]]
    lines += [lines[0][:40], json.dumps({"messages": [{"human": "a", "bot": "b"}]}), lines[0], lines[5]]
    source = tmp_path / "mixed.jsonl"
    source.write_text("\n".join(lines))
    report = prepare(settings(str(source)), verifier, tmp_path / "out")
    line = (
        "read 11, used 5, left out: duplicate 1 (first at mixed.jsonl:10), invalid_json 1 (first at mixed.jsonl:8), "
        "no_assistant_turn 1 (first at mixed.jsonl:7), no_messages 2 (first at mixed.jsonl:6), "
        "unknown_role 1 (first at mixed.jsonl:9)"
    )
    assert summed_up(report.model_dump(mode="json")) == line
    assert "mixed.jsonl:6 has the keys prompt, completion; expected messages or conversations" in caplog.text

    renamed = source.rename(tmp_path / "other.jsonl")
    assert prepare(settings(str(renamed)), verifier, tmp_path / "again").first_dropped["duplicate"] == "other.jsonl:10"
    for name in ("report.json", "rows.jsonl", "rows.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_report_without_losses_or_of_an_older_version_is_a_line_too() -> None:
    assert summed_up({"records": 4, "used": 4, "dropped": {}, "first_dropped": {}}) == "read 4, used 4"
    assert summed_up({"dropped": {"overlong": 2}}) == "read ?, used ?, left out: overlong 2"


def test_conversations_are_used_once_whether_asked_or_trained_on(verifier: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "chats.jsonl", chats(40))
    report = prepare(settings(source, evaluation_prompts=8, max_rows=30), verifier, tmp_path / "out")
    assert (report.records, report.conversations, report.used) == (40, 30, 30)
    assert report.splits["evaluation"] == 7 and report.dropped == {"beyond_max_rows": 10}


def test_the_mend_follows_from_what_was_counted(
    verifier: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = "Please write down a short and friendly greeting for customer number"
    alike = [
        {"messages": [{"role": "user", "content": f"{asked} {i}"}, {"role": "assistant", "content": f"Hello {i}"}]}
        for i in range(40)
    ]
    source = write(tmp_path / "alike.jsonl", alike)
    with pytest.raises(
        DataError,
        match=r"near_duplicate_of_evaluation 39 \(first at alike.jsonl:2 asks nearly what "
        r"alike.jsonl:1 does",
    ) as caught:
        prepare(settings(source, evaluation_prompts=128), verifier, tmp_path / "out")
    assert "data.evaluation_prompts" in str(caught.value.mend) and "unseen" in str(caught.value.mend)
    assert "max_length" not in str(caught.value.mend)
    assert "10 prompts are held back, not 128: at most a quarter of the 40 conversations; 512 would" in caplog.text
    with pytest.raises(DataError, match=r"overlong_prompt 4 \(first at chats.jsonl:1\)") as caught:
        prepare(settings(write(tmp_path / "chats.jsonl", chats(4)), max_length=8), verifier, tmp_path / "out")
    assert caught.value.mend == "raise data.max_length"


def test_wrong_names_of_fields_are_said_with_an_example(tmp_path: Path) -> None:
    source = write(tmp_path / "bad2.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(
        DataError, match=r"bad2\.jsonl:1 has the keys prompt, completion; expected messages or conv"
    ) as e:
        check_content(settings(source))
    assert '{"conversations": [{"role": "user"' in str(e.value.mend) and "`messages`" in str(e.value.mend)


def test_a_template_that_refuses_is_counted(make_verifier: Callable[..., Path], tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    report = prepare(settings(*ALL), make_verifier(strict), tmp_path)
    assert report.dropped == {"refused_by_template": 2} and report.rows == 4


def test_max_rows_draws_by_seed(verifier: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "chats.jsonl", chats(40))

    def drawn(seed: int) -> list[str]:
        prepare(settings(source, max_rows=10, seed=seed), verifier, tmp_path / "out")
        rows = RowSet.open(tmp_path / "out")
        return [rows.row(i).id for i in range(rows.num_rows)]

    assert len(drawn(0)) == 10 and drawn(0) == drawn(0) != drawn(1)


def test_long_rows_are_cut_or_dropped_as_stated(verifier: Path, tmp_path: Path) -> None:
    long = {
        "id": "long",
        "messages": [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "la " * 90}],
    }
    wordy = {
        "id": "wordy",
        "messages": [{"role": "user", "content": "la " * 90}, {"role": "assistant", "content": "Yes."}],
    }
    source = write(tmp_path / "long.jsonl", [long, wordy, *chats(1)])
    report = prepare(settings(source, max_length=64), verifier, tmp_path / "cut")
    rows = RowSet.open(tmp_path / "cut")
    assert report.truncated == 1 and report.dropped == {"overlong_prompt": 1} and report.longest_row == 64
    assert [rows.row(i).id for i in range(rows.num_rows)] == ["long", "c0"]
    report = prepare(settings(source, max_length=64, overlong="drop"), verifier, tmp_path / "dropped")
    assert report.truncated == 0 and report.dropped == {"overlong": 2} and report.rows == 1


def test_cut_off_replies_have_no_end_of_turn(verifier: Path, tmp_path: Path) -> None:
    record = chats(1)[0]
    record["messages"][1]["finish_reason"] = "length"
    source = write(tmp_path / "cut.jsonl", [record])
    prepare(settings(source), verifier, tmp_path / "a")
    assert RowSet.open(tmp_path / "a").row(0).input_ids[-1] != 2
    source = write(tmp_path / "capped.jsonl", chats(1))
    prepare(settings(source, reply_cap=4), verifier, tmp_path / "b")
    prepare(settings(source, reply_cap=400), verifier, tmp_path / "c")
    assert RowSet.open(tmp_path / "b").row(0).input_ids[-1] != 2
    assert RowSet.open(tmp_path / "c").row(0).input_ids[-1] == 2


def test_ids_from_an_engine_are_used_as_they_are_unless_stale(verifier: Path, tmp_path: Path) -> None:
    template = ChatTemplate.load(verifier)
    record = chats(1)[0]
    prompt = template.ids(record["messages"][:1], add_generation_prompt=True)
    spelled = template.tokenise(list("It is number 0."))
    exact = [token for ids in spelled for token in ids] + [2]  # a spelling that no tokenizer would choose
    record["turns"] = [{"message": 1, "prompt_token_ids": prompt, "token_ids": exact, "finish_reason": "stop"}]
    report = prepare(settings(write(tmp_path / "exact.jsonl", [record])), verifier, tmp_path / "a")
    assert report.exact_turns == 1
    assert RowSet.open(tmp_path / "a").row(0).input_ids.tolist() == prompt + exact
    record["turns"][0]["prompt_token_ids"] = prompt[1:]
    report = prepare(settings(write(tmp_path / "stale.jsonl", [record])), verifier, tmp_path / "b")
    assert report.exact_turns == 0 and report.dropped == {"stale_exact_ids": 1} and report.rows == 1


def test_exact_turns_share_a_row_where_ids_continue(verifier: Path, tmp_path: Path) -> None:
    template = ChatTemplate.load(verifier)
    record = json.loads((CONVERSATIONS / "multi_turn.jsonl").read_text().splitlines()[0])
    record["turns"] = []
    for j in (2, 4, 6):
        prompt = template.ids(record["messages"][:j], add_generation_prompt=True)
        reply = template.tokenise([record["messages"][j]["content"] + "<|im_end|>"])[0]
        handle = {"handle": {"backend": "file", "key": f"r{j}"}}
        turn = {"message": j, "prompt_token_ids": prompt, "token_ids": reply, "kv_transfer_params": handle}
        record["turns"].append(turn)
    source = tmp_path / "exact.jsonl"
    report = prepare(settings(write(source, [record])), verifier, tmp_path / "rows")
    rows = RowSet.open(tmp_path / "rows")
    assert report.exact_turns == 3 and report.rows == 1 and rows.record(0).turns == (2, 4, 6)
    assert match_handles(rows, read_regenerated(source)) == {0: Handle("file", "r6")}

    prepare(settings(str(source), max_length=rows.length(0) - 2), verifier, tmp_path / "short")
    short = RowSet.open(tmp_path / "short")
    assert match_handles(short, read_regenerated(source)) == {}, "a cut row has no record"


def test_bad_input_ends_before_the_first_token(
    make_verifier: Callable[..., Path], verifier: Path, tmp_path: Path
) -> None:
    good = write(tmp_path / "good.jsonl", chats(4))
    questions = write(tmp_path / "questions.jsonl", [{"messages": chats(1)[0]["messages"][:1]}])
    empty = write(tmp_path / "empty.jsonl", [])
    cases: list[tuple[DataConfig, Path, type[DraftsmithError], str]] = [
        (settings(good), tmp_path / "nowhere", VerifierError, "does not exist"),
        (settings(good), tmp_path, VerifierError, "not a model directory"),
        (settings(good), make_verifier(None), VerifierError, "no chat template"),
        (settings(questions), verifier, DataError, "no assistant turn"),
        (settings(empty), verifier, DataError, "no usable conversation"),
        (settings(good, max_length=4096), verifier, DataError, "context ends at 2048"),
        (settings(good, max_length=8), verifier, DataError, "no supervised token"),
        (settings(str(tmp_path / "none.jsonl")), verifier, DataError, "does not exist"),
    ]
    for config, directory, kind, words in cases:
        output = tmp_path / "out"
        with pytest.raises(kind, match=words) as caught:
            prepare(config, directory, output)
        assert caught.value.mend, words
        assert not output.exists(), "nothing is left behind that could pass for rows"


def test_torn_rows_are_not_opened(verifier: Path, tmp_path: Path) -> None:
    prepare(settings(ALL[0]), verifier, tmp_path / "a")
    file = tmp_path / "a" / "rows.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match="torn"):
        RowSet.open(tmp_path / "a")
    with pytest.raises(DataError, match="no prepared rows"):
        RowSet.open(tmp_path)


def test_a_data_set_without_replies_is_known_before_anything_is_tokenised(tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    with pytest.raises(DataError, match="no assistant turn"):
        check_content(settings(str(asked)))
    check_content(settings(str(asked), replies="regenerate"))
    with asked.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    check_content(settings(str(asked)))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="no usable conversation"):
        check_content(settings(str(tmp_path / "empty.jsonl"), replies="regenerate"))
