"""ModelFormat: which parsers a template asks for, and what a reply's form is."""

import json

import llguidance
import pytest
from llguidance import LLMatcher

from servd.api.output.incremental import Content, Reasoning, ToolCallStart
from servd.api.output.model_format import ModelFormat
from servd.api.output.output_parser import OutputParser
from servd.api.output.tool_parsers import hermes
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import ToolOptions
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError, InvalidRequest
from servd.config import Config
from servd.core.structured_output.vocabulary import ByteVocabulary
from servd.messages.params import StructuredOutput

# Lines of the models' own templates that tell the format, by the parsers of tools and reasoning.
TEMPLATES = {
    "hermes none": [  # Qwen 2.5, Granite 4
        r'{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call> <tool_call>'
    ],
    "hermes qwen3": [  # Qwen 3
        r"<tool_call>\n{\"name\": <function-name>, \"arguments\": x}\n</tool_call>"
        r"{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    ],
    "qwen3_coder none": [r"<tool_call>\n<function=example_function_name>\n<parameter=a>"],
    "qwen3_coder qwen3": [  # Qwen 3.5 and 3.6, Granite 4.2
        r"<tool_call>\n<function=example_function_name>\n<parameter=a> tool_call.arguments|items"
        r"{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% else %}<think>\n"
    ],
    "lfm2 none": [  # LFM2, LFM2.5
        'ns.system_prompt + "List of tools: <|tool_list_start|>[" + tool + "]<|tool_list_end|>"',
        'ns.system_prompt + "List of tools: [" + tool | tojson + "]"',
    ],
    "lfm2 qwen3": [  # LFM2.5 that thinks
        "'List of tools: ' + (tools | tojson) <|tool_call_start|>[ content.split('</think>')[-1]"
    ],
    "glm45 qwen3": [r"<tool_call>{function-name}\n<arg_key>{k}</arg_key> arguments </think>"],
    "kimi_k2 qwen3": ["<|tool_calls_section_begin|><|tool_call_argument_begin|> </think>"],
    "minimax_m2 qwen3": ["begin_token = '<minimax:tool_call>' -%} arguments <think> </think>"],
    "seed_oss seed_oss": [
        r"<seed:tool_call>\n<function=example_function_name>\n<parameter=a>value_1</parameter>"
        "{%- set think_end_token = '</seed:think>' -%}"
    ],
    "granite granite": [
        "respond only with <|tool_call|> followed by a JSON list of tools used. "
        "Here is my thought process: ... Here is my response:"
    ],
    "phi4_mini none": ["{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"],
    "jamba none": ["{{ '<tool_calls>[' + calls | join(', ') + ']</tool_calls>' }}"],  # Hunyuan
    "minimax none": [r'<tool_calls>\n{"name": <tool-name-1>, "arguments": <args-json>}\n...'],
    "internlm none": [r"{{ '<|action_start|><|plugin|>\n' + call }}"],
    "functiongemma none": ["{{- '<start_function_call>call:' + name + '{' -}} <escape>"],
    "gemma4 gemma4": ['<|tool_call>call:{ <|"|> <|channel>thought\\n<channel|>'],
    "llama3_json none": [
        '"Respond in the format {"name": function name, "parameters": ...}" <|python_tag|>',
        'Respond in the format {"name": function name, "parameters": dictionary of argument name',
    ],
    "pythonic none": ["[func_name1(name1=value1), func_name2(params)] <|python_start|>"],
    "mistral none": ["{{- '[TOOL_CALLS] [' }}"],
    "mistral mistral": ["[TOOL_CALLS]{{ name }}[ARGS] [THINK]{{ thoughts }}[/THINK]"],
    "deepseek qwen3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> content.split('</think>')[-1]"],
    "harmony harmony": ['{{- "<|start|>assistant<|channel|>analysis<|message|>" + thinking }}'],
    "none none": ["{{ messages[0].content }}"],
}
QWEN3 = TEMPLATES["hermes qwen3"][0]


def choose(template: str, **options: str) -> ModelFormat:
    compiled = ChatTemplate("{#" + template + "#}")
    return ModelFormat.choose(Config.load(options), compiled, Tokenizer.bytes())


def name_of(parser: type | None) -> str:
    return parser.__module__.rpartition(".")[2] if parser else "none"


