"""Reads headers of harmony, the format of GPT-OSS: author, channel and recipient of a message.

A message is `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>TEXT`
and one of `ENDS`. The prompt ends after the role. The recipient may come before the channel, and
`<|constrain|>` is optional. Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re

from servd.api.output.incremental import Reader, Steps

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END, CALL, RETURN = ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = " to="  # start of an output with the recipient before the channel
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

_WORDS = re.compile(r"[^<\n]*")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def header(reader: Reader) -> Steps[str | None]:
    """Read the rest of a header, up to the message. Return the header; None if malformed. Before
    the call, `reader.consumed` must be the header's first marker.
    """
    while True:
        yield from reader.run(_WORDS)
        if (yield from reader.accept(MESSAGE)):
            return reader.consumed
        has_more = (yield from reader.accept(CHANNEL)) or (yield from reader.accept(CONSTRAIN))
        if not has_more:
            return None


def channel(head: str) -> str:
    match = _CHANNEL.search(head)
    return match[1] if match else ""


def recipient(head: str) -> str:
    match = _RECIPIENT.search(head)
    return match[1] if match else ""
