"""GPT-OSS: one message after the other, each with a channel."""

from tests.api.reasoning_parsers.recorded import Case

AGAIN = "<|end|><|start|>assistant"
HEADER = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
CALL = f"<|start|>assistant{HEADER}{{}}<|call|>"


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}"


def final(text: str, end: str = "<|return|>") -> str:
    return f"<|channel|>final<|message|>{text}{end}"


def preamble(text: str) -> str:
    return f"<|channel|>commentary<|message|>{text}"


CASES = {
    "reasoning and answer": Case(analysis("2 < 3\n") + AGAIN + final(" No.\n"), "2 < 3", " No.\n"),
    "the end is no text": Case(analysis("Hm.") + AGAIN + final("Yes.", ""), "Hm.", "Yes."),
    "no reasoning": Case(final("Hello"), "", "Hello"),
    "no answer": Case(analysis("Hm.") + "<|end|>", "Hm.", ""),
    "unicode": Case(analysis("日本語 🤔") + AGAIN + final("はい ✅"), "日本語 🤔", "はい ✅"),
    "opened by the prompt": Case(f"Hm.{AGAIN}{final('Yes.')}", "Hm.", "Yes.", True),
    "the prompt opened the answer": Case("Yes.<|return|>", "", "Yes."),
    "twice": Case(analysis("A.") + AGAIN + analysis("B. ") + AGAIN + final("C."), "A.\n\nB.", "C."),
    "two messages": Case(
        preamble("First, a plan.") + AGAIN + final("Done."), "", "First, a plan.\n\nDone."
    ),
    "a call": Case(analysis("I need it.") + "<|end|>" + CALL, "I need it.", CALL),
    "a message and a call": Case(
        analysis("A.") + AGAIN + preamble("I will.") + "<|end|>" + CALL, "A.", "I will." + CALL
    ),
    "the recipient first": Case(
        analysis("A.") + "<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
        "A.",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ),
    "cut off in the reasoning": Case(analysis("I wonder if "), "I wonder if", ""),
    "cut off in a header": Case(analysis("A.") + AGAIN + "<|channel|>fin", "A.", ""),
    "no header": Case("<|start|>\nHello <|channel|>\n", "", "<|start|>\nHello <|channel|>\n"),
    "only text": Case("Hello, 1 < 2", "", "Hello, 1 < 2"),
    "nothing": Case("", "", "", True),
}
