"""How well the demo model answers prompts that its training text does not have.

`quality_prompts.jsonl` was written apart from the training text, which was widened where the model
failed on them; `fresh_prompts.jsonl` by somebody who had not read the training text, when it was
finished. Each prompt has a kind, and `KINDS` has the rule by which an answer of that
kind passes. Whatever the kind, an answer must end by itself and must not loop. `pytest
tests/demo_model/test_quality.py -s` shows the scores and the answers that failed.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from servd import LLM, SamplingParams
from tools.demo_model.skills import Skills

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "servd" / "demo_model"
SETS = {
    name: [
        json.loads(line)
        for line in (ROOT / "tools" / "demo_model" / f"{name}_prompts.jsonl")
        .read_text("utf8")
        .splitlines()
    ]
    for name in ("quality", "fresh")
}
PROMPTS = [prompt for prompts in SETS.values() for prompt in prompts]
REQUIRED_SCORE = {"quality": 0.75, "fresh": 0.85}  # the first set is the harder one
MAX_NEW_TOKENS = 240


@pytest.fixture(scope="module")
def token_ids():
    """Token ids of each prompt, as transformers makes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    texts = [
        prompt.get("prompt")
        or tokenizer.apply_chat_template(
            prompt["messages"],
            tools=prompt.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=prompt.get("thinking", False),
        )
        for prompt in PROMPTS
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module")
def outputs(token_ids):
    """Greedy answers by servd."""
    llm = LLM("demo", device="cpu", dtype="float32", executor="uniproc")
    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)
    yield [output.outputs[0] for output in llm.generate(token_ids, params, use_tqdm=False)]
    llm.close()


def numbers(text):
    return re.findall(r"-?\b\d+\b", text)


def sentences(text):
    return [sentence for sentence in re.split(r"[.!?]\"?\s+|[.!?]\"?$", text) if sentence.strip()]


def has_keywords(prompt, answer):
    """Whether one of each group of keywords is in the answer."""
    return all(
        any(word.lower() in answer.lower() for word in group) for group in prompt["keywords"]
    )


def has_value(prompt, answer):
    """The last number of the answer is the right result."""
    return numbers(answer)[-1:] == [str(prompt["value"])]


def is_story(prompt, answer):
    """At least three sentences, and everyone asked for occurs."""
    return len(sentences(answer)) >= 3 and all(
        name.lower() in answer.lower() for name in prompt["names"]
    )


def is_listing(prompt, answer, kinds):
    """As many different things as asked for, all of the kind asked for."""
    things = {thing.lower() for thing in kinds[prompt["category"]]}
    items = [
        re.sub(r"^\W*\d*\W*", "", line).strip(" .").lower() for line in re.split(r"[\n,]", answer)
    ]
    return len(items) == len(set(items)) == prompt["count"] and set(items) <= things


def is_sorted(prompt, answer):
    """Exactly the items, in order."""
    return re.findall(r"[\w-]+", answer.lower()) == prompt["items"]


def is_object(prompt, answer):
    """Valid JSON with exactly the keys and values (and their types)."""
    try:
        return json.loads(answer) == prompt["object"]
    except ValueError:
        return False


def calls_tools(prompt, answer):
    """Exactly the expected calls; with `loose`, a text argument may have further or fewer words
    around its noun.
    """
    try:
        calls = [
            json.loads(call)
            for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", answer, re.DOTALL)
        ]
    except ValueError:
        return False
    if not prompt.get("loose"):
        return calls == prompt["calls"]
    if len(calls) != 1 or calls[0]["name"] != prompt["calls"][0]["name"]:
        return False
    given, wanted = calls[0]["arguments"], prompt["calls"][0]["arguments"]
    return given.keys() == wanted.keys() and all(
        wanted[key].split()[-1] in given[key] for key in wanted
    )


def thinks(prompt, answer):
    """Reasoning that is not empty, then an answer that passes its own rule."""
    match = re.fullmatch(r"<think>\n(.+?)\n</think>\n\n(.+)", answer, re.DOTALL)
    return bool(match) and passes_by_fields(prompt, match[2])


