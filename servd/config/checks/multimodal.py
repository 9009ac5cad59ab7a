"""Whether a model that sees reads pictures with the options, and on this machine."""

import importlib.util
import logging

from servd.base.errors import ConfigError
from servd.checkpoint import pooling
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.multimodal_config import MultiModalSpec
from servd.config import Config

log = logging.getLogger("servd.config")


def choose_modalities(config: Config, spec: ModelSpec) -> MultiModalSpec | str:
    """Return how the server reads pictures; else why it reads none. Raises ConfigError if the model
    cannot run in stages.
    """
    multimodal = spec.multimodal
    if isinstance(multimodal, str):
        return multimodal
    parallel = config.parallel
    if config.multimodal.language_model_only:
        return "it runs with --language-model-only"
    if importlib.util.find_spec("PIL") is None:
        reason = "Pillow is not installed: pip install pillow"
        log.warning("the model's text part alone is served: %s", reason)
        return reason
    if config.model.model_impl == "transformers" or not pooling.has_file(spec):
        return "pictures need servd's own models: leave --model-impl out"
    if parallel.executor == "ray" or parallel.num_engines_here < parallel.data_parallel_size:
        return "pictures stay on one host: leave Ray and engines on other hosts out"
    if parallel.pipeline_parallel_size > 1 and multimodal.num_deepstack:
        raise ConfigError(
            "--pipeline-parallel-size: the first layers add features of pictures, so all layers "
            "run in one stage: use --tensor-parallel-size, or --language-model-only"
        )
    return multimodal
