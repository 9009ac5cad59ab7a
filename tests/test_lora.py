"""Adapters as files: what is read, what is refused in which words, and the store."""

import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from servd.base.errors import ConfigError
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.lora import CONFIG, TENSORS, AdapterFiles, _is_finite, parse_module
from tests.adapters import Q_PROJ, write_adapter

LAYER = "layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"k_proj": 3, "q_proj": 12}}, 3.0),
        ({"alpha_pattern": {r"layers\.\d+\..*": 20, "q_proj": 12}}, 5.0),
        ({"r": 99, "rank_pattern": {"self_attn.q_proj": 4}}, 2.0),
        ({"r": 99, "rank_pattern": {r"layers\.(0|1)\.self_attn\.(?:q|k)_proj": 4}}, 2.0),
        ({"lora_alpha": None}, 2.0),
        ({"target_modules": r".*\.q_proj"}, 2.0),
    ],
    ids=str,
)
def test_factors_follow_patterns(tmp_path: Path, config, scale: float):
    files = AdapterFiles(write_adapter(tmp_path, **config))
    assert files.modules == {LAYER: (f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_B.weight", scale)}
    assert files.rank == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "type IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"r": 8}, "has rank 8"),
        ({"rank_pattern": {"(": 3}}, "cannot be read"),
        ({"lora_alpha": "much"}, r"cannot be read: .*\$\.lora_alpha"),
        ({"exclude_modules": 3}, r"cannot be read: .*\$\.exclude_modules"),
        ({"use_rslora": "no"}, r"cannot be read: .*\$\.use_rslora"),
        ({"rank_pattern": [1]}, "cannot be read"),
        ({"rank_pattern": {r"(?:\w|\w\w|\.|.)+q_proj.": 4}}, "rank_pattern takes too long"),
        ({"alpha_pattern": {r"(?:\w|\w\w|\.|.)+j(?<!j)": 4}}, "alpha_pattern takes too long"),
        ({"more": "x" * (1 << 20)}, "the most is 1048576"),
    ],
    ids=str,
)
def test_what_is_not_a_plain_sum_is_refused_by_name(tmp_path, monkeypatch, config, words: str):
    monkeypatch.setattr("servd.checkpoint.lora.PATTERN_SECONDS", 0.5)
    write_adapter(tmp_path, **config)
    with pytest.raises(ConfigError, match=words):
        AdapterFiles(tmp_path)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({f"{Q_PROJ}.lora_A.weight": (4, 8)}, "without the other factor"),
        ({"model.layers.0.q_proj.lora_A.weight": (4, 8)}, "not of a linear layer"),  # PEFT drops it
        ({f"{Q_PROJ}.lora_embedding_A": (4, 8)}, "not of a linear layer"),
        ({f"{Q_PROJ}.lora_magnitude_vector": (4, 8)}, "not of a linear layer"),
        ({f"base_model.model.{'a' * 300_000}.lora_A.weight": (4, 8)}, "not of a linear layer"),
        (
            {
                f"base_model.model.{tower}.layers.0.q.lora_{half}.weight": (4, 4)
                for tower in ("model", "language_model.model")
                for half in "AB"
            },
            "two modules are called layers.0.q",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": (4, 8),
                "base_model.model.lm_head.lora_B.weight": (6, 4),
            },
            "lm_head is not part of a layer",
        ),
    ],
    ids=str,
)
def test_tensors_that_have_no_place_are_refused(tmp_path: Path, shapes, words: str):
    write_adapter(tmp_path, shapes=shapes)
    with pytest.raises(ConfigError, match=words):
        AdapterFiles(tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path):
    files = AdapterFiles(write_adapter(tmp_path))
    files.check(4, {LAYER: (8, 6)})
    with pytest.raises(ConfigError, match="raise --max-lora-rank"):
        files.check(2, {})
    with pytest.raises(ConfigError, match="for another model"):
        files.check(4, {LAYER: (8, 7)})
    with pytest.raises(ConfigError, match=f"no linear layer {LAYER}"):
        files.check(4, {"layers.0.other": (8, 6)})


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("mlp.experts.3.up_proj", "is of experts, each of which computes a few of the tokens"),
        ("self_attn.kv_b_proj", "is applied head by head, .*: adapters cannot change it; train it"),
        ("mlp.gate", "chooses the experts"),
        ("mlp.shared_experts.up_proj", "the model has no linear layer layers.0.mlp.shared_experts"),
    ],
)
def test_layers_that_adapters_cannot_change_are_said(tmp_path: Path, module: str, words: str):
    name = f"base_model.model.model.layers.0.{module}"
    shapes = {f"{name}.lora_A.weight": (4, 8), f"{name}.lora_B.weight": (6, 4)}
    with pytest.raises(ConfigError, match=words):
        AdapterFiles(write_adapter(tmp_path, shapes=shapes)).check(8, {"layers.0.other": (8, 6)})


