"""Resolves every "auto" of a Config and validates its options for a model and a machine."""

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import re
from pathlib import Path

import msgspec

from servd.base import plugins
from servd.base.errors import ConfigError, UnsupportedModel
from servd.checkpoint import pooling, quantization_config
from servd.checkpoint.hub import DEMO_MODEL
from servd.checkpoint.lora import parse_module
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.pooling import is_encoder_as_decoder
from servd.config import Config, LoRAConfig, choices, data_parallel, flag_of, options_by_name
from servd.config.data_parallel import Decision
from servd.config.keys import read_token

log = logging.getLogger("servd.resolve")

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
OTLP_EXPORTER = "opentelemetry-exporter-otlp-proto-http"


class Machine(msgspec.Struct, frozen=True):
    """The machine's capabilities, found without importing torch."""

    num_gpus: int = 0
    torch_has_cuda: bool = False
    has_triton: bool = False


def look_at_machine() -> Machine:
    """Return the machine: GPUs from the CUDA driver, CUDA support from torch's version file."""
    has_triton = importlib.util.find_spec("triton") is not None
    return Machine(num_gpus=_num_gpus(), torch_has_cuda=_torch_has_cuda(), has_triton=has_triton)


def _num_gpus() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds the package without running it
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    built_for = re.compile(r"^cuda\b.*=\s*'", re.MULTILINE)
    return version.exists() and built_for.search(version.read_text()) is not None


def resolve(config: Config, spec: ModelSpec, machine: Machine) -> Config:
    """Return `config` with the values that `decide` chooses."""
    return decide(config, spec, machine)[0]


def decide(config: Config, spec: ModelSpec, machine: Machine) -> tuple[Config, dict[str, Decision]]:
    """Choose and log a value for every "auto" and None that needs one; return the resolved config
    and the decisions by option. `attention_backend` stays auto, because only the worker, which has
    torch, knows the supported backends. Raises ConfigError if options are incompatible with each
    other, this machine or this model.
    """
    decided: dict[str, Decision] = {}

    def take(found: dict[str, Decision]) -> None:
        nonlocal config
        decided.update(found)
        config = config.replace(**{name: decision.value for name, decision in found.items()})

    _check_plugins(config, spec)
    take(data_parallel.divide(config))
    take(_resolve_devices(config, spec, machine))
    take(_resolve_lengths(config, spec))
    take(_resolve_computation(config, spec))
    take(resolve_types(config, spec.folder))
    _check_together(config, spec)
    take(_resolve_names(config, spec))
    _check_adapters(config)
    _check_remote(config)
    _check_observability(config)
    for name, decision in decided.items():
        log.info("%s: %s (%s)", name, decision.value, decision.why)
    return config, decided


def _check_plugins(config: Config, spec: ModelSpec) -> None:
    """Check that plugins exist, before the processes that use them import anything."""
    for name, (section, option) in options_by_name().items():
        value = getattr(getattr(config, section), name)
        known = choices(option.type)
        if known and value is not None and ":" not in value:
            if value.replace("-", "_") not in known:
                there_are = ", ".join(known)
                raise ConfigError(f"{flag_of(name)} {value!r} is unknown; there are: {there_are}")
    quantization_config.quant_method_of(spec.folder, config.model.quantization)
    _check_activations(config, spec)
    if config.model.quantization_imatrix and config.model.quantization != "int4":
        raise ConfigError("--quantization-imatrix only works with 4 bits: add --quantization int4")
    if speculative := config.model.speculative_config:
        flag = "--speculative-config:"
        size = speculative.draft_tensor_parallel_size
        plugins.check(f"{flag} method", "servd.worker.spec_decode", speculative.method)
        if size not in (None, config.parallel.tensor_parallel_size):
            raise ConfigError(
                f"{flag} draft_tensor_parallel_size {size}: the draft uses the model's "
                f"{config.parallel.tensor_parallel_size} devices; leave it out"
            )


def _check_activations(config: Config, spec: ModelSpec) -> None:
    if config.model.cpu_activation_dtype != "int8":
        return
    stated = quantization_config.quantization_of(spec.folder)
    is_quantized = stated is not None and stated.get("has_blocks", True)
    if config.model.quantization not in ("int8", "int4") and not is_quantized:
        raise ConfigError(
            "--cpu-activation-dtype int8 needs weights of 4 or 8 bits: add --quantization int8 "
            "or int4, or serve a quantized checkpoint"
        )


