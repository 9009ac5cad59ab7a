"""Offline generation: LLM for scripts, LLMEngine for those who drive the steps themselves."""

from __future__ import annotations

import contextlib
import itertools
import queue
import shutil
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from servd import ipc, launch
from servd.adapter_store import AdapterStore
from servd.api.grammar_checker import GrammarChecker
from servd.api.output_processor import OutputProcessor
from servd.api.processor import Processor
from servd.api.prompt import Chat, Prompt, ToolOptions
from servd.api.tokenizer import Tokenizer
from servd.config import Config
from servd.core.client import EngineCoreClient, identity
from servd.core.engine_core import EngineCore
from servd.core.engine_core_proc import start_executor
from servd.core.structured_output.manager import Compiled
from servd.errors import ConfigError, EngineDead, EngineError, InvalidRequest
from servd.hf import ModelSpec
from servd.launch.engine_supervisor import EngineProcess
from servd.launch.process_tree import ENGINE_STOP_TIMEOUT
from servd.lora import Adapter, LoRARequest
from servd.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineFailed,
    EngineReady,
    EngineStatus,
    RequestOptions,
    ToEngine,
    WorkerReady,
)
from servd.outputs import CompletionOutput, RequestOutput, unpack_vector
from servd.params import PoolingParams, SamplingParams

