"""The fields that chat and text completions share: sampling, streaming options, usage."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from servd.api.protocol.structured import StructuredRequest
from servd.api.protocol.validation import (
    REQUEST_ID,
    BoundsOf,
    ClosedObject,
    FewKeys,
    Int,
    KeptTokens,
    OpenObject,
    TokenId,
    Whole,
    is_neutral,
    wrong_field,
)
from servd.base.bounds import INT32_MAX
from servd.base.errors import InvalidRequest
from servd.messages.engine import RequestOptions
from servd.messages.outputs import Logprob
from servd.messages.params import (
    MAX_BEAMS,
    MAX_STOP,
    MAX_STOP_LENGTH,
    BeamSearchParams,
    RepetitionDetection,
    SamplingParams,
)

# The sampling parameters that beam search uses, or can ignore without effect. Any other parameter
# would change the answer and is refused.
WITH_BEAMS = {
    "n",
    "max_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
}
IDLE_WITH_BEAMS = ("temperature", "top_p", "top_k", "min_p", "seed", "speculative")
ONLY_WITH_BEAMS = ("early_stopping", "length_penalty")
LIMIT_ALIAS = "n_predict"  # llama-server's
BUDGET_ALIASES = ("thinking_budget_tokens", "reasoning_budget_tokens")  # llama-server's
MAX_RETENTION = 86400.0  # seconds
DEFAULTS = msgspec.structs.asdict(SamplingParams())


def _one_or_more(value: Any) -> Any:
    if not isinstance(value, str | list | None):
        raise PydanticCustomError("texts", "must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _bias_by_id(value: Any) -> Any:
    # By hand, because pydantic would list one error per key, and there may be a million.
    if not isinstance(value, dict):
        return value
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12):
            raise PydanticCustomError("logit_bias", 'keys must be token ids, as in {"50256": -100}')
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise PydanticCustomError("logit_bias", "values must be numbers")
        try:
            bias[int(key)] = float(amount)
        except OverflowError:  # an integer of more than 308 digits
            raise PydanticCustomError("logit_bias", "values must be small numbers") from None
    return bias


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), Whole]
Bias = Annotated[
    dict[int, float],
    BoundsOf("logit_bias"),
    Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,11}$"}}),
]
Temperature = Annotated[float, Field(ge=0, le=2)]  # the range of OpenAI's API
TopP = Annotated[float, BoundsOf("top_p")]
TopK = Annotated[Int, BoundsOf("top_k")]
StopTexts = Annotated[list[str], BoundsOf("stop")]


class StreamOptions(OpenObject, total=False):
    """The additional contents of a stream."""

    include_usage: bool | None
    continuous_usage_stats: bool | None


class RepetitionFields(ClosedObject, total=False):
    """The repetitions that end the output; see `servd.messages.params.RepetitionDetection`."""

    max_pattern_size: Annotated[Int, BoundsOf("max_pattern_size", RepetitionDetection)]
    min_pattern_size: Annotated[Int, BoundsOf("min_pattern_size", RepetitionDetection)]
    min_count: Annotated[Int, BoundsOf("min_count", RepetitionDetection)]


class KVTransferParams(OpenObject, total=False):
    """Fields for disaggregated prefill, as vLLM's proxies send them. Other fields are ignored."""

    do_remote_decode: bool | None  # another engine decodes after this prefill
    do_remote_prefill: bool | None  # another engine has computed the prompt
    remote_host: str | None
    remote_port: Int | None


