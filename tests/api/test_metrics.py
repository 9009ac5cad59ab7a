"""Metrics: names, values and several processes, read back with prometheus-client's own parser."""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from servd.api.observability.metric_names import BUCKETS, LABELLED
from servd.api.observability.metrics import Metrics, TalliedHistogram
from servd.api.request.choice import Choice
from servd.base.tracing import Mark
from servd.config import Config
from servd.messages.engine import EngineCoreOutput, EngineReady, FinishReason, WorkerReady
from servd.messages.params import SamplingParams
from servd.messages.stats import BlockEviction, DraftStats, KVStoreStats, SchedulerStats

SECOND = 10**9
LABELS = {"model_name": "m", "engine": "0"}


GAUGES = (
    "num_requests_running num_requests_waiting num_requests_waiting_by_reason "
    "num_requests_swapped kv_cache_usage_perc kv_offload_cpu_cache_usage_perc "
    "num_requests_kv_fetch_by_stage"
)
COUNTERS = (
    "prefix_cache_queries prefix_cache_hits external_prefix_cache_queries "
    "external_prefix_cache_hits prompt_tokens_cached_by_source kv_offload_store_bytes "
    "kv_offload_load_bytes kv_offload_stores_skipped num_preemptions corrupted_requests "
    "prompt_tokens prompt_tokens_cached generation_tokens request_success "
    "prompt_tokens_by_source admission_rejections tool_call_parser_invocations"
)
HISTOGRAMS = (
    "time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_prompt_tokens request_prefill_kv_computed_tokens "
    "request_generation_tokens request_max_num_generation_tokens request_num_preemptions "
    "request_params_n request_params_max_tokens iteration_tokens_total "
    "kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds"
)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    metrics.render()  # the gauges are written for each scrape
    return metrics.registry.get_sample_value(f"vllm:{name}", LABELS | labels)


def values(metrics: Metrics, *names: str) -> list[float | None]:
    return [value(metrics, name) for name in names]


