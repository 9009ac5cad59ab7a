"""The text that heads are trained on: prompts, and what the model itself says to them."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from servd.api.request.request_output import RequestOutput
from servd.api.text.prompt import Chat, ToolOptions
from servd.messages.params import SamplingParams
from servd.offline.llm_engine import LLMEngine

MARK = "(the user's words)"
MAX_MADE_UP = 128  # tokens of a prompt that the model makes up
MAX_WAITING = 256  # requests in the engine


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of what the model went on with."""

    number: int  # in its file
    prompt: array[int]
    output: array[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)


class Prompts:
    """Text of prompt `i`, for any `i`: from a file, again and again, or made up by the model.

    Args:
        engine: of the model, whose chat template is used.
        file: a prompt on each line, or on each line of a .jsonl file {"prompt": text} or
            {"messages": [...]}, maybe with "tools"; an answer at the end is left out.
            None: the model writes what a user would.
    """

    def __init__(self, engine: LLMEngine, file: Path | None) -> None:
        self.template = engine.processor.chat_template
        self.lines: list[Any] = []
        if file is not None:
            lines = [line for line in file.read_text(encoding="utf8").splitlines() if line.strip()]
            is_json = file.suffix == ".jsonl"
            self.lines = [json.loads(line) for line in lines] if is_json else lines

    def make_prompt(self, i: int) -> tuple[str, bool] | None:
        """Text, and whether special tokens are to be added; None: it has to be made up."""
        if not self.lines:
            return None
        line = self.lines[i % len(self.lines)]
        if isinstance(line, str):
            return self.of_user(line)
        if "prompt" in line:
            return line["prompt"], True
        messages = list(line["messages"])
        while messages[-1]["role"] == "assistant":
            messages.pop()
        tools = ToolOptions(line["tools"]) if line.get("tools") else None
        return self.template.render(Chat(messages=messages, tool_options=tools)), False

    def of_user(self, text: str) -> tuple[str, bool]:
        """As a chat of one message."""
        messages = [{"role": "user", "content": text}]
        return self.template.render(Chat(messages=messages)), False

    @property
    def opening(self) -> str:
        """What stands before a user's first words."""
        return self.of_user(MARK)[0].partition(MARK)[0]


class Generator:
    """Fills a file with examples; what is there already is kept.

    Each line has a number, its example's, of which the seed is made too: the same examples come in
    any order and after any interruption.

    Args:
        engine: of the model.
        prompts: of the examples.
        path: the file.
        params: of each answer.
        seed: of all choices.
    """

    def __init__(
        self, engine: LLMEngine, prompts: Prompts, path: Path, params: dict[str, Any], seed: int
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.path = path
        self.params = params
        self.seed = seed

    def run(self, num_examples: int) -> None:
        """Generate those of `num_examples` that the file does not have."""
        done = read_examples(self.path)
        missing = [i for i in range(num_examples) if i not in done]
        bar = tqdm(
            total=num_examples,
            initial=num_examples - len(missing),
            desc="text",
            unit="example",
            mininterval=2,
        )
        indices = iter(missing)
        running = 0
        num_tokens = 0
        with self.path.open("a", encoding="utf8") as file, bar:
            while True:
                while running < MAX_WAITING and (i := next(indices, None)) is not None:
                    self._begin(i)
                    running += 1
                if not running:
                    return
                for output in self.engine.step():
                    if not output.finished or self._answer(output):
                        continue
                    running -= 1
                    num_tokens += len(output.outputs[0].token_ids)
                    number = int(output.request_id.removeprefix("answer "))
                    line = [number, output.prompt_token_ids, output.outputs[0].token_ids]
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
                    bar.update()

    def _begin(self, i: int) -> None:
        if (prompt := self.prompts.make_prompt(i)) is not None:
            self._add(f"answer {i}", *prompt, **self.params)
        else:
            options = {"max_tokens": MAX_MADE_UP, "temperature": 1.0, "top_p": 0.95}
            self._add(f"prompt {i}", self.prompts.opening, False, **options)

    def _add(self, name: str, text: str, special: bool, **params: Any) -> None:
        params["seed"] = (self.seed << 32) + int(name.split()[1])
        self.engine.add_request(name, text, SamplingParams(**params), add_special_tokens=special)

    def _answer(self, output: RequestOutput) -> bool:
        """Whether this was a prompt; then its answer is begun."""
        kind, number = output.request_id.split()
        if kind == "answer":
            return False
        text = output.outputs[0].text.strip() or "Hello!"
        self._add(f"answer {number}", *self.prompts.of_user(text), **self.params)
        return True


def read_examples(path: Path) -> dict[int, Example]:
    """Examples of a file by number. A last line that was cut off is cut from the file."""
    examples: dict[int, Example] = {}
    if not path.exists():
        return examples
    with path.open("rb+") as file:
        while line := file.readline():
            if not line.endswith(b"\n"):
                file.truncate(file.tell() - len(line))
                break
            number, prompt, output = json.loads(line)
            examples[number] = Example(number, array("i", prompt), array("i", output))
    return examples
