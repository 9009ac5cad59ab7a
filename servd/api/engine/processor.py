"""Processor: turns prompts into engine requests with chat template, tokenizer and validation."""

import itertools
import json
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from servd.api.engine.grammar_checker import GrammarChecker
from servd.api.engine.media_loader import LoadedPicture
from servd.api.engine.placeholders import expand, place
from servd.api.output.call_grammar import parameters_of
from servd.api.output.model_format import ModelFormat
from servd.api.output.output_parser import ExpectedOutput
from servd.api.request.request_state import ProcessedInputs
from servd.api.text import score_template
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.fill_in_middle import FillInMiddle
from servd.api.text.pictures import has_pictures, pictures_of, replace_by_notes
from servd.api.text.prompt import Chat, Pair, Picture, Prompt
from servd.api.text.special_tokens import SPLIT_HERE
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ContextTooLong, InvalidRequest
from servd.base.tracing import Mark, now_ns
from servd.checkpoint import generation_config, pooling
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.messages.engine import EngineCoreRequest, RequestOptions
from servd.messages.multimodal import MultiModalFeature
from servd.messages.params import (
    MAX_CANDIDATES,
    TEXT_PARAMS,
    PoolingParams,
    ReasoningTags,
    SamplingParams,
    StructuredOutput,
)

log = logging.getLogger("servd.api")

NO_OPTIONS = RequestOptions()
# Characters of a text that is tokenised even if it cannot fit, e.g. to be truncated: the tokenizer
# needs about 140 bytes of memory for each.
MAX_CHARS = 2 << 20
MAX_TOOL_CHECK = 2.0  # seconds to find the tool whose schema makes a grammar fail
# Defaults in place of the parameters about text, which the engine does not need.
NO_TEXT: dict[str, Any] = {name: getattr(SamplingParams(), name) for name in TEXT_PARAMS}
PROMPT_ONLY = SamplingParams(max_tokens=0, temperature=0.0, ignore_eos=True)


