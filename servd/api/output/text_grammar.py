"""The grammar of a custom tool's text, as rules for a place inside of a call."""

import graphlib
import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from servd.api.output.call_grammar import in_slashes, quoted, regex_in_slashes
from servd.api.text.prompt import TextGrammar
from servd.base.errors import InvalidRequest

# Characters that JSON writes as escapes in a string.
ESCAPED = [chr(code) for code in range(0x20)] + ['"', "\\"]
NOT_ESCAPED = r'[^"\\\x00-\x1f]'
# The parts of Lark that matter here. Two slashes begin a comment, not a regular expression. A quote
# or slash without its end is an error: a line of thousands would be read to its end for each.
LARK = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"(?P<ignores_case>i?))
    |(?P<regex>/(?:\\.|[^/\\\n])+/(?P<flags>[imslux]*))
    |(?P<alias>->\s*\w+)
    |(?P<imported>%import\s+common\.(?P<common>[A-Z_]+)(?:\s*->\s*(?P<import_alias>[A-Z_]+))?)
    |(?P<ignore>%ignore)
    |(?P<repetition>~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?)
    |(?P<other>%\w+|[~&@"/<]|\.\.)
    |(?P<definition>^[!?]*(?P<defined>\w[\w-]*)(?:\.-?\d+)?\s*:)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<rest>\s+|.)""",
    re.VERBOSE | re.MULTILINE,
)
# Parts of a regular expression: a group's head, an atom that matches one character, or a sign
# that JSON writes as it is.
REGEX = re.compile(
    r"""(?P<flags>\(\?(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<ends>[:)]))
    |(?P<open>\()|(?P<close>\))
    |(?P<class>\[\^?\]?(?:\\.|[^\]\\\[])*\])
    |(?P<boundary>\\[bBAzZ])
    |(?P<property>\\p(?:[LNMZ]|\{[LNMZ][a-z]?\}))
    |(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^pPux]))
    |(?P<unknown>\\|\[|\(\?)
    |(?P<sign>\{\d+(?:,\d*)?\}|[^.\\"\x00-\x1f])
    |(?P<char>.)""",
    re.VERBOSE | re.DOTALL,
)
# Terminals of Lark's library that match characters which JSON escapes. The others are left alone.
COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "CPP_COMMENT": r"\/\/[^\n]*",
}


def text_rules(
    grammar: TextGrammar, rule: str, is_in_json: bool, end: str = "", line: str = ""
) -> list[str]:
    """Return Lark rules of which the first, `rule`, matches a custom tool's text, and `end` after.

    Args:
        grammar: of the text.
        rule: its name; the others begin with it.
        is_in_json: the text is inside of a JSON string, with escapes.
        end: what the text then never contains.
        line: between the text and its end.

    Raises:
        InvalidRequest: the grammar has parts that cannot be moved into a call.
    """
    reader = _LarkReader(escaped_regex if is_in_json else None)
    definitions = dict(reader.definitions(_lark(grammar)))
    if "start" not in definitions:
        raise wrong_grammar("it has no rule `start`")
    closing = quoted(line + end) if end else ""
    if reader.skips or _is_recursive(definitions):
        body = "\n".join(f"{name}: {''.join(parts)}" for name, parts in definitions.items())
        skips = "".join(f"\n%ignore {text}" for text in reader.skips)
        return [f"{rule}: {rule}_text {closing}", f"{rule}_text: %lark {{\n{body}{skips}\n}}"]
    # One terminal: as rules, the lexer could not tell an escape in a text from the next one.
    prefix = rule.upper()
    rules: list[str] = []
    for name, parts in definitions.items():
        body = "".join(_terminal(prefix, p) if p in definitions else p for p in parts)
        rules.append(f"{_terminal(prefix, name)}: {body.strip()}")
    start = _terminal(prefix, "start")
    if not end:
        return [f"{rule}: {start}", *rules]
    without_end = f"~/(?s:.*){in_slashes(end)}(?s:.*)/"
    return [
        f"{rule}[lazy]: {prefix}_TEXT {closing}",
        f"{prefix}_TEXT: {start} & {without_end}",
        *rules,
    ]


def _lark(grammar: TextGrammar) -> str:
    if grammar.syntax == "lark":
        return grammar.definition
    return f"start: {regex_in_slashes(grammar.definition)}"


class _LarkReader:
    """A reader of the definitions of a Lark grammar. `change` rewrites regular expressions."""

    def __init__(self, change: Callable[[str, str], str] | None) -> None:
        self.change = change
        self.skips: list[str] = []  # what %ignore names

    def definitions(self, lark: str) -> Iterator[tuple[str, list[str]]]:
        """Yield each name with its definition, as parts. A part may be a name."""
        name = ""
        body: list[str] = []
        for match in LARK.finditer(lark):
            kind = match.lastgroup
            if match["imported"]:
                alias = match["import_alias"] or match["common"]
                yield alias, [self._common(match["common"])]
            elif match["definition"]:
                if name:
                    yield name, body
                name = match["defined"]
                body = []
            elif match["ignore"]:
                if name:
                    yield name, body
                name = "%ignore"
                body = []
            elif kind not in ("comment", "alias"):
                body.append(self._part(match))
            if name == "%ignore" and body and (body[-1].strip() or len(body) > 1):
                self.skips.append("".join(body).strip())
                name = ""
        if name:
            yield name, body

    def _common(self, name: str) -> str:
        if name in COMMON:
            return self._regex(COMMON[name], "")
        raise wrong_grammar(f"servd does not know `%import common.{name}`: define it in place")

    def _part(self, match: re.Match[str]) -> str:
        text = match[0]
        if match["string"]:
            return self._string(text.removesuffix("i"), match["ignores_case"])
        if match["regex"]:
            return self._regex(text[1:].rpartition("/")[0], match["flags"])
        if match["repetition"]:
            return f"{{{match['least']},{match['most'] or match['least']}}}"
        if match["other"]:
            raise wrong_grammar(f"a custom tool's grammar cannot have {text[:32]!r}")
        return text

    def _string(self, text: str, flag: str) -> str:
        try:
            value = json.loads(re.sub(r"\\x|(\\.)", lambda match: match[1] or r"\u00", text))
        except ValueError:
            raise wrong_grammar(f"{text[:64]} is no string") from None
        if self.change is None:
            return text + flag
        written = json.dumps(value, ensure_ascii=False)[1:-1]
        if flag and written != value:
            raise wrong_grammar(f'{text[:64]}i has characters that JSON escapes: leave out the "i"')
        return quoted(written) + flag

    def _regex(self, pattern: str, flags: str) -> str:
        if self.change is not None:
            pattern = self.change(pattern, flags)
        return f"/{pattern}/{flags}"


def escaped_regex(pattern: str, flags: str) -> str:
    """Return a regular expression of the texts that `pattern` matches, as a JSON string has them.
    Raise InvalidRequest if the pattern has parts that servd cannot change.
    """
    parts: list[str] = []
    active = [set(flags)]  # the flags of each group around a part
    for match in REGEX.finditer(pattern):
        text = match[0]
        kind = match.lastgroup
        if match["flags"]:
            changed = active[-1] | set(match["on"]) - set(match["off"] or "")
            if match["ends"] == ")":
                active[-1] = changed
            else:
                active.append(changed)
            parts.append(text)
        elif kind in ("boundary", "unknown"):
            raise wrong_grammar(f"a custom tool's regular expression cannot have {text!r}")
        elif kind in ("class", "escape", "char"):
            parts.append(_escaped_atom(text, "s" in active[-1]))
        else:
            if kind == "open":
                active.append(active[-1])
            elif kind == "close" and len(active) > 1:
                active.pop()
            parts.append(text)
    return "".join(parts)


@lru_cache
def _escaped_atom(atom: str, is_dotall: bool) -> str:
    """Return what matches the characters of an atom: plain ones, or as JSON's escapes."""
    try:
        matches = re.compile(atom, re.ASCII | (re.DOTALL if is_dotall else 0)).fullmatch
    except re.error as error:
        raise wrong_grammar(f"{atom!r}: {error}") from None
    escapes = [json.dumps(char)[1:-1] for char in ESCAPED if matches(char)]
    if not escapes:
        return atom
    written = "|".join(re.escape(escape) for escape in escapes)
    if atom == ".":
        plain = NOT_ESCAPED  # a line break is an escape in any case
    elif matches("a") or matches(" ") or atom.startswith("[") or atom[1:] in tuple("sSdDwW"):
        plain = f"[{atom}&&{NOT_ESCAPED}]"
    else:
        return f"(?-i:{written})"
    return f"(?:{plain}|(?-i:{written}))"


def _is_recursive(definitions: dict[str, list[str]]) -> bool:
    """Return whether a definition refers to itself, through others or not."""
    graph = {
        name: [part for part in body if part in definitions] for name, body in definitions.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return True
    return False


def _terminal(prefix: str, name: str) -> str:
    """Return the name of a terminal. A rule and a terminal may have names that differ in case."""
    kind = "T" if name.isupper() else "R"
    return f"{prefix}_{kind}_{name.upper()}"


def wrong_grammar(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar of a custom tool is not supported: {reason}", param="tools")
