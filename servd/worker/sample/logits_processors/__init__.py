"""Logits processors: one file per feature, with a `LogitsProcessor`.

A new feature is a field of `SamplingParams`, a field of the request's body, and a file here.
tests/worker/sample/test_logits_processors.py tests all files. Processors run by `order`:

| order | what belongs there |
|---|---|
| 10 to 29 | forbids single tokens, in place: min_tokens, bad_words |
| 30 to 59 | joins the fused pass that ends in the maximum: biases, bitmask, penalties |
| 60 to 89 | changes logits in any other way |
| 90 | nothing may undo it: thinking_token_budget |
| 100 | after the fused pass: dry |
| 110 to 199 | after it, in llama.cpp's order: top_n_sigma, typical_p, xtc and others |

The fused pass (`LogitEdits`) adds biases, forbids, penalizes. A request that uses a processor from
110 on has its top-k at 120 and its top-p and min-p at 140, before its temperature.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from servd.base import plugins
from servd.messages.params import SamplingParams
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.sampling_metadata import SamplingMetadata


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A request that enters the batch, for the first time or after preemption."""

    slot: int
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: Sequence[int]


@dataclass(eq=False)
class LogitsProcessor(ABC):
    """Keeps the state of the requests that use a feature, by slot.

    A slot's state is written when a request that uses the feature is added, and read only for such
    requests. Therefore removing a request clears nothing. Never waits for the device.
    """

    order: ClassVar[int]
    # SamplingParams that use it at its most costly, for the memory profile.
    example: ClassVar[Mapping[str, Any]]

    vocab_size: int  # columns of the logits
    max_num_seqs: int  # number of slots
    device: torch.device  # where the logits will be

    def __post_init__(self) -> None:  # noqa: B027 - few need it
        """Allocate the state."""

    @abstractmethod
    def add(self, request: SlotRequest) -> bool:
        """Prepare the slot; return whether the request uses the feature."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        """Change the logits of `rows` in place, or add the change to the fused pass.

        `logits` [all rows of the step, vocab] includes rows without the feature. `rows.index` and
        `rows.repeat` select the rows with the feature; `rows.slots` [n] selects their state.
        """

    def update(self, token_ids: Tensor, rows: SamplingMetadata) -> None:  # noqa: B027 - few need it
        """Update the state by the sampled tokens [n] of all rows; `rows` use the feature."""


def load(vocab_size: int, max_num_seqs: int, device: torch.device) -> list[LogitsProcessor]:
    """Return a processor from each file, in order. The arguments are those of `LogitsProcessor`."""
    names = plugins.names(__name__)
    classes = [plugins.load_class(__name__, name, LogitsProcessor) for name in names]
    classes.sort(key=lambda processor_class: processor_class.order)
    return [processor_class(vocab_size, max_num_seqs, device) for processor_class in classes]