def read(body: bytes) -> dict[str, float]:
    """Sample name -> sum over its label sets, for all samples with our labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if not sample.name.startswith(
                ("http_", "process_", "servd_ignored_fields", "vllm:sleep_mode_")
            ):
                assert sample.labels["model_name"] == "m" and sample.labels["engine"] == "0"
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def test_names_of_vllm():
    body, content_type = Metrics("m").render()
    assert content_type.startswith("text/plain")
    names = read(body)
    for kind, suffix in ((GAUGES, ""), (COUNTERS, "_total"), (HISTOGRAMS, "_bucket")):
        assert {f"vllm:{name}{suffix}" for name in kind.split()} <= names.keys()


def test_state_of_the_engine():
    metrics = Metrics("m")
    metrics.observe_step(SchedulerStats(3, 4, 0.5, 100, 60, 2, step_tokens=[9, 2]))
    assert value(metrics, "num_requests_waiting_by_reason", reason="capacity") == 4
    metrics.observe_step(SchedulerStats(1, 0, 0.25, 10, 5, 1, step_tokens=[0]))
    assert value(metrics, "num_requests_waiting_by_reason", reason="capacity") == 0
    assert values(metrics, "num_requests_running", "num_requests_waiting") == [1, 0]
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert values(metrics, "prefix_cache_queries_total", "prefix_cache_hits_total") == [110, 65]
    assert value(metrics, "num_preemptions_total") == 3
    # A step that computed nothing is none.
    names = ("iteration_tokens_total_sum", "iteration_tokens_total_count")
    assert values(metrics, *names) == [11, 2]


def test_failures_tiers_deferred_requests_and_drafts_of_two_steps():
    metrics = Metrics("m")
    for _ in range(2):
        kv_stores = [
            KVStoreStats("host", num_blocks=3, max_blocks=4),
            KVStoreStats("disk", max_blocks=9),
        ]
        waits = {"num_waiting": 2, "num_deferred": 3, "num_reading": 5, "num_read": 1}
        moved = {"num_bytes_loaded": 64, "num_bytes_stored": 96, "num_stores_skipped": 1}
        drafts = DraftStats(4, 12, 6, [4, 2, 0])
        counted = {"num_failed": 1, "kv_stores": kv_stores, "drafts": drafts, **waits, **moved}
        metrics.observe_step(SchedulerStats(**counted))
    assert value(metrics, "corrupted_requests_total") == 2
    assert value(metrics, "num_requests_waiting") == 5
    for reason, count in (("capacity", 2), ("deferred", 3)):
        assert value(metrics, "num_requests_waiting_by_reason", reason=reason) == count
    names = ("load_bytes_total", "store_bytes_total", "stores_skipped_total")
    assert values(metrics, *(f"kv_offload_{name}" for name in names)) == [128, 192, 2]
    assert value(metrics, "kv_offload_cpu_cache_usage_perc") == 0.75
    stages = {"waiting_to_start": 0, "in_progress": 5, "completed_waiting": 1}
    for stage, count in stages.items():
        assert value(metrics, "num_requests_kv_fetch_by_stage", stage=stage) == count
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert values(metrics, *(f"spec_decode_{name}_total" for name in names)) == [8, 24, 12]
    accepted = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, accepted, position=str(i)) for i in range(3)] == [8, 4, 0]


def test_checkpoints_of_states():
    metrics = Metrics("m")
    assert "servd:state_cache_bytes" not in read(metrics.render()[0])  # a model without states
    held = {"num_checkpoints": 3, "state_cache_bytes": 96, "max_state_cache_bytes": 128}
    metrics.observe_step(SchedulerStats(state_cache_queries=2, num_prompt_tokens=5, **held))
    metrics.observe_step(SchedulerStats(num_state_evictions=4, **held))  # of a decode step
    samples = read(metrics.render()[0])
    names = "checkpoints bytes max_bytes queries_total hits_total evictions_total".split()
    assert [samples[f"servd:state_cache_{name}"] for name in names] == [3, 96, 128, 2, 0, 4]


def test_tokens_of_a_prompt_are_counted_while_it_is_computed():
    metrics = Metrics("m")
    for num_tokens in (8, 8, 3):
        metrics.observe_step(SchedulerStats(num_prompt_tokens=num_tokens))
    assert read(metrics.render()[0])["servd:computed_prompt_tokens_total"] == 19


def test_blocks_that_were_evicted():
    metrics = Metrics("m")
    eviction = BlockEviction(9 * SECOND, 2 * SECOND, [3 * SECOND, SECOND])
    metrics.observe_step(SchedulerStats(evictions=[eviction]))
    for name, count, total in (
        ("lifetime", 1, 9),
        ("idle_before_evict", 1, 2),
        ("reuse_gap", 2, 4),
    ):
        assert value(metrics, f"kv_block_{name}_seconds_count") == count
        assert value(metrics, f"kv_block_{name}_seconds_sum") == total


def test_times_of_a_request():
    metrics = Metrics("m")
    choice = Choice(arrival_ns=0, num_prompt_tokens=7)
    metrics.observe_tokens(choice, 1, 3 * SECOND)
    metrics.observe_tokens(choice, 0, 4 * SECOND)  # an output without tokens is no token
    metrics.observe_tokens(choice, 2, 7 * SECOND)
    stages = "queued scheduled preempted scheduled first_token finished".split()
    marks = [Mark(*mark) for mark in zip(stages, (1, 2, 4, 5, 3, 7), strict=True)]
    for stage_mark in marks:
        stage_mark.at_ns *= SECOND
    choice.add_report(EngineCoreOutput("r", num_cached_tokens=4, marks=marks[:4]))
    choice.add_report(EngineCoreOutput("r", marks=marks[4:]))
    metrics.observe_finished(choice, FinishReason.STOP, 8 * SECOND)
    metrics.observe_request(SamplingParams(n=1, max_tokens=30), [choice])
    expected = {
        1: "request_queue_time_seconds request_prefill_time_seconds request_num_preemptions "
        "request_params_n",
        2: "inter_token_latency_seconds request_time_per_output_token_seconds",
        3: "time_to_first_token_seconds request_prefill_kv_computed_tokens "
        "request_generation_tokens request_max_num_generation_tokens",
        4: "request_decode_time_seconds",
        5: "request_inference_time_seconds",
        7: "request_prompt_tokens",
        8: "e2e_request_latency_seconds",
        30: "request_params_max_tokens",
    }
    for total, names in expected.items():
        for name in names.split():
            assert values(metrics, f"{name}_sum", f"{name}_count") == [total, 1], name
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert values(metrics, "prompt_tokens_total", "generation_tokens_total") == [7, 3]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_requests_that_were_cut_count_but_are_not_timed(reason: FinishReason):
    metrics = Metrics("m")
    metrics.observe_finished(Choice(0, 7), reason, SECOND)
    assert value(metrics, "request_success_total", finished_reason=str(reason)) == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 0


def test_request_metrics_are_published_once_a_second():
    """Nobody may scrape, and a second's gaps, sorted at once, would hold up the event loop."""
    metrics = Metrics("m")
    choice = Choice(arrival_ns=0, num_prompt_tokens=7)
    published = [
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_to_first_token_seconds_count",
        "vllm:generation_tokens_total",
    ]
    ticks = []
    for tick in range(10):
        for number in range(2):
            metrics.observe_tokens(choice, 1, (2 * tick + number) * SECOND)
        metrics.observe_lag(0.0)
        ticks.append([metrics.registry.get_sample_value(name, LABELS) for name in published])
    assert ticks[0] == [1, 0, 0] and ticks[8] == [17, 0, 0] and ticks[9] == [19, 1, 20]


