"""The tokens of the fake executor."""

from servd.core.executor.fake import first_state, next_state, sample


def expected_tokens(
    prompt_token_ids: list[int], num_tokens: int, vocab_size: int, digest: str = "0"
) -> list[int]:
    """Return the tokens that the fake executor must generate for a prompt."""
    state = first_state(digest)
    for token_id in prompt_token_ids:
        state = next_state(state, token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(sample(state, vocab_size))
        state = next_state(state, output[-1])
    return output
