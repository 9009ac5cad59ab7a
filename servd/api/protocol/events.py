"""The events of streams that name their events, as in OpenAI's and Anthropic's APIs."""

from typing import Literal

import msgspec


class ResponseEvent(msgspec.Struct):
    """An event of a response's stream, with OpenAI's fields for its type."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.prompt_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]


class MessageEvent(msgspec.Struct):
    """An event of a message's stream, with Anthropic's fields for its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