def passes_by_fields(prompt, answer):
    """By whatever the prompt states."""
    if "value" in prompt:
        return has_value(prompt, answer)
    if "names" in prompt:
        return is_story(prompt, answer)
    if "sentences" in prompt and len(sentences(answer)) < prompt["sentences"]:
        return False
    return has_keywords({"keywords": prompt.get("keywords", [])}, answer)


KINDS = {
    "fact": has_keywords,
    "talk": has_keywords,
    "unknown": has_keywords,
    "result": has_keywords,
    "sum": has_value,
    "story": is_story,
    "sort": is_sorted,
    "json": is_object,
    "tool": calls_tools,
    "think": thinks,
    "turns": passes_by_fields,
    "text": passes_by_fields,
}


def loops(answer):
    """Whether some eight words in a row occur three times."""
    words = answer.split()
    runs = Counter(tuple(words[start : start + 8]) for start in range(len(words) - 7))
    return any(count >= 3 for count in runs.values())


def passes(prompt, answer, kinds):
    if answer is None or not answer.strip() or loops(answer):
        return False
    if prompt["kind"] != "think" and "<think>" in answer:
        return False
    if prompt["kind"] == "list":
        return is_listing(prompt, answer, kinds)
    return KINDS[prompt["kind"]](prompt, answer)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SETS)
def test_score(outputs, name: str):
    assert len(SETS[name]) >= 60
    kinds = {
        kind: words.split() for kind, words in Skills(lambda a, b: False).words["kinds"].items()
    }
    right, of = Counter(), Counter()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if prompt not in SETS[name]:
            continue
        answer = output.text if output.finish_reason == "stop" else None
        of[prompt["kind"]] += 1
        right[prompt["kind"]] += passes(prompt, answer, kinds)
        if not passes(prompt, answer, kinds):
            print(
                f"\n{prompt['id']}: "
                f"{(prompt.get('prompt') or prompt['messages'][-1]['content'])!r}\n  -> {answer!r}"
            )
    score = right.total() / of.total()
    print("\n" + ", ".join(f"{kind} {right[kind]}/{of[kind]}" for kind in of))
    print(f"score of the {name} prompts: {right.total()} of {of.total()} = {score:.1%}")
    assert score >= REQUIRED_SCORE[name]


@pytest.mark.timeout(600)
def test_transformers_gives_the_same_tokens(token_ids, outputs):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ends, padding = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=ends, pad_token_id=padding
    )
    for ids, output in list(zip(token_ids, outputs, strict=True))[:: len(PROMPTS) // 20][:20]:
        assert output.token_ids == model.generate(torch.tensor([ids]))[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("prompt", "good", "bad"),
    [
        (
            {"kind": "fact", "keywords": [["8000"], ["port"]]},
            "The port is 8000.",
            "The port is 9000.",
        ),
        ({"kind": "sum", "value": -18}, "12 - 30 = -18.", "12 - 30 = 18."),
        (
            {"kind": "story", "names": ["Mia"]},
            "Mia ran. She fell. She got up.",
            "Mia ran. She fell.",
        ),
        ({"kind": "list", "category": "fruits", "count": 2}, "1. apple\n2. fig", "1. fig\n2. fig"),
        ({"kind": "sort", "items": ["5", "31"]}, "5, 31", "31, 5"),
        ({"kind": "json", "object": {"age": 3}}, '{"age": 3}', '{"age": "3"}'),
        (
            {"kind": "tool", "calls": [{"name": "f", "arguments": {"x": "a"}}]},
            '<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>',
            '<tool_call>\n{"name": "f", "arguments": {"x": "b"}}\n</tool_call>',
        ),
        (
            {"kind": "think", "value": 5},
            "<think>\n2 + 3\n</think>\n\n5",
            "<think>\n\n</think>\n\n5",
        ),
        ({"kind": "fact", "keywords": []}, "fine", "one two three four five six seven eight " * 3),
        ({"kind": "fact", "keywords": []}, "fine", None),
    ],
)
def test_rules_tell_right_from_wrong(prompt, good, bad):
    kinds = {"fruits": ["apple", "fig"]}
    assert passes(prompt, good, kinds)
    assert not passes(prompt, bad, kinds)
