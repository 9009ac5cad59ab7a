"""Turn what a client asks into engine requests: template, tokenise, validate everything."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec

from servd import hf
from servd.api.chat_template import ChatTemplate
from servd.api.fill_in_middle import FillInMiddle
from servd.api.grammar_checker import GrammarChecker
from servd.api.message_parser import MessageFormat, ReplyFormat
from servd.api.tokenizer import Tokenizer
from servd.config import Config
from servd.errors import ContextTooLong, InvalidRequest
from servd.hf import ModelSpec
from servd.messages import EngineCoreRequest
from servd.params import INT64_MAX, PoolingParams, ReasoningTags, SamplingParams


class Prepared(msgspec.Struct, kw_only=True):
    """A validated request, and the engine requests that serve it: one per choice."""

    request_id: str
    prompt: str | None  # None if given as token ids
    prompt_token_ids: list[int]
    # as asked, with seed and max_tokens filled in; without output for PoolingParams
    params: SamplingParams
    requests: list[EngineCoreRequest]
    reply: ReplyFormat = ReplyFormat()  # of a chat


class Processor:
    """Everything that can be wrong with a request is found here; after this the engine only
    asserts.

    Args:
        config: resolved.
        spec: of the model.
        tokenizer: of the model.
        max_model_len: longest prompt plus output, in tokens.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, tokenizer: Tokenizer, max_model_len: int
    ) -> None:
        self.config = config
        self.spec = spec
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.chat_template = ChatTemplate.load(tokenizer, config.server.chat_template)
        self.fill_in_middle = FillInMiddle.choose(tokenizer, config.server.fim_template)
        self.message_format = MessageFormat.choose(config, self.chat_template, tokenizer)
        # Sampling defaults of the model for fields that a request leaves out. max_tokens is not
        # among them: where a request has none, `process` takes the smaller of the model's default
        # and the room in the context.
        self.default_params = hf.read_generation_defaults(spec, config.model.generation_config)
        self._default_max_tokens: int | None = self.default_params.pop("max_tokens", None)
        eos = [
            *spec.eos_token_ids,
            *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]),
        ]
        self._eos_token_ids = list(dict.fromkeys(eos))
        self.grammars = GrammarChecker(config, spec)
        self._ordinal = itertools.count()  # of requests without a seed; `next` is safe in threads

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for a chat. It has its own BOS: encode it with `add_special_tokens=False`.

        Raises:
            InvalidRequest: see `ChatTemplate.render`.
        """
        return self.chat_template.render(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs
        )

    def process(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        client: int = 0,
        param: str = "prompt",
    ) -> Prepared:
        """Validate, tokenise and split into one engine request per choice.

        Args:
            request_id: unique among those running.
            prompt: text, or token ids.
            params: what is asked; `max_tokens` None means up to the end of the context.
            add_special_tokens: let the tokenizer add e.g. BOS to a text.
            priority: lower runs first, under --scheduling-policy priority.
            cache_salt: requests share cached prompt beginnings only with the same salt.
            truncate_prompt_tokens: keep only so many tokens, the last ones; -1 for as many as fit.
            client: number of this API server.
            param: the request field that holds the prompt, for errors: prompt or messages.

        Raises:
            InvalidRequest: a parameter is out of bounds, the structured output cannot be generated,
                or the prompt is empty or not in the vocabulary.
            ContextTooLong: prompt and max_tokens together exceed `max_model_len`.
        """
        params.verify(self.spec.vocab_size)
        if params.structured_output is not None:
            self.grammars.check(params.structured_output)
        if params.bad_words:
            params = msgspec.structs.replace(
                params, bad_words_token_ids=self._encode_bad_words(params.bad_words)
            )
            params.verify(self.spec.vocab_size)
        room = self.max_model_len - _least_output(params)
        prompt_token_ids, was_cut = self._encode(
            prompt, add_special_tokens, truncate_prompt_tokens, room, param
        )
        if params.thinking_token_budget is not None and params.reasoning_tags is None:
            params = msgspec.structs.replace(
                params, reasoning_tags=self.thinking_tags(prompt_token_ids)
            )
        params = self._fill(params, len(prompt_token_ids), param, client)
        return Prepared(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) and not was_cut else None,
            prompt_token_ids=prompt_token_ids,
            params=params,
            requests=[
                EngineCoreRequest(
                    request_id=request_id if params.n == 1 else f"{request_id}_{index}",
                    prompt_token_ids=prompt_token_ids,
                    params=_for_choice(params, index),
                    client=client,
                    eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
                    priority=priority,
                    cache_salt=cache_salt,
                )
                for index in range(params.n)
            ],
        )

    def process_pooling(
        self,
        request_id: str,
        prompt: str | list[int],
        params: PoolingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        client: int = 0,
        param: str = "input",
    ) -> Prepared:
        """Validate and tokenise a prompt that becomes a vector. Arguments and errors as of
        `process`.
        """
        params.verify(self.spec.hidden_size)
        prompt_token_ids, _ = self._encode(
            prompt, add_special_tokens, truncate_prompt_tokens, self.max_model_len, param
        )
        no_output = self._fill(
            SamplingParams(max_tokens=0, temperature=0.0), len(prompt_token_ids), param, client
        )
        return Prepared(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=prompt_token_ids,
            params=no_output,
            requests=[
                EngineCoreRequest(request_id, prompt_token_ids, params, client, priority=priority)
            ],
        )

    def thinking_tags(self, prompt_token_ids: list[int] | None) -> ReasoningTags:
        """How the engine follows the thoughts of a reply to a prompt; None for one that begins
        inside them.

        Raises:
            InvalidRequest: the model does not think, or its tags are not one token each.
        """
        parser = self.message_format.reasoning_parser
        if parser is None:
            raise InvalidRequest(
                "this model is not known to think: leave out thinking_token_budget",
                param="thinking_token_budget",
            )
        start_id, end_id = map(self.tokenizer.token_id, (parser.start_tag, parser.end_tag))
        if end_id is None or start_id is None:
            tag = parser.end_tag if end_id is None else parser.start_tag
            raise InvalidRequest(
                f"the {tag} of this model is not one token, so its thoughts cannot be limited: "
                f"leave out "
                "thinking_token_budget",
                param="thinking_token_budget",
            )
        is_thinking = prompt_token_ids is None
        if prompt_token_ids is not None:
            last_tag = next(
                (i for i in reversed(prompt_token_ids) if i in (start_id, end_id)), end_id
            )
            is_thinking = last_tag == start_id
        return ReasoningTags(end_id, None if is_thinking else start_id)

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        """Check that all ids are in the model's vocabulary.

        Raises:
            InvalidRequest: one is not.
        """
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.spec.vocab_size):
            bad = next(i for i in token_ids if not 0 <= i < self.spec.vocab_size)
            raise InvalidRequest(
                f"{param}: token id {bad} is not in the vocabulary, which has "
                f"{self.spec.vocab_size} tokens",
                param=param,
            )

    def _encode(
        self,
        prompt: str | list[int],
        add_special_tokens: bool,
        keep: int | None,
        room: int,
        param: str,
    ) -> tuple[list[int], bool]:
        """Checked token ids, and whether some were cut off."""
        if keep is not None and (keep < -1 or keep == 0):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, got {keep}",
                param="truncate_prompt_tokens",
            )
        # Tokenising costs a second per few megabytes: what cannot fit, whatever its tokens, is not
        # even tried.
        if (
            isinstance(prompt, str)
            and keep is None
            and len(prompt) > self.max_model_len * self.tokenizer.longest_token
        ):
            raise ContextTooLong(
                f"This model's maximum context length is {self.max_model_len} tokens, which the "
                f"{len(prompt)} "
                f"characters of the {param} exceed. Please reduce the length of the {param}.",
                param=param,
            )
        token_ids = (
            self.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        )
        self.check_token_ids(token_ids, param)
        if not token_ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        if keep is None:
            return token_ids, False
        kept = token_ids[-(max(room, 1) if keep == -1 else keep) :]
        return kept, len(kept) < len(token_ids)

    def _encode_bad_words(self, bad_words: list[str]) -> list[list[int]]:
        """Each word as it is written after a space and without one."""
        variants = [text for word in bad_words for text in (word, f" {word.lstrip()}")]
        return list(
            map(list, dict.fromkeys(tuple(self.tokenizer.encode(text, False)) for text in variants))
        )

    def _fill(
        self, params: SamplingParams, num_prompt_tokens: int, param: str, client: int
    ) -> SamplingParams:
        """`params` with max_tokens and seed, after checking that the request fits into the
        context.
        """
        room = self.max_model_len - num_prompt_tokens
        least = _least_output(params)
        if room < least:
            raise ContextTooLong(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested "
                f"{num_prompt_tokens + least} tokens ({num_prompt_tokens} in the {param}, "
                f"{least} in the completion). Please reduce the length of the {param} or "
                f"completion.",
                param=param,
            )
        max_tokens = (
            min(room, self._default_max_tokens or room)
            if params.max_tokens is None
            else params.max_tokens
        )
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most {max_tokens}, the room for output, got "
                f"{params.min_tokens}",
                param="min_tokens",
            )
        seed = params.seed
        if seed is None and not params.is_greedy:
            # Different for every request and API server, yet the same in every run of a server with
            # this --seed.
            seed = random.Random(
                f"{self.config.model.seed}/{client}/{next(self._ordinal)}"
            ).getrandbits(63)
        return msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed)


def _least_output(params: SamplingParams) -> int:
    """Tokens of the context that are not for the prompt."""
    return 1 if params.max_tokens is None else params.max_tokens


def _for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """What the engine needs for one of n choices: its own seed, and nothing that concerns text."""
    seed = params.seed
    if seed is not None:
        seed = (
            (seed + index + INT64_MAX + 1) % (2 * (INT64_MAX + 1)) - INT64_MAX - 1
        )  # wraps as int64 does
    return msgspec.structs.replace(
        params,
        n=1,
        seed=seed,
        stop=[],
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        bad_words=[],
        prompt_logprobs=params.prompt_logprobs
        if index == 0
        else None,  # the prompt is the same for all
    )