class KVTransferAnswer(msgspec.Struct):
    """The `kv_transfer_params` to send to the engine that decodes."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int
    remote_block_size: int
    remote_blocks_expiry_time: float  # Unix time
    tp_size: int
    remote_block_ids: list[int] = []  # empty: blocks are requested by hash
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


class GenerationRequest(StructuredRequest):
    """The fields with the same meaning in chat and text completions."""

    lacking = dict.fromkeys(
        "add_special_tokens audio chat_template function_call functions prompt_embeds watermarking "
        "web_search_options".split(),
        "leave it out",
    )
    lacking |= {"lora": "name an adapter as `model`", "modalities": 'only ["text"] is'}
    lacking |= {"reasoning_format": 'only "auto" and "deepseek" are'}

    n: Annotated[Int, BoundsOf("n")] | None = None
    """Number of choices. Choice i uses `seed` + i."""
    temperature: Temperature | None = None
    """Randomness of sampling. 0 always takes the most probable token."""
    top_p: TopP | None = None
    """Sample among the most probable tokens whose probabilities add up to this."""
    top_k: TopK | None = None
    """Sample among this many of the most probable tokens. 0 and -1 turn the limit off."""
    min_p: Annotated[float, BoundsOf("min_p")] | None = None
    """Drop tokens less probable than this share of the most probable token's probability."""
    typical_p: Annotated[float, BoundsOf("typical_p")] | None = None
    """Sample among the tokens whose surprise is nearest to the entropy, with this probability."""
    top_n_sigma: Annotated[float, BoundsOf("top_n_sigma")] | None = None
    """Sample among the logits within this many standard deviations of the greatest."""
    xtc_probability: Annotated[float, BoundsOf("xtc_probability")] | None = None
    """With this probability, drop all tokens above `xtc_threshold` but the least probable."""
    xtc_threshold: Annotated[float, BoundsOf("xtc_threshold")] | None = None
    """The probability above which XTC drops tokens."""
    dynatemp_range: Annotated[float, BoundsOf("dynatemp_range")] | None = None
    """Move the temperature by up to this much, up with a greater entropy."""
    dynatemp_exponent: Annotated[float, BoundsOf("dynatemp_exponent")] | None = None
    """The power of the entropy's share of its maximum, for `dynatemp_range`."""
    mirostat: Annotated[Int, BoundsOf("mirostat")] | None = None
    """2 samples with Mirostat 2, instead of `top_k`, `top_p` and `min_p`."""
    mirostat_tau: Annotated[float, BoundsOf("mirostat_tau")] | None = None
    """The surprise in bits that Mirostat aims at."""
    mirostat_eta: Annotated[float, BoundsOf("mirostat_eta")] | None = None
    """How quickly Mirostat adapts."""
    dry_multiplier: Annotated[float, BoundsOf("dry_multiplier")] | None = None
    """Lower a token's logit by this if it would prolong a repetition (DRY)."""
    dry_base: Annotated[float, BoundsOf("dry_base")] | None = None
    """Multiplies the penalty for each token of the repetition beyond `dry_allowed_length`."""
    dry_allowed_length: Annotated[Int, BoundsOf("dry_allowed_length")] | None = None
    """Tokens of the shortest repetition with a penalty."""
    dry_penalty_last_n: Annotated[Int, BoundsOf("dry_penalty_last_n")] | None = None
    """Last tokens in which DRY looks for repetitions, at most 8192. -1: as many."""
    dry_sequence_breakers: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None, BoundsOf("dry_sequence_breakers")
    ] = None
    """Texts that end a repetition."""
    presence_penalty: Annotated[float, BoundsOf("presence_penalty")] | None = None
    """Lower the logit of each token that is in the output."""
    frequency_penalty: Annotated[float, BoundsOf("frequency_penalty")] | None = None
    """Lower a token's logit for each time it is in the output."""
    repetition_penalty: Annotated[
        Annotated[float, BoundsOf("repetition_penalty")] | None,
        Field(validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")),
    ] = None
    """Scale the logits of tokens in the prompt or the output. Above 1 makes them less likely."""
    seed: Annotated[Int, BoundsOf("seed")] | None = None
    """Requests with the same seed and parameters return the same text, whatever the load."""
    max_tokens: Annotated[
        Annotated[Int, BoundsOf("max_tokens")] | None,
        Field(validation_alias=AliasChoices("max_tokens", LIMIT_ALIAS)),
    ] = None
    """Maximum number of output tokens."""
    min_tokens: Annotated[Int, BoundsOf("min_tokens")] | None = None
    """Minimum number of output tokens."""
    ignore_eos: bool | None = None
    """Continue after the model's end-of-sequence token."""
    stop: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None,
        BeforeValidator(_one_or_more, StopText | StopTexts | None),
    ] = None
    """A stop string or a list of them. The answer ends before the first one after the reasoning."""
    stop_token_ids: Annotated[TokenIds, BoundsOf("stop_token_ids")] | None = None
    """Token ids that end the output."""
    include_stop_str_in_output: bool | None = None
    """Include the stop string in the text."""
    skip_special_tokens: bool | None = None
    """Remove special tokens from the text."""
    logit_bias: Annotated[Bias | None, BeforeValidator(_bias_by_id)] = None
    """Add to logits: `{"token id": -100 to 100}`."""
    allowed_token_ids: Annotated[TokenIds, BoundsOf("allowed_token_ids")] | None = None
    """Sample among these token ids only."""
    bad_words: Annotated[list[str], Field(fail_fast=True), BoundsOf("bad_words")] | None = None
    """Texts that must not be generated, alone or after a space; up to 32 tokens each."""
    repetition_detection: Annotated[RepetitionFields | None, FewKeys] = None
    """End an output that repeats itself, with the `finish_reason` `repetition`.
    `{"max_pattern_size": 20, "min_pattern_size": 2, "min_count": 4}` looks for four copies of 2 to
    20 tokens.
    """
    speculative: bool | None = None
    """false turns speculative decoding off. The output stays the same."""
    thinking_token_budget: Annotated[
        Annotated[Int, BoundsOf("thinking_token_budget")] | None,
        Field(validation_alias=AliasChoices("thinking_token_budget", *BUDGET_ALIASES)),
    ] = None
    """Maximum number of reasoning tokens. Needs a model whose reasoning tags are single tokens."""
    logprob_token_ids: Annotated[TokenIds, BoundsOf("logprob_token_ids")] | None = None
    """Return the log-probabilities of these token ids and of the sampled one at each position,
    instead of the likeliest. Needs `logprobs`.
    """
    prompt_logprobs: Annotated[Int, BoundsOf("prompt_logprobs")] | None = None
    """Return log-probabilities of the prompt's tokens, and of this many candidates per position (up
    to `--max-logprobs`, 20). Not with `stream`.
    """
    truncate_prompt_tokens: KeptTokens | None = None
    """Keep at most this many of the prompt's last tokens. -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """`right`: `truncate_prompt_tokens` keeps the prompt's first tokens instead."""
    use_beam_search: bool | None = None
    """Run a beam search with `n` beams instead of sampling."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    """Beam search divides log-probabilities by the length to this power."""
    early_stopping: bool | Literal["never"] | None = None
    """When to stop the beam search: true, false or `never`, as in transformers."""

    stream: bool | None = None
    """Stream the answer as server-sent events."""
    stream_options: StreamOptions | None = None
    """`{"include_usage": true}` sends the usage in the last chunk."""
    return_token_ids: bool | None = None
    """Return the token ids in addition to the text."""
    return_tokens_as_token_ids: bool | None = None
    """In log-probabilities, write tokens as `token_id:123`: several tokens may share a text."""
    timings_per_token: bool | None = None
    """Return llama-server's `timings`, in the response or in the last chunk."""
    return_progress: bool | None = None
    """Stream llama-server's `prompt_progress` while the prompt is computed. Needs `stream`."""
    return_prompt_text: bool | None = None
    """Return the rendered prompt in `prompt_text`."""
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    """Id of the request. The header `X-Request-Id` takes precedence."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Share cached prefixes only with requests that have the same salt."""

    retention: Annotated[float, Field(ge=0, le=MAX_RETENTION)] | None = None
    """Seconds to keep the prompt in the KV cache after the answer; see `--max-pinned-share`."""
    kv_transfer_params: KVTransferParams | None = None
    """For disaggregated prefill: the value from the other engine. Needs `--kv-transfer-config`."""
    prompt_cache_retention: str | None = None
    """`24h` sets `retention` to a day. Other values have no effect."""

    user: str | None = None
    """Name of the user. An API key with `by_user` gives each user a fair share."""
    metadata: Annotated[dict[str, Any] | None, FewKeys] = None
    """For your own records. No effect."""
    store: bool | None = None
    """For your own records. No effect."""
    service_tier: str | None = None
    """`flex` runs the request in the background, on idle capacity. Other values have no effect."""
    prompt_cache_key: str | None = None
    """For your own records. No effect."""
    safety_identifier: str | None = None
    """For your own records. No effect."""
    session_id: str | None = None
    """For your own records. No effect."""

    @model_validator(mode="after")
    def _check_support(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "needs `stream`: true")
        if self.logprob_token_ids and self.own_params.get("logprobs") is None:
            raise wrong_field("logprob_token_ids", "needs `logprobs`")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong_field("prompt_logprobs", "cannot be streamed: leave out `stream`")
        transfer = self.kv_transfer_params or {}
        if transfer.get("do_remote_decode") and self.stream:
            raise InvalidRequest(
                "`do_remote_decode` cannot be streamed: leave out `stream`",
                param="kv_transfer_params",
            )
        is_from_peer = transfer.get("do_remote_prefill")
        if is_from_peer and not (transfer.get("remote_host") and transfer.get("remote_port")):
            raise wrong_field(
                "kv_transfer_params",
                "with `do_remote_prefill` need `remote_host` and "
                "`remote_port`: copy the `kv_transfer_params` from the other engine's answer",
            )
        if self.use_beam_search:
            self._check_beam_search()
        return self

    def _check_beam_search(self) -> None:
        fields = type(self).model_fields.keys() & DEFAULTS.keys()
        for name in sorted(fields - WITH_BEAMS - {*IDLE_WITH_BEAMS}):
            value = vars(self)[name]
            if not is_neutral(name, value) and value != DEFAULTS[name]:
                raise wrong_field(name, "is not supported with `use_beam_search`: leave it out")
        if (self.n or 1) > MAX_BEAMS:
            raise wrong_field("n", f"may be at most {MAX_BEAMS} with `use_beam_search`")
        # Each beam needs this many candidates more, at every step.
        if len(self.stop_token_ids or ()) > MAX_STOP:
            raise wrong_field(
                "stop_token_ids", f"may have at most {MAX_STOP} with `use_beam_search`"
            )
        if self.max_tokens == 0:
            raise wrong_field("max_tokens", "must be at least 1 with `use_beam_search`")
        if (form := self.structured_output()) is not None:
            raise InvalidRequest(
                f"`{form.param}` is not supported with `use_beam_search`", param=form.param
            )

    def ignored(self) -> set[str]:
        options = set(self.stream_options or ()) - set(StreamOptions.__annotations__)
        idle = IDLE_WITH_BEAMS if self.use_beam_search else ONLY_WITH_BEAMS
        if self.truncate_prompt_tokens is None:
            idle = {*idle, "truncation_side"}
        fields = vars(self)  # the declared ones
        names = {name for name in idle if fields[name] is not None}
        if self.return_progress and (self.use_beam_search or not self.stream):
            names.add("return_progress")
        return super().ignored() | names | {f"stream_options.{name}" for name in options}

    @property
    def beams(self) -> BeamSearchParams | None:
        """The parameters of a beam search, or None for sampling."""
        if not self.use_beam_search:
            return None
        return BeamSearchParams(
            beam_width=self.n or 1,
            max_tokens=self.max_tokens or INT32_MAX,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
        )

    @property
    def request_options(self) -> RequestOptions:
        """The options of the request that are not sampling parameters."""
        transfer = self.kv_transfer_params or {}
        peer = f"{transfer.get('remote_host')}:{transfer.get('remote_port')}"
        retention = self.retention or 0.0
        if self.retention is None and self.prompt_cache_retention == "24h":
            retention = MAX_RETENTION
        return RequestOptions(
            self.priority or 0,
            self.cache_salt,
            self.truncate_prompt_tokens,
            owner=self.user or "",
            priority_class=int(self.service_tier == "flex"),
            retention=retention,
            kv_source=peer if transfer.get("do_remote_prefill") else "",
            is_exported=bool(transfer.get("do_remote_decode")),
            truncation_side=self.truncation_side,
            reports_progress=bool(self.return_progress and not self.use_beam_search),
        )

    @property
    def own_params(self) -> dict[str, Any]:
        """The sampling parameters whose fields differ between chats and completions."""
        return {}

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the request's sampling parameters. `defaults` are the model's."""
        fields = vars(self)  # the declared ones
        params = {name: fields[name] for name in SHARED_PARAMS if fields[name] is not None}
        if self.repetition_detection is not None:
            params["repetition_detection"] = RepetitionDetection(**self.repetition_detection)
        params["structured_output"] = self.structured_output()
        body_params = self.own_params
        if self.logprob_token_ids:
            body_params["logprobs"] = 0
        return SamplingParams(**{**defaults, **params, **body_params})


# Fields with the name and meaning of a field in SamplingParams.
SHARED_PARAMS = GenerationRequest.model_fields.keys() & DEFAULTS.keys()

# By token id; null for the prompt's first token.
PromptLogprobs = list[dict[int, Logprob] | None]


class PromptTokensDetails(msgspec.Struct):
    """The number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """The number of output tokens that are reasoning."""

    reasoning_tokens: int


