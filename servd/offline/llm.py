"""LLM: offline generation, embeddings and scores, for scripts."""

import itertools
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from servd.api.engine.beam_search import BeamSearch
from servd.api.request.request_output import RequestOutput
from servd.api.text.prompt import Chat, Pair, Prompt, SharedText, ToolOptions
from servd.base.bounds import check_bounds
from servd.base.errors import EngineError, InvalidRequest, Unavailable
from servd.config import Config
from servd.messages.adapter import LoRARequest
from servd.messages.outputs import PoolingOutput, PoolingRequestOutput, unpack_vector
from servd.messages.params import CLASSIFY, BeamSearchParams, PoolingParams, SamplingParams
from servd.offline.llm_engine import LLMEngine, Params, TextOrIds
from servd.offline.metrics import Metric

Messages = list[dict[str, Any]]
OnePrompt = TextOrIds | Mapping[str, Any]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Generate text, embeddings and scores for lists of prompts.

    Args:
        model: Hugging Face id or local folder.
        separate_process: run the engine in its own process, as the server does. Without it, torch
            on a CPU uses one thread between steps until `close`, as more threads would slow the
            kernels down.
        use_tqdm: show progress bars if stderr is a terminal.
        options: any option of `servd serve`, e.g. `max_num_seqs=8, dtype="bfloat16"`.

    Raises:
        ConfigError: the model or an option cannot be used on this machine.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        separate_process: bool = False,
        use_tqdm: bool = True,
        **options: Any,
    ) -> None:
        config = Config.load({"model": model, **options})
        self.engine = LLMEngine(config, separate_process, use_tqdm)
        self.use_tqdm = use_tqdm
        self.request_ids = itertools.count()

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Complete one or more prompts. Return one output for each prompt, in order.

        Args:
            prompts: strings, lists of token ids, or as in vLLM `{"prompt": "text"}` and
                `{"prompt_token_ids": [1, 2]}`.
            sampling_params: for all prompts, or a list with one for each prompt.
            use_tqdm: overrides the setting of this LLM.
            lora_request: an adapter for all prompts, or a list with one for each prompt.

        Raises:
            InvalidRequest: a prompt, parameter or adapter is not valid. Nothing has been computed.
            EngineError: a request failed in the engine. The other requests are aborted.
        """
        return self._run(listed(prompts), sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one or more conversations. Return one output for each conversation, in order.

        Args: those of `generate`, and
            messages: OpenAI-style messages, with pictures if the model sees.
            tools: the tools to show to the model, in OpenAI's form.
            template_options: further fields of `Chat`, e.g. `add_generation_prompt`.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        options = {"tool_options": ToolOptions(tools) if tools else None, **template_options}
        chats = [Chat(messages=messages, **options) for messages in conversations]  # type: ignore[arg-type]
        return self._run(chats, sampling_params, use_tqdm, lora_request)

    def embed(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Return an embedding vector for each prompt, in order. Prompts as in `generate`.

        Raises:
            InvalidRequest: a prompt or parameter is not valid. Nothing has been computed.
        """
        params = pooling_params or PoolingParams()
        outputs = self._run(listed(prompts), params, use_tqdm, lora_request)
        return [_pooled(output, embedding=_vector(output)) for output in outputs]

    def classify(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Return the label probabilities of the model's classification head for each prompt, in
        order. `llm.engine.processor.pooling.labels` has the names of the labels.

        Raises:
            InvalidRequest: a prompt is not valid, or the model has no classification head. Nothing
                has been computed.
        """
        outputs = self._run(listed(prompts), CLASSIFY, use_tqdm, lora_request)
        probabilities = self.engine.processor.pooling.probabilities
        return [_pooled(output, probs=probabilities(_vector(output))) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Return similarities of one text with each other text, or of texts pair by pair: scores of
        the model's head or, if the model has no head, cosine similarities of embeddings.

        Raises:
            InvalidRequest: a text is not valid, or the model cannot score pairs.
        """
        firsts = [data_1] if isinstance(data_1, str) else data_1
        seconds = [data_2] if isinstance(data_2, str) else data_2
        times = len(seconds) if len(firsts) == 1 else 1
        if times * len(firsts) != len(seconds):
            raise InvalidRequest(f"{len(firsts)} texts do not pair with {len(seconds)} texts")
        pooling = self.engine.processor.pooling
        pooling.check_scores()
        if pooling.task == "classify":
            shared = times * [SharedText(text) for text in firsts]
            pairs = [Pair(*texts) for texts in zip(shared, seconds, strict=True)]
            outputs = self._run(pairs, CLASSIFY, use_tqdm, lora_request)
            return [_pooled(output, score=pooling.score(_vector(output))) for output in outputs]
        params = PoolingParams(normalize=True)
        outputs = self._run([*firsts, *seconds], params, use_tqdm, lora_request)
        ones = times * [_vector(output) for output in outputs[: len(firsts)]]
        return [
            _pooled(output, score=sum(map(operator.mul, vector, _vector(output))))
            for vector, output in zip(ones, outputs[len(firsts) :], strict=True)
        ]

    def beam_search(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """Return the most probable continuations of each prompt, in its `outputs`, best first.

        Raises:
            InvalidRequest: a prompt or parameter is not valid. Nothing has been computed.
        """
        check_bounds(params)
        self.engine.processor.check_sums()
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        searches = [
            BeamSearch(
                self.engine.process_inputs(
                    str(next(self.request_ids)), Prompt(content=prompt), sampling, lora_request
                ),
                params,
            )
            for prompt in listed(prompts)
        ]
        try:
            while running := [search for search in searches if search.running]:
                self._advance(running)
        except BaseException:
            self.engine.abort_request([*self.engine.requests])
            raise
        tokenizer = self.engine.processor.tokenizer
        return [
            RequestOutput(
                request_id=search.request.request_id,
                prompt=search.inputs.prompt,
                prompt_token_ids=search.request.prompt_token_ids,
                outputs=search.answers(tokenizer),
            )
            for search in searches
        ]

    def _advance(self, searches: Sequence[BeamSearch]) -> None:
        """Extend every beam of every search by one token."""
        steps = [search.requests() for search in searches]
        for inputs in itertools.chain(*steps):
            self.engine.send(inputs, is_part=True)
        done = {output.request_id: output.outputs[0] for output in self._finished()}
        for search, step in zip(searches, steps, strict=True):
            positions = [done[inputs.request.request_id].positions or [] for inputs in step]
            search.advance([position for (position,) in positions])

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics, with the names of /metrics and the classes of vLLM."""
        return self.engine.metrics.read()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache on the device and in host memory."""
        self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache, at any `level`. The next call loads the model again."""
        self.engine.collective_rpc("sleep")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the whole model again before a call needs it. `tags` have no effect."""
        self.engine.collective_rpc("wake_up")

    def collective_rpc(self, method: str, args: Sequence[str | int] = ()) -> list[str | None]:
        """Call a method of all workers, and return their results by rank.

        Args:
            method: `update_weights` loads another checkpoint of the same architecture, from a
                folder beside the model's own;
                `start_profile` and `stop_profile` record a trace of torch, whose path is the
                result; `sleep` frees weights and KV cache; `wake_up` loads the model again.
            args: of `update_weights`, the folder; of `sleep`, the level.

        Raises:
            InvalidRequest: there is no such method, or its arguments are wrong; nothing changes.
            EngineError: the checkpoint could not be loaded, and the engine cannot be used any more.
        """
        return self.engine.collective_rpc(method, args)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.engine.close()

    def _run(
        self,
        prompts: Sequence[TextOrIds | Pair | Chat],
        params: Params | Sequence[Params] | None,
        use_tqdm: bool | None,
        lora_request: LoRARequests,
    ) -> list[RequestOutput]:
        if params is None:
            processor = self.engine.processor
            length = {"max_tokens": None} if processor.default_max_tokens else {}  # the model's own
            params = SamplingParams(**length, **processor.default_params)
        params_of_prompts = [params] * len(prompts) if isinstance(params, Params) else list(params)
        if len(params_of_prompts) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(params_of_prompts)} parameters")
        is_list = isinstance(lora_request, Sequence)
        adapters = lora_request if is_list else [lora_request] * len(prompts)
        if len(adapters) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(adapters)} lora_requests")
        ids = [str(next(self.request_ids)) for _ in prompts]
        finished: dict[str, RequestOutput] = {}
        show = self.use_tqdm if use_tqdm is None else use_tqdm
        try:
            requests = zip(ids, prompts, params_of_prompts, adapters, strict=True)
            early = (output for request in requests for output in self._add(*request))
            hide = None if show else True  # None: hidden unless stderr is a terminal
            with tqdm(total=len(ids), desc="prompts", disable=hide, dynamic_ncols=True) as bar:
                started = time.perf_counter()
                num_tokens = 0
                for output in itertools.chain(early, self._finished()):
                    finished[output.request_id] = output
                    num_tokens += sum(len(o.token_ids) for o in output.outputs)
                    rate = num_tokens / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{rate:.1f} output tok/s", refresh=False)
                    bar.update()
        except BaseException:
            self.engine.abort_request(ids)
            raise
        return [finished[request_id] for request_id in ids]

    def _add(
        self, request_id: str, prompt: Chat | Pair | TextOrIds, params: Params, adapter: Any
    ) -> Iterator[RequestOutput]:
        """Add a request. Yield those that finish before there is room for its pictures."""
        while True:
            try:
                self.engine.add_request(request_id, prompt, params, lora_request=adapter)
                return
            except Unavailable:
                if not self.engine.has_unfinished_requests():
                    raise
            yield from self._step()

    def _finished(self) -> Iterator[RequestOutput]:
        """Yield each request when it finishes. Raise EngineError if a choice failed."""
        while self.engine.has_unfinished_requests():
            yield from self._step()

    def _step(self) -> Iterator[RequestOutput]:
        for output in self.engine.step():
            for choice in output.outputs:
                if choice.error is not None:
                    raise EngineError(choice.error)
            if output.finished:
                yield output


def _pooled(output: RequestOutput, **result: Any) -> PoolingRequestOutput:
    prompt = output.prompt_token_ids
    pooled = PoolingOutput(**result)
    return PoolingRequestOutput(output.request_id, pooled, prompt, output.num_cached_tokens)


def _vector(output: RequestOutput) -> list[float]:
    return unpack_vector(output.outputs[0].pooled or b"")


def listed(prompts: OnePrompt | Sequence[OnePrompt]) -> list[TextOrIds]:
    """Return one or more prompts as a list of texts and lists of token ids. Raise InvalidRequest if
    a mapping has neither text nor ids.
    """
    is_one = isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int))
    texts: list[TextOrIds] = []
    for prompt in [prompts] if is_one else prompts:
        if isinstance(prompt, Mapping):
            content = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if content is None:
                raise InvalidRequest('a prompt needs "prompt" or "prompt_token_ids"')
            prompt = content
        texts.append(prompt)  # type: ignore[arg-type]
    return texts
