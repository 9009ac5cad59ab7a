"""Trees of drafts: several for the same place, each on its own branch."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams
from servd.worker.batch.draft_tree import DraftTree
from servd.worker.spec_decode.medusa import best_paths
from tests.core.engines import Log
from tests.parity.families import CASES, LLAMA, make_checkpoint, reference
from tests.worker.driver import Driver, config_for
from tests.worker.recorded import use_recorded_runner
from tests.worker.spec_decode import checkpoints
from tests.worker.spec_decode.checkpoints import draw, write
from tests.worker.spec_decode.drafting import drafts_of
from tests.worker.spec_decode.test_proposers import FEW, assert_equal, serve_all
from tests.worker.test_overlap import serve

NUM_DRAFTS = 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of so few tokens that heads of random weights are often right somewhere."""
    folder = tmp_path_factory.mktemp("target")
    return make_checkpoint(folder, "llama", LLAMA | {"vocab_size": 12, "head_dim": 16})


def tree_for(target: Path, folder: Path, **options: Any) -> dict[str, Any]:
    config = checkpoints.medusa(target, folder) | {"num_speculative_tokens": NUM_DRAFTS}
    return config | {"method": "medusa"} | options


def test_each_place_sees_its_branch_and_its_depth_is_its_position():
    tree = DraftTree([(0,), (1,), (0, 0), (1, 0), (0, 0, 2)], CPU)
    num_known = 100
    columns = num_known + torch.arange(-3, 6)
    places = torch.tensor([0, 0, 0, 0, 1, 2, 3, 4, 5])
    assert tree.positions(columns, places).tolist() == [97, 98, 99, 100, 101, 101, 102, 102, 103]
    assert tree.tails(columns, places)[4:].tolist() == [
        [99, 100, 101],
        [99, 100, 102],
        [100, 101, 103],
        [100, 102, 104],
        [101, 103, 105],
    ]
    assert tree.tails(torch.tensor([1, 3]), torch.tensor([0, 2])).tolist() == [[0, 0, 1], [0, 1, 3]]
    assert tree.parents.tolist() == [0, 0, 0, 1, 2, 3]
    assert tree.chain == [0, 2]


def test_the_best_paths_of_fewer_drafts_are_the_first_ones_of_more():
    paths = best_paths(60, 4)
    assert len(set(paths)) == 60 and max(map(len, paths)) == 4
    assert best_paths(9, 4) == paths[:9]
    assert all(path[:-1] in ((), *paths[:i]) for i, path in enumerate(paths))
    assert best_paths(3, 1) == [(0,), (1,), (2,)]


