"""Decoders for retrieval, as Qwen3-Embedding and -Reranker: vectors, scores, ranks."""

import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from servd import LLM
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat, Pair, SharedText
from servd.base.errors import InvalidRequest, UnsupportedModel
from servd.messages.params import PoolingParams
from tests.parity.families import LLAMA, make_checkpoint, reference
from tests.parity.test_encoders import TEXTS, compute_here, options_for, write
from tests.worker.driver import Driver, config_for

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
QWEN3 = LLAMA | {"head_dim": 16, "tie_word_embeddings": True}
SCORE = PoolingParams(task="classify", normalize=False)
END = 3  # what the tokenizer ends each text with
TEMPLATE = """\
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first %}
{%- set text = messages | selectattr("role", "eq", "document") | map(attribute="content") | first %}
{{- "[CLS] " ~ messages[0].content ~ " : " ~ query ~ " [SEP] " ~ text }}
{%- if add_generation_prompt %}{{ " [CLS]" }}{% endif %}"""


def make(folder: Path, modules: dict[str, str], **texts: Any) -> tokenizers.Tokenizer:
    """A Qwen 3 with files of sentence-transformers; returns its tokenizer."""
    make_checkpoint(folder, "qwen3", QWEN3)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = sorted({*" ".join(TEXTS).split(), "judge", "cats", "query", ":"})
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {token: i for i, token in enumerate([*special, *words])}, unk_token="[UNK]"
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", END)]
    )
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    kinds = [{"type": f"sentence_transformers.{k}", "path": p} for p, k in modules.items()]
    write(folder / "modules.json", kinds)
    write(folder / "config_sentence_transformers.json", texts)
    return backend


@torch.inference_mode()
def test_embeddings_of_the_last_token(tmp_path: Path):
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    tokenizer = make(tmp_path, modules, prompts={"query": "judge query : "})
    write(tmp_path / "1_Pooling/config.json", {"pooling_mode_lasttoken": True})
    model = reference(tmp_path).model

    def vector(text: str, size: int) -> torch.Tensor:
        ids = tokenizer.encode(text).ids
        assert ids[-1] == END
        hidden = model(torch.tensor([ids])).last_hidden_state[0, -1, :size]
        return torch.nn.functional.normalize(hidden, dim=0)

    with closing(LLM(**options_for(tmp_path))) as llm:
        for size in (48, 12):
            outputs = llm.embed(TEXTS, PoolingParams(dimensions=size))
            got = torch.tensor([output.outputs.embedding for output in outputs])
            expected = torch.stack([vector(text, size) for text in TEXTS])
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        prompt = llm.engine.processor.pooling.prompt("query")
        (got,) = llm.embed(prompt + TEXTS[0])
    expected = vector("judge query : " + TEXTS[0], 48)
    torch.testing.assert_close(
        torch.tensor(got.outputs.embedding), expected, atol=TOLERANCE, rtol=0
    )


def make_reranker(folder: Path, template: str | None = TEMPLATE, **score: Any) -> Any:
    modules = {"": "base.modules.Transformer", "1_L": "cross_encoder.modules.LogitScore"}
    made = make(folder, modules, prompts={"web": "judge cats"}, default_prompt_name="web")
    write(folder / "1_L/config.json", {"true_token_id": 7, "false_token_id": 9} | score)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return made


@pytest.mark.parametrize("false_token", [9, None])
@torch.inference_mode()
def test_scores_are_those_of_the_next_token(tmp_path: Path, false_token: int | None):
    tokenizer = make_reranker(tmp_path, false_token_id=false_token)
    model = reference(tmp_path)
    with closing(LLM(**options_for(tmp_path))) as llm:
        query = SharedText(TEXTS[0])
        pairs = [Pair(query, text) for text in TEXTS]
        got = llm.embed([*pairs, Pair(query, TEXTS[1], 2, 3)], SCORE)  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="use /score or /rerank"):
            llm.embed(TEXTS, SCORE)
    cut = (" ".join(TEXTS[0].split()[:2]), " ".join(TEXTS[1].split()[:3]))
    scores = [output.outputs.embedding for output in got]
    for (score,), (first, second) in zip(
        scores, [*((TEXTS[0], text) for text in TEXTS), cut], strict=True
    ):
        text = f"[CLS] judge cats : {first} [SEP] {second} [CLS]"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        logits = model(torch.tensor([ids])).logits[0, -1]
        expected = logits[7] - (logits[false_token] if false_token is not None else 0)
        assert score == pytest.approx(expected.item(), abs=1e-4)
    assert len({score for (score,) in scores}) == 4


def test_scores_are_checked_before_they_are_served(tmp_path: Path, monkeypatch):
    folder = tmp_path / "model"
    make_reranker(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", compute_here)
    config = config_for(folder, block_size=16, check_vectors=True)
    Driver(config)
    (kept,) = tmp_path.glob("servd/references/*.json")
    numbers = json.loads(kept.read_text())
    assert [len(vectors) for vectors in numbers] == [1, 1, 1]
    numbers[1][0] += 0.5
    kept.write_text(json.dumps(numbers))
    with pytest.raises(UnsupportedModel, match="is not served"):
        Driver(config)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}query document",
        "{% if messages[0].role != 'user' %}{{ raise_exception('query, document') }}{% endif %}",
    ],
)
def test_a_template_that_shows_no_documents_is_refused(tmp_path: Path, template: str | None):
    make_reranker(tmp_path, template)
    with pytest.raises(UnsupportedModel, match="roles `query` and `document`"):
        LLM(**options_for(tmp_path))


@pytest.mark.parametrize("system", ["", "Find the recipe."])
def test_the_template_of_qwen3_reranker(system: str):
    """The published prompt, https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""
    template = ChatTemplate((ROOT / "examples/qwen3_reranker.jinja").read_text())
    texts = {"system": system, "query": "who?", "document": "Me.\n"}
    messages = [{"role": role, "content": text} for role, text in texts.items() if text]
    instruction = (
        system or "Given a web search query, retrieve relevant passages that answer the query"
    )
    assert template.render(Chat(messages=messages)) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {instruction}\n<Query>: who?\n<Document>: Me.\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_tokens_that_are_not_there_are_refused(tmp_path: Path):
    make_reranker(tmp_path, true_token_id=199)
    with pytest.raises(UnsupportedModel, match=r"tokens \[199, 9\] are not in the vocabulary"):
        LLM(**options_for(tmp_path))
