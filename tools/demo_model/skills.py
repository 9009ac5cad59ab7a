"""What the demo model learns to do in a conversation: each skill writes one or a few turns."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tools.demo_model.grammar import Grammar, tidy

FOLDER = Path(__file__).parent


@dataclass
class Turn:
    """A question, the reasoning that may come before the answer, and the answer."""

    user: str
    reasoning: str
    answer: str


class Skills:
    """Writes turns.

    Args:
        skip_sum: pairs of numbers that never occur in a sum.
    """

    def __init__(self, skip_sum: Callable[[int, int], bool]) -> None:
        self.words = _read("words.toml")
        self.phrases = _read("phrases.toml")
        self.topics: list[dict[str, Any]] = _read("facts.toml")["topic"]
        self.grammar = Grammar(
            {name: words for name, words in self.words.items() if not isinstance(words, dict)}
        )
        self.skip_sum = skip_sum
        self._carriers = self.phrases["carriers"]

    def facts(self, rng: Random) -> list[Turn]:
        """A question about servd."""
        topic = rng.choice(self.topics)
        form = rng.choices(("questions", "nouns", "verbs", "keys"), (3, 2, 2, 4))[0]
        reasoning = f"The user asks about {topic['about']}. I know this about servd."
        return [
            Turn(
                self.loosely(self._question(topic, form, rng), rng),
                reasoning,
                rng.choice(topic["answers"]),
            )
        ]

    def unknown(self, rng: Random) -> list[Turn]:
        """A question whose answer the model does not know, in the same words as those that it
        knows.
        """
        form = rng.choices(("questions", "nouns", "verbs", "keys"), (2, 2, 1, 2))[0]
        question = self._question(self.words["unknown"], form, rng)
        user = self.loosely(self._strangely(question, rng) if rng.random() < 0.5 else question, rng)
        return [
            Turn(
                user,
                "I have not learned this, so I say so.",
                rng.choice(self.phrases["unknown"]["answer"]),
            )
        ]

    def talk(self, rng: Random, about: str | None = None) -> list[Turn]:
        """Small talk, on any topic or on the one that is `about` this."""
        topics = self.phrases["talk"]
        topic = rng.choice([topic for topic in topics if about in (None, topic["about"])])
        user = self.grammar.pick(topic["user"], rng)
        user = user if rng.random() < 0.4 else self.loosely(user, rng)
        return [
            Turn(
                user,
                f"This is about {topic['about']}. I answer politely.",
                rng.choice(topic["answer"]),
            )
        ]

    def sums(self, rng: Random) -> list[Turn]:
        """Two numbers up to 99, added or subtracted; sometimes the result is used again."""
        a, b, sign = self.sum_pair(rng)
        turns = [self._sum("plus" if sign == "+" else "minus", a, b, sign, rng)]
        while rng.random() < 0.25:
            a = a + b if sign == "+" else a - b
            if a < 30:
                sign = "+"
            elif a > 150:
                sign = "-"
            else:
                sign = rng.choice("+-")
            b = rng.randint(1, 40)
            turns.append(self._sum("next_plus" if sign == "+" else "next_minus", a, b, sign, rng))
        return turns

    def sum_pair(self, rng: Random) -> tuple[int, int, str]:
        """Two numbers and a sign; the result is seldom negative. Half of the pairs are up to
        20: people try those first.
        """
        highest = rng.choice((20, 99))
        a = rng.randint(0, highest)
        b = rng.randint(0, highest)
        sign = rng.choice("+-")
        if sign == "-" and a < b and rng.random() < (0.9 if highest == 20 else 0.5):
            a, b = b, a
        return self.sum_pair(rng) if self.skip_sum(a, b) else (a, b, sign)

    def listing(self, rng: Random) -> list[Turn]:
        """Some or all things of a kind."""
        phrases = self.phrases["list"]
        kind = rng.choice(list(self.words["kinds"]))
        things = self.words["kinds"][kind].split()
        name = rng.choice(self.words["aliases"].get(kind, [kind]))
        whole = self.words["wholes"].get(kind)
        if whole and rng.random() < 0.7:
            number = len(things)
            form = "all"
        else:
            number = rng.randint(2, min(8, len(things)))
            form = "ask"
            things = things[:number]
        written = rng.choice((str(number), self.words["count_words"][number]))
        user = self.grammar.pick(phrases[form], rng, n=written, kind=name, whole=whole)
        answer = "\n".join(f"{position}. {thing}" for position, thing in enumerate(things, 1))
        return [Turn(self.roughly(user, rng), f"The user wants {number} {kind}.", answer)]

    def sorting(self, rng: Random) -> list[Turn]:
        """Words by the alphabet, or numbers by size."""
        number = rng.randint(3, 5)
        form = rng.choice(("sort_words", "sort_up", "sort_down"))
        if form == "sort_words":
            words = self._sortable(rng)
            items: list[Any] = sorted(rng.sample(words, min(number, len(words))), key=str.lower)
        else:
            items = sorted(rng.sample(range(100), number), reverse=form == "sort_down")
        shuffled = [str(item) for item in rng.sample(items, len(items))]
        joined = self._enumerate(shuffled, rng)
        user = self.grammar.pick(self.phrases["list"][form], rng, items=joined)
        order = {"sort_words": "alphabet", "sort_up": "size", "sort_down": "size, largest first"}[
            form
        ]
        return [
            Turn(self.roughly(user, rng), f"I order them by {order}.", ", ".join(map(str, items)))
        ]

    def counting(self, rng: Random) -> list[Turn]:
        """Numbers up or down."""
        form = rng.choice(("count_up", "count_down", "count_to"))
        low = 1 if form == "count_to" else rng.randint(0, 60)
        high = low + rng.randint(2, 12)
        a, b = (high, low) if form == "count_down" else (low, high)
        numbers = range(a, b - 1, -1) if form == "count_down" else range(a, b + 1)
        user = self.grammar.pick(self.phrases["list"][form], rng, a=str(a), b=str(b))
        return [
            Turn(self.roughly(user, rng), f"I count from {a} to {b}.", ", ".join(map(str, numbers)))
        ]

    def order(self, rng: Random) -> list[Turn]:
        """The alphabet, the days of the week or the months: all of them, how many, or the one at a
        place.
        """
        phrases = self.phrases["order"]
        series = rng.choices(phrases["series"], (3, 1, 2))[0]
        things = series["things"].split()
        form = rng.choices(
            ("all", "number", "first", "last", "after", "before"), (6, 1, 1, 1, 6, 6)
        )[0]
        place = rng.randrange(len(things))
        slots = {"one": series["one"], "many": series["many"], "whole": series["whole"]}
        slots["x"] = things[place]
        answers = {
            "all": ", ".join(things) + ".",
            "number": f"There are {len(things)} {series['many']} in {series['whole']}.",
            "first": f"The first {series['one']} of {series['whole']} is {things[0]}.",
            "last": f"The last {series['one']} of {series['whole']} is {things[-1]}.",
            "after": f"{things[(place + 1) % len(things)]} comes after {things[place]}.",
            "before": f"{things[place - 1]} comes before {things[place]}.",
        }
        questions = series["all"] if form == "all" else phrases[form]
        user = self.grammar.pick(questions, rng, **slots)
        reasoning = f"This is about the {series['many']} of {series['whole']}. I know their order."
        return [Turn(self.roughly(user, rng), reasoning, answers[form])]

    def copying(self, rng: Random, longest: int = 10) -> list[Turn]:
        """Repeat words, most of them without meaning: names, numbers and arguments are copied in
        the same way.
        """
        text = " ".join(self._any_word(rng) for _ in range(rng.randint(1, longest)))
        if rng.random() < 0.1:
            text += " " + "".join(
                chr(rng.choice((rng.randint(0xC0, 0x17F), rng.randint(0x391, 0x3C9))))
                for _ in "abc"
            )
        user = self.grammar.pick(self.phrases["copy"]["ask"], rng, x=text)
        return [Turn(user, "I repeat the text.", text)]

    def objects(self, rng: Random) -> list[Turn]:
        """A JSON object for a person or an order; sometimes a field is changed after it."""
        phrases = self.phrases["json"]
        values, text = self._person(rng) if rng.random() < 0.5 else self._order(rng)
        keys = list(values)
        request = self.grammar.pick(phrases["lead"], rng) + " " + text
        if rng.random() < 0.4:
            trail = self.grammar.pick(phrases["trail"], rng)
            request = text[0].upper() + text[1:] + ("" if trail[0] in ",." else " ") + trail
        if rng.random() < 0.6:
            rng.shuffle(keys)
            keys = keys[: rng.randint(max(1, len(keys) - 1), len(keys))]
            clause = self.grammar.pick(phrases["keys"], rng, keys=self._enumerate(keys, rng))
            request += (
                rng.choice((" ", ", ")) + clause
                if rng.random() < 0.5
                else ". " + clause.capitalize()
            )
        chosen = {key: values[key] for key in keys}
        turns = [Turn(tidy(request), f"The keys are {', '.join(keys)}.", json.dumps(chosen))]
        if rng.random() < 0.15:
            key = rng.choice(keys)
            chosen[key] = self._new_value(key, rng)
            user = self.grammar.pick(phrases["change"], rng, key=key, value=str(chosen[key]))
            turns.append(Turn(user, f"I change the key {key}.", json.dumps(chosen)))
        return turns

    def memory(self, rng: Random) -> list[Turn]:
        """Two turns, to be put at some distance: the user tells something, and later asks for
        it.
        """
        phrases = self.phrases["memory"]
        if rng.random() < 0.5:
            value = self.grammar.name(rng)
            tell = self.grammar.pick(phrases["name_tell"], rng, value=value)
            reply = rng.choice(phrases["name_answer"]).replace("<value>", value)
            ask = self.grammar.pick(phrases["name_ask"], rng)
            key = "name"
        else:
            thing = rng.choice(phrases["things"])
            key = thing["key"]
            value = self.grammar.word(thing["list"], rng)
            tell = self.grammar.pick(phrases["tell"], rng, key=key, value=value)
            reply = rng.choice(phrases["answer"])
            ask = self.grammar.pick(rng.choice((phrases["ask"], thing["ask"])), rng, key=key)
        recall = self.grammar.pick(phrases["recall"], rng, key=key, value=value)
        return [
            Turn(tell[0].upper() + tell[1:], f"The user tells me the {key}: {value}.", reply),
            Turn(self.roughly(ask, rng), f"The user told me before: the {key} is {value}.", recall),
        ]

    def stories(self, rng: Random) -> list[Turn]:
        """A story about one or two named heroes; sometimes a question about it."""
        phrases = self.phrases["story"]
        two = rng.random() < 0.25
        cast = self.cast(rng, two)
        who = self.grammar.pick(phrases["one"], rng, **cast)
        if two:
            who = self.grammar.pick(phrases["two"], rng, **cast, one=who)
        who += " " + self.grammar.pick(phrases["place"], rng, **cast)
        user = self.roughly(self.grammar.pick(phrases["ask"], rng, who=who), rng)
        turns = [
            Turn(
                user,
                f"A story about {cast['hero']} the {cast['kind']}.",
                self.story(rng, cast, two),
            )
        ]
        if rng.random() < 0.1:
            ask = self.roughly(self.grammar.pick(phrases["follow_ask"], rng, **cast), rng)
            answer = self.grammar.pick(phrases["follow_answer"], rng, **cast)
            turns.append(Turn(ask, "I look at the story above.", answer))
        return turns

    def cast(self, rng: Random, two: bool) -> dict[str, str]:
        """The people, places and things of a story; a friend who is not asked for has a common
        name.
        """
        lists = self.grammar.lists
        kinds = lists["animals"] if rng.random() < 0.7 else lists["people"]
        return {
            "hero": self.grammar.name(rng),
            "kind": rng.choice(kinds),
            "friend": self.grammar.name(rng) if two else rng.choice(lists["first_names"]),
            "fkind": rng.choice(kinds),
            "place": rng.choice(lists["places"]),
            "thing": rng.choice(lists["things"]),
            "mood": rng.choice(lists["moods"]),
        }

    def story(self, rng: Random, cast: dict[str, str], two: bool = False) -> str:
        """Opening, plot and ending."""
        phrases = self.phrases["story"]
        sentences = [rng.choice(phrases["opening_two" if two else "opening"])]
        sentences += rng.choice(phrases["plots"])["sentences"] + [rng.choice(phrases["ending"])]
        return " ".join(self.grammar.expand(sentence, rng, **cast) for sentence in sentences)

    def sum_lines(self, rng: Random) -> str:
        """Many sums, one per line."""
        lines = []
        for _ in range(rng.randint(6, 24)):
            a, b, sign = self.sum_pair(rng)
            lines.append(f"{a} {sign} {b} = {a + b if sign == '+' else a - b}.")
        return "\n".join(lines)

    def plain_text(self, rng: Random) -> str:
        """Text without a chat, for the completions endpoint."""
        form = rng.choices(("story", "facts", "scenes"), (4, 3, 2))[0]
        if form == "story":
            two = rng.random() < 0.2
            return self.story(rng, self.cast(rng, two), two)
        sentences = rng.sample(self.phrases["text"][form], rng.randint(3, 6))
        return " ".join(self.grammar.expand(sentence, rng) for sentence in sentences)

    def loosely(self, text: str, rng: Random) -> str:
        """`roughly`, and with words that do not matter added, dropped or mistyped."""
        words = text.split()
        if rng.random() < 0.12:
            words.insert(rng.randint(0, len(words)), rng.choice(self.phrases["rough"]["fillers"]))
        if rng.random() < 0.08 and len(words) > 4:
            words = [word for word in words if word.lower() not in _WEAK or rng.random() < 0.5]
        if rng.random() < 0.08:
            place = rng.randrange(len(words))
            if words[place].isalpha() and len(words[place]) > 4:
                words[place] = _mistype(words[place], rng)
        text = self.roughly(" ".join(words), rng)
        return text.lower() if rng.random() < 0.15 else text

    def roughly(self, text: str, rng: Random) -> str:
        """The text as people type it: with or without an address, a capital, a question mark, a
        remark.
        """
        rough = self.phrases["rough"]
        text = tidy(text)
        if rng.random() < 0.2:
            text = rng.choice(rough["starts"]) + text
        if rng.random() < 0.65:
            text = text[0].upper() + text[1:]
        if text[-1].isalnum() and rng.random() < 0.75:
            text += rng.choice(rough["ends"]) if rng.random() < 0.5 else rng.choice("??.")
        if rng.random() < 0.06:
            text = rng.choice(rough["contexts"]) + " " + text[0].upper() + text[1:]
        return text

    def _question(self, topic: dict[str, Any], form: str, rng: Random) -> str:
        if form == "keys":
            return self._around(rng.choice(topic.get("keys", [""])), rng)
        phrase = self.grammar.pick(topic[form], rng)
        if form == "questions":
            return phrase
        return self.grammar.pick(self._carriers[form.removesuffix("s")], rng, it=phrase)

    def _strangely(self, text: str, rng: Random) -> str:
        """With made-up words in the place of some: a word never seen is a sign that the answer is
        not known.
        """
        words = text.split()
        for place in rng.sample(range(len(words)), min(len(words), rng.choice((1, 1, 2, 3)))):
            if len(words[place]) > 3:
                word = self.grammar.name(rng)
                words[place] = (
                    word
                    if rng.random() < 0.3
                    else word.lower() + rng.choice(("", "", "s", "ing", "ed"))
                )
        return " ".join(words)

    def _around(self, key: str, rng: Random) -> str:
        """A key among words that do not matter: beginnings and ends of questions about something
        else, in any order.
        """
        unknown = self.words["unknown"]
        words: list[str] = []
        while len(words) < 3 or rng.random() < 0.45:
            form = rng.choice(("questions", "nouns", "verbs", "noun", "verb", "contexts"))
            if form == "contexts":
                other = rng.choice(self.phrases["rough"]["contexts"])
            else:
                other = self.grammar.pick(unknown.get(form) or self._carriers[form], rng, it="")
            part = other.split()
            cut = rng.randint(0, len(part))
            words += part[:cut] if rng.random() < 0.5 else part[cut:]
        words = words[:8]
        words.insert(rng.randint(0, len(words)), key)
        return " ".join(words)

    def _sum(self, form: str, a: int, b: int, sign: str, rng: Random) -> Turn:
        result = a + b if sign == "+" else a - b
        numbers = [str(a), str(b)]
        if 0 <= a <= 20 and b <= 20 and rng.random() < 0.3:
            numbers = [self.phrases["sum"]["number_words"][number] for number in (a, b)]
        names = {"name": self.grammar.name(rng), "name2": self.grammar.name(rng)}
        guess = str(result + rng.choice((0, 0, 1, -1, 10, -10)))
        thing = self.grammar.word("unit", rng)
        phrase = self.grammar.pick(
            self.phrases["sum"][form],
            rng,
            a=numbers[0],
            b=numbers[1],
            c=guess,
            thing=thing,
            **names,
        )
        if rng.random() < 0.3:
            phrase = re.sub(r"(?<=\w) ([+-]) (?=\w)", r"\1", phrase)
        return Turn(
            self.roughly(phrase, rng), f"The user wants {a} {sign} {b}.", sum_in_steps(a, b, sign)
        )

    def _any_word(self, rng: Random) -> str:
        form = rng.random()
        if form < 0.3:
            return self.grammar.name(rng)
        if form < 0.6:
            return rng.choice(self.grammar.lists[rng.choice(list(self.grammar.lists))])
        if form < 0.75:
            return str(rng.randrange(10 ** rng.randint(1, 4)))
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 6)))

    def _sortable(self, rng: Random) -> list[str]:
        """Words of one kind, of any kind, or names."""
        kinds = list(self.words["kinds"].values())
        pool = rng.choice((rng.choice(kinds), rng.choice(kinds), " ".join(kinds)))
        return (
            list(dict.fromkeys(pool.split()))
            if rng.random() < 0.9
            else self.grammar.lists["first_names"]
        )

    def _enumerate(self, items: list[str], rng: Random) -> str:
        form = rng.random()
        if form < 0.5 or len(items) < 2:
            return ", ".join(items)
        if form < 0.6:
            return " ".join(items)
        return ", ".join(items[:-1]) + " and " + items[-1]

    def _person(self, rng: Random) -> tuple[dict[str, Any], str]:
        values: dict[str, Any] = {"name": self.grammar.name(rng)}
        ending = ""
        for key in rng.sample(("age", "city", "job"), rng.choice((1, 1, 2, 2, 3))):
            values[key] = self._new_value(key, rng)
            ending += " " + self.grammar.pick(
                self.phrases["json"][key], rng, **{key: str(values[key])}
            )
        person = self.grammar.pick(
            self.phrases["json"]["person"], rng, name=values["name"], rest=ending
        )
        return values, person

    def _order(self, rng: Random) -> tuple[dict[str, Any], str]:
        values = {
            key: self._new_value(key, rng) for key in ("quantity", "product", "color", "customer")
        }
        if rng.random() < 0.4:
            del values["color"]
        customer = self.grammar.pick(self.phrases["json"]["customer"], rng, name=values["customer"])
        phrase = rng.choice(self.phrases["json"]["order"])
        if "<name>" not in phrase and rng.random() < 0.3:
            del values["customer"]
            customer = ""
        if "color" not in values:
            phrase = phrase.replace("{ in| in the colour|, color} <color>", "").replace(
                " in <color>", ""
            )
            phrase = phrase.replace("<color> ", "")
        if values["quantity"] == 1:
            phrase = phrase.replace("<product>s", "<product>")
        slots = {key: str(value) for key, value in values.items()}
        slots |= {"name": slots.get("customer", ""), "customer": " " + customer}
        return values, self.grammar.expand(phrase, rng, **slots)

    def _new_value(self, key: str, rng: Random) -> Any:
        if key in ("age", "quantity"):
            return rng.randint(1, 90 if key == "age" else 30)
        return (
            self.grammar.name(rng) if key in ("name", "customer") else self.grammar.word(key, rng)
        )


def sum_in_steps(a: int, b: int, sign: str) -> str:
    """A sum in two steps, tens, then ones: each is easy enough for a model of this size."""
    result = a + b if sign == "+" else a - b
    if 0 <= a < b and sign == "-":
        return f"{sum_in_steps(b, a, sign)} So {a} - {b} = {result}."
    tens = b // 10 * 10
    ones = b % 10
    if a < 0 or not tens or not ones:
        return f"{a} {sign} {b} = {result}."
    half = a + tens if sign == "+" else a - tens
    steps = f"{a} {sign} {tens} = {half}, and {half} {sign} {ones} = {result}."
    return f"{steps} So {a} {sign} {b} = {result}."


_WEAK = frozenset(
    "how do i the a an to is can you what does it please me of for in with are we".split()
)


def _mistype(word: str, rng: Random) -> str:
    place = rng.randint(1, len(word) - 2)
    if rng.random() < 0.5:
        return word[:place] + word[place + 1 :]
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf8"))
