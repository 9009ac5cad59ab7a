"""What a model's files state about its vectors and scores: modules.json of sentence-transformers,
the folders that it names, prompts, labels. Needs no torch, as every process reads it.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from servd.base import plugins
from servd.base.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from servd.checkpoint.account import Account, account_for, object_in, without_nulls
from servd.checkpoint.config_json import read_json, read_json_list
from servd.checkpoint.facts import read_page
from servd.checkpoint.model_spec import MAX_SIZE, ModelSpec
from servd.checkpoint.weight_files import leads_out
from servd.messages.params import PoolingParams

MODELS = "servd.worker.models"
# Those that are encoders, by model_type.
ENCODERS = frozenset({"bert", "gte", "modernbert", "roberta", "xlm-roberta"})
# A bit that workers set in the token ids of the second of two texts.
SECOND_TEXT = 1 << 30
MAX_LABELS = 1 << 20
ACTIVATIONS = {"regression": "identity", "multi_label_classification": "sigmoid"}  # by problem
Mode = Literal["last", "mean", "cls"]
MODES: dict[str, Mode] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
Task = Literal["generate", "embed", "classify"]
HINTS = {
    "generate": "it writes text: ask it by /v1/chat/completions, for a class with "
    '`structured_outputs`: {"choice": [...]}, or compare embeddings by /score',
    "embed": "it makes embeddings: use /v1/embeddings, /v2/embed, /score, /rerank or /pooling",
    "classify": "it has a classification head: use /classify, or with a single number /score or "
    "/rerank",
}
# Purpose -> names that files give to its prompt.
PURPOSES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
}
PACKAGE = re.compile(r"^sentence_transformers\.(.*\.)?")
ORDER = re.compile("Transformer Pooling( Dense)*( Normalize)?")
MODULES = "modules.json"
TEXTS = "config_sentence_transformers.json"
# The parts of the names of files with limits of texts, of which the first that exists counts.
LIMITS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


class _Module(msgspec.Struct):
    """An entry of modules.json."""

    type: str
    path: str


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The conversion of hidden states to a vector or a score, as the model's files state it."""

    task: Task = "generate"  # what the model is for; "generate" has vectors too
    is_causal: bool = True
    pooling: Mode = "last"
    normalize: bool = True
    size: int = 0  # numbers of a vector
    dense: list[str] = []  # folders of layers between pooling and normalization
    max_tokens: int | None = None  # length that the model was trained for
    prompts: dict[str, str] = {}  # name -> prompt to put before a text
    default_prompt: str | None = None  # a key of `prompts`
    has_token_types: bool = False  # more than a separator distinguishes two texts
    labels: list[str] = []
    # A score is the first of these tokens' logit after the last token of a chat of query and
    # document, minus the second token's logit, if any. Empty: a head computes the score.
    score_tokens: list[int] = []
    has_scores: bool = True  # False: it scores pairs in a way that its files do not describe
    # The function from a head's outputs to probabilities, and from its only output to a score.
    activation: Literal["softmax", "sigmoid", "identity"] = "softmax"
    score_activation: Literal["sigmoid", "identity"] = "sigmoid"

    def check(self, task: Task) -> None:
        """Check that the model is for `task`. Raises InvalidRequest if it is for another task."""
        if task != self.task and not (task == "embed" and self.task == "generate"):
            lacks = {
                "generate": "the model writes no text",
                "embed": "the model makes no embeddings",
                "classify": "the model has no classification head",
            }
            raise InvalidRequest(f"{lacks[task]}; {HINTS[self.task]}", param="model")

    def check_scores(self) -> None:
        """Check that the model scores pairs of texts. Raises InvalidRequest if its head is a
        classifier, or its files do not state how the model scores.
        """
        if not self.has_scores:
            raise InvalidRequest(
                "the model seems to be a reranker (name or README.md), but its files do not "
                "describe its scores: cosines would be wrong. Add modules.json with a "
                "LogitScore, as docs/how-to/embeddings.md shows for Qwen3-Reranker",
                param="model",
            )
        if self.task == "classify" and len(self.labels) != 1:
            raise InvalidRequest(
                f"the model classifies texts into {len(self.labels)} classes, and cannot score "
                "pairs: use /classify",
                param="model",
            )

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Return `params`, validated, with the model's values for fields that the request omits."""
        self.check(params.task)
        params.validate(self.size)
        return msgspec.structs.replace(
            params,
            pooling=params.pooling or self.pooling,
            normalize=self.normalize if params.normalize is None else params.normalize,
        )

    def prompt(self, name: str | None) -> str:
        """Return the prompt to put before a text. Raises InvalidRequest if the name is unknown."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            there_are = ", ".join(self.prompts) or "none"
            raise InvalidRequest(
                f"prompt_name {name!r} is not in the model's files; there are: {there_are}",
                param="prompt_name",
            )
        return self.prompts[name]

    def name_for(self, purpose: str) -> str | None:
        """Return the name of the prompt for a purpose: search_query, search_document or other."""
        names = PURPOSES.get(purpose, (purpose,))
        return next((name for name in names if name in self.prompts), None)

    def probabilities(self, numbers: list[float], use_activation: bool = True) -> list[float]:
        """Return the labels' probabilities from a head's outputs; for one output, its score.
        Without the activation: the outputs.
        """
        if not use_activation:
            return numbers
        if len(numbers) == 1:
            return [self.score(numbers)]
        if self.activation == "softmax":
            largest = max(numbers)
            weights = [math.exp(number - largest) for number in numbers]
            return [weight / sum(weights) for weight in weights]
        return [_sigmoid(x) for x in numbers] if self.activation == "sigmoid" else numbers

    def score(self, numbers: list[float]) -> float:
        """Return how well two texts match, from the only output of a head."""
        (number,) = numbers
        return _sigmoid(number) if self.score_activation == "sigmoid" else number


def is_encoder(spec: ModelSpec) -> bool:
    """Return whether tokens attend to later tokens. Encoder types also have decoder classes."""
    return spec.model_type in ENCODERS and not spec.architecture.endswith(("CausalLM", "HeadModel"))


def num_positions(spec: ModelSpec) -> int:
    """Return the longest sequence, in tokens, for which the model has positions."""
    if not spec.num_heads:  # Mamba-2 has none, and its length is a choice
        return MAX_SIZE
    return spec.max_position_embeddings - first_position(spec)


def first_position(spec: ModelSpec) -> int:
    """Return the first token's position: RoBERTa models skip positions up to the padding id."""
    if spec.model_type not in ("roberta", "xlm-roberta"):
        return 0
    padding = spec.config.get("pad_token_id", 1)
    if not isinstance(padding, int) or not 0 <= padding < spec.max_position_embeddings:
        raise UnsupportedModel(f"config.json: pad_token_id {padding} leaves no positions")
    return padding + 1


