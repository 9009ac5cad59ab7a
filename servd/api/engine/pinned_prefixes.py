"""PinnedPrefixes: keeps the prompts of --pin-prefix in every engine's prefix cache."""

import itertools
import logging
from contextlib import aclosing
from pathlib import Path

import msgspec

from servd.api.engine.async_llm import AsyncLLM
from servd.api.engine.processor import PROMPT_ONLY
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.validation import parse
from servd.api.request.timeline import Timeline
from servd.api.text.prompt import Chat, Prompt
from servd.base.errors import ConfigError, ServdError
from servd.messages.engine import RequestOptions

log = logging.getLogger("servd.api")

PINNED = RequestOptions(retention=1e9)  # longer than any request may ask for


class PinnedPrefixes:
    """The prompts in the files of --pin-prefix, computed whenever an engine's cache is empty.
    Raises ConfigError if a file cannot be read.
    """

    def __init__(self, files: list[str]) -> None:
        self.contents = {file: _read(file) for file in files}
        self._numbers = itertools.count()

    async def keep(self, async_llm: AsyncLLM) -> None:
        """Send the prompts to each ready engine, and again after its cache was emptied."""
        cache_numbers: dict[int, int] = {}  # engine -> number of its cache that has the prompts
        while True:
            changed = async_llm.has_changed
            for engine in async_llm.engines:
                is_awake = engine.is_ready and not engine.is_asleep
                if is_awake and cache_numbers.get(engine.rank) != engine.cache_number:
                    cache_numbers[engine.rank] = engine.cache_number
                    for file, content in self.contents.items():
                        await self._send(async_llm, engine.rank, file, content)
            await changed.wait()

    async def _send(self, async_llm: AsyncLLM, rank: int, file: str, content: str | Chat) -> None:
        request_id = f"pin-{next(self._numbers)}"
        options = msgspec.structs.replace(PINNED, rank=rank)
        try:
            parent = Timeline("--pin-prefix")  # not a client's request
            outputs = async_llm.generate(
                Prompt(content=content), PROMPT_ONLY, request_id, options, parent=parent
            )
            num_tokens = 0
            async with aclosing(outputs):
                async for output in outputs:
                    num_tokens = len(output.prompt_token_ids)
        except ServdError as error:
            log.error("--pin-prefix %s: engine %d cannot keep it: %s", file, rank, error)
        else:
            log.info(
                "--pin-prefix %s: engine %d computed %d tokens and keeps their full blocks",
                file,
                rank,
                num_tokens,
            )


def _read(file: str) -> str | Chat:
    try:
        data = Path(file).expanduser().read_bytes()
        if file.endswith(".json"):
            return parse(ChatCompletionRequest, data).chat
        if not data:
            raise ConfigError("the file is empty")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"--pin-prefix {file}: {error.strerror}") from None
    except (UnicodeDecodeError, ServdError) as error:
        raise ConfigError(f"--pin-prefix {file}: {error}") from None
