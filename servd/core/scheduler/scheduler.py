"""Scheduler: chooses the tokens that the next step computes, and processes the step's output."""

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice

from servd.base import plugins
from servd.base.tracing import Clock, StepRecord, now_ns
from servd.config import SchedulerConfig
from servd.config.speculative import max_num_samples
from servd.core.draft_length import DraftLengthController
from servd.core.encoder_cache_manager import EncoderCacheManager
from servd.core.kv_cache.connector import KVConnector
from servd.core.kv_cache.manager import KVCacheManager
from servd.core.outputs import Outputs
from servd.core.queues import QUEUES
from servd.core.queues.fcfs import FcfsQueue, by_order
from servd.core.request import (
    FINISHED_STATUS,
    OutputEnd,
    Request,
    RequestStatus,
    failure,
    prompt_too_long,
)
from servd.core.scheduler.drafts import Drafts, choose_drafts
from servd.core.step import NO_DRAFTS, Step, StepLog
from servd.messages.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from servd.messages.stats import SchedulerStats

logger = logging.getLogger("servd.scheduler")

BACKGROUND_SHARE = 8  # prompts of lower classes get 1/8 of the budget, which keeps steps short
# Nanoseconds. After a step with pictures that takes longer, as on a CPU, requests decode without
# such a step: as long for each of them, as all have equal shares of the machine.
SLOW_ENCODING = 100_000_000
MAX_SHARES = 5  # pictures get at least a sixth
MAX_PASSED = 8  # waiting requests that other requests may overtake in one step
GrammarTokens = Mapping[int, list[int]]  # slot -> the only tokens that its grammar allows next
NO_TOKENS: GrammarTokens = {}


