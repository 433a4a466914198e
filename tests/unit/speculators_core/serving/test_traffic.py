"""Counters as vLLM writes them."""

from __future__ import annotations

import math

from speculators_core.serving.traffic import ProxyCounts, Traffic, read_traffic

METRICS = """\
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_sum{engine="0",model_name="chat"} 12.5
vllm:request_decode_time_seconds_count{engine="0",model_name="chat"} 10.0
vllm:request_generation_tokens_sum{engine="0",model_name="chat"} 510.0
vllm:request_generation_tokens_count{engine="0",model_name="chat"} 10.0
vllm:prompt_tokens_total{engine="0",model_name="chat"} 900.0
vllm:generation_tokens_total{engine="0",model_name="chat"} 520.0
vllm:num_requests_waiting{engine="0",model_name="chat"} 3.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="chat"} 200.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="chat"} 600.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="chat"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="chat",position="0"} 100.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="chat",position="1"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="chat",position="2"} 10.0
"""


def test_a_reading_is_what_the_engine_and_the_proxy_say() -> None:
    found = read_traffic(METRICS, ProxyCounts(requests=12, errors=1), Traffic())
    assert found.tpot == 12.5 / 500, "the first token of a reply is not decoded"
    assert (found.requests, found.errors, found.finished) == (12, 1, 10)
    assert (found.prompt_tokens, found.generated_tokens) == (900, 520)
    assert found.spec.acceptance_length == 1.75 and found.spec.accepted_per_position == (100, 40, 10)


def test_looks_add_up_and_two_readings_give_a_span() -> None:
    first = read_traffic(METRICS, ProxyCounts(), Traffic())
    second = read_traffic(METRICS.replace("waiting{", "running{"), ProxyCounts(5, 0), first)
    assert (second.looks, second.crowded) == (2, 1)
    span = second - first
    assert (span.looks, span.crowded, span.requests, span.finished) == (1, 0, 5, 0)
    assert math.isnan(span.tpot) and span.error_rate == 0