def has_file(spec: ModelSpec) -> bool:
    """Return whether servd has a file for the model: for encoder types, it has only encoders."""
    is_decoder = spec.model_type in ENCODERS and not is_encoder(spec)
    return not is_decoder and spec.model_type.replace("-", "_") in plugins.names(MODELS)


def read(spec: ModelSpec) -> PoolingSpec:
    """Return the spec that the files in `spec.folder` state. Raises ModelNotFound if a file that
    another file names is missing or broken; UnsupportedModel if servd lacks a feature.
    """
    sees_all = is_encoder(spec)
    fields: dict[str, Any] = {"is_causal": not sees_all, "size": spec.hidden_size}
    folder = Path(spec.folder)
    if spec.architecture.endswith("ForSequenceClassification"):
        pooling = spec.config.get("classifier_pooling", "cls") if sees_all else "last"
        fields |= {"task": "classify", "pooling": pooling} | _labels(spec.config)
    elif spec.folder and (folder / MODULES).exists():
        fields |= _read_modules(spec, folder)
    elif sees_all:
        fields |= {"task": "embed", "pooling": "mean", "normalize": False}
    else:
        return PoolingSpec(**fields, has_scores=not _is_reranker(folder))
    return PoolingSpec(**fields, **_texts(spec, folder))


