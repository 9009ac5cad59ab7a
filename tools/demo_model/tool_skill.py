"""Conversations with tools: which function to call, with which arguments, and what to say about its
result.
"""

from __future__ import annotations

import json
import operator
from random import Random
from typing import Any

from tools.demo_model.skills import Skills

Message = dict[str, Any]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
KINDS: tuple[str, ...] = ("weather", "calculator", "search", "clock")


class ToolSkill:
    """Writes conversations in which functions are given."""

    def __init__(self, skills: Skills) -> None:
        self.skills = skills
        self.grammar = skills.grammar
        self.phrases = skills.phrases["tools"]

    def conversation(self, rng: Random) -> tuple[list[Message], list[dict[str, Any]]]:
        """Messages, and the functions that are given."""
        kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 2, 3)))
        functions = {kind: self._function(kind, rng) for kind in kinds}
        declarations = list(functions.values())
        distractors = self.phrases["other"]["functions"]
        for name, description, *arguments in rng.sample(distractors, rng.choice((0, 0, 0, 1, 2))):
            declarations.append(_declare(name, description + ".", dict.fromkeys(arguments, "")))
        rng.shuffle(declarations)
        messages: list[Message] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(self.phrases["system"])})
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.25:
                messages += self._plain(kinds, rng)
            else:
                kind = rng.choice(kinds)
                messages += self._use(kind, functions[kind]["function"], rng)
        return messages, declarations

    def _plain(self, kinds: list[str], rng: Random) -> list[Message]:
        skills = self.skills
        possible = [skills.talk, skills.facts, skills.stories, skills.listing]
        if "calculator" not in kinds:
            possible.append(skills.sums)
        if "search" not in kinds:
            possible.append(skills.unknown)
        turn = rng.choice(possible)(rng)[0]
        return [{"role": "user", "content": turn.user}, _say(turn.reasoning, turn.answer)]

    def _use(self, kind: str, function: dict[str, Any], rng: Random) -> list[Message]:
        """Question, call, and mostly the result and the answer."""
        subjects = [self._subject(kind, rng)]
        if kind in ("weather", "clock") and rng.random() < 0.15:
            subjects.append(self._subject(kind, rng))
        values = " and ".join(words for _, words in subjects)
        slots = {"x": values, "words": values}
        user = self.skills.roughly(self.grammar.pick(self.phrases[kind]["ask"], rng, **slots), rng)
        argument = function["parameters"]["required"][0]
        calls = [
            {
                "type": "function",
                "function": {"name": function["name"], "arguments": {argument: value}},
            }
            for value, _ in subjects
        ]
        joined = " and ".join(value for value, _ in subjects)
        reasoning = self.grammar.expand(
            self.phrases[kind]["reasoning"], rng, x=joined, tool=function["name"]
        )
        messages: list[Message] = [{"role": "user", "content": user}, _say(reasoning, "", calls)]
        if rng.random() < 0.25:
            return messages
        results = [self._result(kind, value, rng) for value, _ in subjects]
        messages += [{"role": "tool", "content": content} for content, _ in results]
        return [
            *messages,
            _say("I have the result of the tool.", " ".join(answer for _, answer in results)),
        ]

    def _function(self, kind: str, rng: Random) -> dict[str, Any]:
        phrases = self.phrases[kind]
        argument = self.grammar.expand(phrases["argument"], rng)
        description = (
            self.grammar.expand(phrases["argument_description"], rng) if rng.random() < 0.6 else ""
        )
        name = self.grammar.pick(phrases["name"], rng)
        return _declare(
            name, self.grammar.pick(phrases["description"], rng), {argument: description}
        )

    def _subject(self, kind: str, rng: Random) -> tuple[str, str]:
        """The argument of a call, and the words that the user has for it."""
        if kind == "search":
            topic = self.grammar.pick(self.phrases["search"]["topics"], rng)
            return topic, topic
        if kind == "calculator":
            return self._expression(rng)
        city = self.grammar.word("city", rng) if rng.random() < 0.7 else self.grammar.name(rng)
        return city, city

    def _expression(self, rng: Random) -> tuple[str, str]:
        a, b = (rng.randint(2, 10 ** rng.randint(1, 4)) for _ in "ab")
        sign, word = rng.choice(
            (
                ("*", "times"),
                ("*", "multiplied by"),
                ("*", "x"),
                ("/", "divided by"),
                ("/", "over"),
                ("+", "plus"),
                ("-", "minus"),
                ("+", "+"),
                ("-", "-"),
                ("*", "*"),
                ("/", "/"),
                ("*", "*"),
            )
        )
        return f"{a} {sign} {b}", f"{a} {word} {b}"

    def _result(self, kind: str, value: str, rng: Random) -> tuple[str, str]:
        """What the tool returns, and the answer."""
        if rng.random() < 0.04:
            return json.dumps(
                {"error": "not found"}
            ), "Sorry, the tool reported an error: not found."
        if kind == "calculator":
            a, sign, b = value.split()
            result = f"{OPERATORS[sign](int(a), int(b)):.9g}"
            return rng.choice((result, json.dumps({"result": result}))), f"{value} = {result}."
        if kind == "clock":
            time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
            return rng.choice((time, json.dumps({"time": time}))), f"In {value} it is {time}."
        if kind == "search":
            snippet = self.grammar.pick(self.phrases["results"]["snippets"], rng)
            page = {
                "title": value.capitalize(),
                rng.choice(("snippet", "text", "summary")): snippet,
            }
            content = rng.choice(
                (snippet, json.dumps({"results": [page]}), json.dumps([page]), json.dumps(page))
            )
            return content, f"I found this: {snippet}"
        degrees = rng.randint(-15, 39)
        condition = rng.choice(self.phrases["results"]["conditions"])
        values: dict[str, Any] = {
            rng.choice(("temperature", "temperature", "temp", "degrees", "temp_c")): degrees,
            rng.choice(("condition", "condition", "conditions", "sky", "description")): condition,
        }
        if rng.random() < 0.3:
            values = {"city": value} | values
        content = f"{degrees} degrees, {condition}" if rng.random() < 0.15 else json.dumps(values)
        return content, f"The weather in {value}: {degrees} degrees, {condition}."


def _say(reasoning: str, answer: str, calls: list[dict[str, Any]] | None = None) -> Message:
    message: Message = {"role": "assistant", "reasoning_content": reasoning, "content": answer}
    return message | {"tool_calls": calls} if calls else message


def _declare(name: str, description: str, arguments: dict[str, str]) -> dict[str, Any]:
    properties = {
        argument: {"type": "string", "description": text} if text else {"type": "string"}
        for argument, text in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
