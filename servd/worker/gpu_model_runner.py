"""GPUModelRunner: CUDA memory found by a profile run, and output copies that overlap with the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from servd.messages import NewRequest, ScheduledRequest, SchedulerOutput
from servd.params import MAX_LOGPROBS, SamplingParams
from servd.worker.model_runner import ModelRunner, StepPart


class GPUModelRunner(ModelRunner):
    """Steps on a CUDA device. Nothing but `AsyncOutput.result` waits for it."""

    def kv_cache_memory(self) -> int:
        """What the share of the device's memory leaves beside weights, activations and other processes."""
        torch.cuda.reset_peak_memory_stats(self.device)
        profile_cache_bytes = self._profile_run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - profile_cache_bytes
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        outside_torch = total - free - torch.cuda.memory_reserved(self.device)
        return int(total * self.config.cache.gpu_memory_utilization) - peak - outside_torch

    def _profile_run(self) -> int:
        """Run the largest step with the costliest sampling; returns the bytes of the cache that it had."""
        block_size = self.config.cache.block_size
        num_tokens = min(self.max_num_tokens // self.max_num_seqs, self.max_model_len)
        num_blocks = -(-num_tokens // block_size)
        params = SamplingParams(top_p=0.9, top_k=50, min_p=0.1, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, seed=0)
        slots = range(self.max_num_seqs)
        self.allocate_kv_cache(num_blocks)  # all rows share the blocks: only the sizes matter
        self.execute_model(
            SchedulerOutput(
                step=0,
                new_requests=[
                    NewRequest(
                        slot=slot,
                        token_ids=[0] * num_tokens,
                        num_prompt_tokens=num_tokens,
                        num_computed_tokens=0,
                        block_ids=list(range(num_blocks)),
                        params=params,
                    )
                    for slot in slots
                ],
                scheduled=[ScheduledRequest(slot=slot, num_tokens=num_tokens) for slot in slots],
            )
        )
        self.sample_tokens().result()
        self.execute_model(SchedulerOutput(step=0, scheduled=[], freed_slots=list(slots)))
        self.sample_tokens()
        self.kv_caches = []
        return num_blocks * self.bytes_per_block

    def to_host(self, parts: Sequence[StepPart]) -> tuple[Sequence[StepPart], Callable[[], None]]:
        """Copies run in the stream of the step; an event tells when they are done."""
        copied = [part.to_host() for part in parts]
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return copied, done.synchronize
