"""Worker: order of calls, memory, errors at start-up, grammar masks, log-probabilities."""

import gc
import json
import logging
import re
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from servd.base.errors import ModelNotFound, NotEnoughMemory, UnsupportedModel
from servd.base.sizes import parse_bytes
from servd.checkpoint.model_spec import read_spec
from servd.messages.engine import GrammarOutput, SchedulerOutput
from servd.worker.ops import native
from servd.worker.worker import Worker
from tests.parity.families import GPT2, LLAMA, logits_of, make_checkpoint
from tests.worker.driver import Driver, config_for


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", LLAMA)


def load(folder: Path, **options: object) -> Worker:
    worker = Worker(config_for(str(folder), **options), read_spec(folder), 0, lambda *_: None)
    worker.load_model()
    return worker


def changed(folder: Path, copy: Path, **config: object) -> Path:
    """A copy of a checkpoint with some of config.json changed."""
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | config)
    )
    return copy


def test_calls_out_of_order(llama: Path):
    driver = Driver(config_for(str(llama)))
    with pytest.raises(RuntimeError, match="before execute_model"):
        driver.worker.sample_tokens()
    driver.worker.execute_model(SchedulerOutput(1, []))
    with pytest.raises(RuntimeError, match="twice"):
        driver.worker.execute_model(SchedulerOutput(2, []))
    assert driver.worker.sample_tokens().result().sampled_token_ids == []


@pytest.mark.parametrize(("attention", "in_decode_steps"), [("native", 1), ("torch_sdpa", 2)])
def test_torch_has_one_thread_where_kernels_do_the_work(
    tmp_path, attention, in_decode_steps, monkeypatch
):
    if native.library() is None:
        pytest.skip("no CPU kernels here")
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        folder = make_checkpoint(tmp_path, "llama", LLAMA | {"head_dim": 16})
        driver = Driver(config_for(str(folder), attention_backend=attention, block_size=16))
        slot = driver.add([1, 2, 3])
        driver.generate([slot], 1)
        assert torch.get_num_threads() == 2
        driver.generate([slot], 3)
        assert torch.get_num_threads() == in_decode_steps
        driver.worker.update_weights(str(folder))
        assert driver.worker.runner.num_threads == 2
        driver.worker.shutdown()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_model_that_sleeps_leaves_nothing_to_the_collector(llama: Path):
    """Else another one waits for that before it is loaded."""
    worker = Worker(config_for(str(llama)), read_spec(llama), 0, lambda *_: None)
    worker.allocate_kv_cache(worker.load_model().num_blocks)
    weights = [weakref.ref(weight) for weight in worker.runner.model.parameters()]
    gc.disable()
    try:
        worker.shutdown()
        assert weights and not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


def test_cache_is_not_larger_than_all_requests_need(llama: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "servd.worker")
    driver = Driver(config_for(str(llama), kv_cache_memory=None, max_num_seqs=3, max_model_len=30))
    assert driver.ready.num_blocks == 3 * 8
    assert driver.ready.kv_bytes_per_block == 4 * driver.spec.kv_bytes_per_token(4)
    assert (
        "KV cache 24 blocks of 4 tokens" in caplog.text
        and "3.0 requests of 30 tokens" in caplog.text
    )


def test_a_cache_that_is_larger_than_the_memory_is_warned_of(llama, monkeypatch, caplog):
    """Memory is committed when first written: the server would be killed one day."""
    for free, is_said in ((1 << 40, False), (1 << 12, True)):
        monkeypatch.setattr(
            "servd.worker.runner.cpu_model_runner.available_memory", lambda free=free: free
        )
        Driver(config_for(str(llama)))
        assert ("4KiB of memory are free" in caplog.text) is is_said


def test_not_enough_memory_says_what_would_be(llama: Path):
    with pytest.raises(NotEnoughMemory) as error:
        load(llama, kv_cache_memory=20_000)
    numbers = re.search(
        r"lower --max-model-len to (\d+) or raise --kv-cache-memory to (\w+)", str(error.value)
    )
    assert numbers is not None
    load(llama, kv_cache_memory=20_000, max_model_len=int(numbers[1]))
    load(llama, kv_cache_memory=parse_bytes(numbers[2], "--kv-cache-memory"))
    with pytest.raises(NotEnoughMemory):
        load(llama, kv_cache_memory=20_000, max_model_len=int(numbers[1]) + 1)
    with pytest.raises(NotEnoughMemory):
        load(llama, kv_cache_memory=parse_bytes(numbers[2], "--kv-cache-memory") - 1)
    with pytest.raises(NotEnoughMemory, match="\\): raise --kv-cache-memory"):
        load(llama, kv_cache_memory=1)


