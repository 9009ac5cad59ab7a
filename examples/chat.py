"""A chat through the OpenAI SDK: `servd serve`, then `python examples/chat.py [URL]`."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "On which port does servd listen?"},
    ],
    max_tokens=64,
    temperature=0,
)
print(answer.choices[0].message.content)
if answer.usage is not None:
    print(f"{answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens")
