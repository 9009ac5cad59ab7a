"""OpenAIServingChat: serves chat completions."""

from collections.abc import Sequence

from fastapi import Request, Response
from msgspec import UNSET, UnsetType

from servd.api.call import call_of
from servd.api.output.incremental import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.protocol.chat import (
    AssistantMessage,
    CalledCustom,
    CalledFunction,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatFinishReason,
    ChoiceDelta,
    ChunkChoice,
    DeltaCustom,
    DeltaFunction,
    DeltaToolCall,
    MessageToolCall,
)
from servd.api.protocol.generation import CompletionTokensDetails, UsageInfo
from servd.api.serving.formatter import ChoiceFormatter
from servd.api.serving.serving import OpenAIServing
from servd.messages.engine import FinishReason
from servd.messages.outputs import CompletionOutput

NOTHING = ChoiceDelta()


class OpenAIServingChat(OpenAIServing):
    """Serves chat completions; see OpenAIServing."""

    request_type = "chat_completions"

    async def create_chat_completion(
        self, body: ChatCompletionRequest, request: Request
    ) -> Response:
        """Answer a conversation."""
        response_id = f"chatcmpl-{call_of(request).unique_id}"
        params = self.sampling_params(body, request)
        info = self.response_info(request, response_id, body.request_options)
        formatter = ChatFormatter(info, body, params)
        outputs = self.generate(request, formatter, body.prompt)
        return await self.respond(request, formatter, outputs)


class ChatFormatter(ChoiceFormatter):
    """Formats the choices of a chat as messages, or as chunks of them."""

    body: ChatCompletionRequest

    def chunks(self, output: CompletionOutput) -> list[ChatCompletionChunk]:
        """Return the chunks of an output. A choice's first chunk has only the role."""
        chunks: list[ChatCompletionChunk] = []
        delta = self._delta(output)
        output.text = ""  # `_delta` has parsed it
        has_news = delta != NOTHING or self.has_news(output)
        if not self.has_begun[output.index]:
            is_first = not any(self.has_begun)
            self.has_begun[output.index] = True
            begin = ChoiceDelta(role="assistant", content=self.body.echoed, refusal=None)
            usage = self.chunk_usage(len(output.token_ids))
            chunks.append(self._chunk([ChunkChoice(output.index, begin)], usage))
            if is_first:  # it is said once
                chunks[0].prompt_token_ids, chunks[0].prompt_text = self._prompt()
        if has_news:
            choice = ChunkChoice(
                output.index,
                delta,
                logprobs=self.token_texts[output.index].chat_logprobs(output.positions),
                finish_reason=output.finish_reason and self._finish_reason(output),
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if self.body.return_token_ids else UNSET,
            )
            chunks.append(self._chunk([choice], self.chunk_usage()))
        return chunks

    def usage_chunk(self) -> ChatCompletionChunk:
        return self._chunk([], self.usage())

    def response(self) -> ChatCompletionResponse:
        prompt_token_ids, prompt_text = self._prompt()
        return ChatCompletionResponse(
            *self.head,
            [
                ChatCompletionResponseChoice(
                    choice.index,
                    _message(self._delta(choice), self.body.echoed),
                    self.token_texts[choice.index].chat_logprobs(choice.positions),
                    self._finish_reason(choice),
                    choice.stop_reason,
                    token_ids=choice.token_ids if self.body.return_token_ids else UNSET,
                )
                for choice in self.choices
            ],
            self.usage(),
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs(self.choices[0]),
            prompt_text=prompt_text,
            timings=self.timings(),
            metrics=self.metrics(),
            kv_transfer_params=self.kv_transfer_params(),
        )

    def usage(self) -> UsageInfo:
        """Return the token counts so far, with reasoning tokens if the model reasons."""
        usage = super().usage()
        if self.info.can_reason:
            num_tokens = sum(parser.num_reasoning_tokens for parser in self.parsers.values())
            usage.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return usage

    def _prompt(self) -> tuple[list[int] | UnsetType, str | UnsetType]:
        """Return the prompt's token ids and its text, each only if the client asked for it."""
        prompt = self.prompts[0]
        return (
            prompt.prompt_token_ids if self.body.return_token_ids else UNSET,
            self.prompt_text(prompt) if self.body.return_prompt_text else UNSET,
        )

    def _chunk(
        self, choices: list[ChunkChoice], usage: UsageInfo | None | UnsetType
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(*self.head, choices, usage)

    def _delta(self, output: CompletionOutput) -> ChoiceDelta:
        deltas = self.parse(output)
        if self.body.include_reasoning is False:
            deltas = [delta for delta in deltas if not isinstance(delta, Reasoning)]
        if len(deltas) == 1 and isinstance(deltas[0], Content):  # nearly all chunks
            return ChoiceDelta(content=deltas[0].text)
        return _joined(deltas)

    def _finish_reason(self, output: CompletionOutput) -> ChatFinishReason | None:
        parser = self.parser_of(output.index)
        if output.finish_reason is not FinishReason.STOP or not parser.num_calls:
            return output.finish_reason
        # A call that a stop string cut cannot be run. OpenAI says "stop" too where the request
        # named the function: the call is all that was asked for.
        is_stop = parser.is_in_call or self.body.must_call_one
        return FinishReason.STOP if is_stop else "tool_calls"


def _joined(deltas: Sequence[Delta]) -> ChoiceDelta:
    joined = ChoiceDelta()
    calls: dict[int, DeltaToolCall] = {}
    for delta in deltas:
        match delta:
            case Content(text=text):
                joined.content = (joined.content or "") + text
            case Reasoning(text=text):
                joined.reasoning = joined.reasoning_content = (joined.reasoning or "") + text
            case ToolCallStart(index=index, id=call_id, name=name, is_custom=True):
                custom = DeltaCustom(name, "")
                calls[index] = DeltaToolCall(index, UNSET, call_id, "custom", custom)
            case ToolCallStart(index=index, id=call_id, name=name):
                function = DeltaFunction(name, "")
                calls[index] = DeltaToolCall(index, function, call_id, "function")
            case ToolCallArguments(index=index, text=text, is_custom=True):
                empty = DeltaToolCall(index, custom=DeltaCustom())
                custom = calls.setdefault(index, empty).custom
                assert isinstance(custom, DeltaCustom)
                custom.input = (custom.input or "") + text
            case ToolCallArguments(index=index, text=text):
                empty = DeltaToolCall(index, DeltaFunction())
                function = calls.setdefault(index, empty).function
                assert isinstance(function, DeltaFunction)
                function.arguments = (function.arguments or "") + text
    joined.tool_calls = list(calls.values()) or None
    return joined


def _whole_call(call: DeltaToolCall) -> MessageToolCall:
    call_id = call.id or ""
    if isinstance(call.custom, DeltaCustom):
        custom = CalledCustom(call.custom.name or "", call.custom.input or "")
        return MessageToolCall(call_id, type="custom", custom=custom)
    assert isinstance(call.function, DeltaFunction)
    function = CalledFunction(call.function.name or "", call.function.arguments or "")
    return MessageToolCall(call_id, function)


def _message(delta: ChoiceDelta, echoed: str) -> AssistantMessage:
    calls = [_whole_call(call) for call in delta.tool_calls or []]
    content = echoed + (delta.content or "")
    return AssistantMessage(
        content or None if calls or delta.reasoning else content,
        reasoning=delta.reasoning or UNSET,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
