"""Options of the scheduler."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import NotNegative, Positive, Section, about


class SchedulerConfig(Section, frozen=True):
    """Which requests run in a step."""

    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        about("Most requests in one step. Default: 64 on a CPU, 256 on CUDA."),
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None, about("Token budget of one step. Default: 512 on a CPU, 8192 on CUDA.")
    ] = None
    scheduling_policy: Annotated[
        str,
        about(
            "fair: clients share slots and tokens by their weights. priority: the lowest "
            "`priority` of the request first, fair among equal ones. fcfs: first come, first "
            "served, whoever sent it.",
            extra={"plugins": "servd.core.queues"},
        ),
    ] = "fair"
    long_prefill_token_threshold: Annotated[
        Positive | None,
        about(
            "Prompts with more tokens left are long: shorter ones overtake them, and leave them "
            "this many tokens of each step. Default: half of --max-num-batched-tokens."
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, about("Prompts may be computed in parts, over several steps. Encoders never do it.")
    ] = True
    async_scheduling: Annotated[
        bool | None,
        about("Schedule the next step while the device computes this one. Default: on with CUDA."),
    ] = None
    max_waiting_requests: Annotated[
        NotNegative,
        about(
            "Unfinished requests of an API server beyond which new ones get 429 with Retry-After, "
            "but for clients with less than their share. All choices of a prompt count as one, so "
            "that no request is refused for its `n`."
        ),
    ] = 2048
    max_waiting_tokens: Annotated[Positive, about("The same for the tokens of their prompts.")] = (
        4 * 1024 * 1024
    )
