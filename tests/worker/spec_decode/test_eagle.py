"""eagle and eagle3 against a plain implementation that computes a sequence for each draft."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from servd.base.errors import ConfigError
from servd.checkpoint.config_json import read_json
from servd.checkpoint.model_spec import read_spec
from servd.worker.ops import native
from tests.parity.families import CASES, make_checkpoint, reference
from tests.worker.driver import Driver, config_for
from tests.worker.recorded import use_recorded_runner
from tests.worker.spec_decode import checkpoints
from tests.worker.spec_decode.checkpoints import HEAD_DIM, draw, write
from tests.worker.spec_decode.drafting import drafts_of, make_echo

TARGETS = {"gpt2": "tied", "llama": "llama3 rope"}
NUM_DRAFTS = 4


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = CASES[request.param][TARGETS[request.param]]
    return make_checkpoint(tmp_path_factory.mktemp("target"), request.param, options)


class PlainHead:
    """EAGLE 1 and 2."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        self.config |= self.config.get("transformer_layer_config", {})
        weights = load_file(folder / "model.safetensors")
        self.weights = {k.replace("midlayer.", "layers.0."): v for k, v in weights.items()}
        self.target = reference(target)
        self.embedding = self.target.get_input_embeddings().weight
        if "embed_tokens.weight" in weights:
            self.embedding = weights["embed_tokens.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-5)

    def rotate(self, x: Tensor) -> Tensor:
        """[n, heads, head_dim]."""
        half = HEAD_DIM // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (self.positions[:, None] * frequencies)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat((turned.real, turned.imag), dim=-1)

    def attend(self, x: Tensor, name: str) -> Tensor:
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, HEAD_DIM)) for part in "qkv"
        )
        q = self.rotate(q)
        k = self.rotate(k)
        heads = F.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return self.linear(heads.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def feed(self, x: Tensor, name: str) -> Tensor:
        gated = F.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(gated, f"{name}.down_proj")

    def features(self, tokens: list[int]) -> Tensor:
        return self.target.base_model(torch.tensor([tokens])).last_hidden_state[0]

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        x = self.linear(torch.cat((embedded, features), dim=-1), "fc")
        x = x + self.attend(x, "layers.0.self_attn")
        normed = self.norm(x, "layers.0.post_attention_layernorm")
        return x + self.feed(normed, "layers.0.mlp")

    def top(self, feature: Tensor) -> int:
        return int(self.target.get_output_embeddings()(feature).argmax())

    @torch.inference_mode()
    def drafts(self, tokens: list[int], num_drafts: int, skipped: Container[int]) -> list[int]:
        """The head never saw the tokens at `skipped` positions."""
        features, tokens = self.features(tokens[:-1]), list(tokens)
        for _ in range(num_drafts):
            self.positions = torch.tensor([i for i in range(len(features)) if i not in skipped])
            embedded = self.embedding[tokens[1:]]
            made = self.forward(embedded[self.positions], features[self.positions])
            tokens.append(self.top(made[-1]))
            features = torch.cat((features, made[-1:]))
        return tokens[-num_drafts:]


class PlainHead3(PlainHead):
    """EAGLE 3."""

    def features(self, tokens: list[int]) -> Tensor:
        key = "eagle_aux_hidden_state_layer_ids"
        layers = self.config.get("eagle_config", self.config)[key]
        states = self.target.base_model(torch.tensor([tokens]), output_hidden_states=True)
        states = [states.hidden_states[layer][0] for layer in layers]
        if self.config.get("fc_norm"):
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        x = torch.cat(states, dim=-1)
        if self.config.get("eagle_config", {}).get("norm_before_fc"):
            x = self.norm(x, "input_norm")
        return self.linear(x, "fc")

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        normed = self.norm(features, "layers.0.hidden_norm")
        x = torch.cat((self.norm(embedded, "layers.0.input_layernorm"), normed), dim=-1)
        stream = normed if self.config.get("norm_before_residual") else features
        stream = stream + self.attend(x, "layers.0.self_attn")
        normed = self.norm(stream, "layers.0.post_attention_layernorm")
        stream = stream + self.feed(normed, "layers.0.mlp")
        return self.norm(stream, "norm") if self.config.get("norm_output") else stream

    def top(self, feature: Tensor) -> int:
        if not self.config.get("norm_output"):
            feature = self.norm(feature, "norm")
        token = int(self.linear(feature, "lm_head").argmax())
        return token + int(self.weights["d2t"][token])


def assert_drafts(target: Path, method: str, config: dict[str, Any], **options: Any) -> None:
    """Those of the plain head, at every depth."""
    plain = {"eagle": PlainHead, "eagle3": PlainHead3}[method](target, Path(config["model"]))
    config = {"method": method, "num_speculative_tokens": NUM_DRAFTS} | config
    for tokens, drafts, skipped in drafts_of(target, config, NUM_DRAFTS, **options):
        assert drafts == plain.drafts(tokens, len(drafts), skipped)


def rewrite(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    """Add to a checkpoint."""
    write(
        folder,
        read_json(folder / "config.json") | config,
        load_file(folder / "model.safetensors") | tensors,
    )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle", {"block_size": 16}),
        ("eagle3", {"block_size": 16}),
        ("eagle3", {"block_size": 16, "enforce_eager": True}),
        ("eagle", {"block_size": 4}),
    ],
    ids=["graphs", "graphs, 3", "kernels", "torch"],
)
def test_drafts_are_those_of_a_plain_implementation(target, tmp_path, method, options):
    assert_drafts(target, method, getattr(checkpoints, method)(target, tmp_path), **options)