@pytest.mark.parametrize("size", [0, 5, 50, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, size: int):
    file = write_adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        AdapterFiles(tmp_path)


@pytest.mark.parametrize("about", [{"data_offsets": [0]}, {"data_offsets": {}}, {}], ids=str)
def test_a_header_of_nonsense_is_refused(tmp_path: Path, about):
    header = json.dumps({f"{Q_PROJ}.lora_A.weight": about}).encode()
    file = write_adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="cannot be read"):
        AdapterFiles(tmp_path)


def test_pickles_are_refused(tmp_path: Path):
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        AdapterFiles(tmp_path)


def test_a_replaced_adapter_keeps_its_files_for_those_who_have_it(tmp_path: Path):
    source, store = tmp_path / "source", AdapterStore(tmp_path / "store")
    before = store.load("a", str(write_adapter(source, seed=1)), 16, {})
    bytes_before = (source / "adapter_model.safetensors").read_bytes()
    after = store.load("a", str(write_adapter(source, seed=2)), 16, {})
    assert before.digest != after.digest and store.read_adapters() == {"a": after}
    assert Path(before.folder, "adapter_model.safetensors").read_bytes() == bytes_before
    again = store.load("b", str(write_adapter(source, seed=1)), 16, {})
    assert (again.digest, again.folder) == (before.digest, before.folder)


