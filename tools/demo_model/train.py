"""Train the demo model: `python -m tools.demo_model.train`. Interrupted, it continues."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from tools.demo_model.corpus import Corpus
from tools.demo_model.model import ModelConfig, Qwen3
from tools.demo_model.muon import Muon
from tools.demo_model.tokenizer import END, END_OF_TEXT, Renderer, save_tokenizer, train_tokenizer

HERE = Path(__file__).parent
SAVE_EVERY_S = 60
EXAMPLES_PER_PART = 2000
WARMUP_EXAMPLES = 2000
# An answer, without the empty reasoning that the chat template puts before it when thinking is off.
ANSWER = re.compile(
    r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.DOTALL
)

ROW = 256  # tokens; shorter examples share a row


@dataclass(frozen=True)
class Sequence:
    """One example."""

    ids: list[int]
    counted: list[bool]  # which of them the loss counts

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Batch:
    """Rows of one or more examples, padded on the right."""

    ids: Tensor  # int64 [rows, length]
    weights: Tensor  # float32 [rows, length]: of each token in the loss
    examples: Tensor  # int64 [rows, length]: number of the example in its row; 0 is padding

    def mask(self) -> Tensor:
        """[rows, 1, length, length]: a token sees those of its own example up to itself."""
        same = self.examples[:, :, None] == self.examples[:, None, :]
        return same.tril().unsqueeze(1)


def encode(
    examples: Iterable[dict[str, Any]], tokenizer: Tokenizer, max_length: int
) -> list[Sequence]:
    """Tokens of the examples; the loss counts the assistant's answers, and a plain text or the part
    it states.
    """
    render = Renderer()
    sequences = []
    for example in examples:
        text = render(example)
        encoding = tokenizer.encode(text)
        pattern = re.compile(example["counted"]) if "text" in example else ANSWER
        spans = [match.span(1) for match in pattern.finditer(text)]
        letters = bytearray(len(text) + 1)
        for start, end in spans:
            letters[start:end] = b"\1" * (end - start)
        counted = [bool(letters[start]) for start, _ in encoding.offsets]
        counted[0] = False  # in a row with others it would follow the end of the one before
        sequences.append(Sequence(encoding.ids[:max_length], counted[:max_length]))
    return sequences


def make_batches(sequences: list[Sequence], num_tokens: int, rng: random.Random) -> list[Batch]:
    """Batches of at most `num_tokens` tokens (or one long example), in random order.

    A batch has examples of all kinds: with one kind a step, training takes far longer.
    """
    rows: list[list[Sequence]] = []
    free: list[list[Sequence]] = []  # the rows that were begun last
    for sequence in rng.sample(sequences, len(sequences)):
        row = next((row for row in free if sum(map(len, row)) + len(sequence) <= ROW), None)
        if row is None:
            row = []
            rows.append(row)
            free = [*free[-7:], row]
        row.append(sequence)
    rows.sort(
        key=lambda row: max(ROW, sum(map(len, row)))
    )  # long examples have rows for themselves
    batches = []
    batch = []
    for row in rows:
        longest = max(sum(map(len, other)) for other in (*batch, row))
        if batch and longest * (len(batch) + 1) > num_tokens:
            batches.append(_join(batch))
            batch = []
        batch.append(row)
    batches.append(_join(batch))
    rng.shuffle(batches)
    return batches


def _join(rows: list[list[Sequence]]) -> Batch:
    longest = max(sum(map(len, row)) for row in rows)
    ids, examples = torch.zeros(2, len(rows), longest, dtype=torch.long)
    weights = torch.zeros(len(rows), longest)
    for row, sequences in enumerate(rows):
        start = 0
        for number, sequence in enumerate(sequences, 1):
            place = slice(start, start + len(sequence))
            ids[row, place] = torch.tensor(sequence.ids)
            examples[row, place] = number
            # A long answer counts more than a short one, but not as much more as it is longer: most
            # of a story's tokens are mere chance, where the few of a sum or of a fact's name are
            # what is to be learned.
            weights[row, place] = (
                torch.tensor(sequence.counted) / max(1, sum(sequence.counted)) ** 0.5
            )
            start += len(sequence)
    return Batch(ids, weights, examples)


def steps(
    corpus: Corpus, tokenizer: Tokenizer, args: argparse.Namespace, max_length: int
) -> Iterator[Batch]:
    """The batch of each training step.

    They are made part by part, so that a longer training begins with the same steps as a shorter
    one.
    """
    rng = random.Random(args.seed)
    for start in range(0, args.examples, EXAMPLES_PER_PART):
        examples = islice(corpus, min(EXAMPLES_PER_PART, args.examples - start))
        yield from make_batches(encode(examples, tokenizer, max_length), args.batch_tokens, rng)


def losses(model: Qwen3, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each counted token, in nats, and its weight."""
    ids = batch.ids.to(device)
    weights = batch.weights.to(device)
    counted = weights[:, 1:] > 0
    is_target = F.pad(counted, (0, 1))
    # Few CPUs have units for bfloat16: on the others it takes four times as long as float32.
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(ids, is_target, batch.mask().to(device))
    return F.cross_entropy(logits.float(), ids[:, 1:][counted], reduction="none"), weights[:, 1:][
        counted
    ]