def test_cache_config():
    metrics = Metrics("m")
    worker = WorkerReady("cpu", "float32", "cpu", 77, 0, 0)
    metrics.observe_ready(EngineReady(worker, 64, block_size=16), Config())
    labels = {"block_size": "16", "num_gpu_blocks": "77", "cache_dtype": "auto"}
    labels |= {"enable_prefix_caching": "True", "gpu_memory_utilization": "0.9"}
    labels |= {"kv_cache_size_tokens": "1232", "kv_cache_max_concurrency": "19.25"}
    assert value(metrics, "cache_config_info", **labels) == 1


def test_cached_prompt_tokens_count_once():
    metrics = Metrics("m")
    choice = Choice(arrival_ns=0, num_prompt_tokens=7)
    choice.add_report(EngineCoreOutput("r", num_cached_tokens=4, num_external_tokens=1))
    for second in (1, 2):
        metrics.observe_tokens(choice, 1, second * SECOND)
    assert value(metrics, "prompt_tokens_cached_total") == 4
    for name in ("prompt_tokens_by_source_total", "prompt_tokens_cached_by_source_total"):
        assert value(metrics, name, source="local_cache_hit") == 3
        assert value(metrics, name, source="external_kv_transfer") == 1
    assert value(metrics, "prompt_tokens_by_source_total", source="local_compute") == 3


def test_every_end_of_a_request_has_its_counter():
    assert LABELLED["vllm:request_success"].labels["finished_reason"] == [*FinishReason]


@given(st.lists(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(BUCKETS["itl"])))))
def test_values_handed_on_together_are_counted_as_one_by_one(batches: list[list[float]]):
    registry = CollectorRegistry()
    histogram = Histogram("tallied", "", buckets=BUCKETS["itl"], registry=registry)
    tallied = TalliedHistogram(histogram, BUCKETS["itl"])
    plain = Histogram("plain", "", buckets=BUCKETS["itl"], registry=registry)
    for batch in batches:
        tallied.values.extend(batch)
        for output in batch:
            plain.observe(output)
        tallied.flush()
    counts, expected = (
        [(s.labels, pytest.approx(s.value)) for s in family.samples if "created" not in s.name]
        for family in registry.collect()
    )
    assert counts == expected


