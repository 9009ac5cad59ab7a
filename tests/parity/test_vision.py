"""Models that see: prompts with pictures get transformers' greedy tokens."""

import random
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from servd.core.draft_length import DraftLengthController
from servd.core.encoder_cache_manager import EncoderCacheManager
from servd.core.engine_core import EngineCore
from servd.core.executor.multiproc import MultiProcExecutor
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import EngineCoreRequest
from servd.messages.multimodal import MultiModalFeature, TensorPlace
from servd.messages.params import SamplingParams
from servd.worker.batch.input_batch import InputBatch
from servd.worker.multimodal import FAMILIES, ImageProcessor
from servd.worker.multimodal._tower import VisionTower
from servd.worker.runner import dry_run
from tests import vision_models
from tests.core.engines import Log
from tests.worker import stages
from tests.worker.driver import config_for
from tests.worker.recorded import use_recorded_runner

SIZES = [(61, 47), (75, 131), (150, 34), (90, 90)]  # of pictures, in pixels
NUM_OUTPUTS = 20
ALL = range(6)  # requests
BLOCK_SIZE = 16


class Family:
    """A checkpoint in `folder`, and transformers' model of it; `options` of the processors."""

    def __init__(self, folder: Path, options: dict[str, Any] = {}) -> None:  # noqa: B006
        import transformers

        self.folder = folder
        self.spec = read_spec(folder)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        name = self.spec.multimodal.processor
        processor_class = plugins.load_class(FAMILIES, name, ImageProcessor)
        self.processor: Any = processor_class(folder, options)
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.image_processor = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", **options
        )
        self.draw = random.Random(3)

    def text(self, num_tokens: int) -> list[int]:
        return [self.draw.randrange(100, 500) for _ in range(num_tokens)]

    def picture(self, number: int) -> Image.Image:
        width, height = SIZES[number]
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def prompt(self, *parts: list[int] | Image.Image) -> tuple[list[int], list[MultiModalFeature]]:
        """Return the tokens and pictures of a prompt from texts and pictures."""
        token_ids: list[int] = []
        features: list[MultiModalFeature] = []
        for part in parts:
            if isinstance(part, list):
                token_ids += part
                continue
            processed = self.processor.process(part, "auto")
            of_image = self.tokenizer.encode(processed.text, add_special_tokens=False)
            indices = np.flatnonzero(np.array(of_image) == self.spec.multimodal.image_token_id)
            number = len(list(self.folder.glob("picture*")))
            path = self.folder / f"picture{number}"
            data = bytearray()
            places: list[TensorPlace] = []
            for name, array in processed.tensors.items():
                data += bytes(-len(data) % 64)
                places.append(TensorPlace(name, str(array.dtype), list(array.shape), len(data)))
                data += array.tobytes()
            path.write_bytes(data)
            first = int(indices[0])
            features.append(
                MultiModalFeature(
                    part.tobytes()[:32],
                    len(token_ids) + first,
                    int(indices[-1]) + 1 - first,
                    processed.num_embeds,
                    processed.grid,
                    str(path),
                    places,
                    path.stat().st_ino,
                )
            )
            token_ids += of_image
        return token_ids, features

    @torch.inference_mode()
    def greedy(
        self, token_ids: list[int], images: list[Image.Image], names: list[str]
    ) -> list[int]:
        """Return the continuation by transformers, with its own image processor."""
        inputs: dict[str, Any] = {}
        if images:
            name = self.spec.multimodal.processor
            nested: Any = [images] if name == "idefics3" else images
            sides = {"patch_size": self.processor.side} if name == "mistral3" else {}
            outputs = self.image_processor(images=nested, return_tensors="pt", **sides)
            inputs = {name: outputs[name] for name in names}
        ids = torch.tensor([token_ids])
        is_image = (ids == self.spec.multimodal.image_token_id).long()
        if self.spec.multimodal.mrope_section:
            inputs["mm_token_type_ids"] = is_image
        if self.spec.multimodal.is_bidirectional:
            inputs["token_type_ids"] = is_image
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **inputs,
        )
        return output[0, len(token_ids) :].tolist()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @cache
    def get(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        vision_models.make(name, folder)
        return Family(folder)

    return get


def make_engine(
    family: Family,
    num_blocks: int = 200,
    depth: int = 1,
    executor_class: Any = UniProcExecutor,
    **options: object,
) -> EngineCore:
    spec = family.spec
    config = config_for(
        family.folder,
        kv_cache_memory=num_blocks * BLOCK_SIZE * spec.kv_bytes_per_token(4),
        async_scheduling=depth == 2,
        **(
            {
                "max_num_batched_tokens": 48,
                "max_num_seqs": 6,
                "max_model_len": 1024,
                "block_size": BLOCK_SIZE,
            }
            | options
        ),
    )
    executor = executor_class(config, spec, lambda phase, fraction: None)
    return EngineCore(config, spec, executor, executor.start())


class Requests:
    """Requests with 0, 1 and 3 pictures of odd sizes, and what transformers answers."""

    def __init__(self, family: Family) -> None:
        images = [family.picture(number) for number in range(len(SIZES))]
        text = family.text
        prompts: list[tuple[list[int] | Image.Image, ...]] = [
            (text(21),),
            (text(7), images[0], text(5)),
            (text(3), images[1], text(20), images[2], text(2), images[3], text(1)),
            (text(50),),
            (text(9), images[0], text(4)),
            (text(11), images[2], text(3), images[2], text(9)),
        ]
        self.messages: list[EngineCoreRequest] = []
        self.expected: list[list[int]] = []
        params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
        for number, parts in enumerate(prompts):
            token_ids, features = family.prompt(*parts)
            pictures = [part for part in parts if not isinstance(part, list)]
            names = [place.name for place in features[0].tensors] if features else []
            self.expected.append(family.greedy(token_ids, pictures, names))
            message = EngineCoreRequest(str(number), token_ids, params, mm_features=features)
            self.messages.append(message)

    def check(
        self,
        engine: EngineCore,
        name: str = "",
        numbers: Sequence[int] = ALL,
        neighbours: Sequence[EngineCoreRequest] = (),
    ) -> Log:
        """Run requests together, with neighbours, and compare their tokens."""
        for message in neighbours:
            engine.handle(message)
        for number in numbers:
            engine.handle(replace(self.messages[number], request_id=f"{name}{number}"))
        log = Log().run(engine)
        for number in numbers:
            assert log.token_ids(f"{name}{number}") == self.expected[number], number
        return log


@pytest.mark.parametrize("name", vision_models.FAMILIES)
def test_tokens_are_those_of_transformers(families, name: str):
    """Chunks end inside of pictures; a later request finds its prefix, one with little room is
    preempted, and computes its pictures again.
    """
    family = families(name)
    requests = Requests(family)
    lens = [len(message.prompt_token_ids) for message in requests.messages]
    engine = make_engine(family, max_model_len=max(lens) + NUM_OUTPUTS)
    assert requests.check(engine, "first ").total("prefix_cache_hits") == 0
    assert requests.check(engine, "second ").total("prefix_cache_hits") > 0
    short = [1, 4, 5, 0]
    num_blocks = sum(-(-lens[number] // BLOCK_SIZE) for number in short)
    longest = max(lens[number] for number in short) + NUM_OUTPUTS
    engine = make_engine(family, num_blocks, 2, max_model_len=longest)
    assert requests.check(engine, numbers=short).total("num_preemptions") > 0


WAYS: dict[str, dict[str, Any]] = {
    "torch_sdpa": {"attention_backend": "torch_sdpa"},
    "drafts": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
    "adapters": {"enable_lora": True},
    "whole prompts": {"max_num_batched_tokens": 1024, "enforce_eager": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "smolvlm"])
def test_ways_to_compute(families, monkeypatch, name: str, way: str):
    family = families(name)
    requests = Requests(family)
    options = deepcopy(WAYS[way])
    if way == "drafts":  # by its language model
        options["speculative_config"]["model"] = str(family.folder)
        monkeypatch.setattr(DraftLengthController, "relative_costs", lambda *_: (1e-9, 0.0))
    log = requests.check(make_engine(family, 200, 2, **options))
    if way == "drafts":
        counts = [output.stats.drafts for output in log.by_client[0]]
        assert sum(count.num_accepted_tokens for count in counts) > 0


def test_the_tokens_between_crops_see_no_later_ones(families):
    options = {"min_crop_size": 16, "max_num_crops": 3, "min_ratio_to_activate": 1.2}
    options = {"do_pan_and_scan": True} | {f"pan_and_scan_{k}": v for k, v in options.items()}
    family = Family(families("gemma3").folder, options)
    requests = Requests(family)
    [feature] = requests.messages[4].mm_features
    assert feature.length > feature.num_embeds
    requests.check(make_engine(family, max_num_batched_tokens=1024))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_graphs_of_a_device(families, monkeypatch, name: str):
    use_recorded_runner(monkeypatch)
    family = families(name)
    requests = Requests(family)
    engine = make_engine(family, 200, 2)
    requests.check(engine, "first ")
    requests.check(engine, "second ")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_stages(families, name: str):
    family = families(name)
    requests = Requests(family)
    options = {"executor": "multiproc", "pipeline_parallel_size": 2}
    requests.check(make_engine(family, 200, executor_class=stages.Executor, **options))


def test_features_of_layers_in_a_second_stage_are_refused(families):
    options = {"executor": "multiproc", "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2: the first stage has 1"):
        make_engine(families("qwen3_vl"), 200, executor_class=stages.Executor, **options)


def test_a_picture_that_cannot_be_encoded_fails_its_request_alone(families):
    family = families("smolvlm")
    requests = Requests(family)
    message = requests.messages[1]
    [feature] = message.mm_features
    [pixels, *_] = feature.tensors
    wrong = {
        "gone": replace(feature, memory=str(family.folder / "none")),
        "short": replace(feature, tensors=[replace(pixels, offset=1 << 30)]),
        "of another shape": replace(feature, tensors=[replace(pixels, shape=[1, 1, 3, 64, 64])]),
        "of other tokens": replace(feature, num_embeds=feature.num_embeds + 1),
    }
    neighbours = [
        replace(message, request_id=name, mm_features=[replace(value, identifier=name.encode())])
        for name, value in wrong.items()
    ]
    engine = make_engine(family)
    log = requests.check(engine, "first ", neighbours=neighbours)
    for name in wrong:
        assert log.outputs[name][-1].error and log.token_ids(name) == []
    log = requests.check(engine, "second ", neighbours=[replace(message, request_id="again")])
    assert log.token_ids("again") == requests.expected[1]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_rows_that_are_computed_apart(families, name: str):
    family = families(name)
    requests = Requests(family)
    engine = make_engine(family, max_num_batched_tokens=1024)
    runner = engine.executor.worker.runner
    forward = runner.forward

    def fail_together(batch: InputBatch) -> torch.Tensor:
        if len(batch.rows) > 1:
            raise MemoryError("no room for a tensor")
        return forward(batch)

    runner.forward = fail_together
    requests.check(engine)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_the_tower_is_loaded_again(families, name: str):
    family = families(name)
    requests = Requests(family)
    engine = make_engine(family)
    engine.sleep()
    engine.wake_up()
    requests.check(engine)
    engine.collective_rpc("update_weights", [str(family.folder)])
    requests.check(engine, "updated ")


def test_ranks(families):
    family = families("qwen3_vl")
    requests = Requests(family)
    options = {"executor": "multiproc", "tensor_parallel_size": 2}
    engine = make_engine(family, executor_class=MultiProcExecutor, **options)
    try:
        requests.check(engine)
    finally:
        engine.executor.shutdown()


def test_a_step_says_how_long_the_tower_ran(families, monkeypatch):
    family = families("llava")
    message = Requests(family).messages[1]
    engine = make_engine(family)
    encode = VisionTower.encode

    def slow_encode(tower: VisionTower, tensors: Any) -> torch.Tensor:
        time.sleep(0.05)
        return encode(tower, tensors)

    monkeypatch.setattr(VisionTower, "encode", slow_encode)
    engine.handle(message)
    Log().run(engine)
    records = engine.scheduler.step_log.take_new(client=9)
    encoding = [record for record in records if record.encodes]
    assert [record.encode_ns > 50e6 for record in records] == [bool(r.encodes) for r in records]
    sizes = [record.encodes[message.request_id] for record in encoding]
    assert sum(sizes) == sum(feature.num_embeds for feature in message.mm_features)


def test_a_plan_counts_the_tower(families):
    family = families("gemma3")
    engine = make_engine(family)
    runner = engine.executor.worker.runner
    planned = dry_run.predict(runner)
    assert planned is not None
    assert planned.weights + planned.tower == pytest.approx(runner.weights_bytes, rel=0.01)
    assert planned.tower == pytest.approx(runner.encoder.nbytes, rel=0.02)
    assert planned.tower > 0.1 * runner.weights_bytes
    capacity = EncoderCacheManager.from_config(engine.config, family.spec, 1024).capacity
    assert planned.encoder_cache == capacity * 4 * vision_models.HIDDEN_SIZE


def test_a_language_model_that_scales_embeddings(tmp_path: Path, monkeypatch):
    """Those of pictures, too, as Granite Vision does."""
    model = vision_models.models()["llava_next"]
    model.text |= {"model_type": "granite", "embedding_multiplier": 3.0}
    monkeypatch.setattr(vision_models, "models", lambda: {"llava_next": model})
    vision_models.make("llava_next", tmp_path)
    family = Family(tmp_path)
    Requests(family).check(make_engine(family))


def test_the_language_model_only(families):
    family = families("smolvlm")
    requests = Requests(family)
    with pytest.raises(ConfigError, match="reads no pictures: add --language-model-only"):
        make_engine(family, model_impl="transformers")
    whole = make_engine(family).executor.worker.runner
    engine = make_engine(family, language_model_only=True)
    runner = engine.executor.worker.runner
    assert runner.weights_bytes == whole.weights_bytes - whole.encoder.nbytes
    requests.check(engine, numbers=[0, 3])
