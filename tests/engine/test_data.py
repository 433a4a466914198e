"""Token ids, replies and prompts, against the real engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hs_connectors.contract import CaptureSettings, kv_transfer_config, speculative_config
from hs_connectors.registry import open_reader
from speculators_core.data.check import check_against_engine
from speculators_core.data.config import DataConfig, RegenerationConfig, SynthesisConfig
from speculators_core.data.conversations import Conversation, read_conversations
from speculators_core.data.prepare import prepare
from speculators_core.data.regenerate import RegeneratedTurn, regenerate
from speculators_core.data.rows import RowSet
from speculators_core.data.splits import near_duplicate_groups
from speculators_core.data.synthesise import synthesise
from speculators_core.data.template import ChatTemplate
from speculators_core.engine.client import EngineClient
from speculators_core.engine.server import Engine, ServerSpec
from speculators_core.errors import DataError
from speculators_core.states.replies import match_handles, read_regenerated
from speculators_core.verifier.facts import read_facts

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deployments" / "data" / "conversations.jsonl"
FIXTURES = ROOT / "tests" / "fixtures" / "conversations"
EngineFactory = Callable[[ServerSpec], Engine]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture
def client(engine: EngineFactory, verifier_dir: Path, records: Path) -> Iterator[EngineClient]:
    """One server for the module: it captures, and is asked to only where a test says so."""
    settings = CaptureSettings("file", {"root": str(records)}, layer_ids=(2, 30), verifier_fingerprint="test")
    spec = ServerSpec(
        model=str(verifier_dir),
        max_model_len=1024,
        max_num_seqs=32,
        speculative=speculative_config(settings),
        kv_transfer=kv_transfer_config(settings),
    )
    with engine(spec).client() as opened:
        yield opened


@pytest.fixture
def plain_client(engine: EngineFactory, verifier_dir: Path) -> Iterator[EngineClient]:
    """The verifier alone: where replies are sampled, nothing may draft."""
    with engine(ServerSpec(model=str(verifier_dir), max_model_len=1024, max_num_seqs=32)).client() as opened:
        yield opened


def load(*names: str | Path) -> list[Conversation]:
    return list(read_conversations([str(name) for name in names]))


def test_our_ids_are_the_engines(client: EngineClient, verifier_dir: Path, tmp_path: Path) -> None:
    kinds = [str(FIXTURES / f"{name}.jsonl") for name in ("multi_turn", "sharegpt", "tools", "reasoning")]
    for name, sources in {"demo": [str(DEMO)], "fixtures": kinds}.items():
        # 160 tokens cut most of the demo's replies: what is left must still be a beginning of the engine's ids
        config = DataConfig(sources=tuple(sources), max_length=160, max_rows=64, evaluation_prompts=8)
        prepare(config, verifier_dir, tmp_path / name)
        check = check_against_engine(RowSet.open(tmp_path / name), client, sample=24)
        check.require()
        assert check.agreed == check.checked >= 10


def test_another_template_is_noticed(client: EngineClient, verifier_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "verifier"
    other.mkdir()
    for file in verifier_dir.iterdir():
        (other / file.name).symlink_to(file)
    (other / "chat_template.jinja").unlink()
    template = (verifier_dir / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template.replace("named SmolLM", "named Somebody"))
    prepare(DataConfig(sources=(str(DEMO),), max_rows=16, evaluation_prompts=2), other, tmp_path / "rows")
    check = check_against_engine(RowSet.open(tmp_path / "rows"), client, sample=4)
    assert check.agreed == 0 and check.first is not None and check.first.ours != check.first.engine
    with pytest.raises(DataError, match="renders other token ids") as caught:
        check.require()
    assert caught.value.mend


def test_regeneration_resumes_captures_and_feeds_preparation(
    client: EngineClient, verifier_dir: Path, records: Path, tmp_path: Path
) -> None:
    conversations = load(DEMO)[:20] + load(FIXTURES / "multi_turn.jsonl", FIXTURES / "tools.jsonl")
    template, facts = ChatTemplate.load(verifier_dir), read_facts(verifier_dir)
    config = RegenerationConfig(max_new_tokens=48, max_context=1024, concurrency=8)
    output = tmp_path / "replies.jsonl"

    class Killed(Exception):
        pass

    first: list[RegeneratedTurn] = []

    def kill_after_ten(turn: RegeneratedTurn) -> None:
        first.append(turn)
        if len(first) >= 10:
            raise Killed

    with pytest.raises(Killed):
        regenerate(
            conversations, client, template, facts, config, output,
            capture=True, producer="v1", on_turn=kill_after_ten,
        )  # fmt: skip
    assert not output.exists()
    kept = [line for line in output.with_name("replies.jsonl.part").read_text().splitlines() if '"key"' in line]
    assert kept, "what was finished before the kill is kept"

    second: list[RegeneratedTurn] = []
    report = regenerate(
        conversations, client, template, facts, config, output, capture=True, producer="v1", on_turn=second.append
    )
    assert report.resumed == len(kept) and report.written == 22 and report.conversations == 23
    assert report.cut["tool_call"] == 1 and report.dropped == {"no_reply": 1}
    resumed = {json.loads(line)["record"]["id"] for line in kept}
    assert not resumed & {turn.conversation for turn in second}, "nothing finished is asked for again"

    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["id"] for record in written] == [conversation.id for conversation in conversations[:22]]
    for record in written:
        for turn in record["turns"]:
            assert len(turn["token_ids"]) <= 48
            assert (turn["token_ids"][-1] == 2) == (turn["finish_reason"] == "stop")

    prepared = prepare(
        DataConfig(sources=(str(output),), evaluation_prompts=0, validation_share=0.0), verifier_dir, tmp_path / "rows"
    )
    assert prepared.exact_turns == report.replies and prepared.supervised_tokens == report.reply_tokens
    assert "stale_exact_ids" not in prepared.dropped
    rows = RowSet.open(tmp_path / "rows")
    check_against_engine(rows, client, sample=8).require()

    handles = match_handles(rows, read_regenerated(output))
    assert sorted(handles) == list(range(rows.num_rows))
    reader = open_reader("file", {"root": str(records)})
    for index, handle in handles.items():
        record = reader.get(handle, 30)
        assert record.token_ids.tolist() == rows.row(index).input_ids[:-1].tolist()
        assert tuple(record.hidden_states.shape) == (rows.length(index) - 1, 2, facts.hidden_size)

    other = regenerate(conversations[:2], client, template, facts, config, output, producer="v2")
    assert other.resumed == 0, "another verifier's replies are not taken over"


def test_greedy_replies_repeat_and_sampled_ones_follow_the_seed(
    plain_client: EngineClient, verifier_dir: Path, tmp_path: Path
) -> None:
    template, facts = ChatTemplate.load(verifier_dir), read_facts(verifier_dir)

    def replies(**settings: float) -> list[list[int]]:
        config = RegenerationConfig(max_new_tokens=24, concurrency=1, **settings)
        output = tmp_path / "replies.jsonl"
        regenerate(load(DEMO)[:3], plain_client, template, facts, config, output)
        return [json.loads(line)["turns"][0]["token_ids"] for line in output.read_text().splitlines()]

    assert replies() == replies()
    sampled = replies(temperature=1.0, seed=1)
    assert sampled == replies(temperature=1.0, seed=1) != replies(temperature=1.0, seed=2)


def test_the_verifier_writes_its_own_prompts(plain_client: EngineClient, verifier_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "prompts.jsonl"
    config = SynthesisConfig(prompts=30, max_new_tokens=96, concurrency=32)
    report = synthesise(plain_client, ChatTemplate.load(verifier_dir), config, output)
    prompts = load(output)
    assert report.prompts == len(prompts) == 30
    assert report.samples == report.prompts + sum(report.thrown_away.values())
    assert report.share_thrown_away == pytest.approx(1 - 30 / report.samples, abs=1e-4)
    texts = [conversation.first_user_turn for conversation in prompts]
    assert near_duplicate_groups(texts) == list(range(30))
    assert all("<|im_" not in text and len(text.split()) >= 2 for text in texts)
    assert {conversation.domain for conversation in prompts} == {"synthetic"}