def test_drafts_beside_decode_steps_that_are_graphs(target, tmp_path, monkeypatch):
    use_recorded_runner(monkeypatch)
    assert_drafts(target, "eagle3", checkpoints.eagle3(target, tmp_path))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_decode_steps_remain_programs_and_drafts_are(target: Path, tmp_path: Path, method: str):
    if native.library() is None:
        pytest.skip("no CPU kernels here")
    config = {"method": method} | getattr(checkpoints, method)(target, tmp_path)
    driver = Driver(config_for(target, speculative_config=config, block_size=16))
    slot = driver.add([7, 8, 9])
    driver.generate([slot], 3)
    graphs = driver.worker.runner.graphs
    assert graphs is not None and len(graphs.graphs) == 1
    for num_drafts in (2, NUM_DRAFTS, NUM_DRAFTS - 1):  # all are parts of one graph
        driver.step({slot: driver.num_left(slot)}, max_new_drafts={slot: num_drafts})
    proposer = driver.worker.runner.proposer
    assert proposer.chain.passes.is_recordable
    assert {num_rows for _, num_rows in proposer.chain.graphs} == {1}


def test_a_row_with_few_drafts_beside_one_with_many(target: Path, tmp_path: Path):
    """It has no block for more, and what its block table has there may be another row's."""
    config = {"method": "eagle"} | checkpoints.eagle(target, tmp_path)
    driver = Driver(config_for(target, speculative_config=config))
    nobodys = 0  # what a block table has where it was never filled
    driver.free_blocks.remove(nobodys)
    few = driver.add([7, 8])
    many = driver.add([7, 8, 9, 10, 11])
    driver.step({few: 2, many: 5}, max_new_drafts={few: 1, many: 5})
    assert list(map(len, (driver.drafts[few], driver.drafts[many]))) == [1, 5]
    (cache,) = driver.worker.runner.proposer.kv_caches
    assert not cache[:, nobodys].any() and cache[:, driver.blocks[few]].any()


