"""The options of devices and processes."""

from typing import Annotated, Literal

from servd.config._section import NotNegative, Positive, Section, about


class ParallelConfig(Section, frozen=True):
    """Devices and processes."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        about("Device to run on. auto: CUDA if it works, else the CPU."),
    ] = "auto"
    executor: Annotated[
        str | None,
        about(
            "How workers run. uniproc: in the engine process. multiproc: one process per device. "
            "ray: on nodes that Ray chooses. fake: without a model, to measure the server. "
            "Default: uniproc for one device, else multiproc.",
            extra={"plugins": "servd.core.executor"},
        ),
    ] = None
    tensor_parallel_size: Annotated[
        Positive,
        about("Devices per engine, or per pipeline stage. Each holds a slice of every layer."),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        about(
            "Place whole experts on each device, instead of a slice of every expert. Takes "
            "effect with --tensor-parallel-size above 1."
        ),
    ] = False
    pipeline_parallel_size: Annotated[
        Positive,
        about(
            "Pipeline stages per engine. Each holds some layers, on --tensor-parallel-size devices."
        ),
    ] = 1
    data_parallel_size: Annotated[
        int, about("Engines of the server, each with the whole model.", ge=1, le=4096)
    ] = 1
    data_parallel_size_local: Annotated[
        NotNegative | None,
        about(
            "Engines on this host. Default: all from --data-parallel-start-rank on; 0 with "
            "--data-parallel-backend ray."
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        NotNegative | None,
        about(
            "Number of this server's first engine, if a load balancer spreads requests over "
            "several servers. Implies --data-parallel-hybrid-lb."
        ),
    ] = None
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        about("Where engines start. mp: on this host. ray: on hosts that Ray chooses, too."),
    ] = "mp"
    join_token_file: Annotated[
        str | None,
        about(
            "File with the secret that engines share to exchange and encrypt KV blocks "
            "(--kv-transfer-config). Default: $SERVD_JOIN_TOKEN."
        ),
    ] = None
    data_parallel_rank: Annotated[
        NotNegative | None,
        about(
            "Number of this server's only engine, if a load balancer spreads requests over "
            "--data-parallel-size servers. Implies --data-parallel-external-lb."
        ),
    ] = None
    data_parallel_external_lb: Annotated[
        bool,
        about("Run one engine per server, number --data-parallel-rank, behind a load balancer."),
    ] = False
    data_parallel_hybrid_lb: Annotated[
        bool,
        about(
            "Run one server per host behind a load balancer, each with --data-parallel-size-local "
            "engines."
        ),
    ] = False
    attention_backend: Annotated[
        str,
        about(
            "Implementation of attention. auto: the preferred one for this model and device.",
            extra={"plugins": "servd.worker.attention", "beside": ["auto"]},
        ),
    ] = "auto"

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
