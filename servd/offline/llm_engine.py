"""LLMEngine: runs an engine, in this process or another, one step per call of `step`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import queue
import shutil
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from tqdm import tqdm

from servd import launch
from servd.api.engine.grammar_checker import GrammarChecker
from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import Processor
from servd.api.request.request_state import RequestState, find_choice
from servd.api.text.prompt import Pair, Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError, EngineDead, InvalidRequest
from servd.base.private_dir import private_dir
from servd.base.tracing import now_ns
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core.client import EngineCoreClient, identity
from servd.core.engine_core import EngineCore
from servd.core.engine_core_proc import start_executor
from servd.core.executor import Executor
from servd.core.structured_output.manager import Compiled
from servd.ipc.start_messages import StartEngine
from servd.launch.engine_supervisor import EngineProcess
from servd.launch.process_tree import ENGINE_STOP_TIMEOUT
from servd.messages.adapter import Adapter, LoRARequest
from servd.messages.engine import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFailed,
    EngineReady,
    EngineStatus,
    RequestOptions,
    ResetPrefixCache,
    Sleep,
    ToEngine,
    WakeUp,
    WorkerReady,
)
from servd.messages.outputs import CompletionOutput, RequestOutput
from servd.messages.params import PoolingParams, SamplingParams
from servd.messages.stats import SchedulerStats
from servd.offline.metrics import OfflineMetrics

TextOrIds = str | list[int]
Params = SamplingParams | PoolingParams
Received = tuple[list[EngineCoreOutput], SchedulerStats | None]


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
        with LoadingBar(use_tqdm) as progress:
            port = SeparateProcess if separate_process else InProcess
            self.port: Port = port(config, spec, progress)
        self.processor.max_model_len = self.port.max_model_len
        name = config.model.served_model_name[0]
        self.metrics = OfflineMetrics(name, self.port.max_model_len)
        self.lora = config.lora
        self.adapters = AdapterStore(private_dir()) if config.lora.enable_lora else None
        # Scripts rarely call `close`, so it also runs at exit.
        self._close = weakref.finalize(
            self, _close, self.processor.grammars, self.port, self.adapters
        )

    def add_request(
        self,
        request_id: str,
        prompt: TextOrIds | Pair,
        params: Params,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request for a prompt.

        Raises:
            InvalidRequest: the prompt, parameters or adapter are not valid, or the id is in use.
        """
        whole = Prompt(content=prompt, request_id=request_id, add_special_tokens=add_special_tokens)
        state = self.prepare(whole, params, lora_request)
        # Choices have their own ids, which another request may have.
        taken = any(find_choice(self.requests, each) for each in state.request.choice_ids)
        if request_id in self.requests or taken:
            raise InvalidRequest(
                f"a request with the id {request_id!r} is unfinished", param="request_id"
            )
        self.processor.check_structured_output(state)
        self.send(state)

    def prepare(self, prompt: Prompt, params: Params, adapter: LoRARequest | None) -> RequestState:
        """Validate a request and return its state, without queueing the request."""
        options = RequestOptions(adapter=adapter and self._load(adapter))
        return self.processor.process(prompt, params, options)

    def send(self, state: RequestState) -> None:
        """Queue a request that `prepare` returned."""
        state.start(now_ns())
        state.output = RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[CompletionOutput(index=i) for i in range(state.params.n)],
        )
        self.requests[state.request_id] = state
        self.port.send(state.request)

    def _load(self, asked: LoRARequest) -> Adapter:
        """Return an adapter; load it unless the same path is loaded under this name."""
        if self.adapters is None:
            raise InvalidRequest("adapters need enable_lora=True", param="lora_request")
        loaded = self.adapters.read_adapters().get(asked.lora_name)
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
        """Wait for the engine's next outputs. Return the requests that progressed, with all their
        output so far.

        A choice that failed in the engine has finish_reason "error" and the reason in `error`.

        Raises:
            EngineDead: the engine process has died.
        """
        progressed: dict[str, RequestOutput] = {}
        outputs, stats = self.port.receive()
        self.metrics.take(outputs, stats, self.requests)
        for state, delta, stopped in self.output_processor.process(outputs, self.requests):
            if stopped:  # ended by a stop string, which only this side knows about
                self.port.send(AbortRequests(stopped))
            assert state.output is not None
            state.output.outputs[delta.index].add(delta)
            progressed[state.request_id] = state.output
            self.metrics.observe(state, delta)
        for request_id, output in progressed.items():
            if output.finished:
                del self.requests[request_id]
        return list(progressed.values())

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Abort requests; ignore unknown ids."""
        for request_id in request_ids:
            if (state := self.requests.pop(request_id, None)) is not None:
                self.port.send(AbortRequests(state.open_engine_ids()))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache on the device and in host memory."""
        self.port.send(ResetPrefixCache())

    def sleep(self, is_asleep: bool = True) -> None:
        """Free weights and KV cache, or load the model again. A new request also loads the model.

        Raises:
            InvalidRequest: a request is unfinished.
        """
        if is_asleep and self.requests:
            raise InvalidRequest(
                f"{len(self.requests)} requests are unfinished: call step until all have finished"
            )
        self.port.sleep(is_asleep)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is unfinished, so that `step` has outputs to wait for."""
        return bool(self.requests)

    def close(self) -> None:
        """Stop the engine and free its memory. Further calls have no effect."""
        self._close()


def _close(grammars: GrammarChecker, port: Port, adapters: AdapterStore | None) -> None:
    grammars.close()
    port.close()
    if adapters is not None:
        adapters.clear()


class Port(Protocol):
    """The interface through which LLMEngine talks to its engine."""

    client: int
    max_model_len: int  # limited by the size of the KV cache, too
    worker: WorkerReady

    def __init__(self, config: Config, spec: ModelSpec, progress: LoadingBar) -> None: ...
    def send(self, message: ToEngine) -> None: ...
    def sleep(self, is_asleep: bool) -> None: ...
    def receive(self) -> Received: ...
    def close(self) -> None: ...


class InProcess:
    """A port to an engine in this process."""

    client = 0

    def __init__(self, config: Config, spec: ModelSpec, progress: LoadingBar) -> None:
        self.config = config
        self.spec = spec
        self.executor: Executor | None  # None while asleep
        self.executor, self.worker = start_executor(config, spec, progress)
        self.engine = EngineCore(config, spec, self.executor, self.worker)
        self.compiled: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self.engine.grammars.on_compiled = self.compiled.put
        self.max_model_len = self.engine.scheduler.max_model_len

    def send(self, message: ToEngine) -> None:
        """Pass a message to the engine at once. A new request wakes the engine."""
        if isinstance(message, EngineCoreRequest):
            self.sleep(False)
        self.engine.handle(message)

    def sleep(self, is_asleep: bool) -> None:
        """Free the model's memory, or load it again."""
        if is_asleep and self.executor is not None:
            self._end_steps()
            self.executor.shutdown()
            self.executor = None
            self.engine.forget_workers()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # glibc would keep most of it
        elif not is_asleep and self.executor is None:
            memory = self.worker.num_blocks * self.worker.kv_bytes_per_block  # as much as before
            config = self.config.replace(kv_cache_memory=memory)
            self.executor, worker = start_executor(config, self.spec, lambda phase, fraction: None)
            self.engine.connect(self.executor, worker)

    def receive(self) -> Received:
        """Run one step and return its outputs. If every request waits for a grammar, wait first."""
        while not self.compiled.empty() or (
            not self.engine.has_work and self.engine.grammars.is_compiling
        ):
            self.engine.handle(self.compiled.get())
        outputs = self.engine.step().get(self.client)
        return (outputs.all_outputs, outputs.stats) if outputs else ([], None)

    def close(self) -> None:
        """Save the KV blocks of finished requests, and stop the workers. Call this before exit."""
        if self.executor is not None:
            with contextlib.suppress(RuntimeError):
                self._end_steps()
            self.executor.shutdown()
        self.engine.scheduler.kv_cache.close()

    def _end_steps(self) -> None:
        while self.engine.has_work and not self.engine.scheduler.requests:
            self.engine.step()