def _check_adapters(config: Config) -> None:
    lora = config.lora
    if not lora.enable_lora:
        given = [
            flag_of(name)
            for name, default in msgspec.structs.asdict(LoRAConfig()).items()
            if getattr(lora, name) != default
        ]
        if given:
            raise ConfigError(f"{', '.join(given)}: add --enable-lora")
    if lora.enable_lora and config.model.compile:
        raise ConfigError("--compile cannot compile layers with adapters: leave out --enable-lora")
    if lora.lora_dir is not None and not os.path.isdir(lora.lora_dir):
        raise ConfigError(f"--lora-dir {lora.lora_dir}: the folder does not exist")
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {lora.max_cpu_loras} is below --max-loras {lora.max_loras}"
        )
    for entry in lora.lora_modules:
        name, _ = parse_module(entry)
        if name in config.model.served_model_name:
            raise ConfigError(f"--lora-modules {entry}: that is the name of the model itself")


def _check_together(config: Config, spec: ModelSpec) -> None:
    """Check the compatibility of all options, given and decided. Raises ConfigError."""
    config.cache.validate()
    if config.cache.kv_transfer_config is not None:
        read_token(config)
    model = config.model
    num_stages = config.parallel.pipeline_parallel_size
    if config.parallel.enable_expert_parallel:
        _check_experts(config.parallel.tensor_parallel_size, spec)
    kept = config.cache.kv_cache_dtype
    if config.parallel.device == "cuda" and kept not in ("auto", "fp8", model.dtype):
        raise ConfigError(
            f"--kv-cache-dtype {kept} is for CPUs: on a GPU, use fp8 (8 bits) or auto"
        )
    if num_stages == 1:
        return
    flag = f"--pipeline-parallel-size {num_stages}"
    if num_stages > spec.num_layers:
        raise ConfigError(f"{flag}: must be at most {spec.num_layers}, the model's layers")
    files = pooling.read(spec)
    whole = "leave --pipeline-parallel-size at 1"
    for is_asked, what in (
        (model.speculative_config, "--speculative-config: leave it out"),
        (config.lora.enable_lora, "--enable-lora: leave it out"),
        (
            config.cache.has_connector,
            "--kv-offloading-size, --kv-cache-dir and --kv-transfer-config: leave them out",
        ),
        (model.model_impl == "transformers", f"layers that transformers computes: {whole}"),
        (not files.is_causal, f"encoders: {whole}"),
        (
            files.task != "generate" and model.check_vectors,
            "the check of a model's vectors: add --no-check-vectors",
        ),
    ):
        if is_asked:
            raise ConfigError(f"{flag} does not work with {what}")


def _check_experts(num_ranks: int, spec: ModelSpec) -> None:
    """Log a warning if --enable-expert-parallel has no effect."""
    has_experts = any(
        isinstance(count := spec.config.get(key), int) and count > 1 for key in EXPERT_COUNTS
    )
    if not has_experts or num_ranks == 1:
        why = "one device has all experts" if has_experts else "the model has no experts"
        log.warning("--enable-expert-parallel has no effect: %s", why)


def _check_remote(config: Config) -> None:
    """Reject options that need workers on the engine's host, as they share files and memory."""
    cache = config.cache
    if config.parallel.executor != "ray":
        return
    for is_asked, what in (
        (config.lora.enable_lora, "--enable-lora"),
        (cache.kv_offloading_size or cache.kv_cache_dir, "--kv-offloading-size or --kv-cache-dir"),
        (cache.kv_transfer_config, "--kv-transfer-config"),
    ):
        if is_asked:
            raise ConfigError(
                f"{what} does not work with workers on other hosts (--executor ray): leave it out"
            )


def _check_observability(config: Config) -> None:
    """Check the options of tracing and of draft metrics."""
    tells_of_drafts = config.observability.per_request_spec_decode_metrics != "none"
    if tells_of_drafts and config.model.speculative_config is None:
        raise ConfigError(
            "--per-request-spec-decode-metrics needs speculative decoding: add --speculative-config"
        )
    if (endpoint := config.observability.otlp_traces_endpoint) is None:
        return
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    if not endpoint.startswith(("http://", "https://")) or protocol != "http/protobuf":
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} with {protocol}: servd only supports OTLP over "
            "HTTP (http/protobuf), e.g. http://HOST:4318/v1/traces"
        )
    try:
        importlib.metadata.version(OTLP_EXPORTER)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {OTLP_EXPORTER}: pip install 'servd[otel]'"
        ) from error


