"""Write docs/compatibility.md from what a server really answers: `python -m
tests.api.compatibility`.

Every field is sent alone, with a value that asks for something, to a server with the fake model.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.api.harness import serve, user

PAGE = Path(__file__).resolve().parents[2] / "docs/compatibility.md"
HEAD = """\
# Compatibility

<!-- Written by `python -m tests.api.compatibility` from the answers of a server; changes here are lost. -->

What servd does with each field of a request, tried one by one. *Supported*: it has its effect. *For the record*:
accepted, and never changes an answer. *Ignored*: accepted, without effect, and named in the response header
`X-Servd-Ignored`; with `--strict-fields` a 400. *Refused*: a 400 with the message shown. Images, audio, video and all
values out of bounds are refused. The server was started with `--fim-template`, which `suffix` needs where the model's
tokens do not tell.
"""

FOR_THE_RECORD = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "session_id",
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}

# field -> a value that asks for something
GENERATION: dict[str, Any] = {
    "model": "fake", "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.1, "seed": 1, "max_tokens": 3, "min_tokens": 1,
    "ignore_eos": True, "stop": ["x"], "stop_token_ids": [65], "include_stop_str_in_output": True,
    "skip_special_tokens": False, "logit_bias": {"65": 1}, "allowed_token_ids": [65], "bad_words": ["x"],
    "prompt_logprobs": 1, "logprob_token_ids": [65], "truncate_prompt_tokens": 3, "stream": True,
    "stream_options": {"include_usage": True}, "return_token_ids": True, "return_tokens_as_token_ids": True,
    "priority": 1, "cache_salt": "s", "use_beam_search": True, "length_penalty": 1.0, "early_stopping": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "structured_outputs": {"regex": "[ab]"}, "guided_json": SCHEMA, "guided_regex": "[ab]", "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"', "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "prompt_embeds": "AAAA", "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
    "request_id": "r", "session_id": "s", "return_prompt_text": True, "an_unknown_field": 1,
}  # fmt: skip
CHAT: dict[str, Any] = {
    "messages": user("hi"), "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "tools": [TOOL],
    "tool_choice": "auto", "parallel_tool_calls": False, "add_generation_prompt": False,
    "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}, "chat_template": "{{ 1 }}",
    "reasoning_effort": "low", "include_reasoning": False, "documents": [{"text": "a"}], "functions": [FUNCTION],
    "function_call": "auto", "modalities": ["text", "audio"], "audio": {"voice": "a"},
    "prediction": {"type": "content", "content": "a"}, "web_search_options": {"search_context_size": "low"},
    "verbosity": "low", "echo": True,
}  # fmt: skip
COMPLETIONS: dict[str, Any] = {
    "prompt": "hi", "echo": True, "logprobs": 2, "best_of": 2, "suffix": "x", "add_special_tokens": False,
}  # fmt: skip
EMBEDDINGS: dict[str, Any] = {
    "model": "fake", "input": "hi", "encoding_format": "base64", "dimensions": 4, "pooling": "mean",
    "normalize": False, "truncate_prompt_tokens": 1, "priority": 1, "user": "u", "messages": user("hi"),
    "add_special_tokens": False, "add_generation_prompt": True, "chat_template_kwargs": {"a": 1},
}  # fmt: skip
POOLING: dict[str, Any] = EMBEDDINGS | {"pooling": "all", "task": "token_embed"}
SCORE: dict[str, Any] = {
    "model": "fake", "text_1": "a", "text_2": ["b", "c"], "pooling": "mean", "truncate_prompt_tokens": 1, "priority": 1,
    "user": "u", "activation": True, "mm_processor_kwargs": {"a": 1},
}  # fmt: skip
RERANK: dict[str, Any] = {
    "model": "fake", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False,
    "max_tokens_per_doc": 1, "max_tokens_per_query": 1, "rank_fields": ["text"], "pooling": "mean",
    "truncate_prompt_tokens": 1, "priority": 1, "user": "u", "instruction": "be strict",
}  # fmt: skip
COHERE: dict[str, Any] = {
    "model": "fake", "texts": ["a"], "input_type": "search_query", "embedding_types": ["float", "base64", "binary"],
    "output_dimension": 4, "truncate": "START", "max_tokens": 2, "priority": 1, "images": ["data:image/png;base64,AA"],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "fake", "input": "hi", "instructions": "be kind", "max_output_tokens": 3, "temperature": 0.5,
    "top_p": 0.9, "top_logprobs": 2, "stream": True, "stream_options": {"include_obfuscation": False}, "store": True,
    "previous_response_id": "resp_...", "conversation": "conv_1", "background": True,
    "include": ["message.output_text.logprobs"], "tools": [RESPONSES_TOOL], "tool_choice": "auto",
    "parallel_tool_calls": False, "max_tool_calls": 1, "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "truncation": "auto",
    "prompt": {"id": "p"}, "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto",
    "metadata": {"a": "b"}, "user": "u",
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "fake", "messages": user("hi"), "max_tokens": 3, "system": "be kind", "temperature": 0.5, "top_p": 0.9,
    "top_k": 5, "stop_sequences": ["x"], "stream": True, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "service_tier": "auto",
    "output_config": {"effort": "low"}, "container": "c", "mcp_servers": [{"type": "url", "url": "http://x"}],
}  # fmt: skip

# Route -> body that is sent with every field, and the fields.
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ({"messages": user("hi"), "max_tokens": 12}, GENERATION | CHAT),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 12}, GENERATION | COMPLETIONS),
    "/v1/embeddings": ({"input": "hi"}, EMBEDDINGS),
    "/pooling": ({"input": "hi"}, POOLING),
    "/score": ({"text_1": "a", "text_2": "b"}, SCORE),
    "/rerank": ({"query": "a", "documents": ["b"]}, RERANK),
    "/v2/embed": ({"texts": ["a"]}, COHERE),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 12}, RESPONSES),
    "/v1/messages": ({"model": "fake", "messages": user("hi"), "max_tokens": 12}, MESSAGES),
}
# A field that means something only beside another.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}, "best_of": {"n": 3},
    "length_penalty": {"use_beam_search": True}, "early_stopping": {"use_beam_search": True},
    "include_stop_str_in_output": {"stop": ["x"]},
    "continue_final_message": {
        "messages": [*user("hi"), {"role": "assistant", "content": "so"}], "add_generation_prompt": False,
    },
    "tool_choice": {"tools": [TOOL]}, "parallel_tool_calls": {"tools": [TOOL]},
}  # fmt: skip
# Of requests for vectors: what belongs to a chat, which is sent in place of `input`.
OF_A_CHAT = {"messages", "add_generation_prompt", "chat_template_kwargs"}
BESIDE_TOOLS = {"/v1/responses": RESPONSES_TOOL, "/v1/messages": ANTHROPIC_TOOL}


async def outcome(http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str) -> str:
    """What the server does with the field."""
    answer = await http.post(path, json=body)
    if answer.status_code == 400:
        message = answer.json()["error"]["message"].replace("|", "\\|")
        return f"refused: {message}"
    assert answer.status_code == 200, (path, field, answer.text)
    ignored = answer.headers.get("x-servd-ignored", "").split(", ")
    if any(name == field or name.startswith(f"{field}.") for name in ignored):
        return "ignored"
    stores = path == "/v1/responses" and field == "store"
    return "for the record" if field in FOR_THE_RECORD and not stores else "supported"


async def page() -> str:
    """docs/compatibility.md."""
    parts = [HEAD]
    async with serve(fim_template="{prefix}{suffix}") as served:
        for path, (base, fields) in ROUTES.items():
            parts.append(f"\n## POST {path}\n\n| field | tried with | |\n|---|---|---|\n")
            for field in sorted(fields):
                beside = BESIDE.get(field, {})
                if "tools" in beside and path in BESIDE_TOOLS:
                    beside = {"tools": [BESIDE_TOOLS[path]]}
                if field == "logprob_token_ids":
                    beside = {"logprobs": fields["logprobs"]}
                value = fields[field]
                if field == "previous_response_id":
                    value = (await served.http.post(path, json=base)).json()["id"]
                if path == "/v1/responses" and field == "top_logprobs":
                    beside = {"include": RESPONSES["include"]}
                first = (
                    {"messages": user("hi")}
                    if fields in (EMBEDDINGS, POOLING) and field in OF_A_CHAT
                    else base
                )
                result = await outcome(served.http, path, {**first, **beside, field: value}, field)
                shown = json.dumps(fields[field], ensure_ascii=False).replace("|", "\\|")
                shown = shown if len(shown) <= 60 else shown[:57] + "..."
                parts.append(f"| `{field}` | `{shown}` | {result} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(asyncio.run(page()), encoding="utf8")
