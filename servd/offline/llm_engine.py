"""LLMEngine: runs an engine, in this process or another, one step per call of `step`."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from tqdm import tqdm

from servd import launch
from servd.api.engine.grammar_checker import GrammarChecker
from servd.api.engine.media_loader import LoadedPicture, MediaLoader
from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import Processor
from servd.api.request.request_output import RequestOutput
from servd.api.request.request_state import ProcessedInputs, RequestState, find_choice
from servd.api.request.timeline import Timeline
from servd.api.serving.logprobs import TokenTexts, by_token
from servd.api.text.prompt import Chat, Pair, Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError, InvalidRequest
from servd.base.private_dir import private_dir
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core.client import EngineCoreClient, InprocClient, SyncMPClient, make_rpc
from servd.messages.adapter import Adapter, LoRARequest
from servd.messages.engine import AbortRequests, RequestOptions, ResetPrefixCache
from servd.messages.outputs import CompletionOutput
from servd.messages.params import PoolingParams, SamplingParams
from servd.offline.metrics import OfflineMetrics

TextOrIds = str | list[int]
Params = SamplingParams | PoolingParams


class LLMEngine:
    """An engine: add requests, then call `step` until all requests have finished.

    Args:
        config: the result of `Config.load({"model": ...})`.
        separate_process: run the engine in its own process.
        use_tqdm: show a progress bar while the model loads.
    """

    def __init__(
        self, config: Config, separate_process: bool = False, use_tqdm: bool = False
    ) -> None:
        if config.parallel.data_parallel_size > 1:
            raise ConfigError(
                "data_parallel_size: servd.LLM runs one engine; leave it out, or use `servd serve`"
            )
        config, spec, _ = launch.find_and_resolve(config)
        assert config.model.max_model_len is not None
        tokenizer = Tokenizer.of_model(config, spec)
        self.processor = Processor(config, spec, tokenizer, config.model.max_model_len)
        self.output_processor = OutputProcessor(tokenizer)
        self.requests: dict[str, RequestState] = {}
        self.outputs: dict[str, RequestOutput] = {}
        with loading_bar(use_tqdm) as progress:
            self.engine_core = EngineCoreClient.make_client(
                config, spec, progress, multiprocess_mode=separate_process
            )
        self.processor.max_model_len = self.engine_core.max_model_len
        name = config.model.served_model_name[0]
        self.metrics = OfflineMetrics(name, self.engine_core.max_model_len)
        self.lora = config.lora
        self.adapters: AdapterStore | None = None
        if config.lora.enable_lora:
            self.adapters = AdapterStore(private_dir(), config.model.allow_unknown_keys)
        # Scripts rarely call `close`, so it also runs at exit.
        self.media = _start_media(config, spec) if self.processor.sees else None
        self._close = weakref.finalize(
            self, _close, self.processor.grammars, self.media, self.engine_core, self.adapters
        )

    def add_request(
        self,
        request_id: str,
        prompt: TextOrIds | Pair | Chat,
        params: Params,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request for a prompt.

        Raises:
            InvalidRequest: the prompt, parameters or adapter are not valid, or the id is in use.
        """
        text = Prompt(content=prompt, add_special_tokens=add_special_tokens)
        inputs = self.process_inputs(request_id, text, params, lora_request)
        # Choices have their own ids, which another request may have.
        engine_ids = inputs.request.choice_ids
        is_running = any(find_choice(self.requests, engine_id) for engine_id in engine_ids)
        if request_id in self.requests or is_running:
            raise InvalidRequest(
                f"a request with the id {request_id!r} is unfinished", param="request_id"
            )
        self.processor.check_structured_output(inputs)
        self.send(inputs)

    def process_inputs(
        self, request_id: str, prompt: Prompt, params: Params, adapter: LoRARequest | None
    ) -> ProcessedInputs:
        """Validate a request, without queueing it."""
        options = RequestOptions(adapter=adapter and self._load(adapter))
        if isinstance(params, SamplingParams):  # vLLM takes None for a default, and one stop text
            values = {k: v for k, v in msgspec.structs.asdict(params).items() if v is not None}
            if isinstance(values.get("stop"), str):
                values["stop"] = [values["stop"]]
            params = SamplingParams(**{"max_tokens": None, **values})
        pictures = self.processor.pictures_of(prompt)
        loaded: list[LoadedPicture] = []
        if pictures and self.media is not None:
            media, loop = self.media
            load = media.load(pictures, None, "")
            loaded = asyncio.run_coroutine_threadsafe(load, loop).result()
        if isinstance(prompt.content, Chat):  # as a text: nobody looks for calls in the output
            prompt = Prompt(content=self.processor.render(prompt, loaded), add_special_tokens=False)
        return self.processor.process_inputs(request_id, prompt, params, options, loaded)

    def send(self, inputs: ProcessedInputs, is_part: bool = False) -> None:
        """Queue a request that `process_inputs` returned. The metrics do not count a part of a beam
        search.
        """
        request = inputs.request
        timeline = Timeline(request.request_id)
        state = self.output_processor.add_request(inputs, timeline, is_part=is_part)
        params = inputs.params
        choices = [CompletionOutput(index=i) for i in range(params.n)]
        for choice in choices:
            choice.logprobs = None if params.logprobs is None else []
        self.requests[request.request_id] = state
        self.outputs[request.request_id] = RequestOutput(
            request_id=request.request_id,
            prompt=inputs.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=choices,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self.engine_core.send(request)

    def _load(self, request: LoRARequest) -> Adapter:
        """Return an adapter; load it unless the same path is loaded under this name."""
        if self.adapters is None:
            raise InvalidRequest("adapters need enable_lora=True", param="lora_request")
        loaded = self.adapters.read_adapters().get(request.lora_name)
        if loaded is not None and loaded.source == request.lora_path:
            return loaded
        layers = self.engine_core.worker.adaptable
        try:
            return self.adapters.load(
                request.lora_name, request.lora_path, self.lora.max_lora_rank, layers
            )
        except ConfigError as error:
            raise InvalidRequest(str(error), param="lora_request") from None

    def step(self) -> list[RequestOutput]:
        """Wait for the engine's next outputs. Return the requests that progressed, with all their
        output so far.

        A choice that failed in the engine has finish_reason "error" and the reason in `error`.

        Raises:
            EngineDeadError: the engine process has died.
        """
        progressed: dict[str, RequestOutput] = {}
        outputs, stats = self.engine_core.get_output()
        self.metrics.take(outputs, stats, self.requests)
        for step in outputs:
            running = find_choice(self.requests, step.request_id)
            if running is None:
                continue
            state, choice = running
            delta = self.output_processor.process_outputs([step], state, choice)
            if delta.finish_reason is not None and step.finish_reason is None:
                self.engine_core.send(AbortRequests([step.request_id]))  # a stop string ended it
            output = self.outputs[state.request_id]
            if delta.positions or delta.prompt_positions:
                self._add_logprobs(output, delta, state.params)
            output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
            output.outputs[delta.index].add(delta)
            progressed[state.request_id] = output
            self.metrics.observe(state, delta)
        for request_id, output in progressed.items():
            if output.finished:
                del self.requests[request_id], self.outputs[request_id]
        return list(progressed.values())

    def _add_logprobs(
        self, output: RequestOutput, delta: CompletionOutput, params: SamplingParams
    ) -> None:
        """Add a delta's log-probabilities by token."""
        choice = output.outputs[delta.index]
        texts = TokenTexts(self.processor.tokenizer)
        if delta.prompt_positions:
            texts.append(output.prompt_token_ids[0])
            entries = by_token(delta.prompt_positions, params.prompt_logprobs or 0, texts)
            output.prompt_logprobs = [None, *entries]
        if delta.positions:
            texts.pending = b""
            for token_id in choice.token_ids[-3:]:  # a character has up to four tokens
                texts.append(token_id)
            assert choice.logprobs is not None
            choice.logprobs += by_token(delta.positions, params.logprobs or 0, texts)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Abort requests; ignore unknown ids."""
        for request_id in request_ids:
            if (state := self.requests.pop(request_id, None)) is not None:
                del self.outputs[request_id]
                self.engine_core.send(AbortRequests(state.open_engine_ids()))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache on the device and in host memory."""
        self.engine_core.send(ResetPrefixCache())

    def collective_rpc(self, method: str, args: Sequence[str | int] = ()) -> list[str | None]:
        """Call a method of all workers; see `LLM.collective_rpc`.

        Raises:
            InvalidRequest: a request is unfinished, or there is no such method.
        """
        call = make_rpc(method, args)
        if self.requests and method == "wake_up":
            return []  # they have woken it
        if self.requests:
            raise InvalidRequest(
                f"{len(self.requests)} requests are unfinished: call step until all have finished"
            )
        return self.engine_core.collective_rpc(call)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is unfinished, so that `step` has outputs to wait for."""
        return bool(self.requests)

    def close(self) -> None:
        """Stop the engine and free its memory. Further calls have no effect."""
        self._close()


def _start_media(config: Config, spec: ModelSpec) -> tuple[MediaLoader, asyncio.AbstractEventLoop]:
    """Return a loader of pictures, and its event loop. That runs in a thread, because this one may
    have a loop, as in a notebook, and pictures of failed requests end later.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run, name="media", daemon=True).start()
    return MediaLoader(config, spec), loop


def _close(
    grammars: GrammarChecker,
    media_loop: tuple[MediaLoader, asyncio.AbstractEventLoop] | None,
    engine_core: SyncMPClient | InprocClient,
    adapters: AdapterStore | None,
) -> None:
    grammars.close()
    if media_loop is not None:
        media, loop = media_loop
        media.close()
        loop.call_soon_threadsafe(loop.stop)
    engine_core.close()
    if adapters is not None:
        adapters.clear()


@contextmanager
def loading_bar(enabled: bool) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows a fraction (0 to 1) of one phase after another, in a bar."""
    form = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
    disable = None if enabled else True  # None: hidden unless stderr is a terminal
    with tqdm(total=100, disable=disable, leave=False, bar_format=form) as bar:

        def show(phase: str, fraction: float) -> None:
            bar.set_description_str(phase, refresh=False)
            bar.update(100 * fraction - bar.n)

        yield show