@pytest.mark.parametrize(("parsers", "templates"), TEMPLATES.items(), ids=TEMPLATES)
def test_the_template_tells_the_parsers(parsers, templates):
    for template in templates:
        chosen = choose(template)
        assert parsers == f"{name_of(chosen.tool_parser)} {name_of(chosen.reasoning_parser)}"


def test_options_win_over_the_template():
    chosen = choose(QWEN3, tool_call_parser="mistral", reasoning_parser="deepseek-r1")
    assert name_of(chosen.tool_parser) == "mistral"
    assert name_of(chosen.reasoning_parser) == "deepseek_r1"
    chosen = choose(QWEN3, tool_call_parser="none", reasoning_parser="none")
    assert chosen.tool_parser is None and chosen.reasoning_parser is None
    with pytest.raises(ConfigError, match="qwen3_coder"):
        choose("", tool_call_parser="gpt")


def test_the_template_for_tools_counts():
    template = ChatTemplate("{{ 1 }}", TEMPLATES["hermes none"][0])
    chosen = ModelFormat.choose(Config(), template, Tokenizer.bytes())
    assert chosen.tool_parser is hermes.HermesToolParser


@pytest.mark.parametrize(
    ("prompt", "continued", "first"),
    [
        ("user: hi\nassistant:\n", "", Content("Hm.")),
        ("user: <think>\nassistant:\n", "", Content("Hm.")),
        ("assistant:\n<think>\n", "", Reasoning("Hm.")),
        ("assistant:\n<think>\n\n</think>\n\n", "", Content("Hm.")),
        ("assistant:\n<think>So", "<think>So", Reasoning("Hm.")),
        ("assistant:\n<think>So</think>Well", "<think>So</think>Well", Content("Hm.")),
        ("assistant:\nWell", "Well", Content("Hm.")),
    ],
)
def test_the_prompt_tells_where_the_reply_begins(prompt, continued, first):
    reply = choose(QWEN3).expect(prompt, continued=continued)
    parser = OutputParser(reply)
    assert parser.feed("Hm.") + parser.finish() == [first]


def test_a_structure_cannot_wait_for_a_tag_that_is_not_a_token():
    schema = StructuredOutput("json_object")
    with pytest.raises(InvalidRequest, match="</think>"):
        choose(QWEN3).expect("assistant:", structured_output=schema)
    closed = choose(QWEN3).expect("<think>\n\n</think>\n\n", structured_output=schema)
    assert closed.structured_output == schema
    # A model that is not known to reason by itself is held to the form at once.
    expected = choose(TEMPLATES["deepseek qwen3"][0]).expect("assistant:", structured_output=schema)
    assert expected.tool_parser is None and expected.reasoning_parser is None


# ---- forms of calls ----

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Bonn"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


def allows(output: StructuredOutput, text: str) -> bool:
    """Whether the engine lets a model of bytes write exactly `text`."""
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary(256)))
    is_json = output.kind == "json"
    source = LLMatcher.grammar_from_json_schema(output.value) if is_json else output.value
    matcher = LLMatcher(vocabulary, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


FORMATS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "now", '
    '"parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": '
    '"now", "arguments": {}}]',
    "pythonic": '[get_weather(city="Rome"), now()]',
    "lfm2": '<|tool_call_start|>[get_weather(city="Rome"), now()]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|><|start|>assistant'
    "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    '<parameter name="city">Rome</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
    "</minimax:tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>'
    "functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}, '
    '{"name": "now", "arguments": {}}]',
    "phi4_mini": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}, '
    '{"name": "now", "arguments": {}}]<|/tool_call|>',
    "jamba": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Rome"}}, '
    '{"name": "now", "arguments": {}}]</tool_calls>',
    "minimax": '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n'
    '{"name": "now", "arguments": {}}\n</tool_calls>',
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": '
    '{"city": "Rome"}}<|action_end|>\n'
    '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
    "none": '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "now", '
    '"arguments": {}}]',
}


