"""Grammar: every output has its form; what is not supported is refused with a reason."""

import json
import re
from collections import Counter

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from servd.core.structured_output.grammar import MAX_MESSAGE, Grammar, GrammarError, Matcher
from servd.core.structured_output.vocabulary import ByteVocabulary
from servd.messages.params import StructuredOutput
from tests.core.structured_output.driver import EOS, compile_grammar, random_output

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def outputs(kind: str, value: str = "") -> list[str]:
    generated = [random_output(compile_grammar(kind, value), seed) for seed in range(20)]
    texts = [output.decode() for output in generated if output is not None]
    assert len(texts) >= 10
    return texts


def test_json_schema():
    for text in outputs("json", json.dumps(PERSON)):
        person = json.loads(text)
        assert list(person) == ["name", "age"]
        assert len(person["name"]) <= 8 and type(person["age"]) is int and person["age"] >= 0


def test_json_object():
    assert all(type(json.loads(text)) is dict for text in outputs("json_object"))


@pytest.mark.parametrize("vocab_size", [257, 287, 288, 289])
def test_masks_are_as_long_as_the_vocabulary(vocab_size):
    """Also where it fills its last word, as most models' do."""
    words = ByteVocabulary(256)
    words.tokens = [*words.tokens, *(f"w{i}".encode() for i in range(vocab_size - 257))]
    vocabulary = LLTokenizer(TokenizerWrapper(words))
    matcher = Grammar(StructuredOutput("regex", "[a-z]{3}"), vocabulary).matcher()
    for token_id in b"abc":
        assert len(matcher.bitmask()) == 4 * -(-vocab_size // 32)
        matcher.accept(token_id)


@pytest.mark.parametrize("regex", [r"[a-c]{2,5}-\d+", r"^(yes|no)\n?$", r"é[^\x00-\x7f]{1,3}"])
def test_regex_matches_the_whole_output(regex):
    assert all(re.fullmatch(regex, text) for text in outputs("regex", regex))


def test_choice():
    choices = ['say "hi"\n', "back\\slash", "é😀", "/a/ | b", "<eos>"]
    assert set(outputs("choice", json.dumps(choices))) <= set(choices)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "<" word ">"\nword ::= [a-z]+', 'start: "<" WORD ">"\nWORD: /[a-z]+/'],
    ids=["gbnf", "lark"],
)
def test_grammar(grammar):
    assert all(re.fullmatch(r"<[a-z]+>", text) for text in outputs("grammar", grammar))


def test_a_json_schema_inside_lark():
    grammar = f'start: "<call>" call "</call>"\ncall: %json {json.dumps(PERSON)}'
    for text in outputs("grammar", grammar):
        assert json.loads(text.removeprefix("<call>").removesuffix("</call>"))["age"] >= 0


def fits(kind: str, value: str, text: str) -> bool:
    """Whether a text may be an output, or the beginning of one."""
    matcher = compile_grammar(kind, value).matcher()
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_object", ""),
        ("json", json.dumps({"type": "object"})),
        ("grammar", 'start: "<call>" %json {} "</call>"'),
        ("grammar", 'start: "<call>" call\ncall: %json { "type": "object" } "</call>"'),
    ],
)
def test_white_space_cannot_go_on_for_ever(kind, value):
    begin = "<call>" if kind == "grammar" else ""
    for indent in (None, 2, 4, "\t"):
        assert fits(kind, value, begin + json.dumps({"a": {"b": [1, {}]}}, indent=indent))
    for blanks in (3 * " ", 2 * "\n", "\n" + 21 * " ", 400 * " "):
        assert not fits(kind, value, begin + "{" + blanks)


def test_other_white_space_may_be_asked_for():
    grammar = 'start: %json {"x-guidance": {"whitespace_flexible": false}, "type": "object"}'
    assert fits("grammar", grammar, '{"a":1') and not fits("grammar", grammar, '{"a": 1')


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json", "{", "EOF"),
        ("json", "[1]", "schema"),
        ("json", '{"type": "bogus"}', "bogus"),
        ("json", '{"not": {}}', "Unimplemented keys"),
        ("json", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json", '{"$ref": "#/nowhere"}', "nowhere"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", "hello", "::="),
        ("grammar", 'root ::= "a" b', "'b' not found"),
        ("grammar", "start: " + "(" * 1000, "nested"),
        ("json", "[" * 10_000, "recursion"),
    ],
)
def test_grammars_that_do_not_compile_are_refused_with_a_reason(kind, value, reason):
    with pytest.raises(GrammarError, match=re.escape(reason)) as error:
        compile_grammar(kind, value).matcher().bitmask()
    assert len(str(error.value)) <= MAX_MESSAGE and "\n" not in str(error.value)


def test_a_structure_that_no_output_can_satisfy_is_refused():
    with pytest.raises(GrammarError, match="no output could satisfy it"):
        compile_grammar("json", '{"$ref": "#"}').matcher().bitmask()


def test_matchers_of_one_grammar_are_independent():
    grammar = compile_grammar("regex", "ab|cd")
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(ord("a"))
    second.accept(ord("c"))
    first.accept(ord("b"))
    assert first.is_complete and not second.is_complete
    assert grammar.matcher().bitmask() == compile_grammar("regex", "ab|cd").matcher().bitmask()


