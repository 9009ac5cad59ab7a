"""Greedy tokens of requests with adapters are those of the models that PEFT merges them into."""

import random
import shutil
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from servd.core.engine_core import EngineCore
from servd.messages.engine import EngineCoreRequest, RequestOptions
from servd.messages.params import SamplingParams
from servd.worker.ops import native
from tests.adapters import write_adapter
from tests.core.engines import Log
from tests.parity.adapters import GPT2_KINDS, KINDS, make_adapter, store
from tests.parity.families import CASES, greedy
from tests.parity.test_engine import make_engine

pytest.importorskip("peft")
NUM_OUTPUTS = 12


@pytest.fixture(scope="module")
def adapters(checkpoints, tmp_path_factory):
    """model_type -> (base, adapters by name, merged models by name)."""

    @cache
    def get(model_type: str):
        base = checkpoints(model_type, next(iter(CASES[model_type])))
        folder = tmp_path_factory.mktemp(f"{model_type}-adapters")
        kinds = GPT2_KINDS if model_type == "gpt2" else KINDS
        merged = {
            name: make_adapter(base, folder / name, options, seed)
            for seed, (name, options) in enumerate(kinds.items(), 1)
        }
        folders = {name: folder / name / "adapter" for name in kinds}
        return base, store(folder, **folders), merged

    return get


def requests_of(adapters, count: int) -> list[EngineCoreRequest]:
    """With each adapter and without; prompts begin alike, so that blocks could be mixed up."""
    draw = random.Random(3)
    begin = [draw.randrange(199) for _ in range(18)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS)
    names = [*adapters, None]
    return [
        EngineCoreRequest(
            f"{i}-{names[i % len(names)]}",
            begin + [draw.randrange(199) for _ in range(draw.randint(1, 9))],
            params,
            options=RequestOptions(adapter=adapters.get(names[i % len(names)])),
        )
        for i in range(count)
    ]


def check(engine: EngineCore, base: Path, merged: dict[str, Path], requests) -> Log:
    """Run the requests and compare each with its own model."""
    log = Log()
    for request in requests:
        engine.handle(request)
    log.run(engine)
    for request in requests:
        folder = merged.get(request.request_id.partition("-")[2], base)
        prompt = request.prompt_token_ids
        got = prompt + log.token_ids(request.request_id)
        assert got == greedy(folder, prompt, NUM_OUTPUTS), request.request_id
    return log


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_adapters_in_mixed_cached_and_preempted_batches(adapters, model_type: str):
    base, stored, merged = adapters(model_type)
    engine = make_engine(base, num_blocks=34, depth=1, enable_lora=True, max_loras=3)
    log = check(engine, base, merged, requests_of(stored, 12))
    assert log.total("num_preemptions") > 0 and log.total("prefix_cache_hits") > 0


def test_adapters_of_joined_layers(checkpoints, tmp_path: Path):
    base = checkpoints("phi3", next(iter(CASES["phi3"])))
    kinds = {
        "all": {"r": 8, "target_modules": "all-linear", "lora_alpha": 12},
        "qkv": {
            "r": 4,
            "target_modules": ["qkv_proj"],
            "rank_pattern": {"1.self_attn.qkv_proj": 2},
        },
        "mlp": {"r": 3, "target_modules": r".*(gate_up|down)_proj", "use_rslora": True},
    }
    merged = {
        name: make_adapter(base, tmp_path / name, options, seed)
        for seed, (name, options) in enumerate(kinds.items())
    }
    stored = store(tmp_path, **{name: tmp_path / name / "adapter" for name in kinds})
    engine = make_engine(base, num_blocks=80, depth=1, enable_lora=True, max_loras=3)
    check(engine, base, merged, requests_of(stored, 8))


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text"])
def test_adapters_of_layers_with_states(checkpoints, tmp_path: Path, model_type: str):
    """All their projections, under their names in checkpoints."""
    base = checkpoints(model_type, next(iter(CASES[model_type])))
    options = {"r": 8, "target_modules": "all-linear", "lora_alpha": 4}
    merged = {"all": make_adapter(base, tmp_path, options, 1)}
    stored = store(tmp_path, all=tmp_path / "adapter")
    engine = make_engine(base, num_blocks=80, depth=1, enable_lora=True)
    check(engine, base, merged, requests_of(stored, 4))


def test_more_adapters_than_places_take_turns(adapters):
    base, stored, merged = adapters("llama")
    engine = make_engine(base, num_blocks=60, depth=2, enable_lora=True, max_cpu_loras=2)
    check(engine, base, merged, requests_of(stored, 12))


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"model_impl": "transformers"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_adapters_beside(adapters, options):
    base, stored, merged = adapters("llama")
    engine = make_engine(base, num_blocks=80, depth=1, enable_lora=True, max_loras=3, **options)
    check(engine, base, merged, requests_of(stored, 8))


def test_adapters_without_the_library(adapters, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "library", lambda: None)
    base, stored, merged = adapters("llama")
    engine = make_engine(base, num_blocks=80, depth=1, enable_lora=True, max_loras=3)
    check(engine, base, merged, requests_of(stored, 8))


@pytest.mark.parametrize(
    ("model_type", "queries"), [("deepseek_v2", "q_proj"), ("deepseek_v3", "q_b_proj")]
)
def test_adapters_of_layers_whose_rows_are_in_another_order(
    checkpoints, tmp_path, model_type, queries
):
    base = checkpoints(model_type, next(iter(CASES[model_type])))
    targets = [queries, "kv_a_proj_with_mqa", "o_proj"]
    options = {"r": 4, "target_modules": targets, "lora_alpha": 12}
    merged = make_adapter(base, tmp_path, options, seed=1)
    stored = store(tmp_path, it=tmp_path / "adapter")
    engine = make_engine(base, num_blocks=80, depth=1, enable_lora=True)
    check(engine, base, {"it": merged}, requests_of(stored, 4))


def test_an_adapter_of_what_all_tokens_go_through_beside_experts(checkpoints, tmp_path: Path):
    """PEFT would take experts for it, too: it is merged here."""
    base = checkpoints("deepseek_v2", next(iter(CASES["deepseek_v2"])))
    merged = tmp_path / "merged"
    shapes = {}
    shutil.copytree(base, merged)
    tensors = load_file(base / "model.safetensors")
    names = [f"model.layers.1.mlp.shared_experts.{leaf}_proj" for leaf in ("up", "down")]
    for name in names:
        outputs, inputs = tensors[f"{name}.weight"].shape
        peft = f"base_model.model.{name}"
        shapes |= {f"{peft}.lora_A.weight": (4, inputs), f"{peft}.lora_B.weight": (outputs, 4)}
    write_adapter(tmp_path / "adapter", shapes=shapes)
    added = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in names:
        a, b = (added[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        tensors[f"{name}.weight"] += 8 / 4 * b @ a
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    stored = store(tmp_path, it=tmp_path / "adapter")
    engine = make_engine(base, num_blocks=80, depth=1, enable_lora=True)
    check(engine, base, {"it": merged}, requests_of(stored, 4))
