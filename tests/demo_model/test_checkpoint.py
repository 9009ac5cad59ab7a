"""The checkpoint that ships in the package: small, of the ordinary layout, with a tokenizer and
template that hold.
"""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat, ToolOptions
from servd.checkpoint.hf import read_spec
from tools.demo_model.corpus import Corpus
from tools.demo_model.tokenizer import TEMPLATE, Renderer

MODEL = Path(__file__).parents[2] / "servd" / "demo_model"
FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
}
EMPTY_REASONING = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def test_layout_and_size():
    assert {file.name for file in MODEL.iterdir()} == {*FILES, "eagle3"}
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 12e6
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]
        assert {part.get_dtype() for part in slices} <= {"BF16", "F16"}
        assert 2e6 <= sum(torch.Size(part.get_shape()).numel() for part in slices) <= 6e6


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


def test_digits_are_single_tokens_and_marks_are_visible(tokenizer):
    assert [tokenizer.decode(token) for token in tokenizer.encode("1990-07")] == [
        "1",
        "9",
        "9",
        "0",
        "-",
        "0",
        "7",
    ]
    marks = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ]
    ids = tokenizer.convert_tokens_to_ids(marks)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(marks)
    assert (
        tokenizer.decode(tokenizer.encode("<|im_start|>x<|im_end|>"), skip_special_tokens=True)
        == "x"
    )


def test_template_gives_the_training_text(tokenizer):
    """Training renders by itself; transformers and servd must get the same text from the shipped
    template.
    """
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


def test_thinking_is_switched_by_the_template(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]

    def prompt(**options):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )

    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(enable_thinking=True) == start
    assert prompt(enable_thinking=False) == prompt() == start + EMPTY_REASONING


def test_a_next_turn_begins_with_the_tokens_of_the_last_one(tokenizer):
    """Prompt and answer of a turn are a prefix of the next turn's prompt, so that a prefix cache
    finds them.
    """
    messages = [{"role": "user", "content": "Hi"}]
    first = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    messages += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]
    second = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert second.startswith(first + "Hello!<|im_end|>\n<|im_start|>user\nBye")


def test_tools_and_results(tokenizer):
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    system, rest = text.split("<|im_end|>\n", 1)
    assert (
        system.startswith("<|im_start|>system\nBe brief.\n\n")
        and f"\n{json.dumps(tool)}\n" in system
    )
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert rest == (
        f"<|im_start|>user\nAdd<|im_end|>\n<|im_start|>assistant\n{EMPTY_REASONING}{called}\n{called}<|im_end|>\n"
        f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n{EMPTY_REASONING}"
    )
