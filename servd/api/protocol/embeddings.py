"""Embeddings: the request and the response."""

from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema

from servd.api.protocol.chat import Messages
from servd.api.protocol.completions import Prompts, list_of_prompts
from servd.api.protocol.validation import Int, KeptTokens, RequestBody
from servd.api.text.prompt import Chat, Prompt
from servd.base.bounds import INT32_MAX
from servd.messages.engine import RequestOptions
from servd.messages.params import PoolingParams

# The largest is the model's; `PoolingParams.validate` knows it.
Dimensions = Annotated[Int, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": INT32_MAX})]

IN_TEXTS = "leave it out, and write what it adds into the texts"


class PooledRequest(RequestBody):
    """The fields that all requests for pooled outputs share."""

    lacking = dict.fromkeys(("chat_template", "continue_final_message", "instruction"), IN_TEXTS)
    lacking["embd_normalize"] = "`use_activation`: false returns vectors that are not normalized"

    truncate_prompt_tokens: KeptTokens | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Where `truncate_prompt_tokens` drops tokens. Default: `right` for encoders, else `left`."""
    use_activation: Annotated[
        bool | None, Field(validation_alias=AliasChoices("use_activation", "activation", "softmax"))
    ] = None
    """`false` returns the outputs of a classification head instead of probabilities or scores, and
    vectors as they are instead of normalized. Other names: `activation`, `softmax`.
    """
    user: str | None = None
    service_tier: str | None = None
    """`flex` runs the request in the background, on idle capacity. Other values have no effect."""

    def ignored(self) -> set[str]:
        idle = ["truncation_side"] if self.truncate_prompt_tokens is None else []
        return super().ignored() | (self.model_fields_set & {*idle})

    @property
    def request_options(self) -> RequestOptions:
        return RequestOptions(
            self.priority or 0,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            owner=self.user or "",
            priority_class=int(self.service_tier == "flex"),
        )


class InputRequest(PooledRequest):
    """The fields that requests with inputs share: texts, token ids or a chat."""

    either = ("input", "messages")

    # read as list[str] | list[list[int]] | None
    input: Annotated[Any, BeforeValidator(list_of_prompts, Prompts)] = None
    messages: Messages | None = None
    add_generation_prompt: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True  # to `input`; a chat template writes its own
    prompt_name: str | None = None
    """Name of a prompt in the model's files to put before `input`, e.g. `query`."""

    def ignored(self) -> set[str]:
        idle = (
            ("add_generation_prompt", "chat_template_kwargs")
            if self.messages is None
            else ("add_special_tokens", "prompt_name")
        )
        return super().ignored() | (self.model_fields_set & {*idle})

    @property
    def prompts(self) -> list[Prompt]:
        if self.messages is None:
            return [
                Prompt(
                    content=item,
                    param="input",
                    add_special_tokens=self.add_special_tokens,
                    prompt_name=self.prompt_name,
                )
                for item in self.input
            ]
        chat = Chat(
            messages=cast(list[dict[str, Any]], self.messages),
            add_generation_prompt=self.add_generation_prompt,
            chat_template_kwargs=self.chat_template_kwargs or {},
        )
        return [Prompt(content=chat, param="messages")]


class VectorRequest(InputRequest):
    """The fields that requests for vectors share: the inputs, and the form of the vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of the numbers of `base64`."""
    endianness: Literal["native", "little", "big"] = "little"
    """Order of the bytes of `base64`; `native` is `little`."""
    dimensions: Dimensions | None = None
    normalize: bool | None = None

    def ignored(self) -> set[str]:
        idle = () if self.encoding_format == "base64" else ("embed_dtype", "endianness")
        return super().ignored() | (self.model_fields_set & {*idle})

    def params(self, pooling: str | None) -> PoolingParams:
        """Return the parameters for pooling an input's hidden states into vectors."""
        return PoolingParams(
            pooling=pooling,  # type: ignore[arg-type]
            normalize=self.use_activation if self.normalize is None else self.normalize,
            dimensions=self.dimensions,
        )


class EmbeddingRequest(VectorRequest):
    """Body of POST /v1/embeddings."""

    pooling: Literal["last", "mean"] | None = None


class EmbeddingResponseData(msgspec.Struct, tag_field="object", tag="embedding"):
    """The vector of one input."""

    index: int
    embedding: list[float] | str  # a string is base64 of float32, little-endian


class EmbeddingUsage(msgspec.Struct):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, tag_field="object", tag="list"):
    """The response of /v1/embeddings."""

    data: list[EmbeddingResponseData]
    model: str
    usage: EmbeddingUsage
