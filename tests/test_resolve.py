"""Resolve: every "auto" from config, model and machine; what cannot work together is refused."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
from servd.config import Config, choices, options_by_name
from servd.config.machine import Machine, look_at_machine
from servd.config.resolve import resolve

SPEC = ModelSpec(
    folder="/m",
    model_type="llama",
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_position_embeddings=2048,
    dtype="bfloat16",
    eos_token_ids=[3],
    config={},
)
CPU = Machine()
CUDA = Machine(num_gpus=2, torch_has_cuda=True)


def decide(machine=CPU, **options):
    return resolve(Config.load(options), SPEC, machine)


def test_on_a_cpu():
    config = decide(model="org/name")
    assert (config.parallel.device, config.parallel.executor) == ("cpu", "uniproc")
    assert config.model.dtype == "float32"
    assert config.model.max_model_len == 2048
    assert config.model.served_model_name == ["org/name"]
    assert config.scheduler.async_scheduling is False


def test_on_cuda():
    config = decide(CUDA)
    assert config.parallel.device == "cuda"
    assert config.model.dtype == "bfloat16"
    assert config.scheduler.async_scheduling is True


@pytest.mark.parametrize(
    ("config", "num_ranks", "messages"),
    [
        ({}, 2, "the model has no experts"),
        ({"num_experts": 8}, 1, "one device has all experts"),
        ({"n_routed_experts": 8}, 2, None),
    ],
)
def test_experts_that_are_not_spread_are_said(config, num_ranks, messages, caplog):
    spec = msgspec.structs.replace(SPEC, config=config)
    options = {"enable_expert_parallel": True, "tensor_parallel_size": num_ranks}
    resolve(Config.load(options), spec, CPU)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ([f"--enable-expert-parallel has no effect: {messages}"] if messages else [])


def test_only_cuda_compiles():
    machine = msgspec.structs.replace(CUDA, has_triton=True)
    assert decide(machine, compile=True).model.compile and not decide(machine).model.compile
    with pytest.raises(ConfigError, match="--compile is for CUDA: on a cpu, torch cannot compile"):
        decide(machine, compile=True, device="cpu")
    with pytest.raises(ConfigError, match="--compile needs the package triton"):
        decide(CUDA, compile=True)


def test_batch_invariance_is_for_what_has_kernels_for_it():
    machine = msgspec.structs.replace(CUDA, has_triton=True)
    assert decide(machine, batch_invariant=True).model.batch_invariant
    for options, why in [
        ({"device": "cpu"}, "for CUDA: on a cpu"),
        ({"tensor_parallel_size": 2}, "no kernels for --tensor-parallel-size"),
        ({"quantization": "fp8"}, "no kernels for --quantization"),
        ({"compile": True}, "no kernels for --compile"),
        ({"enable_lora": True}, "no kernels for --enable-lora"),
    ]:
        with pytest.raises(ConfigError, match=why):
            decide(machine, batch_invariant=True, **options)
    with pytest.raises(ConfigError, match="--batch-invariant needs the package triton"):
        decide(CUDA, batch_invariant=True)


def test_two_devices_need_a_process_each():
    assert decide(CUDA, tensor_parallel_size=2).parallel.executor == "multiproc"


def test_kv_heads_may_be_fewer_than_devices():
    assert decide(CPU, tensor_parallel_size=8).parallel.num_workers == 8  # 4 of 8 heads
    with pytest.raises(ConfigError, match="16 must divide the model's 8 heads"):
        decide(CPU, tensor_parallel_size=16)


def test_steps_in_flight_are_one_more_than_the_stages():
    config = decide(pipeline_parallel_size=2)
    assert config.parallel.executor == "multiproc" and config.num_steps_in_flight == 2
    assert decide(CUDA, pipeline_parallel_size=2).num_steps_in_flight == 3
    assert [decide(machine).num_steps_in_flight for machine in (CPU, CUDA)] == [1, 2]


def test_a_gpu_with_a_cpu_build_of_torch_falls_back_to_cpu_with_a_warning(caplog):
    config = decide(Machine(num_gpus=1, torch_has_cuda=False))
    assert config.parallel.device == "cpu"
    assert "CUDA build" in caplog.text


GIVEN = {
    "cpu_activation_dtype": "float32",
    "kv_cache_dtype": "bfloat16",
    "device": "cpu",
    "dtype": "float16",
    "shorten_max_model_len": False,
    "max_model_len": 100,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 7,
    "async_scheduling": True,
    "served_model_name": ["x"],
    "executor": "fake",
    "block_size": 4,
    "model_impl": "servd",
}


def test_a_folder_is_known_by_its_own_name_too(tmp_path):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    config = resolve(Config.load({"model": str(folder)}), SPEC, CPU)
    assert config.model.served_model_name == ["gpt2", str(folder)]


def test_types_of_activations_and_of_the_kv_cache():
    def types(machine=CPU, **options):
        config = decide(machine, **options)
        return config.model.cpu_activation_dtype, config.cache.kv_cache_dtype

    assert types() == ("float32", "float32")
    assert types(dtype="bfloat16") == ("float32", "bfloat16")
    assert types(quantization="int8") == ("int8", "bfloat16")
    assert types(quantization="int8", dtype="float16") == ("int8", "float16")
    assert types(quantization="int8", cpu_activation_dtype="float32") == ("float32", "float32")
    assert types(CUDA, quantization="int8") == ("auto", "bfloat16")


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    stated = {"quantization_config": {"quant_method": "gguf", "has_blocks": True}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    spec = msgspec.structs.replace(SPEC, folder=str(tmp_path))
    assert resolve(Config.load({}), spec, CPU).cache.kv_cache_dtype == "bfloat16"
    with pytest.raises(ConfigError, match="--quantization int8: .* quantized already, by gguf"):
        resolve(Config.load({"quantization": "int8"}), spec, CPU)


def test_what_is_given_is_kept():
    config = Config.load(GIVEN)
    assert resolve(config, SPEC, CUDA) == config


@given(
    machine=st.sampled_from([CPU, CUDA]),
    max_num_seqs=st.none() | st.integers(1, 100_000),
    budget=st.none() | st.integers(1, 100_000),
    max_model_len=st.none() | st.integers(1, 2048),
)
def test_resolving_twice_changes_nothing_and_a_step_holds_a_token_of_each(
    machine, max_num_seqs, budget, max_model_len
):
    options = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
    }
    try:
        config = decide(machine, **options)
    except ConfigError:
        return
    assert config.scheduler.max_num_batched_tokens >= config.scheduler.max_num_seqs
    assert config.model.max_model_len <= SPEC.max_position_embeddings
    assert resolve(config, SPEC, machine) == config


@pytest.mark.parametrize(
    ("machine", "options", "parts"),
    [
        (CPU, {"device": "cuda"}, ["--device cuda", "CUDA build"]),
        (
            CUDA,
            {"tensor_parallel_size": 4},
            ["--tensor-parallel-size 4", "2 device", "CUDA_VISIBLE_DEVICES"],
        ),
        (CPU, {"tensor_parallel_size": 3}, ["--tensor-parallel-size 3", "4 key-value heads"]),
        (CUDA, {"tensor_parallel_size": 2, "executor": "uniproc"}, ["uniproc", "multiproc"]),
        (
            CUDA,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            ["--tensor-parallel-size 2 with --pipeline-parallel-size 2", "2 device"],
        ),
        (CPU, {"pipeline_parallel_size": 2, "executor": "uniproc"}, ["uniproc", "multiproc"]),
        (
            CPU,
            {"pipeline_parallel_size": 3},
            ["--pipeline-parallel-size 3", "at most 2, the model's layers"],
        ),
        *(
            (CPU, {"pipeline_parallel_size": 2} | options, ["--pipeline-parallel-size 2", hint])
            for options, hint in (
                ({"speculative_config": '{"method": "ngram"}'}, "--speculative-config: leave"),
                ({"enable_lora": True}, "--enable-lora: leave"),
                (
                    {"kv_offloading_size": 1.0},
                    "--kv-offloading-size, --kv-cache-dir and --kv-transfer-config: leave",
                ),
                ({"model_impl": "transformers"}, "layers that transformers computes"),
            )
        ),
        (CPU, {"max_model_len": 4096}, ["--max-model-len 4096", "2048"]),
        (CPU, {"max_num_batched_tokens": 8, "max_num_seqs": 9}, ["8", "--max-num-seqs 9"]),
        (CPU, {"headless": True, "attach": "/d"}, ["--headless", "--attach"]),
        (
            CPU,
            {"per_request_spec_decode_metrics": "summary"},
            ["--per-request-spec-decode-metrics", "add --speculative-config"],
        ),
        (CPU, {"headless": True}, ["--headless", "--ipc-dir"]),
        (CPU, {"max_loras": 4, "lora_dir": "/"}, ["--max-loras, --lora-dir", "--enable-lora"]),
        (
            CPU,
            {"cpu_activation_dtype": "int8"},
            ["--cpu-activation-dtype", "--quantization int8 or int4"],
        ),
        (
            CPU,
            {"quantization": "int8", "quantization_imatrix": "/file"},
            ["--quantization-imatrix", "add --quantization int4"],
        ),
        *(
            (CUDA, {"kv_cache_dtype": name}, [f"--kv-cache-dtype {name}", "on a GPU, use fp8"])
            for name in ("int8", "float16")
        ),
        (
            CPU,
            {"attention_backend": "fast"},
            ["--attention-backend 'fast'", "auto", "native", "torch_sdpa"],
        ),
        (CPU, {"tool_call_parser": "hermez"}, ["--tool-call-parser 'hermez'", "none", "hermes"]),
        (CPU, {"reasoning_parser": "thoughts"}, ["--reasoning-parser 'thoughts'", "none", "qwen3"]),
    ],
)
def test_impossible_settings_are_refused_with_numbers(machine, options, parts):
    with pytest.raises(ConfigError) as error:
        decide(machine, **options)
    for part in parts:
        assert part in str(error.value)


def test_look_at_machine_agrees_with_torch():
    import torch

    machine = look_at_machine()
    assert machine.torch_has_cuda == (torch.version.cuda is not None)
    if machine.torch_has_cuda:
        assert machine.num_gpus == torch.cuda.device_count()


PACKAGES = {
    "executor": "servd.core.executor",
    "quantization": "servd.worker.quantization",
    "attention_backend": "servd.worker.attention",
}


@pytest.mark.parametrize("option", PACKAGES)
def test_what_a_plugin_option_may_be_are_the_files_of_its_package(option):
    section, field = options_by_name()[option]
    names = choices(field.type)
    assert set(plugins.names(PACKAGES[option])) <= set(names)
    for value in names:
        assert getattr(getattr(Config.load({option: value}), section), option) == value
    with pytest.raises(ConfigError, match=f"there are: {', '.join(names)}"):
        decide(**{option: "nonsense"})


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram"}},
        {"kv_transfer_config": {"kv_role": "kv_producer"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_of_layers_that_keep_a_state_only_the_last_token_s_is_there(options: dict[str, Any]):
    config = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
    spec = msgspec.structs.replace(SPEC, model_type="qwen3_next", config=SPEC.config | config)
    resolved = resolve(Config.load({}), spec, CPU)
    assert resolved.cache.enable_prefix_caching and not resolved.model.enforce_eager
    flag = next(iter(options)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag}.*.*(leave it out|remove the options)"):
        resolve(Config.load(options), spec, CPU)


def test_an_encoder_computes_prompts_whole():
    spec = msgspec.structs.replace(SPEC, model_type="bert", architecture="BertModel")

    def decide(**options):
        return resolve(Config.load(options), spec, CPU)

    config = decide()
    assert not config.cache.enable_prefix_caching and config.model.enforce_eager
    assert not config.scheduler.enable_chunked_prefill
    assert config.scheduler.max_num_batched_tokens == config.model.max_model_len == 2048
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 512 is below the 2048 tokens"):
        decide(max_num_batched_tokens=512)
    with pytest.raises(
        ConfigError, match="--kv-cache-dir, --kv-offloading-size and --kv-transfer-config need"
    ):
        decide(kv_offloading_size=1)
    with pytest.raises(ConfigError, match="--model-impl transformers has no encoders"):
        decide(model_impl="transformers")
    for option, value in (
        ("speculative_config", "ngram"),
        ("tool_call_parser", "hermes"),
        ("reasoning_parser", "deepseek_r1"),
    ):
        flag = option.replace("_", "-")
        with pytest.raises(ConfigError, match=f"--{flag} .* bert is an encoder.*: leave it out"):
            decide(**{option: value})
    assert decide(tool_call_parser="none") == config.replace(tool_call_parser="none")


def test_several_engines_need_devices_and_api_servers_of_their_own():
    two = {"executor": "fake", "data_parallel_size": 2}
    for option in ({"attach": "/run/servd"}, {"headless": True, "ipc_dir": "/run/servd"}):
        with pytest.raises(ConfigError, match="supports one engine.*--api-server-count"):
            resolve(Config.load(two | option), FAKE_SPEC, Machine())
    gpus = Machine(num_gpus=1, torch_has_cuda=True)
    with pytest.raises(ConfigError, match="--data-parallel-size 2: the CUDA driver shows 1 dev"):
        resolve(Config.load(two), FAKE_SPEC, gpus)
    with pytest.raises(ConfigError, match="behind a load balancer"):
        Config.load({"data_parallel_multi_port_external_lb": True})
