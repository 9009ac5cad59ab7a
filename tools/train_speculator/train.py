"""Training of a head: batches in a fixed order, checkpoints, and the folder that is served."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tools.demo_model.muon import Muon
from tools.train_speculator.data import Example
from tools.train_speculator.heads import Batch, Head, kept, loss
from tools.train_speculator.teacher import StateCache, Teacher

SAVE_EVERY_S = 60
POOL = 256  # examples of which batches of like lengths are made
WARMUP = 0.05  # share of the steps


@dataclass(frozen=True)
class Options:
    """What a training depends on besides its examples."""

    batch_tokens: int = 4096  # padding included
    epochs: int = 3
    learning_rate: float = 4e-3
    max_length: int = 1024  # tokens of an example; the rest is not read
    seed: int = 0


def make_batches(examples: Sequence[Example], options: Options, epoch: int) -> list[list[Example]]:
    """Examples of like lengths together, in random order."""
    rng = random.Random(f"{options.seed} {epoch}")
    shuffled = rng.sample(examples, len(examples))
    batches: list[list[Example]] = []
    for start in range(0, len(shuffled), POOL):
        batch: list[Example] = []
        for example in sorted(shuffled[start : start + POOL], key=len):
            longest = min(len(example), options.max_length)
            if batch and longest * (len(batch) + 1) > options.batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(example)
        batches.append(batch)
    return rng.sample(batches, len(batches))


class Trainer:
    """A head, its optimizers and the place reached; what `save` writes, `load` brings back.

    Args:
        head: on the teacher's device.
        teacher: the model.
        options: of the training.
        cache: of what the teacher says of the examples it learns from.
    """

    def __init__(
        self, head: Head, teacher: Teacher, options: Options, cache: StateCache | None = None
    ) -> None:
        self.head = head
        self.teacher = teacher
        self.options = options
        self.cache = cache
        self.device = teacher.device
        is_16_bit = teacher.dtype != torch.float32
        self.dtype = torch.bfloat16 if is_16_bit else torch.float32  # products' type
        self.step = 0
        parameters = [item for item in head.named_parameters() if item[1].requires_grad]
        matrices = [p for name, p in parameters if p.dim() == 2 and name != "lm_head.weight"]
        adam_parameters = [p for name, p in parameters if p.dim() != 2 or name == "lm_head.weight"]
        self.optimizers: list[torch.optim.Optimizer] = [Muon(matrices, dtype=self.dtype)]
        if adam_parameters:
            self.optimizers.append(
                torch.optim.AdamW(adam_parameters, betas=(0.9, 0.95), weight_decay=0.0)
            )

    def read(self, examples: Sequence[Example], cache: StateCache | None) -> Batch:
        """A batch with what the teacher says of it."""
        longest = min(max(map(len, examples)), self.options.max_length)
        ids = torch.zeros((len(examples), longest), dtype=torch.int64)
        is_output = torch.zeros((len(examples), longest), dtype=torch.bool)
        for row, example in enumerate(examples):
            tokens = torch.tensor([*example.prompt, *example.output][:longest])
            ids[row, : len(tokens)] = tokens
            is_output[row, len(example.prompt) : len(tokens)] = True
        ids = ids.to(self.device)
        is_output = is_output.to(self.device)
        if cache is None:
            return Batch(ids, is_output, *self.teacher(ids))
        numbers = [example.number for example in examples]
        return Batch(ids, is_output, *cache(ids, numbers))

    def measure(
        self, examples: Sequence[Example], cache: StateCache | None = None
    ) -> tuple[Tensor, list[float]]:
        """Loss, and the shares of rows in which N drafts are right."""
        batch = self.read(examples, cache)
        enabled = self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            places = self.head.places(batch, self.teacher)
        return loss(places), kept(self.head, places, batch.ids.shape)

    def update(self, examples: Sequence[Example], num_steps: int) -> tuple[float, float]:
        """One of `num_steps` steps; returns the loss and the mean acceptance length."""
        value, shares = self.measure(examples, self.cache)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.step += 1
        # Up over the first steps, then down to nothing.
        done = self.step / num_steps
        rate = self.options.learning_rate * min(done / WARMUP, (1 - done) / (1 - WARMUP))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return value.item(), 1 + sum(shares)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Sequence[Example]]) -> tuple[float, list[float]]:
        """Mean loss, and mean shares, over batches."""
        made = [self.measure(batch) for batch in batches]
        depth = min(len(shares) for _, shares in made)
        means = [sum(shares[i] for _, shares in made) / len(made) for i in range(depth)]
        return sum(value.item() for value, _ in made) / len(made), means

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is whole."""
        parts = [part.state_dict() for part in (self.head, *self.optimizers)]
        new = path.with_suffix(".new")
        torch.save({"parts": parts, "step": self.step}, new)
        new.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, map_location=self.device)
        for part, values in zip((self.head, *self.optimizers), state["parts"], strict=True):
            part.load_state_dict(values)
        self.step = state["step"]


def train(trainer: Trainer, examples: Sequence[Example], checkpoint: Path) -> None:
    """Run the steps after those done, with a progress bar."""

    def batches() -> Iterator[list[Example]]:
        for epoch in range(trainer.options.epochs):
            yield from make_batches(examples, trainer.options, epoch)

    num_steps = sum(1 for _ in batches())
    saved = time.monotonic()
    bar = tqdm(total=num_steps, initial=trainer.step, desc="training", unit="step", mininterval=2)
    smooth_loss = smooth_length = 0.0
    with bar:
        for number, batch in enumerate(batches()):
            if number < trainer.step:
                continue
            value, acceptance = trainer.update(batch, num_steps)
            memory = 0.95 if smooth_loss else 0.0
            smooth_loss = memory * smooth_loss + (1 - memory) * value
            smooth_length = memory * smooth_length + (1 - memory) * acceptance
            bar.set_postfix_str(
                f"loss {smooth_loss:.3f}, acceptance length {smooth_length:.2f}", refresh=False
            )
            bar.update()
            if time.monotonic() - saved > SAVE_EVERY_S:
                trainer.save(checkpoint)
                saved = time.monotonic()
    trainer.save(checkpoint)


def export(head: Head, folder: Path) -> None:
    """Write the folder that `--speculative-config` names, with weights in 16 bits."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config, indent=2) + "\n", encoding="utf8")
    weights = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
