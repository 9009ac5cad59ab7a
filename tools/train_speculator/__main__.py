"""Train a head that drafts for a model: `python -m tools.train_speculator MODEL --out FOLDER`.

Interrupted, it continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from servd import LLM
from servd.checkpoint.hub import download_weights
from servd.checkpoint.model_spec import read_spec
from tools.train_speculator.data import Example, Generator, Prompts, read_examples
from tools.train_speculator.heads import Eagle3, Head, Medusa
from tools.train_speculator.teacher import StateCache, Teacher
from tools.train_speculator.train import Options, Trainer, export, make_batches, train

NUM_HELD_OUT = 32  # examples, for the figures at the end; a tenth if that is less


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_speculator",
        description="Train a head that drafts for a model, on text that the model itself writes.",
    )
    add = parser.add_argument
    add("model", help="folder or Hugging Face id; demo is servd's own")
    add("--out", type=Path, required=True, help="folder for the head")
    add("--base", type=Path, help="folder of a head of the same sizes to continue with")
    add("--method", choices=("eagle3", "medusa"), default="eagle3", help="[%(default)s]")
    add(
        "--prompts",
        type=Path,
        help="a prompt on each line; of a .jsonl file, an object with "
        '"prompt" or "messages". Default: the model makes them up',
    )
    add("--num-examples", type=int, default=2000, help="prompts and answers [%(default)s]")
    add("--max-tokens", type=int, default=256, help="of an answer [%(default)s]")
    add("--temperature", type=float, default=0.6, help="of the answers [%(default)s]")
    add("--num-drafts", type=int, default=5, help="tokens drafted in a row [%(default)s]")
    add("--draft-vocab-size", type=int, default=8192, help="of eagle3, at most [%(default)s]")
    add("--num-layers", type=int, default=1, help="of a Medusa head [%(default)s]")
    add("--epochs", type=int, default=3, help="[%(default)s]")
    add("--batch-tokens", type=int, default=4096, help="padding included [%(default)s]")
    add("--max-length", type=int, default=1024, help="tokens read of an example [%(default)s]")
    add("--learning-rate", type=float, default=1e-2, help="the highest [%(default)s]")
    add("--seed", type=int, default=0)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="[%(default)s]")
    add("--max-num-seqs", type=int, default=32, help="answers at a time [%(default)s]")
    add(
        "--state-cache-gib",
        type=float,
        default=8,
        metavar="GIB",
        help="disk for hidden states of later epochs; they are computed again if they need more "
        "[%(default)s]",
    )
    add("--work", type=Path, help="folder for text and checkpoints [OUT/.work]")
    return parser.parse_args(arguments)


def fingerprint(*parts: Any) -> str:
    """Equal for equal parts: what depends on them is kept under this name."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def generate(args: argparse.Namespace, folder: Path, work: Path) -> tuple[str, list[Example]]:
    """The text, of which a part may be there; and its fingerprint."""
    prompts = args.prompts.read_text(encoding="utf8") if args.prompts else None
    params = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    name = fingerprint(str(folder), prompts, params, args.seed, args.dtype)
    path = work / f"text-{name}.jsonl"
    if not read_examples(path).keys() >= {*range(args.num_examples)}:
        llm = LLM(str(folder), dtype=args.dtype, max_num_seqs=args.max_num_seqs)
        source = Prompts(llm.engine, args.prompts)
        Generator(llm.engine, source, path, params, args.seed).run(args.num_examples)
        llm.close()
    examples = read_examples(path)
    return name, [examples[i] for i in range(args.num_examples)]


def make_head(args: argparse.Namespace, folder: Path, examples: Sequence[Example]) -> Head:
    """A head with random weights, in the sizes of the model."""
    spec = read_spec(folder)
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size, "dtype": "bfloat16"}
    if args.method == "medusa":
        return Medusa(
            {"model_type": "medusa", "architectures": ["MedusaModel"], "original_lm_head": True}
            | {"num_heads": args.num_drafts, "num_hidden_layers": args.num_layers}
            | {"medusa_fc_bias": False, "truncated_vocab_size": spec.vocab_size}
            | sizes
        )
    counts = Counter(token for example in examples for token in example.output)
    frequent = counts | {token: 0 for token in range(spec.vocab_size) if token not in counts}
    chosen = sorted(frequent, key=lambda token: (-frequent[token], token))
    chosen = torch.tensor(sorted(chosen[: args.draft_vocab_size]))
    last = spec.num_layers - 1
    # An early, a middle and a late one; of a few layers, as different ones as there are.
    layers = [2, spec.num_layers // 2, last - 2] if last > 5 else [1, (last + 1) // 2, last]
    rope = spec.config.get("rope_parameters") or spec.config
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.config.get("intermediate_size", 4 * spec.hidden_size),
        "hidden_act": "silu",
        "rms_norm_eps": spec.config.get("rms_norm_eps", 1e-5),
        "rope_theta": rope.get("rope_theta", 10000.0),
        "attention_bias": False,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": False,
        "draft_vocab_size": len(chosen),
        "target_hidden_size": spec.hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
    head = Eagle3(config | sizes, args.num_drafts)
    head.use_vocabulary(chosen)
    return head


def main(arguments: list[str] | None = None) -> None:
    """Generate, train, export, measure."""
    args = parse(arguments)
    folder = Path(download_weights(args.model))
    work = args.work or args.out / ".work"
    work.mkdir(parents=True, exist_ok=True)
    text, examples = generate(args, folder, work)
    num_held_out = min(NUM_HELD_OUT, len(examples) // 10)
    held_out, examples = examples[:num_held_out], examples[num_held_out:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = make_head(args, folder, examples).to(device)
    teacher = Teacher(folder, getattr(torch, args.dtype), device, head.aux_layers)
    head.start_from(teacher)
    if args.base:
        head.load_state_dict(load_file(args.base / "model.safetensors"))
    options = Options(
        args.batch_tokens, args.epochs, args.learning_rate, args.max_length, args.seed
    )
    lengths = [min(len(example), args.max_length) for example in (*held_out, *examples)]
    cache = None
    if args.epochs > 1 and StateCache.num_bytes(teacher, lengths) <= args.state_cache_gib * 2**30:
        of = fingerprint(text, head.aux_layers, args.max_length)
        cache = StateCache(teacher, work / f"states-{of}.bin", lengths)
    trainer = Trainer(head, teacher, options, cache)
    name = fingerprint(text, len(examples), head.config, vars(options), args.base)
    checkpoint = work / f"{args.method}-{name}.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"going on from step {trainer.step}; remove {checkpoint} to begin anew", flush=True)
    train(trainer, examples, checkpoint)
    export(head, args.out)
    value, shares = trainer.evaluate(make_batches(held_out or examples, options, 0))
    measured = f"{len(held_out)} examples that were held out"
    if not held_out:
        measured = f"the {len(examples)} it learned from: of fewer than 10 none is held out"
    by_place = " ".join(f"{share:.2f}" for share in shares)
    print(
        f"{args.out}: loss {value:.3f}, mean acceptance length {1 + sum(shares):.2f}, drafts kept "
        f"by position {by_place}, on {measured}"
    )


if __name__ == "__main__":
    main()
