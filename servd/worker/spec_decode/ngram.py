"""ngram: drafts the tokens that followed the previous occurrence of the last tokens in prompt or
output (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

import torch
from torch import Tensor

from servd.worker.spec_decode import Proposer


class NgramProposer(Proposer):
    """Searches the rows of token ids on the device. Needs no model and no state."""

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> Tensor:
        """Return the tokens after the latest earlier occurrence of the longest possible run of the
        last `prompt_lookup_max` to `prompt_lookup_min` tokens.
        """
        tokens = self.states.token_ids[slots, :max_len]  # [n, max_len]
        last = self.states.num_computed[slots].unsqueeze(1)  # index of the newest token
        places = torch.arange(max_len, device=slots.device)
        run = places < last  # do the tokens that end here equal the row's last ones?
        lengths = torch.zeros_like(tokens)
        for back in range(self.config.prompt_lookup_max):
            suffix = tokens.gather(1, (last - back).clamp_(min=0))
            run = run & (places >= back) & (tokens.roll(back, dims=1) == suffix)
            lengths += run
        longest, place = (lengths.long() * max_len + places).max(dim=1, keepdim=True)
        # If fewer tokens than drafts follow the match, they repeat.
        after = torch.arange(num_drafts, device=slots.device) % (last - place).clamp_(min=1)
        drafts = tokens.gather(1, (place + 1 + after).clamp_(max=max_len - 1)).long()
        return drafts.masked_fill_(longest < self.config.prompt_lookup_min * max_len, -1)