def _resolve_names(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    """Return the served model names: MODEL. For a folder or file, its base name comes first."""
    if given := config.model.served_model_name:
        if config.model.model == DEMO_MODEL and any(map(os.path.isdir, given)):
            raise ConfigError("--served-model-name got a folder as a name: write MODEL before it")
        return {}
    model = config.model.model or spec.model_type
    folder_name = [Path(model).resolve().name] if os.path.exists(model) else []
    names = list(dict.fromkeys([*folder_name, model]))
    return {"served_model_name": Decision(names, "the name of the model")}


def _check_batch_invariant(config: Config, device: str, machine: Machine) -> None:
    if not config.model.batch_invariant:
        return
    for is_asked, flag in (
        (config.parallel.tensor_parallel_size > 1, "--tensor-parallel-size"),
        (config.model.compile, "--compile"),
        (config.lora.enable_lora, "--enable-lora"),
        (config.model.quantization, "--quantization"),
    ):
        if is_asked:
            raise ConfigError(f"--batch-invariant has no kernels for {flag}: leave one of them out")
    if device != "cuda":
        raise ConfigError(
            f"--batch-invariant is for CUDA: on a {device}, servd's own kernels always are"
        )
    if not machine.has_triton:
        raise ConfigError("--batch-invariant needs the package triton: install it")


def _resolve_devices(config: Config, spec: ModelSpec, machine: Machine) -> dict[str, Decision]:
    decided: dict[str, Decision] = {}
    size = config.parallel.tensor_parallel_size
    num_stages = config.parallel.pipeline_parallel_size
    num_workers = config.parallel.num_workers
    device = config.parallel.device
    if device == "auto":
        has_cuda = machine.num_gpus and machine.torch_has_cuda
        device = "cuda" if has_cuda else "cpu"
        build = "built for CUDA" if machine.torch_has_cuda else "built for CPUs"
        why = f"the CUDA driver shows {machine.num_gpus} GPUs, and torch is {build}"
        decided["device"] = Decision(device, why)
        if machine.num_gpus and not machine.torch_has_cuda:
            log.warning(
                "there is a GPU, but this torch is built for CPUs: install a CUDA build of torch "
                "to use it"
            )
    if device == "cuda" and not machine.torch_has_cuda:
        raise ConfigError(
            "--device cuda: this torch is built for CPUs; install a CUDA build of torch"
        )
    if config.model.compile and device != "cuda":
        raise ConfigError(
            f"--compile is for CUDA: on a {device}, torch cannot compile servd's own kernels"
        )
    _check_batch_invariant(config, device, machine)
    if config.model.compile and not machine.has_triton:
        raise ConfigError("--compile needs the package triton: install it")
    num_engines = config.parallel.num_engines_here
    num_here = 0 if config.parallel.executor == "ray" else num_workers
    if device == "cuda" and machine.num_gpus < num_here * num_engines:
        engines = f" with --data-parallel-size {num_engines}" if num_engines > 1 else ""
        stages = f" with --pipeline-parallel-size {num_stages}" if num_stages > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size {size}{stages}{engines}: the CUDA driver shows "
            f"{machine.num_gpus} "
            "device(s); lower it, or check CUDA_VISIBLE_DEVICES"
        )
    if config.parallel.executor is None:
        one = Decision("uniproc", "one device, whose worker runs inside the engine process")
        many = Decision("multiproc", f"{num_workers} devices")
        decided["executor"] = one if num_workers == 1 else many
    elif config.parallel.executor == "uniproc" and num_workers > 1:
        raise ConfigError(
            "--executor uniproc drives one device; --tensor-parallel-size or "
            "--pipeline-parallel-size > 1 needs multiproc"
        )
    heads = spec.num_heads
    kv_heads = spec.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"--tensor-parallel-size {size} must divide the model's {heads} heads, and its "
            f"{kv_heads} key-value heads, unless it is a multiple of these"
        )
    return decided