@pytest.mark.parametrize("num_missed", [1, 9])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_tokens_that_nobody_drafts_at_are_not_followed(
    target, tmp_path, method, num_missed, monkeypatch
):
    """Such steps do nothing for drafts; those after them are of a head that never saw them."""
    config = {"method": method} | getattr(checkpoints, method)(target, tmp_path)
    driver = Driver(config_for(target, speculative_config=config, enforce_eager=True))
    plain = {"eagle": PlainHead, "eagle3": PlainHead3}[method](target, Path(config["model"]))
    proposer = driver.worker.runner.proposer
    calls: list[int] = []
    run = proposer.advance
    monkeypatch.setattr(
        proposer, "advance", lambda ids, *arguments: calls.append(len(ids)) or run(ids, *arguments)
    )
    prompt = [7, 8, 9, 10, 11, 12, 13, 14]
    slot = driver.add(prompt)
    driver.step({slot: len(prompt)})
    assert calls == [8]
    beside = driver.add([5])
    driver.generate([slot, beside], num_missed + 1)
    assert calls == [8]
    driver.step({slot: driver.num_left(slot), beside: 1}, max_new_drafts={slot: NUM_DRAFTS})
    assert calls == [8, *[1] * NUM_DRAFTS]
    skipped = range(8, 8 + num_missed)
    assert skipped.stop + 1 == len(driver.tokens[slot]) - 1
    for _ in range(3):
        expected = plain.drafts(driver.tokens[slot], NUM_DRAFTS, skipped)
        assert driver.drafts[slot] == expected
        driver.step({slot: driver.num_left(slot)}, max_new_drafts={slot: NUM_DRAFTS})


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_prompts_are_not_followed_where_nobody_drafts_for_long(target, tmp_path, method):
    """But for those that drafts are wanted after; drafts after others know what came later."""
    config = {"method": method} | getattr(checkpoints, method)(target, tmp_path)
    driver = Driver(config_for(target, speculative_config=config, block_size=16))
    plain = {"eagle": PlainHead, "eagle3": PlainHead3}[method](target, Path(config["model"]))
    first = driver.add([7, 8, 9])
    driver.generate([first], 120)
    drafted = driver.add([11, 12, 13, 14])
    other = driver.add([21, 22, 23, 24, 25])
    driver.step({drafted: 4, other: 5}, max_new_drafts={drafted: NUM_DRAFTS})
    assert driver.drafts[drafted] == plain.drafts(driver.tokens[drafted], NUM_DRAFTS, ())
    driver.step({other: 1}, max_new_drafts={other: NUM_DRAFTS})
    assert driver.drafts[other] == plain.drafts(driver.tokens[other], NUM_DRAFTS, range(5))
    for _ in range(6):  # they are wanted again
        driver.step({other: driver.num_left(other)}, max_new_drafts={other: NUM_DRAFTS})
    late = driver.add([31, 32, 33])
    driver.step({late: 3})
    driver.step({late: 1}, max_new_drafts={late: NUM_DRAFTS})
    assert driver.drafts[late] == plain.drafts(driver.tokens[late], NUM_DRAFTS, ())


def test_nothing_is_drafted_past_max_model_len(target: Path, tmp_path: Path):
    config = {"method": "eagle", "max_model_len": 6} | checkpoints.eagle(target, tmp_path)
    driver = Driver(config_for(target, speculative_config=config))
    slot = driver.add([7, 8])
    driver.step({slot: 2}, max_new_drafts={slot: 5})
    assert len(driver.tokens[slot] + driver.drafts[slot]) == 6
    full = driver.add([7] * 6)
    driver.step({full: 6}, max_new_drafts={full: 5})
    assert driver.drafts[full] == []


def test_a_head_of_eagle_with_all_of_its_own(target: Path, tmp_path: Path):
    config = checkpoints.eagle(target, tmp_path)
    size = read_spec(target).hidden_size
    vocab_size = read_spec(target).vocab_size
    tensors = {"fc.bias": draw(size), "embed_tokens.weight": draw(vocab_size, size, seed=5)}
    rewrite(tmp_path, tensors | {"lm_head.weight": draw(vocab_size, size, seed=6)})
    plain = PlainHead(target, tmp_path)
    plain.top = lambda feature: int(plain.linear(feature, "lm_head").argmax())  # type: ignore[method-assign]
    speculative = {"method": "eagle", "num_speculative_tokens": NUM_DRAFTS} | config
    for tokens, drafts, skipped in drafts_of(target, speculative, NUM_DRAFTS):
        assert drafts == plain.drafts(tokens, len(drafts), skipped)


