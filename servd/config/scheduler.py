"""The options of the scheduler."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import NotNegative, Positive, Section, about


class SchedulerConfig(Section, frozen=True):
    """Which requests run in a step."""

    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        about("Maximum requests that run at once. Default: 64 on a CPU, 256 on CUDA."),
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None,
        about(
            "Maximum tokens per step, which is one pass through the model. Default: 512 on a CPU, "
            "8192 on CUDA."
        ),
    ] = None
    scheduling_policy: Annotated[
        str,
        about(
            "Order of requests. fair: clients share slots and tokens by weight. priority: lowest "
            "`priority` first, then fair. fcfs: first come, first served.",
            extra={"plugins": "servd.core.queues"},
        ),
    ] = "fair"
    long_prefill_token_threshold: Annotated[
        Positive | None,
        about(
            "A prompt is long while it has more tokens than this to compute. Shorter prompts "
            "overtake it, but leave it this many tokens per step. Default: half of "
            "--max-num-batched-tokens."
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, about("Compute long prompts in chunks, over several steps. Encoders never do.")
    ] = True
    async_scheduling: Annotated[
        bool | None,
        about(
            "Schedule the next step while the device computes the current one. Default: on "
            "with CUDA."
        ),
    ] = None
    max_waiting_requests: Annotated[
        NotNegative,
        about(
            "Maximum unfinished requests per API server; all choices (`n`) of a prompt count as "
            "one. Beyond it, clients that have used their share get 429."
        ),
    ] = 2048
    max_waiting_tokens: Annotated[
        Positive,
        about(
            "Maximum prompt tokens of unfinished requests per API server. Beyond it, clients that "
            "have used their share get 429."
        ),
    ] = 4 * 1024 * 1024