@torch.no_grad()
def evaluate(model: Qwen3, batches: list[Batch], device: torch.device) -> float:
    """Mean cross-entropy per counted token, in nats."""
    return torch.cat([losses(model, batch, device)[0] for batch in batches]).mean().item()


class Trainer:
    """Model, optimizers and the place reached; what `save` writes, `load` brings back.

    Matrices are trained by Muon, which needs far fewer steps here, and the embedding and the norms
    by AdamW.

    Args:
        model: on `device`.
        num_examples: that the updates will have seen at the end.
        learning_rate: the highest.
        device: computes.
        origin: of the text and the options: one training does not go on from the checkpoint of
            another one.
    """

    def __init__(
        self,
        model: Qwen3,
        num_examples: int,
        learning_rate: float,
        device: torch.device,
        origin: str = "",
    ) -> None:
        self.model = model
        self.num_examples = num_examples
        self.device = device
        self.learning_rate = learning_rate
        self.origin = origin
        self.step = 0
        self.examples = 0
        self.seconds = 0.0
        layers = [
            parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2
        ]
        layer_ids = {id(parameter) for parameter in layers}
        scalars = [parameter for parameter in model.parameters() if id(parameter) not in layer_ids]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(layers),
            torch.optim.AdamW(scalars, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def update(self, batch: Batch) -> float:
        """One step; returns the weighted mean of the loss."""
        started = time.monotonic()
        values, weights = losses(self.model, batch, self.device)
        loss = (values * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.step += 1
        self.examples += int(batch.examples.amax(dim=1).sum())
        # Up over the first examples, level, and down to nothing over the second half.
        remaining = 1 - self.examples / self.num_examples
        scale = min(1.0, self.examples / WARMUP_EXAMPLES, remaining / 0.5)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * scale
            optimizer.step()
            optimizer.zero_grad()
        self.seconds += time.monotonic() - started
        return loss.item()

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is whole."""
        parts = [part.state_dict() for part in (self.model, *self.optimizers)]
        new = path.with_suffix(".new")
        place = (self.step, self.examples, self.seconds)
        torch.save({"origin": self.origin, "parts": parts, "place": place}, new)
        new.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            SystemExit: it is of another training.
        """
        state = torch.load(path, map_location=self.device)
        if state["origin"] != self.origin:
            sys.exit(
                f"{path} is of another training (text or options have changed): remove it, or "
                f"give another --work"
            )
        for part, values in zip((self.model, *self.optimizers), state["parts"], strict=True):
            part.load_state_dict(values)
        self.step, self.examples, self.seconds = state["place"]


def export(model: Qwen3, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face model folder with weights in 16 bits."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)]
    config = model.config.to_json() | {
        "dtype": "bfloat16",
        "eos_token_id": ends[0],
        "pad_token_id": ends[1],
    }
    generation = {
        "eos_token_id": ends,
        "pad_token_id": ends[1],
        "do_sample": True,
        "temperature": 0.1,
        "top_p": 0.9,
    }
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf8")
    weights = {
        name: weight.to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def train(trainer: Trainer, batches: Iterable[Batch], checkpoint: Path) -> None:
    """Run the steps after those done, with a progress bar."""
    saved = time.monotonic()
    bar = tqdm(
        total=trainer.num_examples,
        initial=trainer.examples,
        unit="example",
        smoothing=0.05,
        mininterval=2,
    )
    smooth = None
    for batch in islice(batches, trainer.step, None):
        loss = trainer.update(batch)
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
        bar.update(trainer.examples - bar.n)
        if time.monotonic() - saved > SAVE_EVERY_S:
            trainer.save(checkpoint)
            saved = time.monotonic()
    trainer.save(checkpoint)
    bar.close()


def make_tokenizer(seed: int, vocab_size: int, num_examples: int = 20_000) -> Tokenizer:
    """A tokenizer for the corpus of this seed. What is listed and sorted are tokens, with a space
    before or without.
    """
    corpus = Corpus(seed)
    words = sorted(
        {word for kind in corpus.skills.words["kinds"].values() for word in kind.split()}
    )
    texts = map(Renderer(), islice(corpus, num_examples))
    return train_tokenizer(
        chain(texts, ["\n".join([*words, *(f"- {word}" for word in words)])] * 200), vocab_size
    )


def origin_of(args: argparse.Namespace) -> str:
    """Equal for trainings by the same code, with the same text, options and order."""
    options = args.examples, args.seed, args.batch_tokens, args.learning_rate
    parts = [repr((*options, str(args.base), args.topics)).encode()]
    parts += [
        path.read_bytes()
        for path in sorted(HERE.iterdir())
        if path.suffix in (".py", ".toml", ".jinja")
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; its defaults are those of the first training of the shipped model, but for
    the threads (README.md has both).
    """
    parser = argparse.ArgumentParser(
        description="Train the demo model and write it as a Hugging Face model folder."
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=76_000,
        help="conversations and texts to train on, each once",
    )
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument(
        "--batch-tokens", type=int, default=2048, help="tokens of a batch, padding included"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU [%(default)s]")
    parser.add_argument(
        "--base", type=Path, help="model folder to continue from; half of the examples are short"
    )
    parser.add_argument(
        "--topics", nargs="+", default=[], help="of small talk that one in four examples has"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE / ".work", help="folder for the checkpoint"
    )
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "servd" / "demo_model")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, export, measure."""
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.work.mkdir(parents=True, exist_ok=True)
    config = ModelConfig()
    corpus = Corpus(args.seed, topics=args.topics)
    model = Qwen3(config)
    if args.base is None:
        tokenizer = make_tokenizer(args.seed, config.vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
        weights = load_file(args.base / "model.safetensors")
        model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        corpus.num_short = args.examples // 2
    model.to(device)
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters on {device}",
        flush=True,
    )
    trainer = Trainer(model, args.examples, args.learning_rate, device, origin_of(args))
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"going on from step {trainer.step}; remove {checkpoint} to begin anew", flush=True)
    train(trainer, steps(corpus, tokenizer, args, config.max_position_embeddings), checkpoint)
    export(model, tokenizer, args.out)
    held_out = encode(
        islice(Corpus(args.seed, held_out=True), 1000), tokenizer, config.max_position_embeddings
    )
    loss = evaluate(
        model, make_batches(held_out, args.batch_tokens, random.Random(args.seed)), device
    )
    minutes = trainer.seconds / 60
    print(
        f"held-out cross-entropy: {loss:.4f} nats per token of an answer; training took "
        f"{minutes:.1f} minutes"
    )


if __name__ == "__main__":
    main()