def test_the_context_is_shortened_to_the_cache_unless_asked_for(llama, caplog):
    with caplog.at_level(logging.WARNING, logger="servd"):
        load(llama, kv_cache_memory=20_000, shorten_max_model_len=True)
    limit, smaller = map(
        int, re.search(r"shortening the context from (\d+) to (\d+) tokens", caplog.text).groups()
    )
    assert limit == 128 > smaller
    load(llama, kv_cache_memory=20_000, max_model_len=smaller)
    with pytest.raises(NotEnoughMemory):
        load(llama, kv_cache_memory=1, shorten_max_model_len=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "unheard_of"},
            "cannot run in servd: servd has no file for it, and transformers does not build it",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures names 'LlamaForSequenceClassification'; .*servd runs LlamaForCausalLM",
        ),
        ({"hidden_act": "swish9"}, "activation 'swish9' is not supported; there are: gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type 'longrope'"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
            "rope_type 'linear' without factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": 2}, "has a tensor 'model.layers.2."),
        ({"intermediate_size": 96}, r"layer 0: mlp\.\w+\.weight has shape \[.*80.*\], expected"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(llama, tmp_path, config, message):
    with pytest.raises(UnsupportedModel, match=message):
        load(changed(llama, tmp_path / "copy", **config))


def test_missing_weights(llama: Path, tmp_path: Path):
    folder = changed(llama, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelNotFound, match=r"1 parameters of the model: model.layers.1.self_attn.qkv_proj.weight"
    ):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"12345678 not a checkpoint")
    with pytest.raises(ModelNotFound, match="cannot be read"):
        load(folder)


def test_old_checkpoint_forms(tmp_path: Path, llama: Path):
    """Names without the bare model's prefix, old buffers, rope_theta at the top."""
    gpt2 = make_checkpoint(tmp_path / "gpt2", "gpt2", GPT2)
    file = gpt2 / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file)
    old_rope = changed(llama, tmp_path / "rope", rope_parameters=None, rope_theta=500.0)
    new_rope = changed(
        llama, tmp_path / "new", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    for folder, reference in ((gpt2, gpt2), (old_rope, new_rope)):
        driver = Driver(config_for(str(folder)))
        prompt = [5, 3, 8, 100, 42, 8, 1]
        slot = driver.add(prompt)
        driver.generate([slot], 1)
        torch.testing.assert_close(
            driver.logits[slot][0], logits_of(reference, prompt)[-1], atol=1e-4, rtol=0
        )


def test_dummy_weights_need_no_file_and_repeat(llama: Path, tmp_path: Path):
    folder = changed(llama, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    runs = []
    for seed in (0, 0, 1):
        driver = Driver(config_for(str(folder), load_format="dummy", seed=seed))
        slot = driver.add([1, 2, 3])
        driver.generate([slot], 1)
        runs.append(driver.logits[slot][0])
    assert torch.isfinite(runs[0]).all() and runs[0].std() > 0
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_bitmask_reaches_its_rows_only(llama: Path):
    driver = Driver(config_for(str(llama)))
    midway, free, bound = (driver.add([i + 1] * 6) for i in range(3))
    words = np.zeros(-(-driver.spec.vocab_size // 32), dtype=np.int32)
    words[77 // 32] = 1 << 77 % 32
    mask = GrammarOutput(indices=[0, 2], offsets=[0, 0], bitmask=words.tobytes() * 2)
    output = driver.step({midway: 3, free: 6, bound: 6}, mask)
    assert output.sampled_token_ids[0] == [] and output.sampled_token_ids[2] == [77]
    assert output.sampled_token_ids[1] == [int(driver.logits[free][0].argmax())]


def test_bfloat16_is_close_to_float32(llama: Path):
    logits = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(config_for(str(llama), dtype=dtype))
        slot = driver.add([9, 8, 7, 6, 5])
        driver.generate([slot], 1)
        logits.append(driver.logits[slot][0])
    assert driver.ready.dtype == "bfloat16" and logits[1].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=0) > 0.99
