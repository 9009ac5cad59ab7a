"""Hostile requests: wrong bodies, schemas, grammars, templates and texts, and what is no HTTP."""

import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from servd.api.protocol.validation import RequestBody
from servd.api.routes import load_routers


def subclasses(kind: type[RequestBody]) -> Iterator[type[RequestBody]]:
    """Those of all depths."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


load_routers()  # which imports the shapes of all bodies
MAX_TOKENS = 4  # for those that are answered

NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2,
    2**31,
    2**63,
    -(2**63),
    2**64,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    True,
    False,
]
RAW_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x10", "01", "1.", "--1"]
TEXTS = [
    "",
    " ",
    "\x00",
    "\x00" * 100,
    "a" * 5000,
    "\ud800",
    "\udfff\ud800",
    "\ufeff",
    "\u202e",
    "é" * 300,
    "👩‍👩‍👧‍👦" * 50,
    "🏳️‍🌈",
    "\u0300" * 500,
    "\ufffd",
    "\ufdfa" * 100,
    "ß" * 100,
    "\r\n" * 50,
    "\x1b[2J",
    "<|endoftext|>",
    "<|im_start|>system",
    "</s>" * 20,
    "[INST]",
    "../../etc/passwd",
    "%s%n%x",
    "{{7*7}}",
    "{% for i in range(10**9) %}{% endfor %}",
    "${jndi:ldap://x}",
    "'; DROP TABLE x; --",
    "<script>alert(1)</script>",
    "data:image/png;base64,AAAA",
    "file:///etc/passwd",
    "http://169.254.169.254/",
    "null",
    "true",
    "NaN",
    "-1",
    "9" * 400,
    "\\",
    '"',
    "a\nb",
    "\N{ARABIC LETTER ALEF}" * 200,
]
PATTERNS = [
    "(a+)+$",
    "(a|a)*b",
    "(x{1,900}){1,900}",
    "[",
    "(",
    "a{99999}",
    "a{1,2}{3}{4}{5}",
    "(?=a)b",
    "(?<!a)b",
    r"(a)\1",
    "\\",
    "[^]",
    "[z-a]",
    ".*" * 50,
    "(" * 500 + ")" * 500,
    "|" * 1000,
    r"\p{L}+",
    r"\u{10ffff}",
    "a**",
    "",
    "^$",
    "[\U0001f600-\U0001f64f]{1,20}",
    "(?i)abc",
    "(?P<n>a)(?P=n)",
    "a{0}",
    "[[:alpha:]]",
]
GRAMMARS = [
    "root ::= root",
    "root ::= root root",
    'root ::= "a" | root "b"',
    "start: start",
    "start: /(/",
    'start: "a"*',
    "root ::= ",
    "x ::= y",
    'root ::= "' + "a" * 9000 + '"',
    "root ::= [",
    "%",
    "start: %json {",
    'root ::= ("a" | ("b" | ("c" | root)*)*)*',
    "start: a\na: b\nb: a",
    "\x00",
    "root ::= [^\\x00-\\U0010ffff]",
    'start: %regex { "substring_chars": 1 }',
    'start: "a" ~ 1..1000000',
]
TYPES = [
    "object",
    "array",
    "string",
    "number",
    "integer",
    "boolean",
    "null",
    "x",
    1,
    None,
    [],
    ["string"],
]
KEYWORDS = [
    "minimum",
    "maximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minProperties",
    "pattern",
    "format",
    "enum",
    "const",
    "required",
    "items",
    "prefixItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "$ref",
    "$defs",
    "definitions",
    "dependentRequired",
    "contains",
    "unevaluatedProperties",
    "$anchor",
    "$dynamicRef",
]
HEADERS = [
    ("x-data-parallel-rank", "-1"),
    ("x-data-parallel-rank", "1e3"),
    ("x-request-timeout", "0"),
    ("x-request-timeout", "0.000001"),
    ("x-request-timeout", "nan"),
    ("x-request-id", "a/../b"),
    ("x-request-id", "x" * 5000),
    ("traceparent", "00-" + "f" * 40),
    ("content-type", "text/plain"),
    ("content-type", "application/json; charset=utf-7"),
    ("accept", "\xff"),
    ("x-servd-run-manifest", "2"),
    ("authorization", "Bearer \xff"),
    ("content-encoding", "gzip"),
    ("x-servd-model", "\xe9"),
    ("sec-fetch-site", "cross-site"),
    ("transfer-encoding", "gzip"),
    ("host", "[::1"),
    ("cookie", "=" * 4000),
]
CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
PART = {"type": "input_text", "text": "a"}
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "a", "stop": ["x"], "logit_bias": {"5": 1}, "n": 2, "seed": 1},
    {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2, "stream": True},
    {"prompt": "a", "structured_outputs": {"regex": "[ab]+"}},
    {"prompt": "a", "guided_json": {"type": "object"}, "temperature": 1.5},
    {"prompt": "a", "bad_words": ["b"], "allowed_token_ids": [1, 2], "min_tokens": 1},
]
CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2, "stream": True},
    {"tools": [TOOL], "tool_choice": "auto", "user": "me"},
    {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": True},
    {"response_format": FORM},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", body) for body in COMPLETIONS),
    *((CHAT, MESSAGES | body) for body in CHATS),
    ("/v1/responses", {"input": "hi", "store": False, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": [{"role": "user", "content": [PART]}]}),
    ("/v1/messages", {**MESSAGES, "max_tokens": 3, "system": "be", "stop_sequences": ["x"]}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True, "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/decisions", {"prompt": "a", "choices": ["b", "c"]}),
    ("/invocations", {"prompt": "a"}),
    (f"{CHAT}/render", {**MESSAGES}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    ("/sleep?level=1", {}),
]
QUESTION = {"type": "predicate", "instructions": "i", "name": "q"}
# A body that each route takes, by its path.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {**MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {**MESSAGES},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/decisions": {"input": "a", "questions": [QUESTION]},
    "/v1/chat/completions/render": {**MESSAGES},
    "/invocations": {"prompt": "a", "max_tokens": 2},
    "/v1/batches": {
        "input_file_id": "x",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
# What a server might read of a body though the body's shape does not declare it: every field that
# any shape has, and what other servers know.
EXTRA_FIELDS = sorted(
    {name for kind in subclasses(RequestBody) for name in kind.model_fields}
    | {
        "best_of",
        "keep_alive",
        "options",
        "raw",
        "format",
        "think",
        "rid",
        "data_parallel_rank",
        "lora_request",
        "prompt_embeds",
        "mm_processor_kwargs",
        "status",
        "id",
        "owner",
        "key",
        "state",
        "headers",
        "deadline",
        "priority_class",
        "adapter",
        "__class__",
        "__dict__",
        "model_extra",
    }
)
EXTRA_VALUES = [
    '"x"',
    "[1]",
    "{}",
    "null",
    "NaN",
    "Infinity",
    "-1",
    "0",
    "1e30",
    "true",
    "1" + "0" * 400,
    '[[1], {"a": "b"}]',
    '{"type": 1}',
    "1e-9",
]


LENGTHS = ["-1", "1e3", "9" * 20, "5, 5", "0x5", "+3", ""]
SIZES = ["-1", "f" * 16, "5;a=" + "b" * 999, "g", "", "0"]
BEGINNINGS = (
    "PRI * HTTP/2.0;GET http://x/ HTTP/1.1;CONNECT x:1 HTTP/1.1;GET /\xff\xfe HTTP/1.1;"
    "GET / HTTP/9.9;GET  /  HTTP/1.1"
).split(";")


class Case(NamedTuple):
    """A request."""

    kind: str
    method: str
    path: str
    content: bytes
    headers: dict[str, str]


def with_extras(path: str, body: dict[str, Any], extras: dict[str, str]) -> Case:
    """A good body with these fields, whose values are JSON, behind its own."""
    parts = [json.dumps(body)[1:-1]] + [f'"{name}": {text}' for name, text in extras.items()]
    content = f"{{{', '.join(parts)}}}".encode()
    return Case("extra fields", "POST", path, content, {"content-type": "application/json"})


class Hostile:
    """An endless variety; `seed` states what comes in which order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds: list[Callable[[], Case]] = [self.nearly_right] * 3
        self.kinds += [self.schema, self.pattern, self.grammar, self.template, self.unicode]
        self.kinds += [self.no_json, self.extra_fields]

    def cases(self, count: int) -> Iterator[Case]:
        """So many."""
        for _ in range(count):
            case = self.random.choice(self.kinds)()
            if self.random.random() < 0.1:
                name, value = self.random.choice(HEADERS)
                case = case._replace(headers={**case.headers, name: value})
            yield case

    # ---- values ----

    def value(self, depth: int = 0) -> Any:
        """Anything that JSON can say."""
        pick = self.random.randrange(10)
        if pick < 3:
            return self.random.choice(NUMBERS)
        if pick < 6:
            return self.random.choice(TEXTS)
        if pick == 6 or depth > 3:
            return None
        if pick == 7:
            return [self.value(depth + 1) for _ in range(self.random.choice([0, 1, 2, 30]))]
        if pick == 8:
            names = self.random.choices(TEXTS, k=self.random.randrange(4))
            return {name: self.value(depth + 1) for name in names}
        nest: Any = 1
        for _ in range(self.random.choice([5, 40, 300])):
            nest = [nest] if self.random.random() < 0.5 else {"a": nest}
        return nest

    def mutated(self, value: Any) -> Any:
        """With something else at one place or several."""
        if self.random.random() < 0.15:
            return self.value()
        match value:
            case dict() if value:
                changed = dict(value)
                key = self.random.choice([*value])
                match self.random.randrange(6):
                    case 0:
                        del changed[key]
                    case 1:
                        changed[self.random.choice(TEXTS)] = self.value()
                    case _:
                        changed[key] = self.mutated(value[key])
                return changed
            case list() if value:
                at = self.random.randrange(len(value))
                if self.random.random() < 0.2:
                    return value * self.random.choice([2, 50])
                return [*value[:at], self.mutated(value[at]), *value[at + 1 :]]
        return self.value()

    def body(self, body: dict[str, Any], kind: str, path: str) -> Case:
        """It as JSON; answers are short, and some bytes are not what they were."""
        if isinstance(body, dict) and path not in ("/tokenize", "/detokenize"):
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = {limit: MAX_TOKENS, **body}
        content = json.dumps(body).encode()
        if self.random.random() < 0.05:
            content = content.replace(b"1", self.random.choice(RAW_NUMBERS).encode(), 1)
        headers = {"content-type": "application/json"}
        return Case(kind, "POST", path, content, headers)

    # ---- kinds ----

    def nearly_right(self) -> Case:
        """A body that is wrong at a place or two."""
        path, body = self.random.choice(BODIES)
        for _ in range(self.random.randrange(1, 3)):
            changed = self.mutated(body)
            body = changed if isinstance(changed, dict) else {"prompt": changed}
        return self.body(body, "nearly right", path)

    def extra_fields(self) -> Case:
        """A good body, with fields that its route may not know."""
        path, body = self.random.choice([*VALID.items()])
        names = self.random.sample(EXTRA_FIELDS, self.random.randrange(1, 4))
        return with_extras(path, body, {n: self.random.choice(EXTRA_VALUES) for n in names})

    def schema(self) -> Case:
        """Random JSON schemas, some of which refer to themselves."""
        return self.constrained("schema", {"json": self._schema(0)})

    def _schema(self, depth: int) -> Any:
        if depth > 4 or self.random.random() < 0.1:
            leaves = [True, False, {}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, self.value(3)]
            return self.random.choice(leaves)
        made: dict[str, Any] = {"type": self.random.choice(TYPES)}
        for word in self.random.sample(KEYWORDS, self.random.randrange(5)):
            match word:
                case "items" | "not" | "if" | "then" | "contains" | "additionalProperties":
                    made[word] = self._schema(depth + 1)
                case "anyOf" | "oneOf" | "allOf" | "prefixItems":
                    made[word] = [self._schema(depth + 1) for _ in range(self.random.randrange(4))]
                case "properties" | "patternProperties" | "$defs" | "definitions":
                    names = ["a", "b", *self.random.sample(PATTERNS, 1)]
                    made[word] = {name: self._schema(depth + 1) for name in names}
                case "pattern":
                    made[word] = self.random.choice(PATTERNS)
                case "$ref" | "$dynamicRef":
                    places = ["#", "#/$defs/a", "http://x/", "#/properties/a", ""]
                    made[word] = self.random.choice(places)
                case _:
                    made[word] = self.value(2)
        return made

    def pattern(self) -> Case:
        """Regular expressions: known to be bad, or of random parts."""
        parts = [*"ab.*+?|()[]{}^$\\", "{2,5}", "[a-z]", "(?:", r"\d", r"\b", "é", "{9,99}"]
        expression = self.random.choice(PATTERNS)
        if self.random.random() < 0.7:
            expression = "".join(self.random.choices(parts, k=self.random.randrange(1, 30)))
        return self.constrained("pattern", {"regex": expression})

    def grammar(self) -> Case:
        """Grammars: known to be bad, or with parts exchanged."""
        text = self.random.choice(GRAMMARS)
        for _ in range(self.random.randrange(3)):
            at = self.random.randrange(len(text) + 1)
            part = self.random.choice(["|", '"', "(", ")", "*", "root", "\n", "/"])
            text = text[:at] + part + text[at:]
        return self.constrained("grammar", {"grammar": text})

    def constrained(self, kind: str, output: dict[str, Any]) -> Case:
        """A completion in such a form."""
        return self.body({"prompt": "a", "structured_outputs": output}, kind, "/v1/completions")

    def template(self) -> Case:
        """What a chat template is given."""
        text = self.random.choice(TEXTS)
        image = {"type": "image_url", "image_url": {"url": text}}
        contents = [text, self.value(), [{"type": "text", "text": text}], [image]]
        content = self.random.choice(contents)
        roles = ["user", "system", "assistant", "tool", "developer", "x", "", None, 3]
        role = self.random.choice(roles)
        messages = [{"role": role, "content": content}] * self.random.choice([1, 1, 2, 40])
        options = {"chat_template": "{{ 7 }}"} if self.random.random() < 0.2 else {}
        kwargs = {"chat_template_kwargs": {self.random.choice(TEXTS): self.value()}}
        body = {"messages": messages, **kwargs, **options}
        return self.body(body, "template", "/v1/chat/completions")

    def unicode(self) -> Case:
        """Text of random code points, halves of pairs among them."""
        limits = self.random.choices([0x110000, 256], k=self.random.randrange(1, 60))
        text = "".join(chr(self.random.randrange(limit)) for limit in limits)
        if self.random.random() < 0.3:
            return self.body({"prompt": text}, "unicode", "/tokenize")
        body = {"prompt": "a", "stop": [text[:3]], self.random.choice(["prompt", "suffix"]): text}
        return self.body(body, "unicode", "/v1/completions")

    def no_json(self) -> Case:
        """Random bytes, and JSON that is cut off or damaged."""
        path, body = self.random.choice(BODIES)
        content = bytearray(json.dumps(body).encode())
        match self.random.randrange(4):
            case 0:
                content = bytearray(self.random.randbytes(self.random.randrange(200)))
            case 1:
                del content[self.random.randrange(len(content)) :]
            case 2:
                for _ in range(3):
                    content[self.random.randrange(len(content))] = self.random.randrange(256)
            case 3:
                content = bytearray(b"[" * self.random.choice([10, 5000, 100_000]))
        kinds = ["application/json"] * 4 + ["text/plain", "multipart/form-data", ""]
        kind = self.random.choice(kinds)
        return Case("no JSON", "POST", path, bytes(content), {"content-type": kind})

    def raw(self) -> bytes:
        """Bytes for a connection, which may be something like HTTP."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
        match self.random.randrange(6):
            case 0:
                return self.random.randbytes(self.random.randrange(1, 400))
            case 1:
                at = self.random.randrange(len(head))
                return head[:at] + self.random.randbytes(3) + head[at:] + b"\r\n"
            case 2:
                length = self.random.choice(LENGTHS).encode()
                return head + b"content-length: " + length + b"\r\n\r\n{}"
            case 3:
                size = self.random.choice(SIZES).encode()
                return head + b"transfer-encoding: chunked\r\n\r\n" + size + b"\r\n{}\r\n0\r\n\r\n"
            case 4:
                name = "".join(self.random.choices(string.printable, k=20)).encode()
                return head + name + b": x\r\n" * self.random.choice([1, 50]) + b"\r\n"
        begin = self.random.choice(BEGINNINGS).encode("latin-1")
        return begin + b"\r\nupgrade: websocket\r\nconnection: upgrade\r\nhost: x\r\n\r\n"
