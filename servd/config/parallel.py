"""The options of devices and processes."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import NotNegative, Positive, Section


class ParallelConfig(Section, frozen=True):
    """Devices and processes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on. auto: CUDA if it works, else the CPU."""
    executor: Annotated[str | None, Meta(extra={"plugins": "servd.core.executor"})] = None
    """How workers run. uniproc: in the engine process. multiproc: one process per device. ray: on
    nodes that Ray chooses. fake: without a model, to measure the server. Default: uniproc for one
    device, else multiproc.
    """
    fake_script: str | None = None
    """File with the answers of --executor fake, in order: a line `{"text": ...}` each, as JSON.
    `"match"` answers all prompts that contain a text, and `"cut": true` leaves out the end.
    """
    tensor_parallel_size: Positive = 1
    """Devices per engine, or per pipeline stage. Each holds a slice of every layer."""
    enable_expert_parallel: bool = False
    """Place whole experts on each device, instead of a slice of every expert. Takes effect with
    --tensor-parallel-size above 1.
    """
    pipeline_parallel_size: Positive = 1
    """Pipeline stages per engine. Each holds some layers, on --tensor-parallel-size devices."""
    data_parallel_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Engines of the server, each with the whole model."""
    data_parallel_size_local: NotNegative | None = None
    """Engines on this host. Default: all from --data-parallel-start-rank on; 0 with
    --data-parallel-backend ray.
    """
    data_parallel_start_rank: NotNegative | None = None
    """Number of this server's first engine, if a load balancer spreads requests over several
    servers. Implies --data-parallel-hybrid-lb.
    """
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    """Where engines start. mp: on this host. ray: on hosts that Ray chooses, too."""
    join_token_file: str | None = None
    """File with the secret that engines share to exchange and encrypt KV blocks
    (--kv-transfer-config). Default: $SERVD_JOIN_TOKEN.
    """
    data_parallel_rank: NotNegative | None = None
    """Number of this server's only engine, if a load balancer spreads requests over
    --data-parallel-size servers. Implies --data-parallel-external-lb.
    """
    data_parallel_external_lb: bool = False
    """Run one engine per server, number --data-parallel-rank, behind a load balancer."""
    data_parallel_hybrid_lb: bool = False
    """Run one server per host behind a load balancer, each with --data-parallel-size-local engines.
    """
    attention_backend: Annotated[
        str, Meta(extra={"plugins": "servd.worker.attention", "beside": ["auto"]})
    ] = "auto"
    """Implementation of attention. auto: the preferred one for this model and device."""

    @property
    def num_engines_here(self) -> int:
        """The number of engines on this host, which share its CPUs and memory."""
        local = self.data_parallel_size_local
        if local is not None:
            return local
        return 0 if self.data_parallel_backend == "ray" else self.data_parallel_size

    @property
    def first_rank(self) -> int:
        """The number of this host's first engine."""
        return self.data_parallel_start_rank or 0

    @property
    def num_workers(self) -> int:
        """The number of an engine's devices. The ranks of a stage are consecutive."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank of the worker that answers for all: the first of the last stage."""
        return self.num_workers - self.tensor_parallel_size
