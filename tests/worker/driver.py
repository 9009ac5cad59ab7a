"""Drives a Worker with hand-made SchedulerOutputs: blocks in shuffled order, any chunks."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch

from servd.checkpoint.model_spec import read_spec
from servd.config import Config
from servd.config.checks.model import resolve_types
from servd.messages.engine import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
)
from servd.messages.params import SamplingParams
from servd.worker.sample.sampler import Sampler, SamplerOutput
from servd.worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def config_for(folder: object, **options: object) -> Config:
    """A resolved config for a tiny model on a CPU."""
    defaults: dict[str, object] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "executor": "uniproc",
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_memory": 1 << 22,
        "async_scheduling": False,
        "check_vectors": False,
    }
    config = Config.load(defaults | options)
    decided = resolve_types(config, str(folder))
    return config.replace(**{name: decision.value for name, decision in decided.items()})


class LogitsSpy:
    """Stands before a sampler and keeps the logits that each row got."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.rows: list[torch.Tensor] = []  # the last call's

    def __call__(self, logits: torch.Tensor, *args: Any) -> SamplerOutput:
        self.rows = list(logits.clone())
        return self.sampler(logits, *args)

    @property
    def ops(self) -> Any:
        """Those of the sampler, for steps that need no more of it."""
        return SimpleNamespace(choose=self._choose)

    def _choose(self, logits: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        self.rows = list(logits.clone())
        return self.sampler.ops.choose(logits, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


class Driver:
    """Keeps what a scheduler would: free slots, free blocks, and the tokens of every request. With
    `gives_back`, blocks of groups of layers that read them no more are free, and hold `poison`.
    """

    gives_back = False
    poison = float("nan")

    def __init__(
        self,
        config: Config,
        seed: int = 0,
        progress: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        assert config.model.model is not None
        self.spec = read_spec(config.model.model, config.model.hf_overrides)
        self.worker = Worker(config, self.spec, 0, progress)
        self.ready = self.worker.load_model(plans_memory=False)
        self.worker.allocate_kv_cache(self.ready.num_blocks)
        self.spy = LogitsSpy(self.worker.runner.sampler)
        self.worker.runner.sampler = cast("Sampler", self.spy)
        self.block_size = config.cache.block_size
        self.random = random.Random(seed)
        self.free_blocks = list(range(self.ready.num_blocks))
        self.random.shuffle(self.free_blocks)
        self.free_slots = list(range(config.scheduler.max_num_seqs or 0))
        self.random.shuffle(self.free_slots)
        self.tokens: dict[int, list[int]] = {}  # slot -> all tokens known
        self.blocks: dict[int, list[int]] = {}  # of all groups in turn
        self.num_groups = len(self.ready.kv_windows)
        self.computed: dict[int, int] = {}
        self.num_prompt: dict[int, int] = {}
        self.drafts: dict[int, list[int]] = {}  # slot -> drafted behind its tokens
        self.logits: dict[
            int, list[torch.Tensor]
        ] = {}  # slot -> those that its samples were drawn from
        self.new: list[NewRequest] = []
        self.freed: list[int] = []
        self.step_number = 0

    def add(
        self,
        token_ids: list[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        cached_blocks: list[int] | None = None,
    ) -> int:
        """Give a request a slot; its first blocks may be shared, see `first_blocks`. Returns it."""
        slot = self.free_slots.pop()
        cached = list(cached_blocks or [])
        self.tokens[slot] = list(token_ids)
        self.logits[slot] = []
        self.drafts[slot] = []
        self.blocks[slot] = cached
        self.computed[slot] = len(cached) // self.num_groups * self.block_size
        self.num_prompt[slot] = num_prompt_tokens or len(token_ids)
        self.new.append(
            NewRequest(
                slot=slot,
                token_ids=list(token_ids),
                num_prompt_tokens=self.num_prompt[slot],
                num_computed_tokens=self.computed[slot],
                block_ids=list(cached),
                params=params,
                eos_token_ids=self.spec.eos_token_ids,
            )
        )
        return slot

    def first_blocks(self, slot: int, num_tokens: int) -> list[int]:
        """Those of a slot's first tokens."""
        return self.blocks[slot][: num_tokens // self.block_size * self.num_groups]

    def _give_back(self, slot: int, position: int) -> None:
        """What no token from a position on reads."""
        for group, window in enumerate(self.ready.kv_windows):
            last = (position - (window or position + 1) + 1) // self.block_size
            for at in range(group, last * self.num_groups, self.num_groups):
                if (block := self.blocks[slot][at]) >= 0:
                    self.blocks[slot][at] = -1
                    self.free_blocks.append(block)
                    for cache in self.worker.runner.kv_caches:
                        cache[:, block] = self.poison

    def free(self, slot: int, keep_blocks: int = 0) -> list[int]:
        """Free the slot and its blocks after the first `keep_blocks`. Returns its tokens."""
        self.freed.append(slot)
        self.free_slots.insert(0, slot)
        blocks = self.blocks.pop(slot)[keep_blocks * self.num_groups :]
        self.free_blocks += [block for block in blocks if block >= 0]
        self.random.shuffle(self.free_blocks)
        return self.tokens.pop(slot)

    def step(
        self,
        chunks: dict[int, int],
        bitmask: GrammarOutput | None = None,
        max_new_drafts: Mapping[int, int] = MappingProxyType({}),
    ) -> ModelRunnerOutput:
        """Compute N tokens of each slot, in this order; a slot with none left to know samples
        and verifies its drafts, and may get N new ones.
        """
        scheduled: list[ScheduledRequest] = []
        for slot, num_tokens in chunks.items():
            start = self.computed[slot]
            end = self.computed[slot] + num_tokens
            assert end <= len(self.tokens[slot])
            samples = end == len(self.tokens[slot])
            num_drafts = len(self.drafts[slot]) if samples else 0
            max_drafts = max_new_drafts.get(slot, 0) if samples else 0
            end += num_drafts
            if self.gives_back:
                self._give_back(slot, start)
            num_blocks = -(-(end + max_drafts) // self.block_size) * self.num_groups
            missing = max(num_blocks - len(self.blocks[slot]), 0)
            new_blocks = [self.free_blocks.pop() for _ in range(missing)]
            self.blocks[slot] += new_blocks
            self.computed[slot] = end
            scheduled.append(
                ScheduledRequest(
                    slot, end - start, new_blocks, samples, start, num_drafts, max_drafts
                )
            )
        self.step_number += 1
        self.worker.execute_model(
            SchedulerOutput(self.step_number, scheduled, self.new, self.freed)
        )
        self.new = []
        self.freed = []
        output = self.worker.sample_tokens(bitmask).result()
        logits = list(self.spy.rows)
        for index, row in enumerate(scheduled):
            sampled = output.sampled_token_ids[index]
            assert row.samples <= len(sampled) <= row.samples * (1 + row.num_drafts)
            self.tokens[row.slot] += sampled
            if sampled:
                self.computed[row.slot] = len(self.tokens[row.slot]) - 1
                self.drafts[row.slot] = output.draft_token_ids.get(index, [])
                self.logits[row.slot] += logits[: len(sampled)]
                del logits[: 1 + row.num_drafts]
        return output

    def num_left(self, slot: int) -> int:
        """Tokens of the slot that are known and not computed."""
        return len(self.tokens[slot]) - self.computed[slot]

    def outputs(self, slot: int) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[slot][self.num_prompt[slot] :]

    def generate(self, slots: list[int], num_outputs: int, chunk: int = 10**6) -> None:
        """Step until each slot has N outputs; prompts in chunks, beside decoding."""
        while pending := [s for s in slots if len(self.outputs(s)) < num_outputs]:
            self.step({s: min(chunk, self.num_left(s)) for s in pending})
