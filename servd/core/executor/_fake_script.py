"""FakeScript: the answers of --fake-script."""

from pathlib import Path

import msgspec

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.tokenizer_files import find_tokenizer, read_backend, tokenizer_folder
from servd.config import Config
from servd.messages.engine import NewRequest

ENDED = "The script has no more answers."


class ScriptLine(msgspec.Struct, forbid_unknown_fields=True):
    """An answer. With `match`, it answers all prompts that contain this text, and only them. With
    `cut`, no end of sequence follows: the last token repeats up to the request's limit.
    """

    text: str
    match: str | None = None
    cut: bool = False


class FakeScript:
    """Gives each request that begins the next answer of the file, as tokens of the model."""

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        """Read the file and the model's tokenizer. Raises ConfigError, also for a wrong line."""
        model = config.model
        folder = tokenizer_folder(spec, model.tokenizer, model.download_dir)
        file = find_tokenizer(folder, model.trust_remote_code) if folder else None
        self.tokenizer = read_backend(file) if file else None  # None: tokens are bytes
        self.eos_token_id = spec.eos_token_ids[0]
        lines = _read_lines(config.parallel.fake_script or "")
        self.matches = [(line.match, self._encode(line)) for line in lines if line.match]
        self.waiting = [self._encode(line) for line in lines if not line.match]
        self.waiting.reverse()  # the next answer is the last item
        self.interrupted: list[tuple[list[int], list[int]]] = []  # prompts and their answers

    def _encode(self, line: ScriptLine) -> list[int]:
        token_ids = [*line.text.encode()]
        if self.tokenizer is not None:
            token_ids = self.tokenizer.encode(line.text, add_special_tokens=False).ids
        return token_ids if line.cut else [*token_ids, self.eos_token_id]

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is not None:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")

    def begin(self, request: NewRequest) -> list[int]:
        """Return the answer to a request, which may have a part of it in its output already."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        output = request.token_ids[request.num_prompt_tokens :]
        prompt_text = self._decode(prompt) if self.matches else ""
        for text, answer in self.matches:
            if text in prompt_text:
                return answer
        for index, (known_prompt, answer) in enumerate(self.interrupted):
            if known_prompt == prompt and _agree(answer, output):
                del self.interrupted[index]
                return answer
        while self.waiting:
            answer = self.waiting.pop()
            # A restarted engine reads the file again: skip what was answered before the restart.
            if _agree(answer, output):
                return answer
        return self._encode(ScriptLine(ENDED))

    def interrupt(self, prompt: list[int], answer: list[int]) -> None:
        """Keep an answer of which tokens are left for the next request with the same prompt."""
        if all(answer is not other for _, other in self.matches):
            self.interrupted.append((prompt, answer))


def _agree(answer: list[int], output: list[int]) -> bool:
    return answer[: len(output)] == output[: len(answer)]


def _read_lines(path: str) -> list[ScriptLine]:
    try:
        texts = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--fake-script {path}: {error.strerror}") from None
    lines: list[ScriptLine] = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(msgspec.json.decode(text, type=ScriptLine))
        except ValueError as error:  # not the JSON of a line, or not UTF-8
            raise ConfigError(f"--fake-script {path}, line {number}: {error}") from None
    return lines
