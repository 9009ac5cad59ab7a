"""The measurements, each in a process of its own: facts by name, printed as they are found."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu import attention, ceilings, shapes
from benchmarks.gpu.engine import Bench, arrive, decode, prompt_seconds
from servd.worker.device.device import name_of

Emit = Callable[..., None]
"""Called with facts as keyword arguments."""


def measure_ceilings(device: str, is_tiny: bool, emit: Emit) -> None:
    """The machine."""
    emit(device=name_of(torch.device(device)), torch=torch.__version__)
    emit(**ceilings.measure(torch.device(device), is_tiny))


def measure_attention(device: str, is_tiny: bool, emit: Emit) -> None:
    """The backends; on them `auto` depends."""
    for name, result in attention.measure(torch.device(device), is_tiny):
        emit(**{f"attention_{name}": result})


def llama(device: str, is_tiny: bool, **options: Any) -> tuple[Bench, int, int, int, int]:
    """8B shapes, the batch, its context, tokens of the long prompt, and steps to measure."""
    shape = shapes.tiny(shapes.LLAMA_8B) if is_tiny else shapes.LLAMA_8B
    batch, context, prompt, num_steps = (4, 16, 64, 6) if is_tiny else (256, 1024, 8192, 64)
    bench = Bench(
        shape,
        device,
        max_num_seqs=batch,
        max_num_batched_tokens=prompt,
        max_model_len=prompt + 64,
        enable_prefix_caching=False,
        kv_cache_memory=1 << 24 if is_tiny else None,
        async_scheduling=True,
        **options,
    )
    return bench, batch, context, prompt, num_steps


def measure_llama(device: str, is_tiny: bool, emit: Emit) -> None:
    """8B shapes: decoding at batch 1 and 256, and a prompt of 8k tokens."""
    bench, batch, context, prompt, num_steps = llama(device, is_tiny)
    emit(attention=bench.ready.attention_backend, llama_weight_bytes=bench.weight_bytes_per_step)
    emit(llama_one_step=decode(bench, 1, context // 8, num_steps).step)

    matrix_bytes = bench.weight_bytes_per_step - bench.head_bytes  # the head is for one token only
    operations = 2 * prompt * matrix_bytes / bench.worker.runner.dtype.itemsize
    # Half of the scores are of tokens that come later; each of the others is a product with a key
    # and one with a value.
    operations += 2 * prompt**2 * bench.spec.num_heads * bench.spec.head_dim * bench.spec.num_layers
    prefill = prompt_seconds(bench, prompt)
    emit(llama_prefill=prefill, llama_prefill_operations=operations)

    kv_bytes = bench.ready.kv_bytes_per_block / bench.config.cache.block_size  # of a token
    few = decode(bench, batch // 4, context, num_steps)
    emit(llama_some_step=few.step, llama_some_kv_bytes=batch // 4 * few.context * kv_bytes)
    decoding = decode(bench, batch, context, num_steps, num_profiled=16)
    emit(llama_all_step=decoding.step, llama_host_step=decoding.host)
    emit(llama_kv_bytes=batch * decoding.context * kv_bytes)
    if kernels := sorted(decoding.kernels, key=lambda kernel: -kernel[1]):
        total = sum(seconds for _, seconds in kernels)
        emit(
            llama_kernel_step=total,
            kernels=[(name[:90], seconds / total) for name, seconds in kernels[:12]],
        )
    measure_mixed(bench, context, prefill / prompt, decoding.step / batch, emit)


def measure_mixed(
    bench: Bench, context: int, per_prompt_token: float, per_output_token: float, emit: Emit
) -> None:
    """As many requests as could be served if each token took its share of a full step, in seconds:
    of a prompt, or of decoding.
    """
    input_len = context // 2
    output_len = context // 8
    rate = 1 / (input_len * per_prompt_token + output_len * per_output_token)
    prompts, outputs, seconds = arrive(bench, rate, context // 2, input_len, output_len)
    ideal = prompts * per_prompt_token + outputs * per_output_token
    emit(mixed_share=ideal / seconds, mixed_rate=(prompts + outputs) / seconds)


def measure_compiled(device: str, is_tiny: bool, emit: Emit) -> None:
    """8B shapes again, with --compile; a CPU has none."""
    bench, batch, context, prompt, num_steps = llama(device, is_tiny, compile=device == "cuda")
    emit(compiled_prefill=prompt_seconds(bench, prompt))
    emit(compiled_all_step=decode(bench, batch, context, num_steps).step)


def workload(is_tiny: bool) -> list[tuple[int, int]]:
    """Input and output lengths of nano-vllm's benchmark: 256 sequences, 100 to 1024 tokens each
    way.
    """
    draw = random.Random(0)
    num_sequences, min_tokens, max_tokens = (6, 4, 20) if is_tiny else (256, 100, 1024)
    return [
        (draw.randint(min_tokens, max_tokens), draw.randint(min_tokens, max_tokens))
        for _ in range(num_sequences)
    ]


def offline(
    shape: dict[str, Any], name: str, device: str, is_tiny: bool, emit: Emit, max_num_seqs: int = 0
) -> Bench:
    """The workload twice: the first time kernels are compiled and graphs captured.

    Also the bytes that its decoding must read: the weights in each step of the longest output, and
    for each token the keys and values of those before it.
    """
    lengths = workload(is_tiny)
    bench = Bench(
        shapes.tiny(shape) if is_tiny else shape,
        device,
        max_num_seqs=max(len(lengths), 0 if is_tiny else max_num_seqs),
        enable_prefix_caching=False,
        max_num_batched_tokens=64 if is_tiny else 16384,
        max_model_len=64 if is_tiny else 2048,
        kv_cache_memory=1 << 22 if is_tiny else None,
        async_scheduling=True,
    )
    kv_bytes = bench.ready.kv_bytes_per_block / bench.config.cache.block_size  # of a token
    num_read = sum(n * input_len + n * (n - 1) // 2 for input_len, n in lengths)
    num_steps = max(output_len for _, output_len in lengths)
    emit(**{f"{name}_bytes": num_read * kv_bytes + num_steps * bench.weight_bytes_per_step})
    for _ in range(2):
        for input_len, output_len in lengths:
            bench.add(input_len, output_len)
        bench.forget()
        began = time.perf_counter()
        num_tokens = bench.run()
        seconds = time.perf_counter() - began
        assert num_tokens == sum(output_len for _, output_len in lengths)
        emit(
            **{
                f"{name}_seconds": seconds,
                f"{name}_rate": num_tokens / seconds,
                f"{name}_waiting": bench.executor.waited / seconds,
            }
        )
    return bench


GPT2_ROWS = (64, 256, 1024)


def measure_gpt2(device: str, is_tiny: bool, emit: Emit) -> None:
    """124M shapes: one request, and many."""
    bench = offline(shapes.GPT2_124M, "gpt2", device, is_tiny, emit, max(GPT2_ROWS))
    emit(gpt2_one_step=decode(bench, 1, 8, 16 if is_tiny else 256).step)
    for rows in GPT2_ROWS:
        batch = max(rows // 256, 1) if is_tiny else rows
        step = decode(bench, batch, 8 if is_tiny else 128, 8 if is_tiny else 64).step
        emit(**{f"gpt2_decode_{rows}": batch / step})


def measure_qwen3(device: str, is_tiny: bool, emit: Emit) -> None:
    """0.6B shapes: many requests."""
    offline(shapes.QWEN3_06B, "qwen3", device, is_tiny, emit)


def measure_rival(device: str, is_tiny: bool, emit: Emit, limit_s: float = 45.0) -> None:
    """The continuous batching of transformers on the same shapes and workload, with its own
    choices.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if device == "cpu" and find_spec("psutil") is None:
        raise SystemExit("transformers' batching needs psutil on a CPU: pip install psutil")
    shape = shapes.tiny(shapes.QWEN3_06B) if is_tiny else shapes.QWEN3_06B
    options = {
        key: value
        for key, value in shape.items()
        if key not in ("model_type", "architectures", "dtype")
    }
    dtype = getattr(torch, shape["dtype"])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3", **options), dtype=dtype
        ).eval()
    draw = random.Random(0)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1)
    )
    manager.start()
    try:
        for is_measured in (False, True):
            lengths = workload(is_tiny) if is_measured else workload(is_tiny)[:8]
            prompts = [
                [draw.randrange(shape["vocab_size"]) for _ in range(input_len)]
                for input_len, _ in lengths
            ]
            began = time.perf_counter()
            for prompt, (_, output_len) in zip(prompts, lengths, strict=True):
                manager.add_request(prompt, max_new_tokens=output_len, eos_token_id=-1)
            num_done, num_tokens = _finished(manager, len(lengths), began + limit_s)
            seconds = time.perf_counter() - began
            if is_measured:
                emit(rival_rate=num_tokens / seconds, rival_done=num_done)
    finally:
        manager.stop(block=False)


def _finished(manager: Any, num_requests: int, deadline: float) -> tuple[int, int]:
    """Requests that end before the deadline, and their tokens."""
    num_done = num_tokens = 0
    while num_done < num_requests and time.perf_counter() < deadline:
        output = manager.get_result(timeout=1.0)
        if output is None and not manager.is_running():
            raise RuntimeError("transformers' batching has stopped")
        if output is not None and output.error:
            raise RuntimeError(f"transformers' batching: {output.error}")
        if output is not None and output.is_finished():
            num_done = num_done + 1
            num_tokens = num_tokens + len(output.generated_tokens)
    return num_done, num_tokens


PARTS: dict[str, Callable[[str, bool, Emit], None]] = {
    "ceilings": measure_ceilings,
    "attention": measure_attention,
    "gpt2": measure_gpt2,
    "qwen3": measure_qwen3,
    "llama": measure_llama,
    "rival": measure_rival,
    "compiled": measure_compiled,
}


def run(name: str, device: str, is_tiny: bool) -> None:
    """One part, in this process; its facts are lines of JSON."""

    def emit(**facts: Any) -> None:
        print("FACTS " + json.dumps(facts), flush=True)

    PARTS[name](device, is_tiny, emit)