def test_a_name_that_is_taken_is_kept_refused_or_given_to_another(tmp_path: Path):
    store = AdapterStore(tmp_path / "store")
    folders = [str(write_adapter(tmp_path / str(seed), seed=seed)) for seed in range(2)]
    first = store.load("a", folders[0], 16, {}, "refuse")
    assert store.load("a", folders[1], 16, {}, "keep") == first
    with pytest.raises(ConfigError, match="load_inplace"):
        store.load("a", folders[1], 16, {}, "refuse")
    assert store.load("a", folders[1], 16, {}).digest != first.digest


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str):
    write_adapter(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(ConfigError, match="is no file"):
        AdapterStore(tmp_path / "store").load("a", str(tmp_path / "a"), 16, {})


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_json_that_is_too_deep_is_refused(tmp_path: Path, name: str):
    write_adapter(tmp_path)
    deep = b'{"a":' + b"[" * 200_000
    (tmp_path / name).write_bytes(
        deep if name == CONFIG else len(deep).to_bytes(8, "little") + deep
    )
    with pytest.raises(ConfigError, match=name):
        AdapterFiles(tmp_path)


def test_replaced_adapters_are_kept_for_an_hour(tmp_path: Path):
    store = AdapterStore(tmp_path / "store")
    old = store.load("a", str(write_adapter(tmp_path / "a", seed=1)), 16, {})
    os.utime(old.folder, (0, 0))
    store.load("a", str(write_adapter(tmp_path / "a", seed=2)), 16, {})
    assert Path(old.folder).exists()


def test_files_of_unloaded_adapters_are_removed_in_time(tmp_path: Path):
    store = AdapterStore(tmp_path / "store")
    old = store.load("old", str(write_adapter(tmp_path / "a", seed=1)), 16, {})
    assert store.unload("old") == old and store.unload("old") is None
    assert Path(old.folder).exists()
    os.utime(old.folder, (0, 0))
    new = store.load("new", str(write_adapter(tmp_path / "b", seed=2)), 16, {})
    assert not Path(old.folder).exists() and store.read_adapters() == {"new": new}


def test_all_processes_see_each_change_at_once(tmp_path: Path):
    first, second = AdapterStore(tmp_path / "store"), AdapterStore(tmp_path / "store")
    folders = [write_adapter(tmp_path / str(seed), seed=seed) for seed in range(8)]
    assert second.read_adapters() == {}

    def load(number: int) -> None:
        for seed, folder in enumerate(folders):
            loaded = first.load(f"{number}-{seed}", str(folder), 16, {})
            assert second.read_adapters()[f"{number}-{seed}"] == loaded

    threads = [threading.Thread(target=load, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(first.read_adapters()) == len(AdapterStore(tmp_path / "store").read_adapters()) == 32


def test_modules_are_given_as_text_or_json():
    assert parse_module("sql=/a/b=c") == ("sql", "/a/b=c")
    as_json = json.dumps({"name": "sql", "path": "/a", "base_model_name": "org/m"})
    assert parse_module(as_json) == ("sql", "/a")
    for wrong in ("sql", "=/a", "sql=", '{"name": "sql"}', "{"):
        with pytest.raises(ConfigError, match="--lora-modules"):
            parse_module(wrong)


def test_many_patterns_have_little_time(tmp_path: Path, monkeypatch):
    folder = write_adapter(tmp_path, rank_pattern={f".*q.*Q{i}": 4 for i in range(1000)})
    AdapterFiles(folder)
    monkeypatch.setattr("servd.checkpoint.lora.PATTERN_SECONDS", 0.001)
    with pytest.raises(ConfigError, match="rank_pattern takes too long to compare"):
        AdapterFiles(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_values_that_are_not_finite_are_found(value: float, dtype: str):
    numbers = np.random.default_rng(0).standard_normal(10_000).astype(dtype)
    kind = {"<f4": "F32", "<f2": "F16"}[dtype]
    assert _is_finite(numbers.tobytes(), kind)
    for place in (0, 777, 9_999):
        damaged = numbers.copy()
        damaged[place] = value
        assert not _is_finite(damaged.tobytes(), kind)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_values_of_bfloat16_that_are_not_finite_are_found(bits: int):
    numbers = np.random.default_rng(0).standard_normal(1000).astype("<f4").view("<u4") >> 16
    numbers = numbers.astype("<u2")
    assert _is_finite(numbers.tobytes(), "BF16")
    numbers[7] = bits
    assert not _is_finite(numbers.tobytes(), "BF16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("half", ["A", "B"])
def test_an_adapter_with_such_values_is_refused_with_the_tensor_s_name(tmp_path, value, half):
    file = write_adapter(tmp_path) / TENSORS
    tensors = load_file(file)
    tensors[f"{Q_PROJ}.lora_{half}.weight"][3, 2] = value
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=f"{Q_PROJ}.lora_{half}.weight has values that are NaN"):
        AdapterFiles(tmp_path).check_values()


@pytest.mark.parametrize("begin", [b"9", b"4", b"1"])
def test_an_adapter_with_wrong_offsets_is_refused_with_the_tensor_s_name(tmp_path, begin):
    file = write_adapter(tmp_path) / TENSORS
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"data_offsets":[0', b'"data_offsets":[' + begin, 1))
    with pytest.raises(ConfigError, match=f"tensor {Q_PROJ}.lora_A.weight is at bytes"):
        AdapterFiles(tmp_path)


def write_adapter_of(folder: Path, modules: list[str], **config) -> Path:
    names = [f"base_model.model.{module}.lora_{half}.weight" for module in modules for half in "AB"]
    return write_adapter(folder, shapes=dict.fromkeys(names, (4, 4)), **config)


@pytest.mark.parametrize(
    "prefix",
    ["model.", "", "transformer.", "model.language_model.", "language_model.model.", "_orig_mod."],
)
def test_a_language_model_has_known_names(tmp_path: Path, prefix: str):
    files = AdapterFiles(write_adapter_of(tmp_path, [f"{prefix}layers.0.mlp.up_proj"]))
    assert [*files.modules] == ["layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    "prefix",
    [
        "model.vision_tower.vision_model.encoder.",
        "model.visual.",
        "audio_tower.",
        "model.multi_modal_projector.",
        "mtp.",
        "model.vision_model.",
        "talker.model.",
        "model.qformer.",
        "model.language_model.model.layers.0.vision.",
    ],
)
def test_an_adapter_of_another_part_of_a_model_is_refused(tmp_path: Path, prefix: str):
    modules = ["model.layers.0.self_attn.q_proj", f"{prefix}layers.1.self_attn.q_proj"]
    with pytest.raises(ConfigError, match=prefix.split(".")[-2]):
        AdapterFiles(write_adapter_of(tmp_path, modules)).check(8, {LAYER: (4, 4)})


SOME = [
    f"model.layers.{i}.{name}"
    for i in (0, 1, 11)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp).*?(?:q_proj|o_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attn|mlp)\.(?:(?:q_proj|up_proj)))"
)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["proj"]},
        {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]},
        {"target_modules": "q_proj"},
        {"target_modules": r".*\.1\..*proj"},
        {"target_modules": UNSLOTH},
        {"target_modules": r".*proj", "exclude_modules": ["up_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 11]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]},
        {"target_modules": ["proj"], "layers_to_transform": [0], "layers_pattern": ["layers"]},
    ],
    ids=str,
)
def test_the_modules_are_those_of_peft(tmp_path: Path, caplog, config):
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    stated = peft.LoraConfig(**config)
    expected = [name for name in SOME if check_target_module_exists(stated, name)]
    write_adapter_of(tmp_path, SOME, **config)
    if not expected:
        with pytest.raises(ConfigError, match="target_modules"):
            AdapterFiles(tmp_path)
        return
    files = AdapterFiles(tmp_path)
    assert files.modules.keys() == {name.removeprefix("model.") for name in expected}
    assert ("target_modules" in caplog.text) is (len(expected) < len(SOME))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "("}, "cannot be read"),
        ({"target_modules": r"(?:\w|\w\w|\.|.)+q_proj."}, "target_modules takes too long"),
        ({"target_modules": "(" * 9999}, "cannot be read"),
        ({"target_modules": 3}, "cannot be read"),
        ({"target_modules": ["q_proj"], "layers_to_transform": "1"}, "layers_to_transform"),
        ({"layers_to_transform": [1], "target_modules": ["q_proj"], "layers_pattern": "("}, "pat"),
        ({"kasa_config": {"x": 1}}, "kasa_config"),
        ({"velora_config": {"x": 1}}, "velora_config"),
        ({"lora_scale": 3}, "lora_scale"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_keys_that_servd_does_not_understand_are_refused(tmp_path, monkeypatch, config, words: str):
    monkeypatch.setattr("servd.checkpoint.lora.PATTERN_SECONDS", 0.5)
    write_adapter(tmp_path, **config)
    with pytest.raises(ConfigError, match=words):
        AdapterFiles(tmp_path)


def test_a_key_that_servd_does_not_understand_may_be_allowed(tmp_path: Path, caplog):
    adapter = write_adapter(tmp_path / "a", new_gate=2)
    with pytest.raises(ConfigError, match="new_gate"):
        AdapterStore(tmp_path / "strict").load("a", str(adapter), 64, {})
    with caplog.at_level(logging.WARNING, logger="servd.checkpoint"):
        AdapterStore(tmp_path / "store", allow_unknown_keys=True).load("a", str(adapter), 64, {})
    assert ["new_gate (2)" in record.getMessage() for record in caplog.records] == [True]


def test_every_key_that_peft_writes_is_understood(tmp_path: Path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / CONFIG).read_text())
    assert AdapterFiles(write_adapter(tmp_path, **stated)).rank == 4
    AdapterFiles(write_adapter(tmp_path, **stated | {"peft_type": "lora"}))
