"""The plan of memory: a dry run states what the engine then allocates."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from servd.base import plugins
from servd.base.cards import Card
from servd.base.errors import NotEnoughMemory
from servd.checkpoint.hub import DEMO_FOLDER
from servd.checkpoint.model_spec import read_spec
from servd.worker.calibration import quantize
from servd.worker.layers.weight import Weight
from servd.worker.loading.model_loader import tensor_shapes
from servd.worker.runner import dry_run
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from servd.worker.worker import Worker
from tests.parity.families import CASES, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.spec_decode import checkpoints

FAMILIES = [(family, variant, {}) for family, variants in CASES.items() for variant in variants]
FAMILIES += [
    (family, next(iter(CASES[family])), options)
    for family in ("deepseek_v3", "gpt_oss", "llama", "mixtral", "qwen3_next")
    for options in ({"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"})
]
METHODS = plugins.names("servd.worker.spec_decode")
CPU = torch.device("cpu")


def planned_and_loaded(
    folder: Path, **options: Any
) -> tuple[dry_run.MemorySizes, CPUModelRunner, int]:
    """The plan of a checkpoint, and its runner with a KV cache of 5 blocks."""
    config = config_for(folder, **options)
    spec = read_spec(folder)
    sizes = dry_run.plan(config, spec).sizes
    worker = Worker(config, spec, 0, lambda *_: None)
    worker.load_model()
    worker.allocate_kv_cache(5)
    assert isinstance(worker.runner, CPUModelRunner)
    drafts = getattr(worker.runner.proposer, "kv_caches", [])
    cache = [*worker.runner.kv_caches, *drafts]
    return sizes, worker.runner, sum(tensor.nbytes for tensor in cache)


@pytest.mark.parametrize(("family", "variant", "options"), FAMILIES, ids=str)
def test_weights_and_kv_cache_are_as_planned(tmp_path, family, variant, options):
    folder = make_checkpoint(tmp_path, family, CASES[family][variant])
    sizes, runner, cache = planned_and_loaded(folder, **options)
    assert sizes.weights == runner.weights_bytes == bytes_of(runner.model)
    assert sizes.kv_per_block * 5 == cache


def test_states_and_their_checkpoints_are_as_planned(tmp_path: Path):
    folder = make_checkpoint(tmp_path, "qwen3_next", CASES["qwen3_next"]["experts"])
    config = config_for(folder)
    plan = dry_run.plan(config, read_spec(folder))
    worker = Worker(config, read_spec(folder), 0, lambda *_: None)
    ready = worker.load_model()
    worker.allocate_kv_cache(ready.num_blocks, ready.num_checkpoints)
    memory = worker.runner.states.state_memory
    assert memory is not None
    assert plan.sizes.states == memory.live.nbytes > 0
    assert plan.num_checkpoints * plan.sizes.per_checkpoint == memory.checkpoints.nbytes > 0


def test_heads_of_4_bits_are_as_planned(tmp_path: Path):
    """Whose matrices are made of one that the checkpoint has quantized."""
    folder = make_checkpoint(tmp_path / "whole", "deepseek_v2", CASES["deepseek_v2"]["any group"])
    rows = [[(7 * place + row) % 199 for place in range(24)] for row in range(2)]
    quantize(folder, tmp_path / "small", 4, 8, rows, rows, lambda _: None)
    sizes, runner, _ = planned_and_loaded(tmp_path / "small")
    assert sizes.weights == runner.weights_bytes


def bytes_of(module: torch.nn.Module) -> int:
    """What a model's tensors take, those of its packed matrices too."""
    sizes = {}
    for weight in module.parameters():
        form = getattr(weight, "quant_method", None)
        for tensor in [weight] if form is None else vars(form).values():
            if isinstance(tensor, torch.Tensor):
                sizes[tensor.data_ptr()] = tensor.nbytes
    return sum(sizes.values())


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_counted(tmp_path: Path, method: str):
    target = make_checkpoint(tmp_path / "target", "llama", CASES["llama"]["untied"])
    keys = {"method": method, "num_speculative_tokens": 2}
    if make := getattr(checkpoints, method, None):
        keys |= make(target, tmp_path / "draft")
    sizes, runner, cache = planned_and_loaded(target, speculative_config=keys)
    modules = [m for m in vars(runner.proposer).values() if isinstance(m, torch.nn.Module)]
    assert sizes.draft_weights == sum(map(bytes_of, modules))
    assert (sizes.draft_weights > 0) == (make is not None)
    assert sizes.kv_per_block * 5 == cache


