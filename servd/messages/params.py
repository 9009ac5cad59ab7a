"""Request parameters: SamplingParams for generation, PoolingParams for embeddings and scores."""

from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

from servd.base.bounds import INT32_MAX, INT64_MAX, Count, TokenId, check_bounds
from servd.base.errors import InvalidRequest

# Limits of one request. The engine's numbers have 32 or 64 bits; lists are sent once per prompt.
MAX_N = 128
MAX_BEAMS = 16
MAX_LOGPROBS = 20  # of clients, unless --max-logprobs allows more
MAX_CANDIDATES = 512  # of beam search: per beam, more than there are end tokens
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024  # tokens
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_PATTERN_SIZE = 256  # tokens that the engine compares for each new token
MAX_BAD_WORDS = 512
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_BAD_WORD_TOKENS = 32
MAX_GRAMMAR_BYTES = 65536
MAX_DRY_TOKENS = 8192  # in which DRY looks for repetitions
MAX_DRY_BREAKERS = 16
MAX_DRY_BREAKER = 40  # characters
MAX_VOCAB = 2**19

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

# Used by the API process only, as they concern text.
TEXT_PARAMS = (
    *("stop", "include_stop_str_in_output", "skip_special_tokens", "bad_words"),
    "dry_sequence_breakers",
)

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Within these bounds, logits stay finite in float32.
RepetitionPenalty = Annotated[float, Meta(ge=1e-30, le=1e18)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_CANDIDATES)]
BadWord = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]


class Params(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The base class of parameters. Positional on the wire, like messages."""


class BeamSearchParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The parameters of a beam search, with vLLM's names; see `BeamSearch`."""

    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAMS)]
    max_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    ignore_eos: bool = False
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False


class StructuredOutput(Params, frozen=True, gc=True, weakref=True):
    """A constraint on the output, which the engine enforces token by token."""

    # The API turns structural tags into grammars.
    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    # JSON schema as JSON text, regex, JSON list of choices, grammar text; "" for json_object
    value: str = ""
    # The constraint applies after this token sequence, e.g. </think>; empty: at once.
    starts_after: list[TokenId] = []
    param: str = "structured_outputs"  # the field of the client's request, for errors

    @property
    def key(self) -> tuple[str, str]:
        """The same for outputs with the same grammar."""
        return self.kind, self.value


class RepetitionDetection(Params, frozen=True):
    """The limits beyond which an output that repeats a pattern ends. Fields as in vLLM."""

    # Tokens; 0 is off.
    max_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN_SIZE)] = 0  # 0 is 1
    min_count: Count = 0  # consecutive repetitions; at least 2

    def validate(self) -> None:
        """Check the bounds. Raises InvalidRequest, with the field in `param`."""
        param = "repetition_detection"
        check_bounds(self, param)
        largest = self.max_pattern_size
        smallest = self.min_pattern_size
        problem = None
        if smallest > largest:
            problem = f"min_pattern_size must be at most {largest}, got {smallest}"
        elif largest and self.min_count < 2:
            problem = f"min_count must be at least 2, got {self.min_count}"
        if problem:
            raise InvalidRequest(f"{param}.{problem}", param=param)


class ReasoningTags(Params, frozen=True):
    """The tokens that enclose a model's reasoning."""

    end_id: TokenId
    start_id: TokenId | None = None  # None: the output begins inside the reasoning


