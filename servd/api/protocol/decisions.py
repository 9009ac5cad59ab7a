"""Decisions: questions about an input, answered with probabilities of the given options."""

import json
from typing import Annotated, Any, Literal, NotRequired, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from servd.api.protocol.completions import SomeText
from servd.api.protocol.responses import InputItem, ResponseUsage, as_items, check_kind
from servd.api.protocol.validation import ClosedObject, RequestBody
from servd.base.errors import InvalidRequest

# ---- request ----

MAX_OPTIONS = 2048  # all questions together: each may take two requests to the engine


def _is_json(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_json"


def _text_parts(content: Any) -> Any:
    """Return the parts of a content, with JSON parts converted to text."""
    if not isinstance(content, list):
        return content
    if any(_is_json(part) and not isinstance(part.get("data"), dict | list) for part in content):
        raise PydanticCustomError("content", "parts of type input_json must have JSON `data`")
    return [
        {"type": "input_text", "text": json.dumps(part["data"], ensure_ascii=False)}
        if _is_json(part)
        else part
        for part in content
    ]


def _with_text_parts(item: Any) -> Any:
    if isinstance(item, dict) and "content" in item:
        item = {**item, "content": _text_parts(item["content"])}
    return check_kind(item)


def _joined(instructions: Any) -> Any:
    parts = _text_parts(instructions)
    is_text = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "input_text" and "text" in part
        for part in parts
    )
    if not is_text:
        return instructions
    texts = [str(part["text"]) for part in parts]
    return "\n".join(texts) if all(texts) else ""


class InstructionText(TypedDict):
    """A part of a question that is text."""

    type: Literal["input_text"]
    text: SomeText


class InstructionJSON(TypedDict):
    """A part of a question that is JSON. The model reads it as text."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[Any]


Instructions = Annotated[
    str,
    BeforeValidator(
        _joined, SomeText | Annotated[list[InstructionText | InstructionJSON], Field(min_length=1)]
    ),
    Field(min_length=1),
]


class Predicate(ClosedObject):
    """The question whether a statement about the input is true."""

    type: Literal["predicate"]
    instructions: Instructions
    name: NotRequired[str]


class DecisionChoice(ClosedObject):
    """An option of a choice question. "true" and the boolean true are different options."""

    value: str | bool
    description: NotRequired[str]


class ChoiceQuestion(ClosedObject):
    """The question which of the options is right."""

    type: Literal["choice"]
    instructions: Instructions
    choices: Annotated[list[DecisionChoice], Field(fail_fast=True, min_length=2, max_length=255)]
    name: NotRequired[str]


class Level(ClosedObject):
    """A level of a scale."""

    label: str
    description: NotRequired[str]


class ScoreQuestion(ClosedObject):
    """The question where the input is on a scale. The levels are in ascending order."""

    type: Literal["score"]
    instructions: Instructions
    levels: Annotated[list[Level], Field(fail_fast=True, min_length=2, max_length=255)]
    name: NotRequired[str]


Question = Annotated[Predicate | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionsRequest(RequestBody):
    """Body of POST /v1/decisions."""

    input: Annotated[
        list[Annotated[InputItem, BeforeValidator(_with_text_parts)]],
        Field(fail_fast=True, min_length=1),
        BeforeValidator(as_items, str | Annotated[list[InputItem], Field(min_length=1)]),
    ]
    questions: Annotated[list[Question], Field(fail_fast=True, min_length=1, max_length=400)]
    # Inputs share cached beginnings only under the same key.
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    safety_identifier: str | None = None  # for the client's own records

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        num_options = sum(len(options(question)) for question in self.questions)
        if num_options > MAX_OPTIONS:
            raise InvalidRequest(
                f"the questions have {num_options} options together, the most per request is "
                f"{MAX_OPTIONS}: send fewer questions",
                param="questions",
            )
        for number, question in enumerate(self.questions):
            texts = [text for text, _ in options(question)]
            if len(set(texts)) < len(texts):
                param = f"questions[{number}]"
                raise InvalidRequest(f"the options of `{param}` must all differ", param=param)
        return self


def options(question: Predicate | ChoiceQuestion | ScoreQuestion) -> list[tuple[str, str]]:
    """Return the texts that the model may answer, each with the client's description."""
    match question["type"]:
        case "predicate":
            return [("yes", ""), ("no", "")]
        case "score":
            return [(level["label"], level.get("description", "")) for level in question["levels"]]
        case "choice":
            choices = question["choices"]
            values = [choice["value"] for choice in choices]
            if any(isinstance(value, bool) for value in values):  # true is not "true"
                values = [json.dumps(value, ensure_ascii=False) for value in values]
            return [
                (str(value), choice.get("description", ""))
                for value, choice in zip(values, choices, strict=True)
            ]


# ---- response ----


class PredicateAnswer(msgspec.Struct, tag_field="type", tag="predicate"):
    """The probability that the statement is true."""

    probability: float
    name: str | None = None


class ChoiceProbability(msgspec.Struct):
    """The probability of an option."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, tag_field="type", tag="choice"):
    """The most probable option, with its probability as `confidence`."""

    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]
    name: str | None = None


class LevelProbability(msgspec.Struct):
    """The probability of a level. `value` is the index of the level, from 0."""

    label: str
    value: int
    probability: float


class ScoreAnswer(msgspec.Struct, tag_field="type", tag="score"):
    """The mean level by probability. `confidence` is the highest probability of a level."""

    score: float
    confidence: float
    probabilities: list[LevelProbability]
    name: str | None = None


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionResponse(msgspec.Struct):
    """The response of /v1/decisions: an answer for each question, in order."""

    model: str
    answers: list[Answer]
    usage: ResponseUsage


def answer(
    question: Predicate | ChoiceQuestion | ScoreQuestion, probabilities: list[float]
) -> Answer:
    name = question.get("name")
    best = max(probabilities)
    match question["type"]:
        case "predicate":
            return PredicateAnswer(probabilities[0], name)
        case "choice":
            values = [choice["value"] for choice in question["choices"]]
            choices = list(map(ChoiceProbability, values, probabilities))
            return ChoiceAnswer(values[probabilities.index(best)], best, choices, name)
        case "score":
            labels = [level["label"] for level in question["levels"]]
            levels = list(map(LevelProbability, labels, range(len(labels)), probabilities))
            mean = sum(level.value * level.probability for level in levels)
            return ScoreAnswer(mean, best, levels, name)
