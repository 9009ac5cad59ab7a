"""Checks the options of the model and chooses their values."""

import os
from pathlib import Path

from servd.base.errors import ConfigError, UnsupportedModel
from servd.checkpoint import quantization_config
from servd.checkpoint.hub import DEMO_MODEL
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.pooling import has_file
from servd.config import Config
from servd.config.data_parallel import Decision
from servd.config.machine import Machine


def resolve_names(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    """Return the served model names: MODEL. For a folder or file, its base name comes first."""
    if served_names := config.model.served_model_name:
        if config.model.model == DEMO_MODEL and any(map(os.path.isdir, served_names)):
            raise ConfigError("--served-model-name got a folder as a name: write MODEL before it")
        return {}
    model = config.model.model or spec.model_type
    folder_name = [Path(model).resolve().name] if os.path.exists(model) else []
    names = list(dict.fromkeys([*folder_name, model]))
    return {"served_model_name": Decision(names, "the name of the model")}


def resolve_computation(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    """Choose the dtype, the model implementation and the number of steps in flight."""
    if spec.dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(
            f"config.json: dtype {spec.dtype} is not supported, only float32, bfloat16, float16"
        )
    decided: dict[str, Decision] = {}
    on_cuda = config.parallel.device == "cuda"
    model_type = spec.model_type
    if config.model.dtype == "auto":
        why = "what the checkpoint has" if on_cuda else "a CPU computes in float32"
        decided["dtype"] = Decision(spec.dtype if on_cuda else "float32", why)
    if config.model.model_impl == "auto":
        choice = Decision("transformers", f"servd has no file for {model_type}")
        if has_file(spec):
            choice = Decision("servd", f"servd has a file for {model_type}")
        decided["model_impl"] = choice
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


def resolve_whole_prompts(config: Config, spec: ModelSpec) -> dict[str, Decision]:
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


def resolve_states(config: Config, spec: ModelSpec) -> dict[str, Decision]:
    """Resolve options for a recurrent state. Raises ConfigError if one needs earlier states."""
    what = f"layers of {spec.model_type} keep a state, which is that of the last token alone"
    model = config.model
    on_cuda = config.parallel.device == "cuda"
    is_invariant = on_cuda and model.batch_invariant
    sends = config.cache.kv_transfer_config is not None
    for is_asked, flag, why in (
        (model.speculative_config, "--speculative-config", "drafts that are not kept stay in it"),
        (model.compile, "--compile", "torch would compile it anew for each step"),
        (is_invariant, "--batch-invariant", "its rounding depends on chunks of prompts"),
        (sends, "--kv-transfer-config", "engines do not send states to each other yet"),
    ):
        if is_asked:
            raise ConfigError(f"{flag}: {what}; {why}: leave it out")
    if not on_cuda:
        return {}
    return {
        "enable_prefix_caching": Decision(False, f"{what}, and has checkpoints on CPUs"),
        "enforce_eager": Decision(True, "linear attention runs operation by operation"),
    }


def check_activations(config: Config, spec: ModelSpec) -> None:
    if config.model.cpu_activation_dtype != "int8":
        return
    stated = quantization_config.quantization_of(spec.folder)
    is_quantized = stated is not None and stated.get("has_blocks", True)
    if config.model.quantization not in ("int8", "int4") and not is_quantized:
        raise ConfigError(
            "--cpu-activation-dtype int8 needs weights of 4 or 8 bits: add --quantization int8 "
            "or int4, or serve a quantized checkpoint"
        )


def check_batch_invariant(config: Config, device: str, machine: Machine) -> None:
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
