"""EngineCoreClient: how an API server or LLM reaches an engine, in this process or its own."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, get_args

import msgspec

import servd
from servd.base.errors import ConfigError, EngineDeadError, InvalidRequest
from servd.base.memory import release_memory
from servd.base.private_dir import PARENT_DIR, private_dir
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.ipc.channels import Inbox, Outbox, address
from servd.ipc.child import Child
from servd.ipc.heartbeat import Heartbeat, make_file
from servd.ipc.start_messages import StartEngine
from servd.messages.engine import (
    Attach,
    CollectiveRpc,
    CollectiveRpcResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFailed,
    EngineReady,
    EngineStatus,
    FromEngine,
    RpcMethod,
    ToEngine,
)
from servd.messages.stats import SchedulerStats

if TYPE_CHECKING:
    from servd.core.executor import Progress
    from servd.core.structured_output.manager import Compiled

ENGINE_MODULE = "servd.core.engine_core_proc"
ENGINE_STOP_TIMEOUT = 3.0  # seconds from SIGTERM to SIGKILL


def identity(config: Config, spec: ModelSpec) -> str:
    """Return, as text for error messages, what an engine and its clients must agree on: servd's
    version, and a fingerprint of the model, tokenizer, LoRA limits and number of engines.
    """
    folder = os.path.realpath(spec.folder) if spec.folder else "fake"
    lora = config.lora.num_adapter_slots, config.lora.max_lora_rank
    size = config.parallel.data_parallel_size
    deciding = [msgspec.structs.replace(spec, folder=folder), config.model.tokenizer, lora, size]
    fingerprint = hashlib.sha256(msgspec.json.encode(deciding)).hexdigest()[:12]
    return f"servd {servd.__version__} with model {os.path.basename(folder)} ({fingerprint})"


def engine_dir(ipc_dir: str, rank: int) -> str:
    """Return the folder of the sockets of the engine `rank` and its clients."""
    return os.path.join(ipc_dir, f"rank-{rank}") if rank else ipc_dir


def engine_address(ipc_dir: str, generation: int) -> str:
    """Return the address where an engine listens. Every restart has a new address, so that a
    message to a dead engine never reaches its replacement.
    """
    return address(ipc_dir, f"engine-{generation}" if generation else "engine")


def make_rpc(method: str, args: Sequence[Any]) -> CollectiveRpc:
    """Return the message of a call. Raises InvalidRequest if there is no such RpcMethod, or if it
    has other arguments.
    """
    match method, [*args] if isinstance(args, list | tuple) else [args]:
        case ("update_weights", [str()]) | ("sleep", [] | [1 | 2]):
            return CollectiveRpc(method, [*args])
        case ("start_profile" | "stop_profile" | "wake_up", []):
            return CollectiveRpc(method)
    if method not in get_args(RpcMethod):
        methods = ", ".join(sorted(get_args(RpcMethod)))
        raise InvalidRequest(f"there is no method {method!r:.66}, only: {methods}", param="method")
    takes = {"update_weights": "one argument, a folder", "sleep": "one argument, the level 1 or 2"}
    raise InvalidRequest(f"{method} has {takes.get(method, 'no arguments')}", param="args")


class EngineProcess(Child):
    """An engine process, which waits for a StartEngine with `descriptor` as its heartbeat.
    `prepares`: the executor and number of workers for which it imports modules ahead, and the
    niceness of that. `devices` is CUDA_VISIBLE_DEVICES, or empty to inherit.
    """

    def __init__(
        self, ipc_dir: str, prepares: Sequence[str] = (), name: str = "engine", devices: str = ""
    ) -> None:
        self.ipc_dir = ipc_dir
        self.descriptor = make_file()
        self.heartbeat = Heartbeat(self.descriptor)
        env = {PARENT_DIR: ipc_dir}
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = devices
        try:
            super().__init__(name, ENGINE_MODULE, None, [self.descriptor], env, prepares)
        finally:
            os.close(self.descriptor)  # the child has it under the same number


class EngineCoreClient(ABC):
    """A client of an engine: it sends ToEngine messages, and gets outputs."""

    @staticmethod
    def make_client(
        config: Config, spec: ModelSpec, progress: Progress, *, multiprocess_mode: bool
    ) -> SyncMPClient | InprocClient:
        """Start an engine, in its own process with `multiprocess_mode`; return its client."""
        if multiprocess_mode:
            return SyncMPClient(config, spec, progress)
        return InprocClient(config, spec, progress)

    @abstractmethod
    def send(self, message: ToEngine) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class InprocClient(EngineCoreClient):
    """A client whose engine runs a step in each call of `get_output`."""

    client = 0
    has_failed = False  # a step raised an error: its outputs never come, no step can follow

    def __init__(self, config: Config, spec: ModelSpec, progress: Progress) -> None:
        from servd.core.engine_core import EngineCore  # API servers need none of it
        from servd.core.executor import start_executor

        executor, self.worker = start_executor(config, spec, progress)
        self.engine = EngineCore(config, spec, executor, self.worker)
        self.compiled: SimpleQueue[Compiled] = SimpleQueue()
        self.engine.grammars.on_compiled = self.compiled.put
        self.max_model_len = self.engine.scheduler.max_model_len

    def send(self, message: ToEngine) -> None:
        """Pass a message to the engine at once. A new request wakes the engine."""
        if isinstance(message, EngineCoreRequest):
            self._wake_up()
        self.engine.handle(message)

    def collective_rpc(self, call: CollectiveRpc) -> list[str | None]:
        """Call a method of all workers; return their results by rank."""
        if call.method == "sleep":
            self._sleep()
            return []
        self._end_steps()
        if call.method == "update_weights":
            spec = self.engine.check_update(str(call.args[0]))
            self._wake_up()
            return self.engine.update_weights(spec)
        self._wake_up()
        if call.method == "wake_up":
            return []
        return self.engine.collective_rpc(call.method, call.args)

    def _sleep(self) -> None:
        if not self.engine.is_asleep:
            self._end_steps()
            self.engine.sleep()
            gc.collect()  # reference cycles of the model
            release_memory()

    def _wake_up(self) -> None:
        if self.engine.is_asleep:
            self.engine.wake_up()

    def get_output(self) -> tuple[list[EngineCoreOutput], SchedulerStats | None]:
        """Run one step and return its outputs. If every request waits for a grammar, wait first."""
        while not self.compiled.empty() or (
            not self.engine.has_work and self.engine.grammars.is_compiling
        ):
            self.engine.handle(self.compiled.get())
        if self.has_failed:
            raise EngineDeadError("an earlier step failed, which ended the engine: make a new LLM")
        self.has_failed = True
        outputs = self.engine.step().get(self.client)
        self.has_failed = False
        return (outputs.all_outputs, outputs.stats) if outputs else ([], None)

    def close(self) -> None:
        """Save the KV blocks of finished requests, and stop the workers. Call this before exit."""
        if not self.engine.is_asleep:
            with contextlib.suppress(RuntimeError):
                self._end_steps()
            self.engine.executor.shutdown()
        self.engine.scheduler.kv_cache.close()

    def _end_steps(self) -> None:
        while self.engine.has_work and not (self.engine.scheduler.requests or self.has_failed):
            self.engine.step()


class MPClient(EngineCoreClient):
    """A client's connection to an engine process: sends ToEngine, receives FromEngine, in one
    thread.

    The engine may start later: messages wait in the socket. After the client attaches, the engine
    answers with EngineStatus while loading, then with EngineReady. If its `identity` differs from
    the client's, the engine answers with EngineGone instead.
    """

    def __init__(self, ipc_dir: str, client: int, identity: str, generation: int = 0) -> None:
        self.ipc_dir = ipc_dir
        self.client = client
        self.identity = identity
        self.inbox: Inbox[FromEngine] = Inbox(address(ipc_dir, f"client-{client}"), FromEngine)
        self._attach(generation)

    def _attach(self, generation: int) -> None:
        self.generation = generation
        self.outbox = Outbox(engine_address(self.ipc_dir, generation))
        self.send(Attach(self.client, self.inbox.at, self.identity))

    def send(self, message: ToEngine) -> None:
        self.outbox.send(message)

    def recv(self, timeout: float | None = None) -> FromEngine | None:
        """Return the next message, or None if none arrives within `timeout` seconds."""
        return self.inbox.recv(timeout)

    def close(self) -> None:
        self.outbox.close()
        self.inbox.close()


class AsyncMPClient(MPClient):
    """An API server's client: an event loop waits for its descriptor, and it follows restarts."""

    def follow(self, generation: int) -> None:
        """Attach to the engine that replaces a dead engine. Messages of the dead engine may still
        arrive; their `generation` identifies them.
        """
        self.outbox.close()
        self._attach(generation)

    def drain(self, limit: int) -> list[FromEngine]:
        return self.inbox.drain(limit)

    def fileno(self) -> int:
        """Return a descriptor that is readable when messages may have come (edge-triggered)."""
        return self.inbox.fileno()