class SamplingParams(Params, tag="sampling", kw_only=True, frozen=True):
    """The sampling parameters and limits of a request. Defaults are neutral, as in vLLM.

    The engine turns `n` choices into requests, and uses all fields except TEXT_PARAMS.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    temperature: Temperature = 1.0  # 0 is greedy
    top_p: TopP = 1.0
    top_k: TopK = 0  # 0 and -1 are off
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0  # over output tokens
    frequency_penalty: Penalty = 0.0  # over output tokens
    repetition_penalty: RepetitionPenalty = 1.0  # over prompt and output tokens
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    # None: up to the end of the context; 0: only the prompt is computed.
    max_tokens: Count | None = 16
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] = []
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)
    ] = {}
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    # None: no logprobs; k: sampled token and k most likely ones. Clients: up to --max-logprobs.
    logprobs: Annotated[int, Meta(ge=0, le=MAX_CANDIDATES)] | None = None
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]],
        Meta(max_length=MAX_STOP),
    ] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None
    # None: no logprobs; k: of every prompt token but the first, and the k most likely.
    prompt_logprobs: NumLogprobs | None = None
    bad_words: Annotated[  # text that may not be generated
        list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]],
        Meta(max_length=MAX_BAD_WORDS),
    ] = []
    # Bad words as tokens, with and without a space before: the last may not follow the others.
    bad_words_token_ids: Annotated[list[BadWord], Meta(max_length=2 * MAX_BAD_WORDS)] = []
    repetition_detection: RepetitionDetection | None = None
    speculative: bool = True  # allow speculative decoding
    thinking_token_budget: Count | None = None  # tokens of reasoning, after which it ends
    # How the engine detects reasoning; set by the API process.
    reasoning_tags: ReasoningTags | None = None
    # With logprobs: also the log-probabilities of these tokens.
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] = []
    # Samplers of llama.cpp, with its names; see `servd.worker.sample.logits_processors`.
    typical_p: TopP = 1.0
    top_n_sigma: Annotated[float, Meta(ge=-1, le=1000)] = 0.0  # 0 and below are off
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.1
    dynatemp_range: Temperature = 0.0
    dynatemp_exponent: Annotated[float, Meta(ge=0, le=100)] = 1.0
    mirostat: Annotated[int, Meta(ge=0, le=2)] = 0  # the version; 0 is off
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] = 5.0  # bits of surprise
    mirostat_eta: Annotated[float, Meta(ge=0, le=1)] = 0.1
    dry_multiplier: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    dry_base: Annotated[float, Meta(ge=1, le=1000)] = 1.75
    dry_allowed_length: Annotated[int, Meta(ge=1, le=INT32_MAX)] = 2
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = -1  # up to MAX_DRY_TOKENS
    dry_sequence_breakers: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_DRY_BREAKER)]],
        Meta(max_length=MAX_DRY_BREAKERS),
    ] = msgspec.field(default_factory=lambda: ["\n", ":", '"', "*"])
    # The tokens with a breaker in their text; set by the API process.
    dry_breaker_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_VOCAB)] = []

    def validate(self, vocab_size: int) -> None:
        """Check every bound once, before the engine receives the request.

        Raises InvalidRequest, with the field in `param`.
        """
        check_bounds(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most the limit of {self.max_tokens} output tokens, got "
                f"{self.min_tokens}",
                param="min_tokens",
            )
        if self.mirostat == 1:
            raise InvalidRequest("mirostat must be 0 or 2: servd has version 2", param="mirostat")
        if self.repetition_detection is not None:
            self.repetition_detection.validate()
        if self.reasoning_tags is not None:
            check_bounds(self.reasoning_tags, "thinking_token_budget")
        tags = self.reasoning_tags
        token_ids = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias.keys(),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logprob_token_ids": self.logprob_token_ids,
            "dry_sequence_breakers": self.dry_breaker_token_ids,
            "bad_words": [token_id for word in self.bad_words_token_ids for token_id in word],
            "thinking_token_budget": () if tags is None else (tags.end_id, tags.start_id or 0),
        }
        for name, ids in token_ids.items():
            if ids and max(ids) >= vocab_size:
                raise InvalidRequest(
                    f"every entry of {name} must be a whole number between 0 and {vocab_size - 1}, "
                    f"got {max(ids)}",
                    param=name,
                )

    def of_choice(self, index: int) -> Self:
        """Return the parameters of a choice: seeds increase, only the first has prompt logprobs."""
        # Wrap around as int64 does.
        seed = self.seed
        if seed is not None:
            seed = (seed + index + INT64_MAX + 1) % 2**64 - INT64_MAX - 1
        prompt_logprobs = self.prompt_logprobs if index == 0 else None
        return msgspec.structs.replace(self, n=1, seed=seed, prompt_logprobs=prompt_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature is 0, or so small that dividing by it would overflow."""
        return self.temperature < 1e-5


class PoolingParams(Params, tag="pooling", kw_only=True, frozen=True):
    """The pooling of a prompt's hidden states: to one vector, to a vector per token ("all"), or to
    the outputs of a classification head.

    None stands for the model's default, which the API process fills in.
    """

    pooling: Literal["last", "mean", "cls", "all"] | None = None
    normalize: bool | None = None
    dimensions: Count | None = None  # truncate the vector to N numbers
    task: Literal["embed", "classify"] = "embed"
    # Start of the second text, for models that distinguish two texts; 0: one text.
    second_text: Count = 0

    def validate(self, hidden_size: int) -> None:
        """Check every bound once, before the engine receives the request.

        Raises InvalidRequest, with the field in `param`.
        """
        check_bounds(self)
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            raise InvalidRequest(
                f"dimensions must be between 1 and {hidden_size}, the size of this model's "
                f"vectors, got {self.dimensions}",
                param="dimensions",
            )


CLASSIFY = PoolingParams(task="classify", normalize=False)