TextOrIds = str | list[int]
Messages = list[dict[str, Any]]
Params = SamplingParams | PoolingParams
OnePrompt = TextOrIds | Mapping[str, Any]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Generate text for lists of prompts.

    Args:
        model: Hugging Face id or local folder.
        separate_process: run the engine in a process of its own, as the server does. In yours, on a
            CPU, torch has one thread between steps, until `close`: its threads and those of the
            kernels would hold each other up.
        use_tqdm: show progress bars, on a terminal.
        options: any option of `servd serve`, e.g. `max_num_seqs=8, dtype="bfloat16"`.

    Raises:
        ConfigError: the model or an option does not work here.
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
        """Complete one prompt or several, in order, with an adapter for all or one for each.

        Args:
            prompts: strings, lists of token ids, or as in vLLM `{"prompt": "text"}` and
                `{"prompt_token_ids": [1, 2]}`.
            sampling_params: for all prompts, or one for each.
            use_tqdm: overrides the setting of this LLM.
            lora_request: an adapter for all, or one for each.

        Raises:
            InvalidRequest: a prompt, parameter or adapter is not acceptable; nothing has been
                computed.
            EngineError: a request failed in the engine; the others are dropped.
        """
        requests = [(prompt, True) for prompt in listed(prompts)]
        return self._run(requests, sampling_params, use_tqdm, lora_request)

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
        """Answer one conversation or several, in order.

        Args:
            messages: OpenAI-style messages.
            sampling_params: for all conversations, or one for each.
            tools: in OpenAI's form; the model sees them.
            use_tqdm: overrides the setting of this LLM.
            lora_request: an adapter for all, or one for each.
            template_options: further fields of `Chat`, e.g. `add_generation_prompt`.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        render = self.engine.processor.chat_template.render
        # The template writes its own beginning-of-sequence token.
        options = {"tool_options": ToolOptions(tools) if tools else None, **template_options}
        prompts = [(render(Chat(messages=c, **options)), False) for c in conversations]  # type: ignore[arg-type]
        return self._run(prompts, sampling_params, use_tqdm, lora_request)

    def embed(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[list[float]]:
        """One vector for each prompt (strings, or lists of token ids), in order.

        Raises:
            InvalidRequest: a prompt or parameter is not acceptable; nothing has been computed.
        """
        requests = [(prompt, True) for prompt in listed(prompts)]
        params = pooling_params or PoolingParams()
        outputs = self._run(requests, params, use_tqdm, lora_request)
        return [unpack_vector(output.outputs[0].pooled or b"") for output in outputs]

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.engine.close()

    def _run(
        self,
        prompts: Sequence[tuple[TextOrIds, bool]],
        params: Params | Sequence[Params] | None,
        use_tqdm: bool | None,
        lora_request: LoRARequests,
    ) -> list[RequestOutput]:
        if params is None:
            processor = self.engine.processor
            length = {"max_tokens": None} if processor.default_max_tokens else {}  # the model's own
            params = SamplingParams(**length, **processor.default_params)
        each = [params] * len(prompts) if isinstance(params, Params) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} parameters")
        adapters = (
            [lora_request] * len(prompts)
            if lora_request is None or isinstance(lora_request, LoRARequest)
            else list(lora_request)
        )
        if len(adapters) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(adapters)} lora_requests")
        ids = [str(next(self.request_ids)) for _ in prompts]
        finished: dict[str, RequestOutput] = {}
        show = self.use_tqdm if use_tqdm is None else use_tqdm
        try:
            for request_id, (prompt, special), p, adapter in zip(
                ids, prompts, each, adapters, strict=True
            ):
                options = {"add_special_tokens": special, "lora_request": adapter}
                self.engine.add_request(request_id, prompt, p, **options)
            hide = None if show else True  # None: hidden unless stderr is a terminal
            with tqdm(total=len(ids), desc="prompts", disable=hide, dynamic_ncols=True) as bar:
                started, num_tokens = time.perf_counter(), 0
                while self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        for choice in output.outputs:
                            if choice.error is not None:
                                raise EngineError(choice.error)
                        if output.finished:
                            finished[output.request_id] = output
                            num_tokens += sum(len(o.token_ids) for o in output.outputs)
                            rate = num_tokens / (time.perf_counter() - started)
                            bar.set_postfix_str(f"{rate:.1f} output tok/s", refresh=False)
                            bar.update()
        except BaseException:
            self.engine.abort_request(ids)
            raise
        return [finished[request_id] for request_id in ids]


class LLMEngine:
    """One engine driven by hand: add requests, then step until none is unfinished.

    Args:
        config: as from `Config.load({"model": ...})`.
        separate_process: run the engine in a process of its own.
        use_tqdm: show a progress bar while the model loads.
    """

    def __init__(
        self, config: Config, separate_process: bool = False, use_tqdm: bool = False
    ) -> None:
        if config.parallel.data_parallel_size > 1:
            raise ConfigError(
                "data_parallel_size: offline there is one engine; leave it out, or send batches to "
                "`servd serve`"
            )
        config, spec, _ = launch.find_and_resolve(config)
        assert config.model.max_model_len is not None
        tokenizer = Tokenizer.of_model(config, spec)
        self.processor = Processor(config, spec, tokenizer, config.model.max_model_len)
        self.output_processor = OutputProcessor(tokenizer)
        self.requests: dict[str, RequestOutput] = {}
        with LoadingBar(use_tqdm) as progress:
            port = SeparateProcess if separate_process else InProcess
            self.port: Port = port(config, spec, progress)
        self.processor.max_model_len = self.port.max_model_len
        self.lora = config.lora
        self.adapters = AdapterStore(ipc.private_dir()) if config.lora.enable_lora else None
        # Scripts rarely call `close`; then it runs at exit.
        self._close = weakref.finalize(
            self, _close, self.processor.grammars, self.port, self.adapters
        )

    def add_request(
        self,
        request_id: str,
        prompt: TextOrIds,
        params: Params,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a prompt.

        Raises:
            InvalidRequest: prompt, parameters or adapter are not acceptable, or the id is in use.
        """
        whole = Prompt(content=prompt, request_id=request_id, add_special_tokens=add_special_tokens)
        options = RequestOptions(adapter=lora_request and self._load(lora_request))
        prepared = self.processor.process(whole, params, options)
        # Choices have ids of their own, which may be taken by another request.
        taken = map(self.output_processor.owner, prepared.request.choice_ids)
        if request_id in self.requests or any(taken):
            raise InvalidRequest(
                f"a request with the id {request_id!r} is unfinished", param="request_id"
            )
        self.processor.check_structured_output(prepared)
        self.output_processor.add(prepared)
        self.requests[request_id] = RequestOutput(
            request_id=request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=[CompletionOutput(index=i) for i in range(prepared.params.n)],
        )
        self.port.send(prepared.request)

    def _load(self, asked: LoRARequest) -> Adapter:
        """The adapter, as it was when its path was first named."""
        if self.adapters is None:
            raise InvalidRequest("adapters need enable_lora=True", param="lora_request")
        loaded = self.adapters.named().get(asked.lora_name)
        if loaded is not None and loaded.source == asked.lora_path:
            return loaded
        layers = self.port.worker.adaptable
        try:
            return self.adapters.load(
                asked.lora_name, asked.lora_path, self.lora.max_lora_rank, layers
            )
        except ConfigError as error:
            raise InvalidRequest(str(error), param="lora_request") from None

    def step(self) -> list[RequestOutput]:
        """Wait for the next outputs of the engine; return the requests that got some, each whole up
        to now.

        A choice that failed in the engine has finish_reason "error", and `error` says why.

        Raises:
            EngineDead: the engine process is gone.
        """
        progressed: dict[str, RequestOutput] = {}
        outputs = self.port.receive()
        for request_id, delta, stopped in self.output_processor.process(outputs):
            if stopped:  # ended by a stop string, which only this side knows about
                self.port.send(AbortRequests(stopped))
            progressed[request_id] = self.requests[request_id]
            progressed[request_id].outputs[delta.index].add(delta)
        for request_id, output in progressed.items():
            if output.finished:
                del self.requests[request_id]
        return list(progressed.values())

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        for request_id in request_ids:
            if self.requests.pop(request_id, None) is not None:
                self.port.send(AbortRequests(self.output_processor.abort(request_id)))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to wait for."""
        return bool(self.requests)

    def close(self) -> None:
        """Stop the engine and free its memory. May be called more than once."""
        self._close()


def listed(prompts: OnePrompt | Sequence[OnePrompt]) -> list[TextOrIds]:
    """One prompt or several as a list of texts and lists of ids.

    Raises:
        InvalidRequest: a mapping has neither text nor ids.
    """
    is_one = isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int))
    texts: list[TextOrIds] = []
    for prompt in [prompts] if is_one else prompts:
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if given is None:
                raise InvalidRequest('a prompt needs "prompt" or "prompt_token_ids"')
            prompt = given
        texts.append(prompt)  # type: ignore[arg-type]
    return texts


def _close(grammars: GrammarChecker, port: Port, adapters: AdapterStore | None) -> None:
    grammars.close()
    port.close()
    if adapters is not None:
        adapters.clear()


class Port(Protocol):
    """Where LLMEngine's messages go, and where outputs come from."""

    client: int
    max_model_len: int  # what the KV cache allows, too
    worker: WorkerReady

    def __init__(self, config: Config, spec: ModelSpec, progress: LoadingBar) -> None: ...
    def send(self, message: ToEngine) -> None: ...
    def receive(self) -> list[EngineCoreOutput]: ...
    def close(self) -> None: ...