class Scheduler:
    """Continuous batching with a token budget of at least one token per running request.
    `max_model_len` limits prompt and output together. `clock` times marks and records.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        max_model_len: int,
        kv_cache: KVCacheManager,
        max_drafts: int = 0,
        max_adapters: int = 1,
        clock: Clock = now_ns,
        encoder_cache: EncoderCacheManager | None = None,
    ) -> None:
        assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
        assert config.max_num_batched_tokens >= config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self.max_num_samples = max_num_samples(
            config.max_num_seqs, config.max_num_batched_tokens, max_drafts
        )
        # No request may outgrow the whole cache: alone, it must always be able to finish.
        self.kv_cache = kv_cache
        self.cache_len = kv_cache.max_tokens(max_model_len)
        self.max_model_len = min(max_model_len, self.cache_len)
        self.draft_length = DraftLengthController(max_drafts)
        self.drafts = Drafts(self.draft_length, self.kv_cache)
        self.requests: dict[str, Request] = {}  # unfinished
        self.running: list[Request] = []  # by order: the last is preempted first
        self.max_background_tokens = max(self.max_num_batched_tokens // BACKGROUND_SHARE, 1)
        self.long_prompt = config.long_prefill_token_threshold or self.max_num_batched_tokens // 2
        self.encoder_cache = encoder_cache or EncoderCacheManager()
        self.chunks_prompts = config.enable_chunked_prefill
        # A prompt, or a picture in it, needs a large part of a step's budget at once.
        if not self.chunks_prompts or self.encoder_cache.is_bidirectional:
            self.max_background_tokens = self.max_num_batched_tokens
            self.long_prompt = self.max_num_batched_tokens
        policy = plugins.load_class(QUEUES, config.scheduling_policy, FcfsQueue)
        self.waiting: FcfsQueue = policy(self.long_prompt, max_adapters, clock)
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []  # not yet sent to the workers
        self._in_flight: deque[Step] = deque()
        self.clock = clock
        self.outputs = Outputs(clock)
        self._rests_until_ns = 0  # until then, pictures are not encoded beside decoding requests
        self._stats = SchedulerStats()
        self._num_steps = 0
        self.step_log = StepLog()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, even if only collecting or delivering outputs."""
        if self.requests or self._in_flight or self.outputs:
            return True
        return self.kv_cache.connector.has_swaps

    def add_request(self, message: EngineCoreRequest) -> None:
        """Accept a request. It ends in exactly one terminal output unless it is aborted."""
        assert message.request_id not in self.requests, "request ids are unique"
        order = self.waiting.order(message.options)
        request = Request.from_message(message, order, self.max_model_len)
        min_output = 0 if request.is_prompt_only else 1
        if request.num_tokens + min_output > self.max_model_len:
            by_cache = self.max_model_len == self.cache_len
            error = prompt_too_long(request.num_tokens, self.max_model_len, by_cache)
            self.outputs.reject(message, error)
            return
        try:
            self.encoder_cache.open_pictures(request)
        except OSError:
            self.outputs.reject(message, "the engine cannot open the request's pictures")
            return
        request.set_status(RequestStatus.WAITING, self.clock())
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests in any state. Unknown ids are ignored: they may have just finished."""
        for request_id in request_ids:
            if (request := self.requests.get(request_id)) is not None:
                self._finish_request(request, RequestStatus.FINISHED_ABORTED)
                self.outputs.report_abort(request)

    # ---- schedule ----

    def schedule(
        self, idle_slots: Set[int] = frozenset(), grammar_tokens: GrammarTokens = NO_TOKENS
    ) -> SchedulerOutput | None:
        """Choose the work of the next step; return None if nothing can be computed now.

        Decoding requests come first, so that they never wait for another request's prompt. Then
        prompts continue, or start while slots and blocks are free. While a priority class has
        prompts to compute, lower classes wait. `idle_slots`: slots of running requests that skip
        this step. `grammar_tokens`: by slot, the only tokens that the grammar allows next.
        """
        record = StepRecord(self._num_steps, self.clock())
        step = Step(record)
        self.waiting.begin_step()
        self.encoder_cache.begin_step(self._count_encodable(record.started_ns))
        for request, error in self.kv_cache.connector.take_failed():
            self._end_with_error(request, error)
        self.draft_length.begin_step(record.step, len(self.running))
        self._preempt_for_waiting(step)
        budget = self.max_num_batched_tokens
        for priority_class, part in self._priority_classes():
            budget, partial = self._schedule_running(step, budget, part, idle_slots, grammar_tokens)
            if partial or (self.waiting and self.free_slots):
                budget = self._schedule_prompts(step, budget, partial, priority_class)
            if record.prefills:
                break
        step.swaps = self.kv_cache.take_swaps()
        if not (step.decoding or step.scheduled) and step.swaps is None:
            return None
        step.freed_encoder_outputs = self.encoder_cache.take_freed()
        self._num_steps += 1
        self._in_flight.append(step)
        freed, self._freed_slots = self._freed_slots, []
        output = step.build_output(freed)
        record.num_tokens = self.max_num_batched_tokens - budget
        record.num_requests = output.num_rows
        record.num_waiting = len(self.waiting)
        if self.waiting:
            # If nothing else delayed the first waiting request, the budget did.
            record.waits_for = (record.waits_for or "budget") if self.free_slots else "slots"
        record.scheduled_ns = self.clock()
        return output

    def _count_encodable(self, now_ns: int) -> int:
        """Return how long a step may encode pictures, as a number of tokens; see SLOW_ENCODING."""
        is_decoding = any(request.decodes_until for request in self.running)
        rests = now_ns < self._rests_until_ns and is_decoding
        return 0 if rests else self.max_num_batched_tokens

    def forget_workers(self) -> None:
        """Discard the workers' state. No step may be in flight."""
        self.kv_cache.connect(KVConnector())
        self.kv_cache.reset()
        self.encoder_cache.clear()
        self._freed_slots = []

    @property
    def is_background(self) -> bool:
        return bool(self.running) and self.running[0].order[0] > 0

    @property
    def records(self) -> list[StepRecord]:
        """The records of the steps in flight."""
        return [step.record for step in self._in_flight]

    def _priority_classes(self) -> Iterator[tuple[int, Iterable[Request]]]:
        """Yield each priority class, down to the lowest with requests, and its running requests.
        Lazy, because scheduling a class may preempt running requests of the next class.
        """
        last = self.waiting.last_class
        if self.running:
            last = max(last, self.running[-1].order[0])
        first = 0
        for priority_class in range(last):
            end = bisect_left(self.running, (priority_class + 1,), key=by_order)
            yield priority_class, islice(self.running, first, end)
            first = bisect_left(self.running, (priority_class + 1,), key=by_order)
        yield last, islice(self.running, first, None)

    def _preempt_for_waiting(self, step: Step) -> None:
        for victim in self.waiting.outranked(self.running):
            self.running.remove(victim)
            self._preempt(victim, step.record)
        while self.waiting and (victim := self.waiting.victim(self.running)) is not None:
            head = self.waiting.head(self.running)
            cached = self.kv_cache.get_computed_blocks(head)
            if self.free_slots and self.kv_cache.fits(head, cached):
                return
            self.running.remove(victim)
            self._preempt(victim, step.record)

    def _schedule_running(
        self,
        step: Step,
        budget: int,
        part: Iterable[Request],
        idle_slots: Set[int],
        grammar_tokens: GrammarTokens,
    ) -> tuple[int, list[Request]]:
        """Schedule the next token of each decoding request, with its drafts. Returns the remaining
        budget, and the requests whose prompts are not fully computed.
        """
        partial: list[Request] = []
        num_samples = min(len(self.requests), self.max_num_seqs)
        # One token of the budget is reserved for each running request.
        drafts_left = min(self.max_num_samples - num_samples, budget - len(self.running))
        may_draft = self.draft_length.is_open
        special_slots = {*idle_slots, *grammar_tokens}  # slots that do not just decode one token
        for request in part:
            decodes = request.decodes_until and request.slot not in special_slots
            num_new_drafts = self.drafts.count_useful(request) if may_draft and decodes else 0
            decodes = decodes and not num_new_drafts
            if decodes and request.num_computed_tokens < request.decodes_until:
                step.add_decode(request)
                budget -= 1
                continue
            if request.num_tokens >= request.max_num_tokens or request.slot in idle_slots:
                continue  # its last token is in flight, or it skips this step
            num_left = request.num_tokens - request.num_computed_tokens
            if num_left > 1 or request.reads_picture:
                partial.append(request)
                continue
            drafts = NO_DRAFTS
            num_drafts = 0
            if not decodes:
                allowed = grammar_tokens.get(request.slot)
                drafts, num_drafts = choose_drafts(request, allowed, self._in_flight)
                num_drafts = max(min(num_drafts, drafts_left), 0)
            new_block_ids = self.kv_cache.allocate_slots(request, 1 + num_drafts)
            if new_block_ids is None:
                num_drafts = 0
                new_block_ids = self._allocate_blocks(step, request, 1)
            if new_block_ids is None:
                break
            if decodes and len(new_block_ids) < 2:  # DecodeBatch has room for one per row
                self._schedule_decode(step, request, new_block_ids)
            else:
                scheduled = step.add_row(request, 1, new_block_ids, num_drafts, drafts[:num_drafts])
                self._finish_scheduling(request, scheduled, num_new_drafts)
            budget -= 1 + num_drafts
            drafts_left -= num_drafts
        return budget, partial

    def _schedule_prompts(
        self, step: Step, budget: int, partial: list[Request], priority_class: int
    ) -> int:
        """Schedule prompts of a class in the policy's order; return the remaining budget.

        A request that was preempted in this step does not restart in the same step, because its
        freed blocks went to another request.
        """
        now = self.clock()
        queue = self.waiting
        may_start = True
        withheld = max(budget - self.max_background_tokens, 0) if priority_class > 0 else 0
        budget -= withheld
        has_long = queue.has_long(priority_class) or any(map(queue.is_long, partial))
        for_long = min(self.long_prompt, budget // 2) if has_long else 0
        passed: list[Request] = []
        while (tokens_left := budget - step.record.encoding_cost) > 0:
            partial = [request for request in partial if request.slot >= 0]  # others were preempted
            may_start = may_start and bool(self.free_slots)
            only_long = for_long >= tokens_left
            request = queue.next(partial, priority_class, may_start, only_long)
            if request is None:
                if not only_long:
                    break
                for_long = 0  # no long prompt can continue
                continue
            room = tokens_left if queue.is_long(request) else tokens_left - for_long
            if request.num_uncomputed_tokens > room and not self.chunks_prompts:
                break
            if request.slot < 0:
                cached = self.kv_cache.get_computed_blocks(request)
                # One preempted with a token in flight waits until that is collected.
                is_known = not request.num_placeholders
                may_start = is_known and self.kv_cache.can_allocate(request, cached)
                if may_start and not self.encoder_cache.can_start(
                    request, room, not self.chunks_prompts
                ):
                    may_start = False
                    continue
                if not may_start:
                    step.record.waits_for = "blocks"
                    has_room = len(passed) < MAX_PASSED
                    if has_room and self.kv_cache.connector.may_be_overtaken(request, len(cached)):
                        queue.remove(request)
                        passed.append(request)
                        may_start = True
                    continue
                self._start_request(step, request, cached, now)
            else:
                partial.remove(request)
            budget -= self._schedule_prompt(step, request, room)
        for request in passed:
            queue.add(request)
        return budget + withheld

    def _schedule_prompt(self, step: Step, request: Request, room: int) -> int:
        """Schedule tokens of a prompt that has a slot, and return their number: 0 if it must wait
        for blocks or for room to encode its pictures.
        """
        num_tokens = min(request.num_uncomputed_tokens, room)
        inputs: list[int] = []
        if request.mm_features:
            num_tokens, inputs = self.encoder_cache.count_ready(request, num_tokens)
            if num_tokens == 0:
                return 0
        new_block_ids = self._allocate_blocks(step, request, num_tokens)
        if new_block_ids is None:
            return 0
        if request.mm_features:
            step.encoder_inputs += [(request.slot, index) for index in inputs]
            step.record.encoding_cost += self.encoder_cache.encode(request, num_tokens, inputs)
            if inputs:
                sizes = [request.mm_features[index].num_embeds for index in inputs]
                step.record.encodes[request.request_id] = sum(sizes)
        self.waiting.charge(request, num_tokens)
        self._finish_scheduling(request, step.add_row(request, num_tokens, new_block_ids))
        return num_tokens

    def _allocate_blocks(self, step: Step, request: Request, num_tokens: int) -> list[int] | None:
        """Return new blocks for a request's next tokens, preempting the last running requests if
        needed. None: the request must wait, as requests in this step keep their blocks.
        """
        while (new_block_ids := self.kv_cache.allocate_slots(request, num_tokens)) is None:
            if (victim := self.running[-1]) in step:
                return None
            self.running.pop()
            self._preempt(victim, step.record)
            if victim is request:
                return None
        return new_block_ids

    def _start_request(self, step: Step, request: Request, cached: list[int], now: int) -> None:
        self.waiting.start(request)
        self.kv_cache.attach_cached_blocks(request, cached)
        request.slot = self.free_slots.pop()
        request.num_drafts = 0  # preemption drops the workers' drafts
        insort(self.running, request, key=by_order)
        if request.num_preemptions == 0:
            self.kv_cache.count_hits(request, self._stats)
        request.set_status(RequestStatus.RUNNING, now, step.record.step)
        step.record.num_cached_tokens += request.num_computed_tokens
        step.new_requests.append(request.to_new_request())

    def _schedule_decode(self, step: Step, request: Request, new_block_ids: list[int]) -> None:
        for block in new_block_ids:
            step.new_blocks[request.slot] = block
            request.decodes_until = self.kv_cache.room_of(request)
        self.kv_cache.commit(request)
        step.add_decode(request)

    def _finish_scheduling(
        self, request: Request, scheduled: ScheduledRequest, num_new_drafts: int = 0
    ) -> None:
        """Ask for drafts for the next step, and register full blocks in the prefix cache."""
        if scheduled.samples:
            request.num_drafts = 0
            if self.draft_length.is_open:
                self.drafts.request_drafts(request, scheduled, num_new_drafts)
            request.decodes_until = 0 if request.num_drafts else self.kv_cache.room_of(request)
        self.kv_cache.commit(request)

    def _preempt(self, request: Request, record: StepRecord) -> None:
        """Return a request, removed from `running`, to the queue. Frees its blocks and slot."""
        self._release_slot(request)
        request.num_preemptions += 1
        now = self.clock()
        request.set_status(RequestStatus.PREEMPTED, now, record.step)
        self.kv_cache.connector.swap_out(request, now)
        record.num_preempted += 1
        self.waiting.add(request)
        self._stats.num_preemptions += 1
        logger.debug(
            "request %s (%d tokens) is preempted; %d running, %d waiting",
            request.request_id,
            len(request.token_ids),
            len(self.running),
            len(self.waiting),
        )

    # ---- collect outputs ----

    def update_from_output(self, result: ModelRunnerOutput, ends: Mapping[int, OutputEnd]) -> None:
        """Process the output of the oldest step in flight. `result`: the workers' output of that
        step; `ends`: row -> how the grammar of its request ends the output with this step.
        """
        step = self._in_flight.popleft()
        record = step.record
        record.collected_ns = self.clock()
        record.worker_ns = result.times_ns
        record.encode_ns = result.encode_ns
        took_ns, is_report_due = self.step_log.add(record)
        if is_report_due:
            for request in self.requests.values():
                self.outputs.report_to(request.client)
        for request in step.requests if record.computed else ():
            if request.request_id in record.computed:
                self.outputs.report_to(request.client)
        self.kv_cache.connector.collect_outputs(step)
        if self.draft_length.max_drafts:
            self.draft_length.time(step.scheduled, took_ns * 1e-9, len(step.decoding))
        decoded, rows = step.append_decoded(result, ends)
        self.outputs.add_decoded(decoded)
        num_tokens = sum(map(len, decoded.values()))
        for row in rows:
            num_tokens += self._collect_output(step, row, result, ends.get(row))
        self._stats.step_tokens.append(num_tokens)
        self._stats.num_prompt_tokens += record.num_prompt_tokens
        encoding_ns = record.collected_ns - record.scheduled_ns if record.encoding_cost else 0
        if encoding_ns > SLOW_ENCODING:
            num_decoding = sum(request.decodes_until > 0 for request in self.running)
            rest_ns = min(num_decoding, MAX_SHARES) * encoding_ns
            self._rests_until_ns = record.collected_ns + rest_ns

    def _collect_output(
        self, step: Step, row: int, result: ModelRunnerOutput, end: OutputEnd | None
    ) -> int:
        """Return the number of new tokens in the output, with the prompt's if it is the first."""
        request, scheduled = step.row(row)
        if row in result.errors:
            self._fail_row(step, row, result.errors[row])
        # A step launched before the end of a request was known samples one token too many.
        if request.is_finished:
            return 0
        if request.reads_prompt:
            request.add_prompt_output(result, row)
        if not result.tokens_of(row):
            return 0
        record = step.record
        is_first = len(request.token_ids) == request.num_prompt_tokens
        output = request.collect_output(result, row, end, record.collected_ns, record.step)
        if scheduled.num_drafts or scheduled.max_new_drafts:
            record.num_drafts += scheduled.num_drafts
            record.num_accepted += self.drafts.settle(request, scheduled, output, result, row)
            if output.num_drafts:
                self._stats.drafts.count(output.num_drafts, output.num_accepted)
        if output.finish_reason is not None:
            self._finish_request(request, FINISHED_STATUS[output.finish_reason])
        self.outputs.add(request.client, output)
        num_prompt_tokens = request.num_prompt_tokens if is_first else 0
        return len(output.new_token_ids) + num_prompt_tokens

    def take_outputs(self, num_deferred: int = 0) -> dict[int, EngineCoreOutputs]:
        """Return the outputs since the last call, by client, with the engine's statistics. Clients
        without outputs get no message, except when the engine becomes idle. `num_deferred`:
        requests that wait for a grammar, not for capacity.
        """
        if self.outputs and not self.requests:
            for client in self.step_log.clients:
                self.outputs.report_to(client)
        outputs = self.outputs.take()
        for client, message in outputs.items():
            message.stats = self.report(num_deferred)
            message.steps = self.step_log.take_new(client)
        return outputs

    def report(self, num_deferred: int) -> SchedulerStats:
        """Return current statistics. Counters restart at zero: the total is their sum over the
        reports to all clients.
        """
        report, self._stats = self._stats, SchedulerStats()
        report.num_running = len(self.running)
        report.num_waiting = len(self.waiting)
        report.running_adapters, report.waiting_adapters = self.waiting.adapter_names()
        report.num_deferred = num_deferred
        report.at_ns = self.clock()
        report.step = self._num_steps
        self.kv_cache.report(report)
        return report

    # ---- the end of a request ----

    def _fail_row(self, step: Step, row: int, error: str) -> None:
        """End a request that failed in a step. The blocks that it computed since that step are
        wrong, so requests that share them fail too.
        """
        request, scheduled = step.row(row)
        # If drafts before this step were rejected, it began at the last known token.
        num_tokens = min(scheduled.num_computed_tokens, len(request.token_ids) - 1)
        # Requests that finished meanwhile have blocks in the cache, too.
        candidates = {*self.running, *step.all_requests}
        candidates.update(*(later.all_requests for later in self._in_flight))
        candidates.discard(request)
        sharers = self.kv_cache.prefix_cache.find_sharers(request, num_tokens, candidates)
        for failed in [request, *sharers]:
            self.kv_cache.forget(failed)
            self.encoder_cache.forget(failed)
            if not failed.is_finished:
                self._end_with_error(failed, error, step.record.step)

    def _end_with_error(self, request: Request, error: str, step: int = -1) -> None:
        self._finish_request(request, RequestStatus.FINISHED_ERROR)
        self._stats.num_failed += 1
        output = failure(request.request_id, request.marks, error, self.clock(), step)
        self.outputs.add(request.client, output)

    def _finish_request(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
            self.kv_cache.connector.stop_waiting(request)
        request.set_status(status, self.clock())
        if request.slot >= 0:
            self._release_slot(request)
        del self.requests[request.request_id]

    def _release_slot(self, request: Request) -> None:
        """Free slot and blocks. Steps in flight that use them run before the next owner's steps."""
        self.waiting.stop(request)
        self.kv_cache.free(request)
        request.decodes_until = 0
        self.free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1