class Timings(msgspec.Struct):
    """Durations of prompt and output, with llama-server's names. They exclude cached prompt tokens
    and time in the queue.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class SpeculativeDecodingMetrics(msgspec.Struct):
    """A request's speculative decoding metrics over all steps with drafts, with vLLM's names."""

    mean_acceptance_length: float  # including the token after the drafts
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [num_spec_tokens + 1]: steps by accepted drafts
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the most drafts of a step
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET

    @classmethod
    def of_steps(
        cls, steps: Sequence[tuple[int, int]], num_spec_tokens: int, detailed: bool
    ) -> Self:
        """Return the metrics of `steps`, each with its number of drafts and accepted drafts."""
        drafted = [step[0] for step in steps]
        accepted = [step[1] for step in steps]
        return cls(
            1 + sum(accepted) / max(len(steps), 1),
            sum(accepted) / max(sum(drafted), 1),
            [accepted.count(kept) for kept in range(num_spec_tokens + 1)],
            len(steps),
            sum(accepted),
            sum(drafted),
            num_spec_tokens,
            accepted if detailed else UNSET,
            drafted if detailed else UNSET,
        )


class ResponseMetrics(msgspec.Struct):
    """The metrics in a response."""

    speculative_decoding: SpeculativeDecodingMetrics


class UsageInfo(msgspec.Struct):
    """The token counts of a response. The prompt counts once, whatever the number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # if the model reasons
