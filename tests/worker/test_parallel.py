"""Two ranks give the logits and tokens of one."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.multiprocessing as mp

from servd.base.errors import ConfigError
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.model_spec import read_spec
from servd.messages.adapter import Adapter
from servd.messages.engine import NewRequest, ScheduledRequest, SchedulerOutput
from servd.worker.device.parallel import Parallel
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.linear import ColumnParallelLinear
from servd.worker.worker import Worker
from tests.adapters import write_adapter
from tests.parity.causal_classes import make
from tests.parity.families import CASES, GPT2, LLAMA, QWEN3_MOE, greedy, make_checkpoint
from tests.worker.driver import GREEDY, config_for

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
NUM_OUTPUTS = 8


def generate(
    rank: int,
    size: int,
    folder: str,
    adapter: Adapter | None,
    address: str | None,
    result: str,
    more_options: dict[str, object],
) -> None:
    """Run one rank of a model, then with an adapter; write tokens and logits of the first steps."""
    impl = "transformers" if folder.endswith("through") else "auto"
    options = {"enable_lora": adapter is not None, "model_impl": impl} | more_options
    worker = Worker(
        config_for(folder, tensor_parallel_size=size, **options),
        read_spec(folder),
        rank,
        lambda *_: None,
        address,
    )
    torch.set_num_threads(1)
    worker.load_model()
    worker.allocate_kv_cache(16)
    results = [answer(worker, name) for name in dict.fromkeys((None, adapter))]
    torch.save(results, f"{result}.{rank}")
    worker.shutdown()


def answer(worker: Worker, adapter: Adapter | None) -> tuple[list[int], torch.Tensor]:
    """The tokens of a request, and the logits of its first step."""
    new = NewRequest(
        slot=2,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=[],
        params=GREEDY,
        adapter=adapter,
    )
    free = [9, 4, 11, 3, 7, 2, 14, 0, 12, 5, 15, 1, 8, 13, 6, 10]
    num_groups = len(worker.runner.kv_windows)

    def blocks(count: int) -> list[int]:
        return [free.pop() for _ in range(count * num_groups)]

    first = ScheduledRequest(2, len(PROMPT), blocks(3))
    worker.execute_model(SchedulerOutput(1, [first], [new], [2]))
    assert (
        worker.runner.execute_model_state is not None
        and worker.runner.execute_model_state.computed is not None
    )
    logits = worker.runner.model.compute_logits(worker.runner.execute_model_state.computed[1][-1:])
    tokens = worker.sample_tokens().result().sampled_token_ids[0]
    for step in range(2, NUM_OUTPUTS + 1):
        needs_block = (len(PROMPT) + step - 1) % 4 == 1
        computed = len(PROMPT) + step - 2
        row = ScheduledRequest(2, 1, blocks(needs_block), num_computed_tokens=computed)
        worker.execute_model(SchedulerOutput(step, [row]))
        tokens += worker.sample_tokens().result().sampled_token_ids[0]
    return tokens, logits


def adapter_of(folder: Path, num_kv_heads: int) -> Adapter:
    """One of every layer that ranks share, of a small Llama."""
    shapes = {}
    size = 8 * num_kv_heads
    for module, inputs, outputs in (
        ("self_attn.k_proj", 48, size),
        ("self_attn.o_proj", 48, 48),
        ("mlp.up_proj", 48, 80),
        ("mlp.down_proj", 80, 48),
    ):
        name = f"base_model.model.model.layers.0.{module}"
        shapes |= {f"{name}.lora_A.weight": (4, inputs), f"{name}.lora_B.weight": (outputs, 4)}
    source = write_adapter(folder / "adapter", shapes=shapes)
    return AdapterStore(folder / "store").load("a", str(source), 16, {})


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("gpt2", GPT2 | {"n_inner": 71}, marks=pytest.mark.slow),
        ("llama", LLAMA | {"attention_bias": True}),
        ("llama", LLAMA | {"attention_bias": True, "num_key_value_heads": 1}),
        pytest.param(
            "olmo2",
            LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 1},
            marks=pytest.mark.slow,
        ),
        ("qwen3_moe", QWEN3_MOE),
        # B and C are on both ranks, and the norm is over both.
        ("mamba2", CASES["mamba2"]["one group, biases, tied"]),
        *(
            pytest.param(name, next(iter(CASES[name].values())), marks=pytest.mark.slow)
            for name in (
                "deepseek_v3",
                "gemma2",
                "gemma3_text",
                "gpt_oss",
                "granite",
                "granitemoehybrid",
                "lfm2",
                "lfm2_moe",
                "lfm3",
                "mamba2",
                "mixtral",
                "olmo2",
                "phi3",
                "qwen3_5_moe_text",
                "qwen3_5_text",
                "qwen3_next",
                "smollm3",
            )
        ),
    ],
)
def test_two_ranks_equal_one(tmp_path: Path, model_type: str, options: dict[str, object]):
    folder = make_checkpoint(tmp_path / "model", model_type, options)
    is_llama = model_type == "llama"
    check(folder, adapter_of(tmp_path, options["num_key_value_heads"]) if is_llama else None)


def test_neighbour_ranks_share_kv_heads():
    q = torch.arange(8.0)[:, None]  # 4 and 2 heads of 2
    k = torch.arange(10.0, 14.0)[:, None]
    for rank in range(4):
        parallel = Parallel(rank, 4)
        copies = [1, parallel.num_copies(2)]
        linear = ColumnParallelLinear(1, [8, 4], parallel, bias=True, copies=copies)
        for weight in (linear.weight, linear.bias):
            assert weight is not None
            for part, rows in enumerate((q, k)):
                weight.load(rows.reshape(-1, *weight.shape[1:]), part)
            rank_rows = torch.cat((q[2 * rank :][:2], k[2 * (rank // 2) :][:2]))
            assert torch.equal(weight.data.flatten(), rank_rows.flatten())
        assert linear.local_features == [2, 2]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("deepseek_v2", CASES["deepseek_v2"]["any group"]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("deepseek_v3", CASES["deepseek_v3"]["renormalized"]),
                ("gpt_oss", CASES["gpt_oss"]["sinks"]),
                ("granitemoehybrid", CASES["granitemoehybrid"]["experts, no positions"]),
                ("lfm2_moe", CASES["lfm2_moe"]["biased router"]),
                ("mixtral", CASES["mixtral"]["experts"]),  # 2 and 3 of them
                ("qwen3_moe", QWEN3_MOE),
                ("qwen3_5_moe_text", CASES["qwen3_5_moe_text"]["experts"]),
            )
        ),
    ],
)
def test_two_ranks_with_experts_of_their_own_equal_one(tmp_path, model_type, options):
    check(make_checkpoint(tmp_path / "model", model_type, options), enable_expert_parallel=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_that_cannot_meet_name_the_address_and_the_variable(monkeypatch, device):
    """GPUs meet over NCCL, their hosts over Gloo."""

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(
        "torch.distributed.init_process_group", Mock() if device == "cuda" else fail
    )
    monkeypatch.setattr("torch.distributed.new_group", fail)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    words = r"tcp://10\.0\.0\.1:29500: Gloo .* 127\.0\.1\.1.*GLOO_SOCKET_IFNAME"
    with pytest.raises(ConfigError, match=words):
        Parallel.connect(0, 2, torch.device(device), "tcp://10.0.0.1:29500")


def test_fewer_experts_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="2 experts are too few for 3 ranks; leave it out"):
        SparseMoE(8, 8, 2, 1, True, "silu", Parallel(0, 3, has_whole_experts=True))


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gpt_neox", "GPTNeoXForCausalLM"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", "LlamaForCausalLM"),
                ("glm", "GlmForCausalLM"),
                ("olmo2", "Olmo2ForCausalLM"),
                ("starcoder2", "Starcoder2ForCausalLM"),
            )
        ),
    ],
)
def test_two_ranks_equal_one_through_transformers(tmp_path, model_type, architecture):
    check(make(tmp_path / "through", model_type, architecture))


def check(folder: Path, adapter: Adapter | None = None, **options: object) -> None:
    """Tokens and logits of two ranks are those of one; of greedy tokens, transformers' own."""
    tmp_path = folder.parent
    generate(0, 1, str(folder), adapter, None, str(tmp_path / "one"), options)
    address = f"file://{tmp_path}/rendezvous"
    two = str(tmp_path / "two")
    mp.start_processes(
        generate, (2, str(folder), adapter, address, two, options), nprocs=2, start_method="fork"
    )
    expected = torch.load(tmp_path / "one.0")
    assert PROMPT + expected[0][0] == greedy(folder, PROMPT, NUM_OUTPUTS)
    assert adapter is None or not torch.allclose(expected[1][1], expected[0][1], atol=0.1)
    for rank in range(2):
        of_rank = torch.load(tmp_path / f"two.{rank}")
        for (tokens, logits), (its_tokens, its_logits) in zip(expected, of_rank, strict=True):
            assert its_tokens == tokens
            torch.testing.assert_close(its_logits, logits, atol=1e-4, rtol=0)