class SyncMPClient(MPClient):
    """An LLM's client, which starts the engine's process and waits for it."""

    def __init__(self, config: Config, spec: ModelSpec, progress: Progress) -> None:
        super().__init__(str(private_dir()), 0, identity(config, spec))
        self.child = EngineProcess(self.ipc_dir)
        start = StartEngine(config, spec, self.ipc_dir, time.monotonic())
        start.heartbeat = self.child.descriptor
        self.child.send(start)
        try:
            while not isinstance(message := self._wait_for_message(), EngineReady):
                assert isinstance(message, EngineStatus), message
                progress(message.phase, message.progress)
            self.max_model_len = message.max_model_len
            self.worker = message.worker
        except BaseException:
            self.close()
            raise

    def _wait_for_message(
        self,
    ) -> EngineStatus | EngineReady | EngineCoreOutputs | CollectiveRpcResult:
        """Return the next message. Raise EngineDeadError or ConfigError if the engine failed."""
        while (message := self.recv(timeout=0.5)) is None:
            if self.child.exit_code is not None:
                raise EngineDeadError(f"the engine process ended with code {self.child.exit_code}")
        match message:
            case EngineFailed(reason=reason, is_config_error=is_config_error):
                raise (ConfigError if is_config_error else EngineDeadError)(reason)
            case EngineReady() | EngineStatus() | EngineCoreOutputs() | CollectiveRpcResult():
                return message
        raise AssertionError(message)  # other messages are for API servers

    def collective_rpc(self, call: CollectiveRpc) -> list[str | None]:
        """Call a method of all workers; wait for their results by rank."""
        call.number = 1  # one at a time
        self.send(call)
        while not isinstance(message := self._wait_for_message(), CollectiveRpcResult):
            pass
        message.check()
        return message.results

    def get_output(self) -> tuple[list[EngineCoreOutput], SchedulerStats | None]:
        """Wait for the outputs of a step and return them."""
        message = self._wait_for_message()
        is_step = isinstance(message, EngineCoreOutputs)
        return (message.all_outputs, message.stats) if is_step else ([], None)

    def close(self) -> None:
        """Stop the process and remove its sockets."""
        self.child.stop(ENGINE_STOP_TIMEOUT)
        super().close()
        shutil.rmtree(self.ipc_dir, ignore_errors=True)
