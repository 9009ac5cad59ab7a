"""What the files of a model say of its vectors and scores."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servd.base.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from servd.checkpoint import pooling
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
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
    write(
        folder,
        modules=modules("Transformer", "LogitScore"),
        LogitScore__config={"true_token_id": 7},
    )
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
    single = read(tmp_path, "bert", kind, id2label={"0": "LABEL_0"})
    assert single.probabilities([0.0]) == [0.5] and single.score([0.0]) == 0.5
    assert single.score([-800.0]) == 0.0
    many = {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}
    assert read(tmp_path, "bert", kind, **many).probabilities([0.0, 0.0]) == [0.5, 0.5]
    path = {"activation_fn": "torch.nn.modules.linear.Identity"}
    raw = read(tmp_path, "bert", kind, num_labels=1, sentence_transformers=path)
    assert raw.score([-3.5]) == -3.5 and raw.probabilities([-3.5]) == [-3.5]
    assert read(tmp_path, "qwen3", "Qwen3ForSequenceClassification").pooling == "last"


@pytest.mark.parametrize(
    "kinds",
    [
        [],
        ["Transformer"],
        ["Pooling"],
        ["Transformer", "Dense"],
        ["Transformer", "Pooling", "Normalize", "Dense"],
        ["Transformer", "Normalize", "Pooling"],
        ["Transformer", "Pooling", "Pooling"],
        ["Transformer", "Pooling", "LayerNorm"],
        ["Transformer", "Pooling", "LogitScore"],
        ["Transformer", "WordWeights", "Pooling"],
    ],
    ids=str,
)
def test_modules_in_an_order_that_servd_does_not_run_are_refused(tmp_path, kinds):
    dense = {"in_features": 16, "out_features": 8}
    write(tmp_path, modules=modules(*kinds), Pooling__config={}, Dense__config=dense)
    with pytest.raises(UnsupportedModel, match=r"modules\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    "module",
    [{"type": "pylate.models.Dense.Dense"}, {"type": "custom_st.Pooling"}, {"type": 3}, {}, []],
    ids=str,
)
def test_a_module_of_another_package_is_refused(tmp_path, module):
    entries: list[Any] = modules("Transformer", "Pooling")
    broken = module | {"path": "Dense"} if module and isinstance(module, dict) else module
    write(tmp_path, modules=[*entries, broken], Pooling__config={})
    with pytest.raises(UnsupportedModel, match=r"modules\.json"):
        read(tmp_path)


@pytest.mark.parametrize("sizes", [(17, 8), (16, None), ("16", 8), (16, "8")], ids=str)
def test_layers_whose_sizes_do_not_follow_are_refused(tmp_path, sizes):
    dense = dict(zip(("in_features", "out_features"), sizes, strict=True))
    kinds = modules("Transformer", "Pooling", "Dense")
    write(tmp_path, modules=kinds, Pooling__config={}, Dense__config=dense)
    with pytest.raises(UnsupportedModel, match="in_features"):
        read(tmp_path)


def test_the_limit_of_texts_has_several_names(tmp_path):
    write(tmp_path, **{"sentence_xlm-roberta_config": {"max_seq_length": 77}})
    assert read(tmp_path).max_tokens == 77
    write(tmp_path, tokenizer_config={"model_max_length": 55})
    assert read(tmp_path).max_tokens == 77
    (tmp_path / "sentence_xlm-roberta_config.json").unlink()
    assert read(tmp_path).max_tokens == 55
    write(tmp_path, tokenizer_config={"model_max_length": int(1e30)})
    assert read(tmp_path).max_tokens == 514


def test_a_default_prompt_that_is_not_there_is_refused(tmp_path):
    write(tmp_path, config_sentence_transformers={"prompts": {}, "default_prompt_name": "query"})
    with pytest.raises(UnsupportedModel, match="default_prompt_name"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "stated", "key"),
    [
        ("Dense__config", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("Dense__config", {"module_output_name": "other"}, "module_output_name"),
        ("Dense__config", {"use_residual": True}, "use_residual"),
        ("Normalize__config", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("Pooling__config", {"skip_special_tokens": True}, "skip_special_tokens"),
        ("sentence_bert_config", {"model_args": {"num_hidden_layers": 1}}, "model_args"),
        ("sentence_bert_config", {"query_length": 32}, "query_length"),
        ("config_sentence_transformers", {"truncate_dim": 8}, "truncate_dim"),
        ("config_sentence_transformers", {"query_prefix": "[Q] "}, "query_prefix"),
    ],
    ids=str,
)
def test_keys_that_change_vectors_are_not_understood(tmp_path, name, stated, key):
    kinds = modules("Transformer", "Pooling", "Dense", "Normalize")
    files: dict[str, dict[str, Any]] = {
        "Pooling__config": {"pooling_mode_cls_token": True, "word_embedding_dimension": 16},
        "Dense__config": {"in_features": 16, "out_features": 8, "use_residual": False},
        "sentence_bert_config": {"max_seq_length": 9, "do_lower_case": False},
        "config_sentence_transformers": {"__version__": {}, "similarity_fn_name": "cosine"},
    }
    spec = make_spec(tmp_path, "bert", "BertModel")
    write(tmp_path, modules=kinds, **files)
    accounts = [*pooling.accounts(spec)]
    assert len(accounts) == 8 and not any(account.unknown for account in accounts)
    write(tmp_path, **{name: files.get(name, {}) | stated})
    assert [[*account.unknown] for account in pooling.accounts(spec) if account.unknown] == [[key]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modules", {}),
        ("Pooling__config", []),
        ("Pooling__config", {"pooling_mode": 3}),
        ("Pooling__config", {"pooling_mode": [["cls"]]}),
        ("sentence_bert_config", []),
        ("sentence_bert_config", {"max_seq_length": "many"}),
        ("sentence_bert_config", {"max_seq_length": -1}),
        ("config_sentence_transformers", {"prompts": ["q: "]}),
        ("config_sentence_transformers", {"prompts": {"q": 1}}),
        ("config_sentence_transformers", {"default_prompt_name": {"a": 1}}),
        ("tokenizer_config", {"model_max_length": [1]}),
    ],
    ids=str,
)
def test_values_of_other_types_are_refused_in_a_sentence(tmp_path, name, value):
    write(tmp_path, modules=modules("Transformer", "Pooling"), Pooling__config={})
    write(tmp_path, **{name: value})
    with pytest.raises((ModelNotFound, UnsupportedModel)):
        read(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "architecture", "expected"),
    [
        ("xlm-roberta", "XLMRobertaModel", True),
        ("bert", "BertForSequenceClassification", True),
        ("bert", "BertLMHeadModel", False),
        ("llama", "LlamaForCausalLM", True),
        ("mamba", "MambaForCausalLM", False),
    ],
)
def test_models_that_servd_has_a_file_for(tmp_path, model_type, architecture, expected):
    assert pooling.has_file(make_spec(tmp_path, model_type, architecture)) is expected
