"""The options of devices and processes."""

from typing import Annotated, Literal

from servd.config._section import NotNegative, Positive, Section, about


class ParallelConfig(Section, frozen=True):
    """Devices and processes."""

    device: Annotated[Literal["auto", "cuda", "cpu"], about("auto: CUDA where it works.")] = "auto"
    executor: Annotated[
        str | None,
        about(
            "uniproc: the worker runs inside the engine process. multiproc: one process per "
            "device. ray: processes that Ray places on its nodes. fake: deterministic tokens with "
            "no model, to measure the server itself. Default: uniproc for one device.",
            extra={"plugins": "servd.core.executor"},
        ),
    ] = None
    tensor_parallel_size: Annotated[
        Positive, about("Devices that each hold a slice of every layer.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool, about("They hold whole experts of a layer, in place of a slice of each.")
    ] = False
    pipeline_parallel_size: Annotated[
        Positive,
        about(
            "Stages that each hold some of the layers, on --tensor-parallel-size devices of their "
            "own. As many steps are computed at once."
        ),
    ] = 1
    data_parallel_size: Annotated[
        int, about("Engines, each with the whole model, of one server.", ge=1, le=4096)
    ] = 1
    data_parallel_size_local: Annotated[
        NotNegative | None,
        about(
            "Those of them on this host. Default: all, from --data-parallel-start-rank on; none "
            "with --data-parallel-backend ray."
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        NotNegative | None,
        about(
            "Number of this server's first engine, where a balancer stands before several: "
            "implies --data-parallel-hybrid-lb."
        ),
    ] = None
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        about("Who starts engines that are not of this host: nobody, or Ray, on its nodes."),
    ] = "mp"
    join_token_file: Annotated[
        str | None,
        about(
            "File of the token that engines must have to give each other blocks "
            "(--kv-transfer-config), and that encrypts them. Default: $SERVD_JOIN_TOKEN."
        ),
    ] = None
    data_parallel_rank: Annotated[
        NotNegative | None,
        about(
            "Number of this server's only engine, where a balancer stands before "
            "--data-parallel-size servers: implies --data-parallel-external-lb."
        ),
    ] = None
    data_parallel_external_lb: Annotated[
        bool, about("One engine a server, with the number --data-parallel-rank.")
    ] = False
    data_parallel_hybrid_lb: Annotated[
        bool,
        about(
            "A server on each host, for the --data-parallel-size-local engines there, and a "
            "balancer before them."
        ),
    ] = False
    attention_backend: Annotated[
        str,
        about(
            "auto: the first that can run here.",
            extra={"plugins": "servd.worker.attention", "beside": ["auto"]},
        ),
    ] = "auto"

    @property
    def num_engines_here(self) -> int:
        """Engines of this host, which share its CPUs and memory."""
        local = self.data_parallel_size_local
        if local is not None:
            return local
        return 0 if self.data_parallel_backend == "ray" else self.data_parallel_size

    @property
    def first_rank(self) -> int:
        """Number of this host's first engine."""
        return self.data_parallel_start_rank or 0

    @property
    def num_workers(self) -> int:
        """Devices of an engine; ranks of a stage come one after the other."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The worker that answers for all: the first of the last stage, which samples."""
        return self.num_workers - self.tensor_parallel_size
