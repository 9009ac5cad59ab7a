"""What the files of a model say of its vectors and scores."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servd.base.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from servd.checkpoint import pooling
from servd.checkpoint.hf import FAKE_SPEC, ModelSpec
from servd.checkpoint.pooling import PoolingSpec
from servd.messages.params import PoolingParams


def make_spec(folder: Path, model_type: str, architecture: str, **config: Any) -> ModelSpec:
    return msgspec.structs.replace(
        FAKE_SPEC,
        folder=str(folder),
        model_type=model_type,
        architecture=architecture,
        max_position_embeddings=514,
        config=config,
    )


def read(
    folder: Path, model_type: str = "bert", architecture: str = "BertModel", **config: Any
) -> PoolingSpec:
    return pooling.read(make_spec(folder, model_type, architecture, **config))


def write(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in kinds]


def test_a_model_that_writes_text_has_vectors_too(tmp_path):
    for files in (pooling.read(FAKE_SPEC), read(tmp_path, "llama", "LlamaForCausalLM")):
        assert (files.task, files.pooling, files.normalize) == ("generate", "last", True)
        assert files.is_causal
        files.check("generate")
        files.check("embed")
        with pytest.raises(InvalidRequest, match="no classification head"):
            files.check("classify")


@pytest.mark.parametrize(
    ("name", "page", "has_scores"),
    [
        ("Qwen3-Reranker-0.6B", "", False),
        ("models--Qwen--Qwen3-Reranker-0.6B/snapshots/1a2b", "", False),
        ("model", "---\nlicense: mit\npipeline_tag: text-ranking\n---", False),
        ("rerankers/model", "", True),
        ("model", "---\npipeline_tag: text-generation\n---", True),
    ],
)
def test_a_reranker_whose_files_do_not_say_how_has_no_scores(tmp_path, name, page, has_scores):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(page)
    assert read(folder, "qwen3", "Qwen3ForCausalLM").has_scores is has_scores
    write(folder, modules=modules("LogitScore"), LogitScore__config={"true_token_id": 7})
    assert read(folder, "qwen3", "Qwen3ForCausalLM").has_scores


def test_an_encoder_without_further_files_embeds_by_the_mean(tmp_path):
    files = read(tmp_path)
    assert (files.task, files.pooling, files.normalize) == ("embed", "mean", False)
    assert not files.is_causal and files.max_tokens == 514 and files.has_token_types
    assert read(tmp_path, "roberta", "RobertaModel", pad_token_id=1).max_tokens == 512
    for task in ("generate", "classify"):
        with pytest.raises(InvalidRequest, match="/v1/embeddings"):
            files.check(task)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 16}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
    ids=str,
)
def test_modules_of_sentence_transformers(tmp_path, config, expected):
    write(tmp_path, modules=modules("Transformer", "Pooling", "Normalize"), Pooling__config=config)
    files = read(tmp_path, "qwen3", "Qwen3ForCausalLM")
    assert (files.task, files.pooling, files.normalize) == ("embed", expected, True)
    assert files.is_causal
    params = files.complete(PoolingParams(dimensions=4))
    assert (params.pooling, params.normalize, params.dimensions) == (expected, True, 4)
    assert files.complete(PoolingParams(pooling="last", normalize=False)).normalize is False


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "and"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    ],
    ids=str,
)
def test_pooling_that_would_be_wrong_is_refused(tmp_path, config, words):
    write(tmp_path, modules=modules("Transformer", "Pooling"), Pooling__config=config)
    with pytest.raises(UnsupportedModel, match=words):
        read(tmp_path)


def test_broken_files_are_named(tmp_path):
    write(tmp_path, modules=modules("Transformer", "Pooling"))
    with pytest.raises(ModelNotFound, match=r"Pooling/config\.json is missing"):
        read(tmp_path)
    write(tmp_path, modules=modules("Transformer", "CNN"))
    with pytest.raises(UnsupportedModel, match="CNN"):
        read(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ModelNotFound, match="not valid JSON"):
        read(tmp_path)


def test_prompts(tmp_path):
    texts = {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": "passage"}
    write(
        tmp_path, config_sentence_transformers=texts, sentence_bert_config={"max_seq_length": 256}
    )
    files = read(tmp_path)
    assert files.max_tokens == 256
    assert (files.prompt(None), files.prompt("query")) == ("p: ", "q: ")
    with pytest.raises(InvalidRequest, match="there are: query, passage"):
        files.prompt("other")
    names = [files.name_for(n) for n in ("search_query", "search_document", "query", "clustering")]
    assert names == ["query", "passage", "query", None]


def test_positions_of_roberta_begin_after_that_of_padding(tmp_path):
    spec = make_spec(tmp_path, "roberta", "RobertaModel", pad_token_id=1)
    assert pooling.num_positions(spec) == spec.max_position_embeddings - 2
    assert pooling.read(spec).max_tokens == pooling.num_positions(spec)
    with pytest.raises(UnsupportedModel, match="pad_token_id None"):
        pooling.read(make_spec(tmp_path, "roberta", "RobertaModel", pad_token_id=None))


def test_heads(tmp_path):
    kind = "BertForSequenceClassification"
    files = read(tmp_path, "bert", kind, id2label={"0": "sad", "1": "glad"})
    assert (files.task, files.pooling, files.labels) == ("classify", "cls", ["sad", "glad"])
    assert files.probabilities([1.0, 1.0]) == [0.5, 0.5]
    assert files.probabilities([1000.0, 0.0]) == [1.0, 0.0]
    with pytest.raises(InvalidRequest, match="/rerank"):
        files.check("embed")
    one = read(tmp_path, "bert", kind, id2label={"0": "LABEL_0"})
    assert one.probabilities([0.0]) == [0.5] and one.score([0.0]) == 0.5
    assert one.score([-800.0]) == 0.0
    many = {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}
    assert read(tmp_path, "bert", kind, **many).probabilities([0.0, 0.0]) == [0.5, 0.5]
    path = {"activation_fn": "torch.nn.modules.linear.Identity"}
    raw = read(tmp_path, "bert", kind, num_labels=1, sentence_transformers=path)
    assert raw.score([-3.5]) == -3.5 and raw.probabilities([-3.5]) == [-3.5]
    assert read(tmp_path, "qwen3", "Qwen3ForSequenceClassification").pooling == "last"
