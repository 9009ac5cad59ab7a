"""The options of devices and processes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices and processes."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="auto: CUDA where it works.")
    ] = "auto"
    executor: Annotated[
        str | None,
        Meta(
            description="uniproc: the worker runs inside the engine process. multiproc: one "
            "process per device. fake: deterministic tokens with no model, to measure the server "
            "itself. Default: uniproc for one device.",
            extra={"plugins": "servd.core.executor"},
        ),
    ] = None
    tensor_parallel_size: Annotated[
        Positive, Meta(description="Devices that each hold a slice of every layer.")
    ] = 1
    pipeline_parallel_size: Annotated[
        Positive,
        Meta(
            description="Stages that each hold some of the layers, on --tensor-parallel-size "
            "devices of their own. As many steps are computed at once."
        ),
    ] = 1
    data_parallel_size: Annotated[
        int, Meta(description="Engines behind one port, each with the whole model.", ge=1, le=32)
    ] = 1
    attention_backend: Annotated[
        str,
        Meta(
            description="auto: the first that can run here.",
            extra={"plugins": "servd.worker.attention", "beside": ["auto"]},
        ),
    ] = "auto"

    @property
    def num_workers(self) -> int:
        """Devices of an engine; ranks of a stage come one after the other."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def speaker(self) -> int:
        """The worker that answers for all: the first of the last stage, which samples."""
        return self.num_workers - self.tensor_parallel_size