@torch.inference_mode()
@pytest.mark.parametrize("block_size", [4, 16], ids=["torch_sdpa", "native"])
def test_drafts_are_candidates_of_a_plain_implementation(target: Path, tmp_path: Path, block_size):
    """Also after drafts that were kept: their keys, values and hidden states went with them."""
    config = tree_for(target, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    paths = best_paths(NUM_DRAFTS, 3)
    for tokens, drafts, _ in drafts_of(target, config, NUM_DRAFTS, block_size=block_size):
        x = reference(target).base_model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        candidates = []
        for head in range(3):
            y = x
            for layer in range(2):
                y = y + F.silu(y @ weights[f"blocks.{head}.layers.{layer}.weight"].T)
            logits = y @ weights[f"lm_heads.{head}.weight"].T
            candidates.append(logits.argsort(descending=True).tolist())
        expected = [candidates[len(path) - 1][path[-1]] for path in paths]
        assert drafts == expected[: len(drafts)]


def random_requests(driver: Driver) -> list[int]:
    """Slots of requests whose tokens are drawn."""
    draws = (SamplingParams(temperature=1.5, seed=i, max_tokens=None) for i in range(6))
    return [driver.add([i, 5, 7], params) for i, params in enumerate(draws)]


def test_as_many_are_kept_as_a_walk_by_hand_finds(target, tmp_path, monkeypatch):
    plain = Driver(config_for(target))
    slots = random_requests(plain)
    plain.generate(slots, 80)
    texts = [plain.tokens[slot] for slot in slots]
    paths = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    monkeypatch.setattr("servd.worker.spec_decode.medusa.best_paths", lambda *_: paths)
    config = tree_for(target, tmp_path, num_speculative_tokens=len(paths))
    driver = Driver(config_for(target, speculative_config=config))
    slots = random_requests(driver)
    lengths = []
    for _ in range(16):
        drafts = {slot: driver.drafts[slot] for slot in slots}
        chunks = {slot: driver.num_left(slot) for slot in slots}
        output = driver.step(chunks, max_new_drafts=dict.fromkeys(slots, len(paths)))
        for slot, text, sampled in zip(slots, texts, output.sampled_token_ids, strict=True):
            start = len(driver.tokens[slot]) - len(sampled)
            drafted = dict(zip(paths, drafts[slot], strict=False))
            path: tuple[int, ...] = ()
            for token_id in text[start:]:
                children = [(*path, rank) for rank in range(3)]
                right = [child for child in children if drafted.get(child) == token_id]
                if not right:
                    break
                [path] = right
            assert sampled == text[start : start + len(path) + 1]
            lengths.append(len(sampled))
    assert {1, 2, 3, 4} == set(lengths)


def test_the_cache_holds_what_it_holds_without_drafts(target: Path, tmp_path: Path):
    """A conversation that continues, with cached blocks of texts that trees made, to the bit."""
    config = tree_for(target, tmp_path)
    driver = Driver(config_for(target, speculative_config=config, block_size=16))
    cold = Driver(config_for(target, block_size=16))
    slots = random_requests(driver)
    num_steps = 0
    while any(len(driver.tokens[slot]) < 50 for slot in slots):
        num_steps += 1
        chunks = {slot: driver.num_left(slot) for slot in slots}
        driver.step(chunks, max_new_drafts=dict.fromkeys(slots, NUM_DRAFTS))
    assert num_steps < 45, "some drafts were kept"
    for slot in slots:
        blocks = driver.blocks[slot][:3]
        text = driver.free(slot, keep_blocks=3) + [1, 2, 3]
        for runner, cached in ((driver, blocks), (cold, [])):
            new = runner.add(text, cached_blocks=cached)
            runner.step({new: runner.num_left(new)})
            if runner is driver:
                logits = driver.logits[new][0]
            else:
                assert torch.equal(cold.logits[new][0], logits)
            runner.free(new)


@pytest.mark.parametrize(("batch", "num_blocks", "depth"), [(1, 200, 2), (7, 40, 1), (7, 40, 2)])
def test_a_tree_changes_no_output(batch, num_blocks, depth, tiny_llama, tmp_path, counts):
    """Chunked prompts, penalties, grammars, preemption and all: see `SAMPLINGS`."""
    expected = serve_all(tiny_llama, 1, 1, 200, None)
    counts.clear()
    size = read_spec(tiny_llama).hidden_size
    num_tokens = 2 * len(FEW)
    tensors = {f"blocks.{i}.layers.0.weight": draw(size, size, seed=i) for i in range(3)}
    tensors["lm_heads.0.weight"] = draw(num_tokens, size)
    tensors["token_map"] = torch.arange(FEW.start, FEW.start + num_tokens)
    config = write(tmp_path, {}, tensors) | {"method": "medusa", "num_speculative_tokens": 24}
    log = serve_all(tiny_llama, batch, depth, num_blocks, config)
    assert_equal(log, expected)
    assert (log.total("num_preemptions") > 0) == (num_blocks == 40)
    assert 0 < sum(kept for _, kept in counts)


def serve_few_tokens(
    target: Path, depth: int, prompts: list[list[int]], **options: Any
) -> tuple[Log, list[list[int]]]:
    """Greedy, seeded and penalized requests over few tokens; and their texts."""
    samplings = [{"temperature": 0.0}, {"temperature": 1.0}, {"presence_penalty": 1.0}]
    requests = [
        EngineCoreRequest(
            str(i), prompt, SamplingParams(seed=i, max_tokens=30, logprobs=3, **samplings[i % 3])
        )
        for i, prompt in enumerate(prompts)
    ]
    log = serve(
        target,
        requests,
        depth,
        400,
        aborts=False,
        load_format="auto",
        max_num_seqs=4,
        max_num_batched_tokens=128,
        **{"max_model_len": 96} | options,
    )
    outputs = [log.token_ids(str(i)) for i in range(len(prompts))]
    return log, [prompt + tokens for prompt, tokens in zip(prompts, outputs, strict=True)]


def logprobs_of(log: Log) -> dict[str, list[object]]:
    return {
        name: [entry for output in outputs for entry in output.logprobs or []]
        for name, outputs in log.outputs.items()
    }


PROMPTS = [[random.Random(i).randrange(12) for _ in range(5 + 4 * i)] for i in range(6)]


@pytest.mark.parametrize("depth", [1, 2])
def test_native_kernels_give_the_same_bits_with_a_tree(target, tmp_path, depth, counts):
    """Log-probabilities, too: a draft's keys are added up in the order of its branch."""
    options: dict[str, Any] = {"block_size": 16}
    log, texts = serve_few_tokens(target, depth, PROMPTS, **options)
    counts.clear()
    options["speculative_config"] = tree_for(target, tmp_path)
    with_tree, same_texts = serve_few_tokens(target, depth, PROMPTS, **options)
    assert same_texts == texts
    assert logprobs_of(with_tree) == logprobs_of(log)
    assert sum(kept for _, kept in counts) > 10


def test_kept_drafts_move_in_every_group_of_layers(tmp_path: Path):
    """Blocks behind a window hold no numbers any more, and others' are theirs meanwhile."""
    options = CASES["gemma3_text"]["layer types"] | {"vocab_size": 4}
    folder = make_checkpoint(tmp_path, "gemma3_text", options)
    (tmp_path / "heads").mkdir()
    texts = []
    num_steps = []
    for drafts in ({}, {"speculative_config": tree_for(folder, tmp_path / "heads")}):
        driver = Driver(config_for(folder, **drafts))
        draw = random.Random(1)
        assert driver.ready.kv_windows == (None, 7, 7)
        driver.gives_back = True
        slots = [driver.add([draw.randrange(4) for _ in range(n)]) for n in (5, 17, 9)]
        num_steps.append(0)
        while short := [slot for slot in slots if len(driver.tokens[slot]) < 60]:
            max_new_drafts = dict.fromkeys(short, NUM_DRAFTS if drafts else 0)
            driver.step(
                {slot: driver.num_left(slot) for slot in short}, max_new_drafts=max_new_drafts
            )
            num_steps[-1] += 1
        texts.append([driver.tokens[slot][:60] for slot in slots])
    assert texts[0] == texts[1] and num_steps[1] < num_steps[0]


def test_graphs_take_a_tree(target, tmp_path, counts, monkeypatch):
    _, texts = serve_few_tokens(target, 2, PROMPTS)
    use_recorded_runner(monkeypatch)
    counts.clear()
    config = tree_for(target, tmp_path)
    assert serve_few_tokens(target, 2, PROMPTS, speculative_config=config)[1] == texts
    assert sum(kept for _, kept in counts) > 10


def test_what_computes_no_tree_says_so(target, tmp_path, monkeypatch):
    config = tree_for(target, tmp_path)
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    with pytest.raises(ConfigError, match="synthetic.* is for chains"):
        Driver(config_for(target, speculative_config=config | synthetic))
    monkeypatch.setattr("servd.worker.attention.torch_sdpa.TorchSdpaBackend.supports_tails", False)
    with pytest.raises(ConfigError, match="does not support draft trees; add --attention-backend"):
        Driver(config_for(target, speculative_config=config, attention_backend="torch_sdpa"))