def _resolve_computation(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    """Choose the dtype, the model implementation and the number of steps in flight."""
    if spec.dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(
            f"checkpoints of type {spec.dtype} are not supported, only float32, bfloat16, float16"
        )
    decided: dict[str, Decision] = {}
    on_cuda = config.parallel.device == "cuda"
    model_type = spec.model_type
    if config.model.dtype == "auto":
        why = "what the checkpoint has" if on_cuda else "a CPU computes in float32"
        decided["dtype"] = Decision(spec.dtype if on_cuda else "float32", why)
    if config.model.model_impl == "auto":
        has_file = model_type.replace("-", "_") in plugins.names("servd.worker.models")
        found = Decision("transformers", f"servd has no file for {model_type}")
        if has_file and not is_encoder_as_decoder(spec):
            found = Decision("servd", f"servd has a file for {model_type}")
        decided["model_impl"] = found
    if config.scheduler.async_scheduling is None:
        why = "a CPU that computes has no time to schedule beside it"
        if on_cuda:
            why = "the next step is scheduled while the GPU computes"
        decided["async_scheduling"] = Decision(on_cuda, why)
    return decided


def resolve_types(config: Config, folder: str) -> dict[str, Decision]:
    """Choose the types of activations on a CPU, and of keys and values."""
    model = config.model
    decided: dict[str, Decision] = {}
    on_cpu = config.parallel.device == "cpu"
    activations = model.cpu_activation_dtype
    is_rounded = on_cpu and quantization_config.rounds_activations(
        activations, model.quantization, folder
    )
    if on_cpu and activations == "auto":
        why = "faster with these weights" if is_rounded else "exact with weights of few bits"
        decided["cpu_activation_dtype"] = Decision("int8" if is_rounded else "float32", why)
    if config.cache.kv_cache_dtype == "auto":
        # With 32 bits, a batch would read keys and values for as long as it multiplies int8.
        is_narrow = is_rounded and model.dtype == "float32"
        why = "enough beside activations of 8 bits" if is_narrow else "as --dtype"
        decided["kv_cache_dtype"] = Decision("bfloat16" if is_narrow else model.dtype, why)
    return decided


def _whole_prompts(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    """Resolve options for an encoder. Raises ConfigError if an option is for generation."""
    if config.model.model_impl == "transformers":
        raise ConfigError(
            f"--model-impl transformers has no encoders, and {spec.model_type} is one: leave it out"
        )
    server = config.server
    for is_asked, flag, what in (
        (config.model.speculative_config, "--speculative-config", "drafts tokens"),
        (server.tool_call_parser not in (None, "none"), "--tool-call-parser", "finds tool calls"),
        (server.reasoning_parser not in (None, "none"), "--reasoning-parser", "finds reasoning"),
    ):
        if is_asked:
            raise ConfigError(
                f"{flag} {what} in what a model writes, and {spec.model_type} is an encoder, which"
                " writes nothing: leave it out"
            )
    why = f"tokens of {spec.model_type} see those after them"
    decided = {
        name: Decision(False, why) for name in ("enable_prefix_caching", "enable_chunked_prefill")
    }
    return decided | {"enforce_eager": Decision(True, "there are no decode steps")}


def _with_states(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    """Resolve options for a recurrent state. Raises ConfigError if one needs earlier states."""
    what = f"layers of {spec.model_type} keep a state, which is that of the last token alone"
    model = config.model
    num_stages = config.parallel.pipeline_parallel_size
    for is_asked, flag, why in (
        (model.speculative_config, "--speculative-config", "drafts that are not kept stay in it"),
        (num_stages > 1, f"--pipeline-parallel-size {num_stages}", "stages have none"),
        (model.compile, "--compile", "torch would compile it anew for each step"),
        (model.batch_invariant, "--batch-invariant", "its rounding depends on chunks of prompts"),
    ):
        if is_asked:
            raise ConfigError(f"{flag}: {what}; {why}: leave it out")
    return {
        "enable_prefix_caching": Decision(False, what),
        "enforce_eager": Decision(True, "linear attention runs operation by operation"),
    }


def _resolve_lengths(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    files = pooling.read(spec)
    on_cuda = config.parallel.device == "cuda"
    decided = {} if files.is_causal else _whole_prompts(config, spec)
    if spec.keeps_state:
        decided |= _with_states(config, spec)
    max_model_len = config.model.max_model_len
    if max_model_len is None:
        max_model_len = files.max_tokens or spec.max_position_embeddings
        decided["max_model_len"] = Decision(max_model_len, "the positions that the model has")
    elif max_model_len > (positions := pooling.num_positions(spec)):
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model has positions for {positions} tokens"
        )
    if config.model.shorten_max_model_len is None:
        is_free = config.model.max_model_len is None
        why = f"--max-model-len was {'not ' if is_free else ''}given"
        decided["shorten_max_model_len"] = Decision(is_free, why)
    where = "on CUDA" if on_cuda else "on a CPU"
    max_num_seqs = config.scheduler.max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = 256 if on_cuda else 64
        decided["max_num_seqs"] = Decision(max_num_seqs, "the default " + where)
    budget = config.scheduler.max_num_batched_tokens
    is_whole = not (files.is_causal and config.scheduler.enable_chunked_prefill)
    longest = max_model_len if is_whole else 1
    if budget is None:
        budget = max(8192 if on_cuda else 512, max_num_seqs, longest)
        why = f"the default {where}, and at least --max-num-seqs"
        decided["max_num_batched_tokens"] = Decision(budget, why)
    elif budget < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below --max-num-seqs {max_num_seqs}: "
            "a step could not hold one token of each request"
        )
    elif budget < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below the {longest} tokens of "
            "--max-model-len: without chunked prefill, such a prompt would never run"
        )
    return decided