class InProcess:
    """The engine as an object in this process."""

    client = 0

    def __init__(self, config: Config, spec: ModelSpec, progress: LoadingBar) -> None:
        self.executor, self.worker = start_executor(config, spec, progress)
        self.engine = EngineCore(config, spec, self.executor, self.worker)
        self.compiled: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self.engine.grammars.on_compiled = self.compiled.put
        self.max_model_len = self.engine.scheduler.max_model_len

    def send(self, message: ToEngine) -> None:
        """Handled at once."""
        self.engine.handle(message)

    def receive(self) -> list[EngineCoreOutput]:
        """Run one step, first waiting for a grammar to compile if that is all there is to do."""
        while not self.compiled.empty() or (
            not self.engine.has_work and self.engine.grammars.is_compiling
        ):
            self.engine.handle(self.compiled.get())
        outputs = self.engine.step().get(self.client)
        return outputs.all_outputs if outputs else []

    def close(self) -> None:
        """Stop the workers, once what has ended is kept. At exit it is too late for that."""
        with contextlib.suppress(RuntimeError):
            while self.engine.has_work and not self.engine.scheduler.requests:
                self.engine.step()
        self.executor.shutdown()
        self.engine.scheduler.kv_cache.close()


class SeparateProcess:
    """The engine in a process of its own, as under `servd serve`."""

    client = 0

    def __init__(self, config: Config, spec: ModelSpec, progress: LoadingBar) -> None:
        self.ipc_dir = str(ipc.private_dir())
        self.engine_client = EngineCoreClient(self.ipc_dir, self.client, identity(config, spec))
        self.child = EngineProcess(self.ipc_dir)
        self.child.start(config, spec, time.monotonic())
        try:
            while not isinstance(message := self.wait_for_message(), EngineReady):
                assert isinstance(message, EngineStatus), message
                progress(message.phase, message.progress)
            self.max_model_len, self.worker = message.max_model_len, message.worker
        except BaseException:
            self.close()
            raise

    def wait_for_message(self) -> EngineStatus | EngineReady | EngineCoreOutputs:
        """The next message, or EngineDead when the process is gone."""
        while (message := self.engine_client.recv(timeout=0.5)) is None:
            if self.child.exit_code is not None:
                raise EngineDead(f"the engine process ended with code {self.child.exit_code}")
        match message:
            case EngineFailed(reason=reason, is_config_error=is_config_error):
                raise (ConfigError if is_config_error else EngineDead)(reason)
            case EngineStatus() | EngineReady() | EngineCoreOutputs():
                return message
        raise AssertionError(message)  # the others are for API servers

    def send(self, message: ToEngine) -> None:
        """Queued to the process."""
        self.engine_client.send(message)

    def receive(self) -> list[EngineCoreOutput]:
        """Wait for the outputs of a step."""
        message = self.wait_for_message()
        return message.all_outputs if isinstance(message, EngineCoreOutputs) else []

    def close(self) -> None:
        """Stop the process and remove its sockets."""
        self.child.stop(ENGINE_STOP_TIMEOUT)
        self.engine_client.close()
        shutil.rmtree(self.ipc_dir, ignore_errors=True)


class LoadingBar:
    """Executor progress as a tqdm bar; each phase replaces the one before."""

    def __init__(self, enabled: bool) -> None:
        self.bar = tqdm(
            total=100,
            disable=None if enabled else True,
            leave=False,
            bar_format="{desc} {percentage:3.0f}% |{bar:30}| {elapsed}",
        )

    def __call__(self, phase: str, fraction: float) -> None:
        """Show `fraction` (0 to 1) of `phase`."""
        self.bar.set_description_str(phase, refresh=False)
        self.bar.update(100 * fraction - self.bar.n)

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
