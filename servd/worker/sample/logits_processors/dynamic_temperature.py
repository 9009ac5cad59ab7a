"""dynatemp_range, dynatemp_exponent: a temperature that grows with the entropy."""

from collections.abc import Sequence

from torch import Tensor

from servd.worker.sample.logits_processors._token_filter import TokenFilter
from servd.worker.sample.sampling_metadata import SamplingMetadata

LOWEST = 1e-5  # temperature


class DynamicTemperatureProcessor(TokenFilter):
    """Scales logits so that the request's temperature has the effect of the dynamic temperature:
    within the range around it, by the share of the greatest possible entropy.
    """

    order = 160
    example = {"temperature": 1.0, "dynatemp_range": 0.5}
    fields = ("dynatemp_range", "dynatemp_exponent", "temperature")

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        width, exponent, temperature = values
        _, entropy = self.measure_surprise(self.to_masses(relative))
        num_tokens = relative.isfinite().sum(dim=1, keepdim=True).clamp(min=2)
        share = (entropy / num_tokens.double().log()).clamp(0, 1)
        low = (temperature - width).clamp(min=0)
        dynamic = low + (temperature + width - low) * share**exponent
        return relative * (temperature / dynamic.clamp(min=LOWEST))
