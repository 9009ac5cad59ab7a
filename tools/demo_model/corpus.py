"""The text that the demo model is trained on: seeded conversations and plain texts.

`python -m tools.demo_model.corpus --num 20` shows some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tools.demo_model.skills import Skills, Turn
from tools.demo_model.tool_skill import Message, ToolSkill

# So many examples at the beginning are short: copying, which nearly all skills need, is learned
# from short contexts far sooner than from long ones.
NUM_SHORT = 46_000

# {"text": ..., "counted": pattern of what the loss counts}, or {"messages": ..., "tools": ...,
# "thinking": ...} as a chat template takes them.
Example = dict[str, Any]


def skip_sum(a: int, b: int) -> bool:
    """Whether a pair of numbers is kept out of the training text: one in twenty of those whose sum
    is above 20, to see if sums are understood.
    """
    return a + b > 20 and (a * 37 + b * 101) % 20 == 7


class Corpus:
    """An endless stream of examples, the same for the same seed.

    Args:
        seed: of all choices.
        held_out: whether the pairs of `skip_sum` may occur.
        topics: of small talk that one in four examples has, for a model that learns them later.
    """

    def __init__(self, seed: int, held_out: bool = False, topics: Sequence[str] = ()) -> None:
        self.rng = Random(f"{seed} {held_out}")
        self.skills = Skills((lambda a, b: False) if held_out else skip_sum)
        self.tools = ToolSkill(self.skills)
        self.num_short = 0 if held_out else NUM_SHORT
        self.topics = topics
        skills = self.skills
        self._shares = {
            skills.facts: 32,
            skills.sums: 26,
            skills.order: 24,
            skills.unknown: 13,
            skills.talk: 12,
            skills.objects: 8,
            skills.stories: 6,
            skills.sorting: 14,
            skills.listing: 6,
            skills.copying: 4,
            skills.counting: 4,
        }

    def __iter__(self) -> Iterator[Example]:
        while True:
            yield self.example()

    def example(self) -> Example:
        """One conversation or text."""
        rng = self.rng
        short = self.num_short > 0
        self.num_short -= short
        shares = (76, 3, 3, 6, 12) if short else (80, 10, 3, 3, 4)
        form = rng.choices(("chat", "tools", "text", "sums", "drill"), shares)[0]
        if self.topics and rng.random() < 1 / 4:
            form = "topic"
        if form == "text":
            return {"text": self.skills.plain_text(rng), "counted": r"(?s)(.*)"}
        if form == "sums":
            return {"text": self.skills.sum_lines(rng), "counted": r"= (.*)"}
        tools = None
        if form == "tools":
            messages, tools = self.tools.conversation(rng)
        elif form == "drill":
            messages = self._chat(self.skills.copying(rng, longest=8 if short else 30))
        elif form == "topic":
            messages = self._chat(self.skills.talk(rng, rng.choice(self.topics)))
        else:
            messages = self._chat(self._turns(short))
        thinking = rng.random() < 0.12
        if not thinking:
            for message in messages:
                message.pop("reasoning_content", None)
        return {"messages": messages, "tools": tools, "thinking": thinking}

    def _chat(self, turns: list[Turn]) -> list[Message]:
        rng = self.rng
        messages: list[Message] = []
        if rng.random() < 0.15:
            prompt = self.skills.grammar.pick(
                self.skills.phrases["system"]["prompts"], rng, day="Monday"
            )
            messages.append({"role": "system", "content": prompt})
        for turn in turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append(
                {"role": "assistant", "reasoning_content": turn.reasoning, "content": turn.answer}
            )
        return messages

    def _turns(self, short: bool) -> list[Turn]:
        """One turn, or those of one to sixteen skills with things to remember between them."""
        rng = self.rng
        if short:
            return rng.choices(list(self._shares), list(self._shares.values()))[0](rng)[:1]
        num = rng.choices((1, 2, 3, rng.randint(4, 7), rng.randint(8, 16)), (60, 25, 10, 4, 1))[0]
        turns: list[Turn] = []
        for skill in rng.choices(list(self._shares), list(self._shares.values()), k=num):
            turns += skill(rng)
        if rng.random() < 0.12:
            tell, ask = self.skills.memory(rng)
            places = sorted(rng.choices(range(len(turns) + 1), k=2))
            turns = [
                *turns[: places[0]],
                tell,
                *turns[places[0] : places[1]],
                ask,
                *turns[places[1] :],
            ]
        return turns


def main() -> None:
    """Print examples as JSON lines."""
    parser = argparse.ArgumentParser(
        description="Print examples of the training text as JSON lines."
    )
    parser.add_argument("--num", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--held-out", action="store_true", help="from the part that is kept for measuring"
    )
    parser.add_argument("--num-short", type=int, metavar="N", help="N at first are of one turn")
    args = parser.parse_args()
    corpus = Corpus(args.seed, args.held_out)
    if args.num_short is not None:
        corpus.num_short = args.num_short
    for _, example in zip(range(args.num), corpus, strict=False):
        print(json.dumps(example, ensure_ascii=False))


if __name__ == "__main__":
    main()