def test_the_end_is_allowed_where_the_output_may_stop():
    matcher = compile_grammar("regex", "a+").matcher()
    assert not matcher.bitmask()[EOS // 8] & 1 << EOS % 8
    matcher.accept(ord("a"))
    assert matcher.bitmask()[EOS // 8] & 1 << EOS % 8
    assert not matcher.is_complete
    matcher.accept(EOS)
    assert matcher.is_complete


class Runs(ByteVocabulary):
    """Long tokens, as real vocabularies have them."""

    def __init__(self, eos_token_id: int) -> None:
        super().__init__(eos_token_id)
        self.tokens += [
            10 * run + end for run in (b"a", b"b", b"ab") for end in (b"", b"c", b"cc", 20 * b"a")
        ]


def test_a_mask_of_an_ambiguous_grammar_is_bounded():
    """Its first masks are fast; later ones would take half a second, while every request waits."""
    ambiguous = StructuredOutput(
        "grammar", 'start: "z" e\ne: e e e | "a" | "aa" | "b" e | e "c" | e e'
    )
    matcher = Grammar(ambiguous, LLTokenizer(TokenizerWrapper(Runs(EOS)))).matcher()
    with pytest.raises(GrammarError, match="more than 10000 parser items"):
        for token_id in b"z" + 300 * b"a":
            matcher.bitmask()
            matcher.accept(token_id)


def test_forced_text_is_tokenised_once():
    """Anew for every token, 50 kB of it would hold up each step."""
    text = "lorem ipsum " * 20
    matcher = compile_grammar("choice", json.dumps(["a" + text, "b" + text])).matcher()
    matcher.accept(ord("b"))
    library, calls = matcher._matcher, Counter[str]()

    class Counted:
        def __getattr__(self, name):
            calls[name] += 1
            return getattr(library, name)

    matcher._matcher = Counted()  # type: ignore[assignment]
    for i, byte in enumerate(text.encode()):
        assert bytes(matcher.forced_tokens()) == text[i:].encode()
        assert matcher.bitmask() == library.compute_bitmask()[: len(matcher.bitmask())]
        matcher.accept(byte)
    assert calls == {"compute_ff_tokens": 1, "consume_token": len(text)}
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("kind", "value", "prefix"),
    [
        ("json", '{"type": "number"}', ""),
        ("json", '{"type": "integer"}', "-"),
        ("json", '{"type": "array", "items": {"type": "number"}}', "[1, "),
        ("json", '{"type": "number"}', "0."),
        ("json", '{"type": "number"}', "1e"),
        ("json", '{"type": ["number", "null"]}', ""),
        ("json", '{"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}', ""),
        ("json_object", "", '{"a": '),
        ("grammar", r'start: "{" %json {"type": "number"} /\n/', "{"),
        ("grammar", 'start: "<" %json {"type": "integer"} ">"', "<"),
    ],
)
def test_numbers_end(kind, value, prefix):
    """After 20 digits no digit is allowed, but what may follow the number is."""
    matcher = compile_grammar(kind, value).matcher()
    for token_id in prefix.encode() + 20 * b"3":
        assert allows(matcher, token_id)
        matcher.accept(token_id)
    assert not any(allows(matcher, digit) for digit in b"0123456789")
    assert any(allows(matcher, token_id) for token_id in [*b",}] >\n", EOS])


@pytest.mark.parametrize(
    ("kind", "value", "prefix"),
    [
        ("json", '{"type": "string"}', '"'),
        ("json", '{"type": "string", "minLength": 30}', '"'),
        ("json", '{"type": "string", "pattern": "^[0-9]{30}$"}', '"'),
        ("json", '{"type": "number", "x-guidance": {}}', ""),
        ("json", '{"type": "string", "maxLength": 25}', '"'),
        ("regex", "[0-9]+", ""),
        ("grammar", 'start: TEXT %json {"type": "integer"}\nTEXT: /[0-9a-z]+ /', ""),
    ],
)
def test_other_digits_go_on(kind, value, prefix):
    matcher = compile_grammar(kind, value).matcher()
    for token_id in prefix.encode() + b"1234567890123456789012345":
        assert allows(matcher, token_id)
        matcher.accept(token_id)


@pytest.mark.parametrize(
    ("kind", "value", "output"),
    [
        ("json", '{"enum": ["1234567890123456789012", "12345678901234567890-a"]}', '"%s"'),
        ("json", r'{"type": "string", "pattern": "^[0-9]+\\.[0-9]+$"}', '"%s.%s"'),
        ("json", r'{"type": "string", "pattern": "^[0-9]+-[0-9]+$"}', '"%s-%s"'),
        ("grammar", 'start: N "-" %json {"type": "null"}\nN: /[0-9]{22}|[0-9]{20}/', "%s-null"),
        ("grammar", 'start: N "," %json {"type": "null"}\nN: /[0-9]{22}|[0-9]{20}/', "%s,null"),
    ],
)
def test_every_listed_value_can_be_reached(kind, value, output):
    matcher = compile_grammar(kind, value).matcher()
    for token_id in output.replace("%s", "1234567890123456789012").encode():
        assert allows(matcher, token_id)
        matcher.accept(token_id)
    assert allows(matcher, EOS)


def allows(matcher: Matcher, token_id: int) -> bool:
    return bool(matcher.bitmask()[token_id // 8] >> token_id % 8 & 1)


def test_a_copy_counts_its_own_digits():
    matcher = compile_grammar("json", '{"type": "number"}').matcher()
    for token_id in 19 * b"1":
        matcher.accept(token_id)
    probe = matcher.copy()
    probe.accept(ord("1"))
    assert not allows(probe, ord("1")) and allows(matcher, ord("1"))


@pytest.mark.parametrize("choice", [chr(code) for code in (*range(32), 0x7F, 0x85, 0x2028, 0xFFFF)])
def test_a_choice_may_be_any_character(choice):
    assert set(outputs("choice", json.dumps([choice]))) == {choice}
