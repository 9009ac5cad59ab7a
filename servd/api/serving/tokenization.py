"""OpenAIServingTokenization: converts text to token ids and back, and renders chats."""

import msgspec
from fastapi import Request, Response

from servd.api.call import call_of
from servd.api.context import json_response
from servd.api.protocol.chat import ChatCompletionRequest, RenderedChat
from servd.api.protocol.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from servd.api.serving.serving import OpenAIServing, respond_with
from servd.api.text.prompt import Prompt


class OpenAIServingTokenization(OpenAIServing):
    """Serves the tokenizer; see OpenAIServing."""

    async def create_tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids of a prompt or of a chat."""
        tokenizer = self.processor.tokenizer
        content = body.chat if body.prompt is None else body.prompt
        prompt = Prompt(content=content, add_special_tokens=body.add_special_tokens)
        token_ids = await self.tokenize(request, prompt)

        def build() -> Tokenized:
            strings = None
            if body.return_token_strs:
                strings = [tokenizer.vocabulary_string(token_id) for token_id in token_ids]
            return Tokenized(len(token_ids), self.processor.max_model_len, token_ids, strings)

        return await respond_with(request, len(token_ids), build)

    async def create_detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of the given token ids."""

        def build() -> Detokenized:
            self.processor.check_token_ids(body.tokens, "tokens")
            text = self.processor.tokenizer.decode(body.tokens, skip_special_tokens=False)
            return Detokenized(text, text)

        return await respond_with(request, len(body.tokens), build)

    def get_tokenizer_info(self) -> Response:
        """Return tokenizer_config.json with the chat template in use."""
        config = {k: v for k, v in self.processor.tokenizer.config.items() if k != "name_or_path"}
        return json_response({**config, "chat_template": self.processor.chat_template.source})

    async def render_chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Render, tokenize and check a chat request without running it."""
        call = call_of(request)
        params = body.sampling_params(self.processor.default_params)
        options = self.request_options(request, body.request_options)
        request_id = f"render-{call.unique_id}"
        inputs = await self.async_llm.process_inputs(body.prompt, params, request_id, options, call)
        completed = msgspec.structs.asdict(inputs.params)
        token_ids = inputs.request.prompt_token_ids
        return json_response(RenderedChat(call.model, inputs.prompt, token_ids, completed))