class SeparateProcess:
    """A port to an engine in its own process, as under `servd serve`."""

    client = 0
    is_asleep = False

    def __init__(self, config: Config, spec: ModelSpec, progress: LoadingBar) -> None:
        self.ipc_dir = str(private_dir())
        self.engine_client = EngineCoreClient(self.ipc_dir, self.client, identity(config, spec))
        self.child = EngineProcess(self.ipc_dir)
        start = StartEngine(config, spec, self.ipc_dir, time.monotonic())
        start.heartbeat = self.child.descriptor
        self.child.send(start)
        try:
            while not isinstance(message := self.wait_for_message(), EngineReady):
                assert isinstance(message, EngineStatus), message
                progress(message.phase, message.progress)
            self.max_model_len = message.max_model_len
            self.worker = message.worker
        except BaseException:
            self.close()
            raise

    def wait_for_message(self) -> EngineStatus | EngineReady | EngineCoreOutputs:
        """Return the next message. Raise EngineDead or ConfigError if the engine has failed."""
        while (message := self.engine_client.recv(timeout=0.5)) is None:
            if self.child.exit_code is not None:
                raise EngineDead(f"the engine process ended with code {self.child.exit_code}")
        match message:
            case EngineFailed(reason=reason, is_config_error=is_config_error):
                raise (ConfigError if is_config_error else EngineDead)(reason)
            case EngineReady(is_asleep=is_asleep):
                self.is_asleep = is_asleep
                return message
            case EngineStatus() | EngineCoreOutputs():
                return message
        raise AssertionError(message)  # other messages are for API servers

    def send(self, message: ToEngine) -> None:
        """Queue a message to the process."""
        self.engine_client.send(message)

    def sleep(self, is_asleep: bool) -> None:
        """Put the engine to sleep or wake it, and wait until it has done so."""
        self.send(Sleep() if is_asleep else WakeUp())
        while self.is_asleep != is_asleep:
            self.wait_for_message()

    def receive(self) -> Received:
        """Wait for the outputs of a step and return them."""
        message = self.wait_for_message()
        is_step = isinstance(message, EngineCoreOutputs)
        return (message.all_outputs, message.stats) if is_step else ([], None)

    def close(self) -> None:
        """Stop the process and remove its sockets."""
        self.child.stop(ENGINE_STOP_TIMEOUT)
        self.engine_client.close()
        shutil.rmtree(self.ipc_dir, ignore_errors=True)


class LoadingBar:
    """A tqdm bar of the executor's progress, used for one phase after another."""

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
