"""The checkpoint in the package: small, with a tokenizer and a template that hold."""

import json
from itertools import islice
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat, ToolOptions
from servd.checkpoint.model_spec import read_spec
from tools.demo_model.corpus import Corpus
from tools.demo_model.tokenizer import TEMPLATE, Renderer

MODEL = Path(__file__).parents[2] / "servd" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def test_layout_and_size():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 12e6


def test_transformers_loads_it_whole():
    model, info = transformers.AutoModelForCausalLM.from_pretrained(MODEL, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.max_position_embeddings >= 1024
    assert model.generation_config.validate(strict=True) is None


def test_servd_reads_it(tokenizer):
    spec = read_spec(MODEL)
    assert spec.model_type in ("llama", "qwen3")
    assert spec.vocab_size == len(tokenizer) and 2000 <= spec.vocab_size <= 4000
    assert tokenizer.eos_token_id in spec.eos_token_ids and tokenizer.eos_token == "<|im_end|>"


@given(text=st.text(max_size=60))
def test_tokenizing_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_template_gives_the_training_text(tokenizer):
    """Training renders by itself; the shipped template must give the same text."""
    assert tokenizer.chat_template == TEMPLATE.read_text("utf8")
    render, servd_template = Renderer(), ChatTemplate(tokenizer.chat_template)
    examples = [example for example in islice(Corpus(5), 300) if "messages" in example]
    assert any(example["tools"] for example in examples) and any(
        example["thinking"] for example in examples
    )
    for example in examples:
        text = render(example)
        assert (
            tokenizer.apply_chat_template(
                example["messages"], tools=example["tools"], tokenize=False
            )
            == text
        )
        assert (
            servd_template.render(
                Chat(
                    messages=as_sent(example["messages"]),
                    tool_options=ToolOptions(example["tools"]) if example["tools"] else None,
                    add_generation_prompt=False,
                )
            )
            == text
        )


def as_sent(messages):
    """Messages as the OpenAI API has them: arguments of calls are JSON text."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


def test_a_next_turn_begins_with_the_tokens_of_the_last_one(tokenizer):
    """Prompt and answer begin the next turn's prompt, so that a prefix cache finds them."""
    messages = [{"role": "user", "content": "Hi"}]
    first = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]
    second = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert second.startswith(first + "Hello!<|im_end|>\n<|im_start|>user\nBye")
