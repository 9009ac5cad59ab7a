"""Options of other servers that servd lacks: aliases of servd's options, options without effect,
and hints for all others. Names are vLLM's unless stated.
"""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from servd.base.errors import ConfigError

# Other names of options with the same meaning.
ALIASES = {
    "distributed_executor_backend": "executor",
    "swap_space": "kv_offloading_size",
    "kv_cache_memory_bytes": "kv_cache_memory",
    # SGLang
    "model_path": "model",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "dp_size": "data_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    # llama-server
    "ctx_size": "max_model_len",
}

# Other names of values of an option.
VALUE_ALIASES: dict[str, dict[str, str | None]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "executor": {"mp": "multiproc", "uni": "uniproc"},
    "load_format": dict.fromkeys(("safetensors", "hf", "bitsandbytes", "gguf"), "auto"),
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "max_model_len": {"auto": None, "-1": None},
    "kv_offloading_size": {"0": None},
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch_sdpa",
    },
    "tool_call_parser": {
        "qwen3_xml": "qwen3_coder",
        "openai": "harmony",
        "llama4_pythonic": "pythonic",
        "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek",
        "glm47": "glm45",
        "hunyuan_a13b": "jamba",
        "phi4_mini_json": "phi4_mini",
    },
    "reasoning_parser": {
        "openai_gptoss": "harmony",
        "deepseek_v3": "qwen3",
        **dict.fromkeys(("glm45", "kimi_k2", "minimax_m2", "minimax_m2_append_think"), "qwen3"),
    },
}
COUNTS = {"max_model_len", "max_num_batched_tokens"}  # "8k" is 8000 and "8K" 8192
THOUSANDS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}

# Accepted without effect, and why: servd does that anyway, or decides it itself. Those with "="
# take a value.
IGNORED = {
    "disable_log_requests": "only --enable-log-requests logs prompts",
    "disable_log_stats": "statistics are in GET /metrics, and in an occasional log line",
    "disable_uvicorn_access_log": "only --access-log logs answers",
    "disable_custom_all_reduce": "servd has no custom all-reduce",
    "disable_cascade_attn": "servd has no cascade attention",
    "enable_metrics": "GET /metrics is always on",
    "enable_offline_docs": "/docs always works offline",
    "enable_prompt_tokens_details": "usage always has cached_tokens",
    "enable_reasoning": "the reasoning parser decides",
    "enable_request_id_headers": "every answer has an X-Request-Id",
    "enable_server_load_tracking": "GET /load is always on",
    "enable_sleep_mode": "every engine can sleep",
    "enable_tokenizer_info_endpoint": "GET /tokenizer_info is always on",
    "jinja": "chat templates are always used",
    "language_model_only": "servd reads only text",
    "use_v2_block_manager": "servd has one block manager",
    "chat_template_content_format=": "servd detects the format from the template",
    "convert=": "the model's files and the route determine it",
    "guided_decoding_backend=": "llguidance is the only backend",
    "max_seq_len_to_capture=": "CUDA graphs work at any length",
    "num_scheduler_steps=": "servd schedules the next step while a step runs",
    "runner=": "the model's files and the route determine it",
    "stream_interval=": "tokens share an event if the client or the server is slow",
    "task=": "the model's files and the route determine it",
}

TEXT_ONLY = "leave it out: servd reads only text, and rejects images and sound"
CAPTURE = "leave it out; --enforce-eager turns CUDA graphs off, and --compile fuses layers"
EXPERTS = "leave it out: --enable-expert-parallel and --tensor-parallel-size place experts"
CONTEXT = "not supported: split the model with --tensor-parallel-size or --pipeline-parallel-size"
HF_FILES = "leave it out: servd reads the files in Hugging Face's format"
PROXY = "leave it out: have the proxy remove the prefix"
RAY = "use --data-parallel-backend ray for engines, --executor ray for workers of other hosts"
GUARDED = "leave it out: with --api-key or --api-key-file, all routes but /health and / need a key"

