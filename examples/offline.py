"""Offline generation in one screen: `python examples/offline.py [MODEL]`."""

import sys

from servd import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model)

    prompts = ["Hello, my name is", "The capital of France is", "In the beginning"]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    for output in llm.generate(prompts, greedy):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    # Three different answers to one prompt; the same seed gives the same three again.
    sampled = SamplingParams(n=3, temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
    for choice in llm.generate("Once upon a time", sampled)[0].outputs:
        print(f"choice {choice.index}: {choice.text!r} ({choice.finish_reason})")

    messages = [{"role": "user", "content": "Name a colour."}]
    answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))[0]
    print(f"chat: {answer.outputs[0].text!r}, {len(answer.prompt_token_ids)} prompt tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