def test_token_buckets_end_at_the_context():
    metrics = Metrics("m", max_model_len=64)
    bounds = [
        s.labels["le"]
        for f in text_string_to_metric_families(metrics.render()[0].decode())
        for s in f.samples
        if s.name == "vllm:request_prompt_tokens_bucket"
    ]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "+Inf"]


def test_adapters_that_run_and_wait():
    metrics = Metrics("m")
    assert b"vllm:lora_requests_info{" not in metrics.render()[0]
    metrics.state.max_loras = 2
    names = {"running_adapters": ["b", "a"], "waiting_adapters": ["c"]}
    for at_ns in (1, 2):
        metrics.observe_step(SchedulerStats(at_ns=at_ns, **names))
        [series] = re.findall(rb"^vllm:lora_requests_info{(.*)}", metrics.render()[0], re.MULTILINE)
        assert b'running_lora_adapters="a,b"' in series and b'max_lora="2"' in series
        assert b'waiting_lora_adapters="c"' in series
        names = {"running_adapters": ["a", "b"], "waiting_adapters": ["c"]}


def test_the_newest_engine_stats_count():
    first, second = Metrics("m"), Metrics("m")
    first.observe_step(SchedulerStats(num_running=4, at_ns=2))
    second.observe_step(SchedulerStats(num_running=2, at_ns=9))
    for metrics, reports in (
        (first, [second.report()]),
        (second, [first.report(), first.report()]),
    ):
        metrics.observe_restarts(3)
        counts = read(metrics.render("", reports)[0])
        assert counts["vllm:num_requests_running"] == 2
        assert counts["servd:engine_restarts_total"] == 3  # each knows the whole number
    # What another server knew ends with it: the engine may never report anything newer.
    assert read(first.render()[0])["vllm:num_requests_running"] == 4


def test_the_process_as_client_libraries_of_prometheus_tell_it():
    values = read(Metrics("m").render()[0])
    used = resource.getrusage(resource.RUSAGE_SELF)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    seconds = used.ru_utime + used.ru_stime
    assert values["process_cpu_seconds_total"] == pytest.approx(seconds, abs=0.5)
    kib = float(status["VmRSS"].split()[0])
    assert values["process_resident_memory_bytes"] == pytest.approx(kib * 1024, rel=0.1)
    assert values["process_open_fds"] == pytest.approx(len(os.listdir("/proc/self/fd")), abs=2)
    assert values["process_max_fds"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert time.time() - 86400 < values["process_start_time_seconds"] <= time.time()


def test_every_api_server_answers_for_all(tmp_path):
    """Four real processes, as prometheus-client decides at its import; the last one only reads."""
    program = (
        "import sys; from servd.api.observability.metrics import *\n"
        "tokens = int(sys.argv[1])\n"
        "metrics = Metrics('m')\n"
        "if tokens: metrics.observe_step(SchedulerStats(num_preemptions=1))\n"
        "trace = {'trace_id': 'ab' * 16}\n"
        "metrics.observe_tokens(Choice(0, 10, exemplar=trace), tokens, 10**9)\n"
        "metrics.observe_answer('/health', 'GET', 200, 0.1)\n"
        "text = str(metrics.render('application/openmetrics-text')[0])\n"
        "assert (trace['trace_id'] in text) == (tokens > 0)\n"
        "parent = Report(os.getppid(), [SchedulerStats()])\n"
        "gone = Report(2**22, [SchedulerStats()])\n"  # above the largest pid
        "sys.stdout.buffer.write(metrics.render('', [parent, gone])[0])\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for tokens in (5, 6, 7, 0):
        command = [sys.executable, "-c", program, str(tokens)]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        body = done.stdout
    values = read(body)
    assert values["vllm:num_preemptions_total"] == 3
    assert values["vllm:generation_tokens_total"] == 18
    assert values["http_requests_total"] == 4
    assert values["vllm:time_to_first_token_seconds_count"] == 3
    of_parent = rf'process_open_fds{{pid="{os.getpid()}"}} \d'.encode()
    assert re.search(of_parent, body) and body.count(b"\nprocess_open_fds{pid=") == 2
    assert body.count(b"# TYPE process_open_fds ") == 1