THREADS = "set OMP_NUM_THREADS, or the CPU affinity of the process"

# Rejected options and short flags, and what to do instead.
HINTS = {
    "alias": "use --served-model-name",  # llama-server
    "all2all_backend": EXPERTS,
    "allowed_local_media_path": TEXT_ONLY,
    "allowed_media_domains": TEXT_ONLY,
    "attention_config": "use --attention-backend",
    "code_revision": "use --revision, which applies to all files",
    "collect_detailed_traces": "leave it out: GET /v1/requests/{id}/timeline shows all stages",
    "compilation_config": CAPTURE,
    "config_format": HF_FILES,
    "cpu_offload_gb": "not supported: use --quantization to make the weights smaller",
    "cuda_graph_sizes": CAPTURE,
    "cudagraph_capture_sizes": CAPTURE,
    "decode_context_parallel_size": CONTEXT,
    "disable_fastapi_docs": GUARDED,
    "disable_log_outputs": "leave it out: servd never logs answers",
    "disable_frontend_multiprocessing": "leave it out: the engine always has its own process",
    "disable_sliding_window": "use --max-model-len",
    "disable_hybrid_kv_cache_manager": "leave it out: layers with a window keep only their window",
    "embeddings": "leave it out: /v1/embeddings is always on",  # llama-server
    "enable_eplb": EXPERTS,
    "enable_log_outputs": "not supported: servd never logs answers",
    "enable_per_request_metrics": "use `timings_per_token` in the request, or Server-Timing",
    "enable_prompt_embeds": "not supported: prompts are text or token ids",
    "enable_ssl_refresh": "send SIGHUP to the server after you change certificates",
    "hf_config_path": "use --hf-overrides",
    "hf_token": "set $HF_TOKEN: other users can see flags",
    "data_parallel_address": RAY,
    "data_parallel_rpc_port": RAY,
    "master_addr": RAY,
    "master_port": RAY,
    "nnodes": RAY,
    "node_rank": RAY,
    "ignore_patterns": "leave it out: servd reads one format of the weights",
    "kv_offloading_backend": "leave it out: servd has one backend (docs/how-to/kv-cache.md)",
    "limit_mm_per_prompt": TEXT_ONLY,
    "log_config_file": "use --log-level, --log-format and --access-log",
    "logits_processors": "send `logit_bias`, `bad_words` or `structured_outputs` in the request",
    "max_num_partial_prefills": "use --long-prefill-token-threshold",
    "max_parallel_loading_workers": "leave it out: servd reads files at the speed of the disk",
    "media_io_kwargs": TEXT_ONLY,
    "mem_fraction_static": "use --gpu-memory-utilization, the share that servd takes",  # SGLang
    "metrics": "leave it out: GET /metrics is always on",  # llama-server
    "middleware": "put a proxy in front of the server",
    "mm_encoder_tp_mode": TEXT_ONLY,
    "mm_processor_cache_gb": TEXT_ONLY,
    "mm_processor_kwargs": TEXT_ONLY,
    "model_draft": "use --spec-model",  # llama-server
    "model_loader_extra_config": "leave it out: servd reads files at the speed of the disk",
    "n_gpu_layers": "leave it out: all layers are on the device",  # llama-server
    "num_gpu_blocks_override": "use --kv-cache-memory",
    "num_speculative_tokens": "use --spec-tokens",
    "parallel": "use --max-num-seqs; --max-model-len is each request's context",  # llama-server
    "performance_mode": "leave it out: the batch size follows the load",
    "pooler_config": "leave it out: requests may set `pooling` and `normalize`",
    "prefill_context_parallel_size": CONTEXT,
    "prefix_caching_hash_algo": "leave it out: servd uses SHA-256 (docs/how-to/kv-cache.md)",
    "response_role": "leave it out: the role is always assistant",
    "return_tokens_as_token_ids": "send `return_tokens_as_token_ids` in the request",
    "root_path": PROXY,
    "rope_scaling": "write JSON: --hf-overrides '{\"rope_scaling\": {...}}'",
    "rope_theta": "write JSON: --hf-overrides '{\"rope_theta\": ...}'",
    "safetensors_load_strategy": "leave it out: servd reads files at the speed of the disk",
    "skip_tokenizer_init": "send token ids, and `return_token_ids`, in the request",
    "scheduler_delay_factor": "leave it out: servd schedules a request at once",
    "skip_mm_profiling": TEXT_ONLY,
    "slots": "leave it out: GET /slots is always on",  # llama-server
    "speculative_model": "use --spec-model",
    "structured_outputs_config": "leave it out: llguidance is the only backend",
    "threads": THREADS,  # llama-server
    "tokenizer_mode": HF_FILES,
    "tokenizer_revision": "use --revision, which applies to all files",
    "tool_parser_plugin": "use --tool-call-parser MODULE:CLASS (docs/how-to/add-a-parser.md)",
    "tool_server": "not supported: run tools in your client (docs/how-to/tools.md)",
    "trust_request_chat_template": "not supported: use --chat-template",
    "uvicorn_log_level": "use --log-level",
    "video_pruning_rate": TEXT_ONLY,
    "-O": CAPTURE,
    "-c": "use --max-model-len, the context of each request",  # llama-server
    "-cc": CAPTURE,
    "-b": "use --max-num-batched-tokens",  # llama-server
    "-dcp": CONTEXT,
    "-hf": "MODEL needs no flag",
    "-m": "MODEL needs no flag",
    "-md": "use --spec-model",
    "-ngl": "leave it out: all layers are on the device",
    "-np": "use --max-num-seqs; --max-model-len is the context of each request",
    "-pcp": CONTEXT,
    "-t": THREADS,
    "-ub": "use --max-num-batched-tokens",
}

