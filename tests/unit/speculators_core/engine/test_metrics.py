from __future__ import annotations

import math

from speculators_core.engine.metrics import SpecDecodeCounters, parse_prometheus, read_spec_decode

# as vLLM 0.32.0 prints it
RECORDED = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="/models/a"} 120.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="/models/a"} 1.796014424e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="/models/a"} 360.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="/models/a"} 1.796014424e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="/models/a"} 96.0
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="/models/a"} 1.796014424e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/a",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/a",position="1"} 27.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="/models/a",position="2"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="/models/a",position="0"} 1.79e+09
vllm:generation_tokens_total{engine="0",model_name="/models/a"} 216.0
"""


def test_counters_take_totals_and_no_timestamps() -> None:
    counters = read_spec_decode(RECORDED)
    assert counters == SpecDecodeCounters(120, 360, 96, (60, 27, 9))
    assert counters.acceptance_length == 1.8
    assert counters.acceptance_per_position == (0.5, 0.225, 0.075)


def test_engines_are_summed() -> None:
    second = RECORDED.replace('engine="0"', 'engine="1"')
    assert read_spec_decode(RECORDED + second) == SpecDecodeCounters(240, 720, 192, (120, 54, 18))


def test_lines_that_are_no_samples_are_skipped() -> None:
    assert read_spec_decode("<html>\nnot found\nvllm:spec_decode_num_drafts_total none\n" + RECORDED).drafts == 120


def test_no_speculation_is_all_zero_and_has_no_length() -> None:
    counters = read_spec_decode('vllm:generation_tokens_total{engine="0"} 216.0\n')
    assert counters == SpecDecodeCounters()
    assert math.isnan(counters.acceptance_length)
    assert counters.acceptance_per_position == ()


def test_a_span_is_the_difference_of_two_readings() -> None:
    later = SpecDecodeCounters(130, 390, 100, (63, 28, 9))
    assert later - read_spec_decode(RECORDED) == SpecDecodeCounters(10, 30, 4, (3, 1, 0))
    assert later - SpecDecodeCounters() == later


def test_labels_may_hold_what_separates_labels() -> None:
    [sample] = parse_prometheus('a_total{path="C:\\\\x",text="say \\"hi\\", {ok}",n="1"} +Inf 1700000000\n')
    assert sample.labels == {"path": "C:\\x", "text": 'say "hi", {ok}', "n": "1"}
    assert math.isinf(sample.value)
    assert [s.value for s in parse_prometheus("# HELP x 1\n\nnot a sample\nx 2\n")] == [2.0]
