"""Parsing of the load that each kind of engine reports."""

from __future__ import annotations

import json

from argosy.gateway.backends import LoadReport
from argosy.gateway.backends.load_parsers import (
    SGLANG_METRICS,
    parse_lmdeploy_metrics,
    parse_metric_values,
    parse_sglang_loads,
    parse_tensorrt_iterations,
    parse_vllm_metrics,
)


def test_metric_values_ignore_labels_and_skip_invalid_lines() -> None:
    text = b"""# HELP a_b {x} 7
a_b 1
a_b{l="x} y 5"} 2 1700000000000
a_b{l="z"} NaN
a_bc 9
a_b
a_b{l="q"} zwei
c 3
"""
    assert parse_metric_values(text, {b"a_b", b"missing"}) == {b"a_b": [1.0, 2.0]}


def test_lmdeploy_counts_requests_waiting_in_api_server() -> None:
    text = b"lmdeploy:num_requests_running{} 4.0\nlmdeploy:num_requests_waiting{} 2.0\n"
    assert parse_lmdeploy_metrics(text).waiting == 2
    assert parse_lmdeploy_metrics(text + b"lmdeploy:num_api_requests_waiting{} 3.0\n").waiting == 5


def test_kv_capacity_is_parsed_where_engine_reports_it() -> None:
    vllm = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 2.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{engine="1",num_gpu_blocks="50",block_size="32"} 1.0
"""
    assert parse_vllm_metrics(vllm) == LoadReport(running=3, waiting=0, kv_capacity_tokens=3200)
    unknown = vllm.replace(b'"100"', b'"None"').replace(b'"50"', b'"None"')
    assert parse_vllm_metrics(unknown).kv_capacity_tokens is None
    sglang = b"sglang:num_running_reqs{} 1\nsglang:max_total_num_tokens{} 4096.0\n"
    assert SGLANG_METRICS(sglang).kv_capacity_tokens == 4096
    ranks = [{"num_running_reqs": 1, "max_total_num_tokens": size} for size in (4096, 2048)]
    assert parse_sglang_loads(json.dumps({"loads": ranks}).encode()).kv_capacity_tokens == 6144
    kv = {"usedNumBlocks": 1, "maxNumBlocks": 4, "tokensPerBlock": 32}
    assert (
        parse_tensorrt_iterations(json.dumps([{"kvCacheStats": kv}]).encode()).kv_capacity_tokens
        == 128
    )