OTHER_BALANCERS = (
    "all engines share one port; for a port per engine, start servers with --data-parallel-rank "
    "behind a load balancer (docs/how-to/several-gpus.md)"
)


def translate(name: str, value: Any) -> tuple[str, Any]:
    """Return servd's name and value for an option of another server."""
    name = ALIASES.get(name, name)
    if isinstance(value, str | int):
        value = VALUE_ALIASES.get(name, {}).get(str(value), value)
    if name in COUNTS and isinstance(value, str):
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", value.strip()):
            value = int(float(match[1]) * THOUSANDS[match[2]])
    if isinstance(value, list) and len(value) == 1 and str(value[0]).startswith("["):
        try:
            value = json.loads(value[0])  # as vLLM writes `--allowed-origins`
        except (ValueError, TypeError):
            pass  # rejected later
    return name, value


def why_ignored(name: str) -> str | None:
    """Return why an option has no effect; None if the option has one, or is unknown."""
    return IGNORED.get(name) or IGNORED.get(f"{name}=")


def hint(flag: str, known: Iterable[str], listed: str) -> str:
    """Return what to use instead of an unknown flag.

    `flag`: as given. `known`: all known flags. `listed`: the result if no known flag is similar.
    """
    stem = flag.partition("=")[0]
    name, _, key = stem.removeprefix("--").replace("-", "_").partition(".")
    if not stem.startswith("--"):
        name = stem.rstrip("0123456789.")
    if name in HINTS and "--max-model-len" in known:  # only commands that have an engine
        return HINTS[name]
    if key and f"--{name.replace('_', '-')}" in known:
        return f"write JSON: --{name.replace('_', '-')} '{{\"{key}\": ...}}'"
    if name.startswith("data_parallel_"):
        return OTHER_BALANCERS
    near = difflib.get_close_matches(stem, known, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else listed


def unknown(name: str, known: Iterable[str]) -> ConfigError:
    flag = f"--{name.replace('_', '-')}"
    flags = [f"--{each.replace('_', '-')}" for each in known]
    return ConfigError(f"unknown option {flag}; {hint(flag, flags, 'see `servd serve --help`')}")
