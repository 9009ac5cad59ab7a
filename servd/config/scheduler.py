"""The options of the scheduler."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import NotNegative, Positive, Section


class SchedulerConfig(Section, frozen=True):
    """Which requests run in a step."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """Maximum requests that run at once. Default: 64 on a CPU, 256 on CUDA."""
    max_num_batched_tokens: Positive | None = None
    """Maximum tokens per step, a pass through the model. Default: 512 on a CPU, 8192 on CUDA."""
    scheduling_policy: Annotated[str, Meta(extra={"plugins": "servd.core.queues"})] = "fair"
    """Order of requests. fair: clients share slots and tokens by weight. priority: lowest
    `priority` first, then fair. fcfs: first come, first served.
    """
    long_prefill_token_threshold: Positive | None = None
    """A prompt is long while it has more tokens than this to compute. Shorter prompts overtake it,
    but leave it this many tokens per step. Default: half of --max-num-batched-tokens.
    """
    enable_chunked_prefill: bool = True
    """Compute long prompts in chunks, over several steps. Encoders never do."""
    async_scheduling: bool | None = None
    """Schedule the next step while the device computes the current one. Default: on with CUDA."""
    max_waiting_requests: NotNegative = 2048
    """Maximum unfinished requests per API server; all choices (`n`) of a prompt count as one.
    Beyond it, clients that have used their share get 429.
    """
    max_waiting_tokens: Positive = 4 * 1024 * 1024
    """Maximum prompt tokens of unfinished requests per API server. Beyond it, clients that have
    used their share get 429.
    """