VARIANTS = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "aux layers at the top level": {
        "eagle_config": {},
        "eagle_aux_hidden_state_layer_ids": [2, 1, 1],
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_eagle3(target: Path, tmp_path: Path, variant: str):
    config = checkpoints.eagle3(target, tmp_path, **VARIANTS[variant])
    if variant.startswith("aux"):
        options = read_json(tmp_path / "config.json")
        del options["eagle_config"]
        write(tmp_path, options, load_file(tmp_path / "model.safetensors"))
    assert_drafts(target, "eagle3", config)


@pytest.mark.parametrize("norm", ["input_norm", "fc_norm"])
def test_norms_before_fc(target: Path, tmp_path: Path, norm: str):
    config = checkpoints.eagle3(target, tmp_path)
    size = read_spec(target).hidden_size
    eagle_config = read_json(tmp_path / "config.json")["eagle_config"]
    if norm == "input_norm":
        options = {"eagle_config": eagle_config | {"norm_before_fc": True}}
        rewrite(tmp_path, {"input_norm.weight": 1 + draw(3 * size)}, **options)
    else:
        norms = {f"fc_norm.{i}.weight": 1 + draw(size, seed=i) for i in range(3)}
        rewrite(tmp_path, norms, fc_norm=True)
    assert_drafts(target, "eagle3", config)


def test_a_folder_in_speculators_format(target: Path, tmp_path: Path):
    config = checkpoints.eagle3(target, tmp_path)
    options = read_json(tmp_path / "config.json")
    head_config = {
        key: options.pop(key) for key in ("draft_vocab_size", "eagle_config", "architectures")
    }
    head_config |= head_config.pop("eagle_config") | {"speculators_model_type": "eagle3"}
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    size = read_spec(target).hidden_size
    vocab_size = read_spec(target).vocab_size
    weights["embed_tokens.weight"] = draw(vocab_size, size, seed=5)
    write(tmp_path, {"transformer_layer_config": options} | head_config, weights)
    assert_drafts(target, "eagle3", config)


def test_drafts_of_an_echo_are_all_kept(tmp_path: Path):
    target = make_echo(tmp_path / "echo")
    size = read_spec(target).hidden_size
    config = {"method": "eagle", "num_speculative_tokens": NUM_DRAFTS}
    config |= checkpoints.eagle(target, tmp_path / "head")
    weights = load_file(tmp_path / "head" / "model.safetensors")
    silent = {name: weights[name] * 0 for name in weights if "o_proj" in name or "down" in name}
    passes_embeddings = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    rewrite(tmp_path / "head", silent | {"fc.weight": passes_embeddings})
    driver = Driver(config_for(target, speculative_config=config))
    slot = driver.add([7, 8, 9])
    for num_sampled in (1, 1 + NUM_DRAFTS, 1 + NUM_DRAFTS):
        output = driver.step({slot: driver.num_left(slot)}, max_new_drafts={slot: NUM_DRAFTS})
        assert output.sampled_token_ids == [[9] * num_sampled]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 50}, "has 50 tokens in the vocabulary but the model has 199"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "layers 1, 2, 3, but the model has 3"),
    ],
)
def test_heads_of_another_model(target, tmp_path, options, message):
    config = {"method": "eagle3"} | checkpoints.eagle3(target, tmp_path, **options)
    with pytest.raises(ConfigError, match=message):
        Driver(config_for(target, speculative_config=config))


def test_an_embedding_of_its_own_needs_the_vocabulary_of_the_model_too(target, tmp_path):
    config = {"method": "eagle3"} | checkpoints.eagle3(target, tmp_path)
    rewrite(
        tmp_path, {"embed_tokens.weight": draw(50, read_spec(target).hidden_size)}, vocab_size=50
    )
    with pytest.raises(ConfigError, match="has 50 tokens in the vocabulary but the model has 199"):
        Driver(config_for(target, speculative_config=config))


@pytest.mark.parametrize(("offset", "token_id"), [(101, 199), (-99, -1)])
def test_a_vocabulary_of_eagle3_that_leaves_that_of_the_model(target, tmp_path, offset, token_id):
    """Number 98, the last one of the head's, stands for a token that does not exist."""
    config = {"method": "eagle3"} | checkpoints.eagle3(target, tmp_path)
    d2t = load_file(tmp_path / "model.safetensors")["d2t"]
    d2t[98] = offset
    rewrite(tmp_path, {"d2t": d2t})
    message = f"drafts token {token_id}, but the model has tokens 0 to 198"
    with pytest.raises(ConfigError, match=message):
        Driver(config_for(target, speculative_config=config))
