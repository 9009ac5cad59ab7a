"""Phrases with choices and slots: `{hello|hi} <name>` stands for many texts."""

from __future__ import annotations

import re
from random import Random
from typing import Any

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"<(\w+)>")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO][a-z])")


def tidy(text: str) -> str:
    """Text without double spaces, and without spaces before a comma or around the whole."""
    return re.sub(r" +(?=[ ,]|$)", "", text).lstrip()


class Grammar:
    """Expands phrases with seeded choices.

    Args:
        lists: slot name -> words it may stand for; a string is split at white space.
    """

    def __init__(self, lists: dict[str, Any]) -> None:
        self.lists = {
            name: words.split() if isinstance(words, str) else words
            for name, words in lists.items()
        }

    def expand(self, phrase: str, rng: Random, **values: object) -> str:
        """One of the texts that `phrase` stands for.

        Args:
            phrase: `{a|b}` is one of its parts, which may hold further choices; `<x>` is
                `values["x"]` or else a word of the list x, drawn anew each time it occurs.
            rng: makes the choices.
            values: fixed values of slots.
        """
        while match := _CHOICE.search(phrase):
            phrase = (
                phrase[: match.start()] + rng.choice(match[1].split("|")) + phrase[match.end() :]
            )
        phrase = _SLOT.sub(
            lambda slot: str(values[slot[1]] if slot[1] in values else self.word(slot[1], rng)),
            phrase,
        )
        return tidy(_ARTICLE.sub(r"\1n ", phrase))

    def pick(self, phrases: list[str], rng: Random, **values: object) -> str:
        """Expand one of several phrases."""
        return self.expand(rng.choice(phrases), rng, **values)

    def word(self, name: str, rng: Random) -> str:
        """A word for a slot: `<name>` is a person's name, others come from the list of that name or
        of its plural.
        """
        if name == "name":
            return self.name(rng)
        words = self.lists.get(name) or self.lists.get(f"{name}s") or self.lists[f"{name[:-1]}ies"]
        return rng.choice(words)

    def name(self, rng: Random) -> str:
        """A given name; many are of syllables or letters, so that a model must copy names, not know
        them.
        """
        form = rng.random()
        if form < 0.45:
            return rng.choice(self.lists["first_names"])
        if form < 0.7:
            return "".join(
                rng.choices(self.lists["syllables"], k=rng.choice((2, 2, 3)))
            ).capitalize()
        pattern = rng.choice(("CVCVC", "CVCCV", "VCCVC", "CCVCV", "CVCCVC", "CVCV", "CVVC"))
        letters = {"V": "aeiou", "C": "bcdfghjklmnprstvwxyz"}
        return "".join(rng.choice(letters[place]) for place in pattern).capitalize()