@pytest.mark.parametrize(("name", "text"), FORMATS.items(), ids=FORMATS)
def test_forced_calls_are_written_in_the_models_format_and_obey_their_schemas(name, text):
    chosen = choose("", tool_call_parser=name)
    reply = chosen.expect("", ToolOptions(TOOLS, forced=TOOLS))
    assert reply.structured_output is not None
    assert allows(reply.structured_output, text)
    assert not allows(reply.structured_output, text.replace("Rome", "Paris"))
    assert not allows(reply.structured_output, text.replace("now", "then"))
    assert not allows(reply.structured_output, "Hello")
    parser = OutputParser(reply)
    deltas = parser.feed(text) + parser.finish()
    called = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    assert called == ["get_weather", "now"]
    assert not any(isinstance(delta, Content) for delta in deltas)
    single_call = chosen.expect(
        "", ToolOptions(TOOLS, forced=TOOLS, parallel=False)
    ).structured_output
    assert single_call is not None and not allows(single_call, text)
    named_call = chosen.expect("", ToolOptions(TOOLS, forced=TOOLS[1:])).structured_output
    assert named_call is not None and not allows(named_call, text)


@pytest.mark.parametrize("name", FORMATS.keys() - {"none"})
def test_content_of_a_form_or_calls(name):
    answer = StructuredOutput("json", '{"type": "array", "items": {"type": "integer"}}')
    chosen = choose("", tool_call_parser=name)
    output = chosen.expect("", ToolOptions(TOOLS), answer).structured_output
    assert output is not None
    header = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert allows(output, header + "[1, 2]") and allows(output, FORMATS[name])
    assert not allows(output, header + '["a"]')
    assert not allows(output, FORMATS[name].replace("Rome", "Paris"))


@pytest.mark.parametrize("name", FORMATS)
def test_any_name_can_be_forced(name):
    for function in ("ARGUMENTS", "NAME", "calls", "call0", "a.b-C_9"):
        tool = {"type": "function", "function": {"name": function}}
        options = ToolOptions([tool], forced=[tool])
        output = choose("", tool_call_parser=name).expect("", options).structured_output
        form = FORMATS["none" if name in ("lfm2", "pythonic") and "-" in function else name]
        for arguments in (
            'city="Rome"',
            "<parameter=city>\nRome\n</parameter>\n",
            "<parameter=city>Rome</parameter>\n",
            '<parameter name="city">Rome</parameter>\n',
        ):
            form = form.replace(arguments, "")
        only = form.replace('{"city": "Rome"}', "{}").replace("get_weather", function)
        only = only.replace("now", function)
        assert output is not None and allows(output, only)


def test_free_calls_have_no_form():
    expected = choose("", tool_call_parser="hermes").expect("", ToolOptions(TOOLS))
    assert expected.structured_output is None


def test_references_in_schemas_stay_inside_their_tool():
    properties = {"child": {"$ref": "#"}, "x": {"$ref": "#/definitions/X"}}
    recursive = {"type": "object", "properties": properties, "additionalProperties": False}
    recursive["definitions"] = {"X": {"type": "integer"}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "tree", "parameters": recursive}}]
    output = ModelFormat(Tokenizer.bytes(), None, None).expect("", ToolOptions(tools, forced=tools))
    assert output.structured_output is not None

    def is_valid(name: str, arguments: object) -> bool:
        call = {"name": name, "arguments": arguments}
        return allows(output.structured_output, json.dumps([call]))

    assert is_valid("get_weather", {"city": "Bonn"})
    assert not is_valid("get_weather", {"city": "Oslo"})
    assert is_valid("tree", {"child": {"child": {"x": 1}}})
    assert not is_valid("tree", {"child": {"x": "1"}})
    assert not is_valid("tree", {"city": "Bonn"}) and not allows(output.structured_output, "[]")


def test_structured_output_begins_at_once_without_reasoning():
    """Gemma 4: its template knows `enable_thinking`, but thinking is off unless that is true."""
    chosen = choose(TEMPLATES["gemma4 gemma4"][0] + " enable_thinking")
    schema = StructuredOutput("json_object")
    expected = chosen.expect("<|turn>user\nhi<turn|>\n<|turn>model\n", None, schema)
    assert expected.structured_output == schema
    with pytest.raises(InvalidRequest, match="reasons before it answers"):  # no token in bytes
        chosen.expect("<|turn>system\n<|think|><turn|>\n<|turn>model\n", None, schema)