def _read_modules(spec: ModelSpec, folder: Path) -> dict[str, Any]:
    """Return the fields that the modules of sentence-transformers state."""
    modules = _modules(folder)
    order = " ".join(kind for kind, _ in modules)
    if order == "Transformer LogitScore" and not is_encoder(spec):
        return _read_logit_score(spec, folder, modules[1][1])
    if not ORDER.fullmatch(order):
        raise UnsupportedModel(
            f"{folder}/modules.json: servd does not run {order or 'no modules'}, only Transformer, "
            "Pooling, any number of Dense and at most one Normalize in this order, or Transformer "
            "and LogitScore. Models without Pooling, such as ColBERT, have no vector of a text"
        )
    if modules[0][1] != folder and (modules[0][1] / "config.json").exists():
        raise UnsupportedModel(
            f"{folder}/modules.json: the model is in {modules[0][1]}: serve that"
        )
    dense = [place for kind, place in modules if kind == "Dense"]
    size = spec.hidden_size
    for place in dense:
        config = _part_config(place)
        sizes = config.get("in_features"), config.get("out_features")
        if sizes[0] != size or type(sizes[1]) is not int:
            raise UnsupportedModel(
                f"{place}/config.json: in_features {sizes[0]!r} and out_features {sizes[1]!r} do "
                f"not fit vectors of {size} numbers"
            )
        size = sizes[1]
    return {
        "task": "embed",
        "pooling": _mode(modules[1][1]),
        "normalize": modules[-1][0] == "Normalize",
        "dense": [str(place) for place in dense],
        "size": size,
    }


def accounts(spec: ModelSpec) -> Iterator[Account]:
    """Yield the accounts of the files of sentence-transformers."""
    folder = Path(spec.folder)
    for file, table in (
        (_limits_file(folder), "sentence_bert"),
        (folder / TEXTS, "config_sentence_transformers"),
    ):
        if file.exists():
            yield account_for(file.name, without_nulls(read_json(file)), table)
    if (folder / MODULES).exists():
        entries = read_json_list(folder / MODULES)
        for (kind, place), entry in zip(_modules(folder), entries, strict=True):
            yield account_for(f"modules.json: {kind}", entry, "modules")
            if place != folder and (config := read_json(place / "config.json", {})):
                yield account_for(f"{place.name}/config.json", without_nulls(config), kind.lower())


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the modules of sentence-transformers in their order: class and folder. A class of
    another package has its full name; one without a package is sentence-transformers'.
    """
    try:
        modules = msgspec.convert(read_json_list(folder / MODULES), list[_Module])
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"{folder}/modules.json: {error}") from None
    for module in modules:
        if leads_out(module.path):
            raise UnsupportedModel(f"{folder}/modules.json: {module.path:.80} is not in the folder")
    return [(PACKAGE.sub("", module.type), folder / module.path) for module in modules]


def _is_reranker(folder: Path) -> bool:
    """Return whether a model's name, or the tags of its page, state that it scores pairs."""
    is_of_hub = folder.parent.name == "snapshots"
    name = folder.parent.parent.name if is_of_hub else folder.name
    return "rerank" in name.lower() or b"pipeline_tag: text-ranking" in read_page(folder)


def _read_logit_score(spec: ModelSpec, folder: Path, place: Path) -> dict[str, Any]:
    """Return the fields of a decoder whose next-token logits score a document (Qwen3-Reranker)."""
    stated = _part_config(place)
    ids: list[Any] = [stated.get("true_token_id"), stated.get("false_token_id")]
    ids = ids if ids[1] is not None else ids[:1]
    if not all(type(token) is int and 0 <= token < spec.vocab_size for token in ids):
        raise UnsupportedModel(
            f"{place}/config.json: tokens {ids} are not in the vocabulary of {spec.vocab_size}"
        )
    config = spec.config | {"num_labels": 1}
    if chosen := read_json(folder / TEXTS, {}).get("activation_fn"):
        config["sentence_transformers"] = {"activation_fn": chosen}
    return {"task": "classify", "normalize": False, "score_tokens": ids} | _labels(config)


