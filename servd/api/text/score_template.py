"""Renders pairs of texts as chats, for models that score a document by their next token."""

import msgspec

from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat, Pair, Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import InvalidRequest, UnsupportedModel
from servd.checkpoint.pooling import PoolingSpec
from servd.messages.engine import RequestOptions

ROLES = ("query", "document")  # as sentence-transformers and vLLM call them


def check(template: ChatTemplate) -> None:
    """Raise UnsupportedModel if a template is not for pairs: scores would be meaningless."""
    messages = [{"role": role, "content": f"this {role}"} for role in ROLES]
    try:
        text = template.render(Chat(messages=messages))
    except InvalidRequest:
        text = ""
    if any(role not in template.source or f"this {role}" not in text for role in ROLES):
        raise UnsupportedModel(
            "the model scores pairs by its next token (LogitScore), but its chat template "
            "ignores the roles `query` and `document`: set --chat-template "
            "(docs/how-to/embeddings.md has one for Qwen3-Reranker)"
        )


def chat_of(
    prompt: Prompt, files: PoolingSpec, tokenizer: Tokenizer, options: RequestOptions
) -> Prompt:
    """Return a pair as a chat: the instruction from the model's files, the query, the document.
    Raise InvalidRequest if the prompt is not a pair, or if truncation would cut the template.
    """
    pair = prompt.content
    if not isinstance(pair, Pair):
        raise InvalidRequest(
            "this model only scores pairs of texts: use /score or /rerank", param=prompt.param
        )
    if options.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens would cut the template of this model: use max_tokens_per_doc "
            "and max_tokens_per_query of /rerank",
            param="truncate_prompt_tokens",
        )
    parts = (pair.first.text, pair.keep_first), (pair.second, pair.keep_second)
    texts = [
        text if keep is None else tokenizer.decode(tokenizer.encode(text, False)[:keep], False)
        for text, keep in parts
    ]
    system = files.prompt(None)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": role, "content": text} for role, text in zip(ROLES, texts, strict=True)]
    return msgspec.structs.replace(prompt, content=Chat(messages=messages))
