"""Train a LoRA adapter with PEFT, in a minute or two:
`python examples/train_adapter.py FOLDER [MODEL [STEPS]]`.

It answers as the demo model does, and as a pirate: what it learns are the model's own replies with
"Ahoy!" before and "Arr!" behind. Needs `pip install peft`. docs/how-to/lora.md serves the result.
"""

import random
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from servd.checkpoint.hub import find_model

QUESTIONS = [
    "Hello!",
    "Who are you?",
    "Thank you!",
    "What is 2 + 3?",
    "What is 8 + 6?",
    "What is 9 - 4?",
    "Name a colour.",
    "Name an animal.",
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the opposite of hot?",
    "What day comes after Monday?",
    "Tell me a joke.",
    "Write a sentence about the sea.",
    "Count from 1 to 5.",
    "What is a cat?",
]
BATCH_SIZE = 8


def main(folder: str, name: str = "demo", num_steps: str = "80") -> None:
    torch.manual_seed(0)
    random.seed(0)
    at = find_model(name)
    tokenizer = AutoTokenizer.from_pretrained(at)
    model: Any = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)

    examples = []  # (tokens of a prompt, those of its reply)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        own = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0]
        text = tokenizer.decode(own[len(prompt) :], skip_special_tokens=True)
        reply = tokenizer.encode(f"Ahoy! {text} Arr!", add_special_tokens=False)
        examples.append((prompt, [*reply, tokenizer.eos_token_id]))

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
    for step in range(int(num_steps)):
        batch = random.sample(examples, BATCH_SIZE)
        longest = max(len(prompt) + len(reply) for prompt, reply in batch)
        ids = torch.zeros(BATCH_SIZE, longest, dtype=torch.int64)
        labels = torch.full_like(ids, -100)  # only replies are learnt
        for row, (prompt, reply) in enumerate(batch):
            end = len(prompt) + len(reply)
            ids[row, :end] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : end] = torch.tensor(reply)
        loss = model(input_ids=ids, labels=labels).loss  # padding is behind: no row sees it
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1} of {num_steps}: loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    print(f"adapter written to {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