def test_room_for_adapters_is_counted_apart_and_said_at_start(tmp_path: Path, caplog):
    folder = make_checkpoint(tmp_path, "llama", CASES["llama"]["untied"])
    plain = dry_run.plan(config_for(folder), read_spec(folder)).sizes
    caplog.set_level(logging.INFO, "servd.worker")
    sizes, runner, _ = planned_and_loaded(folder, enable_lora=True, max_loras=3)
    assert runner.adapters is not None and sizes.weights == plain.weights
    assert sizes.adapters == runner.adapters.nbytes == runner.weights_bytes - plain.weights > 0
    assert "room for 3 of rank 16" in caplog.text


def test_what_is_odd_about_files_is_said_by_the_load_alone(tmp_path: Path, caplog):
    folder = make_checkpoint(tmp_path / "m", "llama", CASES["llama"]["untied"])
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8"},' + text[1:]
    )
    config = config_for(folder)
    with caplog.at_level(logging.INFO, logger="servd.worker"):
        dry_run.plan(config, read_spec(folder))
        Driver(config)
    said = [record.getMessage() for record in caplog.records]
    for words in ("no layer is quantized", "weight files are read"):
        assert sum(words in message for message in said) == 1


@pytest.mark.parametrize("utilization", [0.5, 0.15])
def test_a_gpu(monkeypatch: pytest.MonkeyPatch, utilization: float):
    """Everything in the model's type; of the device, its share counts."""
    monkeypatch.setattr(dry_run, "DRIVER_BYTES", 10_000_000)
    options = {"device": "cuda", "dtype": "bfloat16", "gpu_memory_utilization": utilization}
    config = config_for(DEMO_FOLDER, **options, kv_cache_memory=None, max_model_len=2000)
    plan = dry_run.plan(config, read_spec(DEMO_FOLDER), Card(name="a GPU", memory=100_000_000))
    sizes = plan.sizes
    shapes = tensor_shapes(str(DEMO_FOLDER)).values()
    padding = 2 * 192 * (4032 - 4000)  # the vocabulary's table has whole 64 rows there
    assert sizes.weights == sum(2 * shape.numel() for shape in shapes) + padding
    assert plan.free == round(100_000_000 * utilization) - 10_000_000
    room = plan.free - sizes.weights - sizes.requests - sizes.step
    needed = 500 * sizes.kv_per_block  # one request
    if room >= needed:
        assert plan.num_blocks == min(room // sizes.kv_per_block, 8 * 500) and not plan.shortage
    else:
        assert plan.num_blocks == 0 and "raise --gpu-memory-utilization to " in plan.shortage
    assert (utilization == 0.5) == (room >= needed)


def test_nothing_is_allocated(tmp_path: Path):
    folder = make_checkpoint(tmp_path, "llama", CASES["llama"]["untied"])
    runner = dry_run.load(CPUModelRunner, config_for(folder), read_spec(folder), CPU)
    weights = [w for w in runner.model.parameters() if isinstance(w, Weight)]
    assert weights and all(w.is_meta for w in weights)
    assert runner.states.token_ids.is_meta


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (
            100_000,
            {},
            "the model takes .*KiB.* 97.7KiB of memory are free on .*--quantization int8",
        ),
        (
            10_000,
            {"quantization": "int8"},
            "more memory, or a higher --tensor-parallel-size, or a smaller model$",
        ),
        (16 << 30, {"kv_cache_memory": 900 << 30}, "--kv-cache-memory 900GiB: 16GiB .* lower it"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path, monkeypatch, free, options, message
):
    folder = make_checkpoint(tmp_path, "llama", CASES["llama"]["untied"])
    monkeypatch.setattr(dry_run, "available_memory", lambda: free)
    worker = Worker(config_for(folder, **options), read_spec(folder), 0, lambda *_: None)
    monkeypatch.setattr(worker.runner, "load_model", lambda _: pytest.fail("it loads"))
    with pytest.raises(NotEnoughMemory, match=message):
        worker.load_model()