def num_labels(config: dict[str, Any]) -> int:
    """Return the number of outputs of a classification head, counted like transformers. Raises
    UnsupportedModel if config.json states none.
    """
    names = object_in(config, "id2label") or {}
    count = config.get("num_labels") or len(names) or 2
    if type(count) is not int or not 0 < count <= MAX_LABELS:
        raise UnsupportedModel(f"config.json: num_labels {count!r:.40} is no number of labels")
    return count


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _part_config(place: Path) -> dict[str, Any]:
    """Return config.json of a module that needs one."""
    if not (file := place / "config.json").exists():
        raise ModelNotFound(f"{file} is missing, but modules.json lists its folder")
    return read_json(file)


def _limits_file(folder: Path) -> Path:
    files = [folder / f"sentence_{name}_config.json" for name in LIMITS]
    return next((file for file in files if file.exists()), files[0])


def _mode(folder: Path) -> Mode:
    config = _part_config(folder)
    flags = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on]
    modes = [name.removeprefix("pooling_mode_") for name in flags]
    modes = config.get("pooling_mode") or modes or "mean"
    modes = [str(mode) for mode in (modes if isinstance(modes, list) else [modes])]
    if len(modes) != 1 or modes[0] not in MODES:
        raise UnsupportedModel(
            f"{folder}/config.json: pooling by {' and '.join(modes)} is not "
            "supported, only by one of cls, mean and lasttoken"
        )
    if not config.get("include_prompt", True):
        raise UnsupportedModel(f"{folder}/config.json: include_prompt false is not supported")
    return MODES[modes[0]]


def _labels(config: dict[str, Any]) -> dict[str, Any]:
    names = config.get("id2label") or {}
    count = num_labels(config)
    chosen = object_in(config, "sentence_transformers") or {}
    path = chosen.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    name = str(path or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise UnsupportedModel(f"config.json: scores by {path} are not supported")
    return {
        "labels": [str(names.get(str(i), f"LABEL_{i}")) for i in range(count)],
        "activation": ACTIVATIONS.get(str(config.get("problem_type")), "softmax"),
        "score_activation": "sigmoid" if name == "Sigmoid" else "identity",
    }


def _texts(spec: ModelSpec, folder: Path) -> dict[str, Any]:
    """Return the fields for tokenizing texts: length, prompts and the default prompt."""
    limits = read_json(_limits_file(folder), {})
    texts = read_json(folder / TEXTS, {})
    if limits.get("do_lower_case"):
        raise UnsupportedModel(
            f"{_limits_file(folder)}: do_lower_case is not supported, only a tokenizer that does it"
        )
    positions = num_positions(spec)
    tokenizer = read_json(folder / "tokenizer_config.json", {})  # states it in newer files
    limit = limits.get("max_seq_length") or tokenizer.get("model_max_length") or positions
    if type(limit) not in (int, float) or not limit >= 1:
        raise UnsupportedModel(f"{_limits_file(folder)}: max_seq_length {limit!r} is no length")
    try:
        prompts = msgspec.convert(texts.get("prompts") or {}, dict[str, str])
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise UnsupportedModel(f"{folder}/{TEXTS}: prompts: {error}") from None
    default = texts.get("default_prompt_name")
    if default is not None and str(default) not in prompts:
        raise UnsupportedModel(f"{folder}/{TEXTS}: default_prompt_name {default!r} is no prompt")
    return {
        "max_tokens": int(min(limit, positions)),  # infinity, too, is a limit
        "prompts": prompts,
        "default_prompt": default,
        "has_token_types": spec.model_type in ("bert", "gte")
        and spec.config.get("type_vocab_size", 2) > 1,
    }
