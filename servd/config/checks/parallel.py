"""Checks the options of devices, stages and executors, and chooses their values."""

import logging

from servd.base.errors import ConfigError
from servd.checkpoint import pooling
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.checks.model import check_batch_invariant
from servd.config.data_parallel import Decision
from servd.config.machine import Machine

log = logging.getLogger("servd.resolve")

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def resolve_devices(config: Config, spec: ModelSpec, machine: Machine) -> dict[str, Decision]:
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
    check_batch_invariant(config, device, machine)
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
        single = Decision("uniproc", "one device, whose worker runs inside the engine process")
        many = Decision("multiproc", f"{num_workers} devices")
        decided["executor"] = single if num_workers == 1 else many
    elif config.parallel.executor == "uniproc" and num_workers > 1:
        raise ConfigError(
            "--executor uniproc drives one device; --tensor-parallel-size or "
            "--pipeline-parallel-size > 1 needs multiproc"
        )
    if config.parallel.fake_script and config.parallel.executor != "fake":
        raise ConfigError("--fake-script has the answers of --executor fake: add it")
    heads = spec.num_heads
    kv_heads = spec.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"--tensor-parallel-size {size} must divide the model's {heads} heads, and its "
            f"{kv_heads} key-value heads, unless it is a multiple of these"
        )
    return decided


def check_stages(config: Config, spec: ModelSpec) -> None:
    """Raise ConfigError if an option does not work with the stages of a pipeline."""
    model = config.model
    num_stages = config.parallel.pipeline_parallel_size
    if num_stages == 1:
        return
    flag = f"--pipeline-parallel-size {num_stages}"
    if num_stages > spec.num_layers:
        raise ConfigError(f"{flag}: must be at most {spec.num_layers}, the model's layers")
    files = pooling.read(spec)
    whole = "leave --pipeline-parallel-size at 1"
    stores = "--kv-offloading-size, --kv-cache-dir and --kv-transfer-config: leave them out"
    checks_vectors = files.task != "generate" and model.check_vectors
    for is_asked, what in (
        (model.speculative_config, "--speculative-config: leave it out"),
        (config.lora.enable_lora, "--enable-lora: leave it out"),
        (config.cache.has_connector, stores),
        (model.model_impl == "transformers", f"layers that transformers computes: {whole}"),
        (not files.is_causal, f"encoders: {whole}"),
        (checks_vectors, "the check of a model's vectors: add --no-check-vectors"),
    ):
        if is_asked:
            raise ConfigError(f"{flag} does not work with {what}")


def check_experts(config: Config, spec: ModelSpec) -> None:
    """Log a warning if --enable-expert-parallel has no effect."""
    if not config.parallel.enable_expert_parallel:
        return
    num_ranks = config.parallel.tensor_parallel_size
    has_experts = any(
        isinstance(count := spec.config.get(key), int) and count > 1 for key in EXPERT_COUNTS
    )
    if not has_experts or num_ranks == 1:
        why = "one device has all experts" if has_experts else "the model has no experts"
        log.warning("--enable-expert-parallel has no effect: %s", why)


def check_remote(config: Config) -> None:
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
