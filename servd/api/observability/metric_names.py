"""The names, help texts and buckets of the metrics, with vLLM's names where possible."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from servd.messages.engine import FinishReason
from servd.messages.stats import SchedulerStats

Buckets = tuple[float, ...]


def _read_buckets(bounds: str) -> Buckets:
    return tuple(float(bound) for bound in bounds.split())


TTFT_BUCKETS: Buckets = _read_buckets(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
ITL_BUCKETS: Buckets = _read_buckets(
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
LATENCY_BUCKETS: Buckets = _read_buckets(
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
)
BLOCK_BUCKETS: Buckets = _read_buckets(
    "0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10 20 30 60 120 300 600 1200 1800"
)
SLEEP_BUCKETS: Buckets = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
HTTP_BUCKETS: Buckets = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
LAG_BUCKETS: Buckets = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
ITERATION_BUCKETS: Buckets = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

N_BUCKETS: Buckets = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS: Buckets = (0, 1, 2, 5, 10, 20)

GAUGES = {  # see `EngineState.samples`
    "vllm:num_requests_running": "Requests in the current batch.",
    "vllm:num_requests_waiting": "Requests that wait to be scheduled.",
    "vllm:num_requests_waiting_by_reason": "Waiting requests by reason: capacity or deferred.",
    "vllm:num_requests_swapped": "Preempted requests whose KV blocks are offloaded.",
    "vllm:num_requests_kv_fetch_by_stage": "Requests that load KV blocks or have, by stage.",
    "vllm:kv_cache_usage_perc": "Share of the KV cache in use, 0 to 1.",
    "vllm:kv_offload_cpu_cache_usage_perc": "Share of the KV cache in host memory in use.",
    "vllm:engine_sleep_state": "1 for the current sleep_state of an engine: awake or discard_all.",
    "vllm:cache_config_info": "Settings of the KV cache, as labels. The value is always 1.",
    "vllm:lora_requests_info": "Running and waiting adapters, as labels. The value is a time.",
}
COUNTERS = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:external_prefix_cache_queries": "Prompt tokens looked up in host memory and files.",
    "vllm:external_prefix_cache_hits": "Prompt tokens loaded from host memory and files.",
    "vllm:kv_offload_store_bytes": "Bytes of KV blocks copied to host memory.",
    "vllm:kv_offload_load_bytes": "Bytes of KV blocks copied from host memory to the device.",
    "vllm:kv_offload_stores_skipped": "Evicted KV blocks that did not fit into host memory.",
    "vllm:num_preemptions": "Preemptions: a running request lost its KV blocks.",
    "vllm:corrupted_requests": "Requests that failed because their logits were NaN or infinite.",
    "vllm:prompt_tokens": "Prompt tokens of requests that got a first token.",
    "vllm:prompt_tokens_cached": "Cached prompt tokens of requests that got a first token.",
    "vllm:generation_tokens": "Generated tokens.",
    "vllm:spec_decode_num_drafts": "Checks of drafts: one per request and step.",
    "vllm:spec_decode_num_draft_tokens": "Draft tokens that the model checked.",
    "vllm:spec_decode_num_accepted_tokens": "Draft tokens that the model accepted.",
}
# Counter of a value that engines report -> the function that gets it from a report.
OF_STEPS: dict[str, Callable[[SchedulerStats], int]] = {
    f"vllm:{name}": attrgetter(field)
    for name, field in {
        "prefix_cache_queries": "prefix_cache_queries",
        "prefix_cache_hits": "prefix_cache_hits",
        "external_prefix_cache_queries": "external_prefix_cache_queries",
        "external_prefix_cache_hits": "external_prefix_cache_hits",
        "kv_offload_store_bytes": "num_bytes_stored",
        "kv_offload_load_bytes": "num_bytes_loaded",
        "kv_offload_stores_skipped": "num_stores_skipped",
        "num_preemptions": "num_preemptions",
        "corrupted_requests": "num_failed",
        "spec_decode_num_drafts": "drafts.num_drafts",
        "spec_decode_num_draft_tokens": "drafts.num_draft_tokens",
        "spec_decode_num_accepted_tokens": "drafts.num_accepted_tokens",
    }.items()
}
# Name -> text, and for each label the values that it has.
LABELLED: dict[str, tuple[str, dict[str, Sequence[str]]]] = {
    "vllm:request_success": ("Ended requests.", {"finished_reason": [*FinishReason]}),
    "vllm:prompt_tokens_by_source": (
        "Computed and cached prompt tokens.",
        {"source": ["local_compute", "local_cache_hit", "external_kv_transfer"]},
    ),
    "vllm:prompt_tokens_cached_by_source": (
        "Cached prompt tokens.",
        {"source": ["local_cache_hit", "external_kv_transfer"]},
    ),
    "vllm:admission_rejections": (
        "Requests that servd rejected on arrival.",
        {
            "reason": [
                "loading",
                "draining",
                "max_waiting_requests",
                "max_waiting_tokens",
                "max_connections",
                "max_concurrency",
                "requests_per_minute",
                "deadline",
            ]
        },
    ),
    "vllm:tool_call_parser_invocations": (
        "Choices that servd searched for tool calls.",
        {
            "mode": ["streaming", "non_streaming"],
            "outcome": ["tool_call", "no_tool_call"],
            "request_type": ["chat_completions", "responses", "other"],
        },
    ),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Accepted draft tokens.",
        {"position": []},  # as they come
    ),
}
HISTOGRAMS: dict[str, tuple[str, Buckets | None]] = {  # None: up to the context's length
    "vllm:time_to_first_token_seconds": ("Seconds from arrival to first token.", TTFT_BUCKETS),
    "vllm:inter_token_latency_seconds": ("Seconds between tokens of a request.", ITL_BUCKETS),
    "vllm:request_time_per_output_token_seconds": (
        "Mean seconds per token of a request, after its first token.",
        ITL_BUCKETS,
    ),
    "vllm:e2e_request_latency_seconds": ("Seconds from arrival to last token.", LATENCY_BUCKETS),
    "vllm:request_queue_time_seconds": ("Seconds in the engine's waiting queue.", LATENCY_BUCKETS),
    "vllm:request_prefill_time_seconds": (
        "Seconds from scheduling to first token.",
        LATENCY_BUCKETS,
    ),
    "vllm:request_decode_time_seconds": ("Seconds from first to last token.", LATENCY_BUCKETS),
    "vllm:request_inference_time_seconds": (
        "Seconds from scheduling to last token.",
        LATENCY_BUCKETS,
    ),
    "vllm:request_prompt_tokens": ("Prompt tokens per request.", None),
    "vllm:request_prefill_kv_computed_tokens": (
        "Prompt tokens per request that were not in the prefix cache.",
        None,
    ),
    "vllm:request_generation_tokens": ("Generated tokens per request.", None),
    "vllm:request_max_num_generation_tokens": (
        "Generated tokens of the longest choice of a request.",
        None,
    ),
    "vllm:request_num_preemptions": ("Preemptions per request.", PREEMPTION_BUCKETS),
    "vllm:request_params_n": ("Values of the field n.", N_BUCKETS),
    "vllm:request_params_max_tokens": ("Values of the field max_tokens.", None),
    "vllm:kv_block_lifetime_seconds": (
        "Seconds from the first token of a KV block to its eviction (--kv-cache-metrics).",
        BLOCK_BUCKETS,
    ),
    "vllm:kv_block_idle_before_evict_seconds": (
        "Seconds from last use to eviction.",
        BLOCK_BUCKETS,
    ),
    "vllm:kv_block_reuse_gap_seconds": (
        "Seconds between two hits of a KV block in the prefix cache.",
        BLOCK_BUCKETS,
    ),
    "vllm:iteration_tokens_total": ("Tokens computed per step.", ITERATION_BUCKETS),
    "servd:event_loop_lag_seconds": (
        "Delay of an API server's event loop in seconds, sampled ten times a second.",
        LAG_BUCKETS,
    ),
}
SLEEP_OPERATIONS = ("sleep", "wake")
STAGES = {  # histogram -> the marks that it lies between
    "vllm:request_queue_time_seconds": ("queued", "scheduled"),
    "vllm:request_prefill_time_seconds": ("scheduled", "first_token"),
    "vllm:request_decode_time_seconds": ("first_token", "finished"),
    "vllm:request_inference_time_seconds": ("scheduled", "finished"),
}
