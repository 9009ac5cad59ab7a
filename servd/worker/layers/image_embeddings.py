"""ImageEmbeddings: what the vision tower computed for tokens of a step."""

from typing import NamedTuple

from torch import Tensor


class ImageEmbeddings(NamedTuple):
    """The embeddings of a step's image tokens."""

    tokens: Tensor  # int64 [n]: their indices in the step
    # [n, hidden * (1 + num_deepstack)]: what replaces their embeddings, then the terms that the
    # first layers add to their outputs (DeepStack).
    features: Tensor

    def place(self, x: Tensor) -> Tensor:
        """Replace embeddings in `x` [num_tokens, hidden], which is returned."""
        size = x.shape[1]
        return x.index_copy_(0, self.tokens, self.features[:, :size].to(x.dtype))

    def add_features(self, x: Tensor, layer: int) -> Tensor:
        """Add to the output `x` [num_tokens, hidden] of layer number `layer`; return it."""
        size = x.shape[1]
        features = self.features[:, size * (layer + 1) : size * (layer + 2)]
        if features.shape[1]:
            x.index_add_(0, self.tokens, features.to(x.dtype))
        return x