@dataclass(eq=False)
class Processor:
    """Renders, tokenises and validates requests. The engine relies on this validation."""

    config: Config  # resolved
    spec: ModelSpec
    tokenizer: Tokenizer
    max_model_len: int  # longest prompt plus output, in tokens
    client: int = 0  # number of this API server

    def __post_init__(self) -> None:
        config = self.config
        spec = self.spec
        tokenizer = self.tokenizer
        self.pooling = pooling.read(spec)
        server = config.server
        escape = server.escape_special_tokens
        self.chat_template = ChatTemplate.load(
            tokenizer, server.chat_template, escape, server.default_chat_template_kwargs
        )
        if self.chat_template.is_default and self.pooling.is_causal:  # an encoder has no chats
            log.info(
                "the model has no chat template: using the plain `User: ... Assistant:` one (see "
                "--chat-template)"
            )
        if self.pooling.score_tokens:
            score_template.check(self.chat_template)
        self.fill_in_middle = FillInMiddle.choose(tokenizer, server.fim_template)
        # The model's sampling defaults for fields that a request leaves out; without max_tokens,
        # for which `process_inputs` takes the smaller of the default and the room in the context.
        model = config.model
        self.default_params = generation_config.read_generation_defaults(
            spec, model.generation_config, model.override_generation_config
        )
        self.listed_params = generation_config.list_parameters(self.default_params)
        self.default_max_tokens: int | None = self.default_params.pop("max_tokens", None)
        eos = dict.fromkeys((*spec.eos_token_ids, tokenizer.eos_token_id))
        # A token that a file of the tokenizer adds may have no row in the model.
        self._eos_token_ids = [i for i in eos if i is not None and i < spec.vocab_size]
        self.model_format = ModelFormat.choose(
            config, self.chat_template, tokenizer, frozenset(self._eos_token_ids), spec.vocab_size
        )
        self.grammars = GrammarChecker(config, spec)
        self._ordinal = itertools.count()  # of requests without a seed; `next` is safe in threads

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        options: RequestOptions = NO_OPTIONS,
        pictures: Sequence[LoadedPicture] = (),
    ) -> ProcessedInputs:
        """Render, tokenise and validate a prompt. The caller must then call
        `check_structured_output`, which may take seconds. `pictures`: those of a chat, in order.

        Raises InvalidRequest, or ContextTooLong if prompt and `max_tokens` together exceed
        `max_model_len`. `max_tokens` None means up to the end of the context.
        """
        if isinstance(params, PoolingParams):
            prompt, params = self._complete_pooling(prompt, params, options)
            sampling = PROMPT_ONLY
        else:
            if self.pooling.task != "generate":
                self.pooling.check("generate")
            params.validate(self.spec.vocab_size)
            sampling = params
        rendered, marked = self._render_shown(prompt, pictures)
        text = marked.replace(SPLIT_HERE, "") if isinstance(marked, str) else marked
        marks: list[Mark] = []
        structured_output = self.model_format.without_tags(sampling.structured_output)
        expected = ExpectedOutput(structured_output)
        if isinstance(chat := prompt.content, Chat):
            marks.append(Mark("templated", now_ns()))
            if sampling is params:
                last = chat.messages[-1].get("content") if chat.continue_final_message else None
                expected = self.model_format.expect(
                    str(text),
                    chat.tool_options,
                    structured_output,
                    sampling.skip_special_tokens,
                    str(last or ""),
                )
        fills = sampling.max_tokens is None or (prompt.may_fill_context and sampling.max_tokens > 0)
        min_output = 1 if fills else sampling.max_tokens or 0  # tokens kept free for output
        token_ids, was_cut = self._encode(prompt, marked, options, min_output)
        features = self._place(token_ids, pictures, was_cut)
        sampling = self._complete(prompt, sampling, expected, token_ids, min_output)
        marks.append(Mark("tokenised", now_ns()))
        if options.truncate_prompt_tokens is not None:  # done; may be too large for a message
            options = msgspec.structs.replace(
                options, truncate_prompt_tokens=None, truncation_side=None
            )
        if self.spec.keeps_state and isinstance(chat, Chat) and not was_cut:
            start = self._turn_start(prompt, chat, str(rendered), pictures, len(token_ids))
            options = msgspec.structs.replace(options, turn_start=start)
        if not isinstance(params, PoolingParams):
            params = msgspec.structs.replace(sampling, **NO_TEXT)
        eos_token_ids = [] if sampling.ignore_eos else self._eos_token_ids
        request = EngineCoreRequest(
            request_id, token_ids, params, self.client, eos_token_ids, options, mm_features=features
        )
        prompt_text = text if isinstance(text, str) and not was_cut else None
        return ProcessedInputs(request, sampling, prompt_text, expected, marks, pictures)

    @property
    def sees(self) -> bool:
        """Whether prompts may have pictures."""
        return not isinstance(self.spec.multimodal, str)

    def pictures_of(self, prompt: Prompt) -> list[Picture]:
        """Return the pictures that must be loaded to process a prompt. Raise InvalidRequest if
        there are more than --limit-mm-per-prompt.
        """
        chat = prompt.content
        if not isinstance(chat, Chat) or not self.sees:
            return []
        pictures = pictures_of(chat.messages)
        limit = self.config.multimodal.max_images
        if len(pictures) > limit:
            raise InvalidRequest(
                f"the messages have {len(pictures)} pictures, at most {limit} are read "
                "(--limit-mm-per-prompt)",
                param=prompt.param,
            )
        return pictures

    def without_pictures(self, prompt: Prompt) -> Prompt:
        """Return the prompt of a model that reads no pictures: some become notes. Raise
        InvalidRequest if others are left.
        """
        chat = prompt.content
        if not isinstance(chat, Chat) or not any(map(has_pictures, chat.messages)):
            return prompt
        reason = self.spec.multimodal
        if not isinstance(reason, str):
            reason = "this route's models read texts only"
        messages = replace_by_notes(chat.messages, reason)
        return msgspec.structs.replace(
            prompt, content=msgspec.structs.replace(chat, messages=messages)
        )

    def _place(
        self, token_ids: list[int], pictures: Sequence[LoadedPicture], was_cut: bool
    ) -> list[MultiModalFeature]:
        """Return the pictures with their places in a prompt. Raise InvalidRequest if the prompt was
        truncated, or if one has no room in the cache of encoded pictures or in a step.
        """
        multimodal = self.spec.multimodal
        if not pictures or isinstance(multimodal, str):
            return []
        if was_cut:
            raise InvalidRequest(
                "a prompt with pictures cannot be truncated: send less, or leave "
                "truncate_prompt_tokens out",
                param="truncate_prompt_tokens",
            )
        features = place(token_ids, pictures, multimodal.image_token_id)
        scheduler = self.config.scheduler
        assert scheduler.max_num_batched_tokens is not None and scheduler.max_num_seqs is not None
        capacity = self.config.multimodal.encoder_cache_size(
            self.max_model_len, self.spec.embed_bytes
        )
        sizes = [feature.num_embeds for feature in features]
        num_embeds = max(sizes) if scheduler.enable_chunked_prefill else sum(sizes)
        if num_embeds > capacity:
            raise InvalidRequest(
                f"a step must encode {num_embeds} image tokens, and at most {capacity} fit: send "
                "smaller pictures, or raise --encoder-cache-memory",
                param="messages",
            )
        # At worst, others decode, and half of the rest is for long prompts: see Scheduler.
        limit = (scheduler.max_num_batched_tokens - scheduler.max_num_seqs) // 2
        longest = max(feature.length for feature in features)
        if multimodal.is_bidirectional and longest > limit:
            raise InvalidRequest(
                f"a picture has {longest} tokens, of which a step must compute all, and at most "
                f"{limit} fit: raise --max-num-batched-tokens",
                param="messages",
            )
        return features

    def fewest_tokens(self, prompts: Sequence[Prompt], keep: int | None) -> int:
        """Return a lower bound of the tokens of prompts that `process_inputs` accepts. In chats,
        only users' messages count: templates may drop others. `keep` is `truncate_prompt_tokens`.
        """
        total = 0
        for prompt in prompts:
            match prompt.content:
                case list(token_ids):
                    num_tokens = len(token_ids)
                case _ if not self.tokenizer.keeps_all_text:
                    num_tokens = 0
                case Chat(messages=messages):
                    texts = [m.get("content") for m in messages if m.get("role") == "user"]
                    num_chars = sum(len(text.strip()) for text in texts if isinstance(text, str))
                    num_tokens = num_chars // self.tokenizer.longest_token
                case str() | Pair(keep_first=None, keep_second=None):
                    num_tokens = prompt.num_chars // self.tokenizer.longest_token
                case Pair():
                    num_tokens = 0
            limits = (prompt.keep_first, prompt.keep_last, keep and max(keep, 1))
            set_limits = [limit for limit in limits if limit is not None]
            # `process_inputs` refuses more than `max_model_len`.
            total += min(num_tokens, self.max_model_len, *set_limits)
        return total

    def check_structured_output(self, inputs: ProcessedInputs) -> None:
        """Block until `GrammarChecker.check` has checked the grammar of a structured output, if
        any. Raise the errors of that method.
        """
        output = inputs.params.structured_output
        if output is None:
            return
        owner = inputs.request.options.owner
        try:
            self.grammars.check(output, owner)
        except InvalidRequest:
            options = inputs.expected.tool_options
            if output.param == "tools" and options is not None:
                self._check_each_tool(options.forced or options.tools, owner)
            raise

    def _check_each_tool(self, tools: list[dict[str, Any]], owner: str) -> None:
        """Raise InvalidRequest that names the first tool whose own schema is refused. Give up after
        MAX_TOOL_CHECK: only the message depends on it.
        """
        deadline = time.monotonic() + MAX_TOOL_CHECK
        for tool in tools:
            function = tool["function"]
            schema = json.dumps(parameters_of(function))
            place = f"the parameters of the tool `{function['name']}`"
            try:
                self.grammars.check(StructuredOutput("json", schema, param=place), owner)
            except InvalidRequest as error:
                raise InvalidRequest(str(error), param="tools") from None
            if time.monotonic() > deadline:
                return

    def render(self, prompt: Prompt, pictures: Sequence[LoadedPicture] = ()) -> str | list[int]:
        """Return the text to tokenise, or the token ids if the prompt consists of token ids. A
        placeholder stands for each picture of a chat.
        """
        if not pictures:
            prompt = self.without_pictures(prompt)
        content = prompt.content
        if isinstance(content, Chat):
            return self.chat_template.render(content, pictures[0].placeholder if pictures else "")
        assert not isinstance(content, Pair), "`process_inputs` makes token ids of pairs first"
        if isinstance(content, str):
            content = self.pooling.prompt(prompt.prompt_name) + content
        if not prompt.suffix or not isinstance(content, str):
            return content
        if self.fill_in_middle is None:
            raise InvalidRequest(
                "`suffix` is not supported: servd knows no fill-in-the-middle tokens of this "
                "model. Start the server with --fim-template, or write the model's own tokens in "
                "`prompt`",
                param="suffix",
            )
        return self.fill_in_middle.prompt(content, prompt.suffix)

    def tokenize(self, prompt: Prompt, pictures: Sequence[LoadedPicture] = ()) -> list[int]:
        """Return the token ids of a prompt, without checking that they fit in the context."""
        return self._token_ids(prompt, self._render_shown(prompt, pictures)[1])

    def _render_shown(
        self, prompt: Prompt, pictures: Sequence[LoadedPicture]
    ) -> tuple[str, str] | tuple[list[int], list[int]]:
        """Return a prompt as `render` does, and with the texts of its pictures in place."""
        rendered = self.render(prompt, pictures)
        if isinstance(rendered, str):
            return rendered, expand(rendered, pictures)
        return rendered, rendered

    def reasoning_tags(self, prompt_token_ids: list[int] | None) -> ReasoningTags:
        """Return the tokens by which the engine recognises reasoning, and whether the output begins
        inside reasoning after this prompt. Without a prompt, assume that it does.

        Raises InvalidRequest: the model does not reason, or its tags are not single tokens.
        """
        parser = self.model_format.reasoning_parser
        if parser is None:
            raise InvalidRequest(
                "servd knows no reasoning format of this model: leave out thinking_token_budget",
                param="thinking_token_budget",
            )
        start_id, end_id = map(self.tokenizer.token_id, (parser.start_tag, parser.end_tag))
        if end_id is None or start_id is None:
            tag = parser.end_tag if end_id is None else parser.start_tag
            raise InvalidRequest(
                f"the {tag} of this model is not one token, so its reasoning cannot be "
                "limited: leave out thinking_token_budget",
                param="thinking_token_budget",
            )
        searched_ids = [start_id] if prompt_token_ids is None else prompt_token_ids
        last_tag = next((i for i in reversed(searched_ids) if i in (start_id, end_id)), end_id)
        return ReasoningTags(end_id, None if last_tag == start_id else start_id)

    def check_logprobs(self, name: str, num_logprobs: int) -> None:
        """Raise InvalidRequest if field `name` asks for more logprobs than --max-logprobs."""
        limit = self.config.model.max_logprobs
        if num_logprobs > (MAX_CANDIDATES if limit < 0 else limit):
            raise InvalidRequest(
                f"{name} must be at most {limit} (--max-logprobs), got {num_logprobs}", param=name
            )

    def check_sums(self) -> None:
        """Raise InvalidRequest if logprobs are in fact logits, whose sums mean nothing."""
        mode = self.config.model.logprobs_mode
        if mode.endswith("logits"):
            raise InvalidRequest(
                f"this needs log-probabilities, but the server runs with --logprobs-mode {mode}"
            )

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        """Raise InvalidRequest if an id is not in the model's vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.spec.vocab_size):
            bad = next(i for i in token_ids if not 0 <= i < self.spec.vocab_size)
            raise InvalidRequest(
                f"{param}: token id {bad} is not in the vocabulary, which has "
                f"{self.spec.vocab_size} tokens",
                param=param,
            )

    def _complete_pooling(
        self, prompt: Prompt, params: PoolingParams, options: RequestOptions
    ) -> tuple[Prompt, PoolingParams]:
        params = self.pooling.complete(params)
        pair = prompt.content
        if self.pooling.score_tokens and not isinstance(pair, list):
            return score_template.chat_of(prompt, self.pooling, self.tokenizer, options), params
        if not isinstance(pair, Pair):
            return prompt, params
        if prompt.num_chars > MAX_CHARS:
            raise InvalidRequest(
                f"a pair of texts has {prompt.num_chars} characters, the most is {MAX_CHARS}: "
                "send less",
                param=prompt.param,
            )
        limit = options.truncate_prompt_tokens
        if limit is not None and options.truncation_side == "left":
            raise InvalidRequest(
                "this model reads pairs of texts, which are truncated at the end of the longer "
                "text: leave truncation_side out, or set it to right",
                param="truncation_side",
            )
        is_whole = limit is None and pair.keep_first is None and pair.keep_second is None
        if is_whole and prompt.num_chars > self._max_chars:
            raise self._too_long(prompt.num_chars, prompt.param)
        if pair.first.token_ids is None:
            pair.first.token_ids = self.tokenizer.encode(pair.first.text, False)
        token_ids, start = self.tokenizer.join_pair(
            pair.first.token_ids,
            self.tokenizer.encode(pair.second, False),
            (pair.keep_first, pair.keep_second),
            self.max_model_len if limit == -1 else limit,
        )
        second = start if self.pooling.has_token_types else 0
        params = msgspec.structs.replace(params, second_text=second)
        return msgspec.structs.replace(prompt, content=token_ids), params

    def _encode(
        self, prompt: Prompt, text: str | list[int], options: RequestOptions, min_output: int
    ) -> tuple[list[int], bool]:
        """Return the validated token ids, and whether the prompt was truncated."""
        keep = options.truncate_prompt_tokens
        if keep is not None and (keep < -1 or keep == 0):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, got {keep}",
                param="truncate_prompt_tokens",
            )
        param = prompt.param
        is_whole = keep is None and prompt.keep_first is None
        if is_whole and isinstance(text, str) and len(text) > self._max_chars:
            raise self._too_long(len(text), param)
        token_ids = self._token_ids(prompt, text)
        self.check_token_ids(token_ids, param)
        if not token_ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        kept = token_ids
        if prompt.keep_first is not None:
            kept = self._beginning(token_ids, prompt.keep_first)
        if keep is not None:
            limit = max(self.max_model_len - min_output, 1) if keep == -1 else keep
            # An encoder was trained on the beginnings of texts.
            side = options.truncation_side or ("left" if self.pooling.is_causal else "right")
            if side == "left":
                kept = self._end(kept, limit)
            else:  # The client's token ids are cut as they are.
                is_exact = isinstance(prompt.content, list)
                kept = kept[:limit] if is_exact else self._beginning(kept, limit)
        if prompt.keep_last is not None:
            kept = self._end(kept, prompt.keep_last)
        return kept, len(kept) < len(token_ids)

    @property
    def _max_chars(self) -> int:
        """The maximum length of a text that fits in the context, to refuse longer texts early."""
        return self.max_model_len * self.tokenizer.longest_token

    def _no_room(self, num_tokens: int, min_output: int, param: str) -> ContextTooLong:
        more = f", and the {param} has {num_tokens}. Shorten it, or set truncate_prompt_tokens."
        if min_output:
            more = (
                f". However, you requested {num_tokens + min_output} tokens ({num_tokens} in the "
                f"{param}, {min_output} in the completion). Please reduce the length of the "
                f"{param} or completion."
            )
        text = f"This model's maximum context length is {self.max_model_len} tokens{more}"
        return ContextTooLong(text, num_tokens, self.max_model_len - 1, param=param)

    def _too_long(self, num_chars: int, param: str) -> ContextTooLong:
        return ContextTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens, which the "
            f"{num_chars} characters of the {param} exceed. Please reduce the length of the "
            f"{param}.",
            num_chars // self.tokenizer.longest_token,
            self.max_model_len - 1,
            param=param,
        )

    def _token_ids(self, prompt: Prompt, text: str | list[int]) -> list[int]:
        if not isinstance(text, str):
            return text
        limit = max(MAX_CHARS, self._max_chars)
        if len(text) > limit:
            raise InvalidRequest(
                f"the {prompt.param} has {len(text)} characters, the most per request is "
                f"{limit}: send less",
                param=prompt.param,
            )
        # A chat template writes its own special tokens.
        adds = prompt.add_special_tokens and not isinstance(prompt.content, Chat)
        first, *pieces = text.split(SPLIT_HERE)
        token_ids = self.tokenizer.encode(first, adds)
        for piece in pieces:
            token_ids += self.tokenizer.encode(piece, False)
        return token_ids

    def _turn_start(
        self,
        prompt: Prompt,
        chat: Chat,
        text: str,
        pictures: Sequence[LoadedPicture],
        num_tokens: int,
    ) -> int:
        """Return about how many tokens of a chat come before its last user message; 0: unknown.
        `text`: the rendered chat.
        """
        beginning = self.chat_template.before_last_turn(chat, text)
        if pictures or 2 * len(beginning) < len(text):
            return len(self._token_ids(prompt, expand(beginning, pictures)))
        return max(num_tokens - len(self._token_ids(prompt, text[len(beginning) :])), 0)

    def _beginning(self, token_ids: list[int], limit: int) -> list[int]:
        """Return the first `limit` token ids, but keep the special tokens at the end."""
        if len(token_ids) <= limit:
            return token_ids
        num_last = 0
        while num_last < limit and token_ids[-1 - num_last] in self.tokenizer.special_ids:
            num_last += 1
        return token_ids[: limit - num_last] + token_ids[len(token_ids) - num_last :]

    def _end(self, token_ids: list[int], limit: int) -> list[int]:
        """Return the last `limit` token ids. An encoder keeps its first token for pooling."""
        if len(token_ids) <= limit or self.pooling.is_causal:
            return token_ids[-limit:]
        return [token_ids[0], *token_ids[len(token_ids) - limit + 1 :]]

    def _complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        expected: ExpectedOutput,
        token_ids: list[int],
        min_output: int,
    ) -> SamplingParams:
        """Return `params` with the defaults that depend on prompt and model. Raise InvalidRequest
        or ContextTooLong if the request does not fit.
        """
        for name in ("logprobs", "prompt_logprobs"):
            if (num_logprobs := getattr(params, name)) is not None:
                self.check_logprobs(name, num_logprobs)
        room = self.max_model_len - len(token_ids)
        param = prompt.param
        if room < min_output:
            raise self._no_room(len(token_ids), min_output, param)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = min(room, self.default_max_tokens or room)
        max_tokens = min(max_tokens, room)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most {max_tokens}, the most output tokens here, got "
                f"{params.min_tokens}",
                param="min_tokens",
            )
        filled: dict[str, Any] = {
            "max_tokens": max_tokens,
            "structured_output": expected.structured_output,
        }
        if params.seed is None and not params.is_greedy:
            # Different for every request and API server, but reproducible with the same --seed.
            root = f"{self.config.model.seed}/{self.client}/{next(self._ordinal)}"
            filled["seed"] = random.Random(root).getrandbits(63)
        filled |= self._tokens_of_texts(params)
        if prompt.suffix and self.fill_in_middle:
            filled["stop_token_ids"] = [*params.stop_token_ids, *self.fill_in_middle.end_token_ids]
        if params.thinking_token_budget is not None and params.reasoning_tags is None:
            filled |= self._limit_reasoning(prompt, expected, token_ids)
        completed = msgspec.structs.replace(params, **filled)
        if any(isinstance(value, list) for value in filled.values()):  # longer than checked before
            completed.validate(self.spec.vocab_size)
        if completed.allowed_token_ids is not None:
            self._check_allowed_tokens(completed, completed.allowed_token_ids)
        return completed

    def _tokens_of_texts(self, params: SamplingParams) -> dict[str, Any]:
        """Return the parameters with the token ids of the texts in others."""
        filled: dict[str, Any] = {}
        if params.bad_words:
            filled["bad_words_token_ids"] = self._encode_each(params.bad_words)
        if params.dry_multiplier:
            filled["dry_breaker_token_ids"] = self._tokens_with(tuple(params.dry_sequence_breakers))
        return filled

    @lru_cache(maxsize=16)  # noqa: B019 - a processor lives as long as its process
    def _tokens_with(self, texts: tuple[str, ...]) -> list[int]:
        """Return the ids of all tokens whose text has one of these in it."""
        tokenizer = self.tokenizer
        num_tokens = min(tokenizer.vocab_size, self.spec.vocab_size)
        strings = [tokenizer.token_string(i) for i in range(num_tokens)]
        return [i for i, string in enumerate(strings) if any(text in string for text in texts)]

    def _check_allowed_tokens(self, params: SamplingParams, allowed: list[int]) -> None:
        """Raise InvalidRequest if not even the first token can be sampled."""
        forbidden = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
        if params.min_tokens:
            forbidden.update(params.stop_token_ids)
            if not params.ignore_eos:
                forbidden.update(self._eos_token_ids)
        if forbidden.issuperset(allowed):
            raise InvalidRequest(
                f"none of the {len(allowed)} allowed_token_ids may be sampled: "
                "`bad_words` and `min_tokens` forbid them; allow others",
                param="allowed_token_ids",
            )

    def _limit_reasoning(
        self, prompt: Prompt, expected: ExpectedOutput, token_ids: list[int]
    ) -> dict[str, Any]:
        if not isinstance(prompt.content, Chat):
            return {"reasoning_tags": self.reasoning_tags(token_ids)}
        # In chats only the prompt's end counts: messages may contain tags.
        tags = self.reasoning_tags(None if expected.is_reasoning else [])
        off = {} if expected.reasoning_parser else {"thinking_token_budget": None}
        return {"reasoning_tags": tags, **off}

    def _encode_each(self, texts: list[str]) -> list[list[int]]:
        variants = [variant for text in texts for variant in (text, f" {text.lstrip()}")]
        encoded = dict.fromkeys(tuple(self.tokenizer.encode(text, False)) for text in variants)
        return [[*token_ids] for token_ids in encoded]
