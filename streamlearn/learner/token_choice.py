"""How the next token is chosen from the logits: the most likely one, or a sample.

    p = softmax(logits / temperature)                                          (1)
    nucleus: the fewest tokens, most likely first, whose p sum to top_p        (2)

Eq. (2) is nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751).
"""
# Shape suffixes: B texts decoded together, V tokens of the vocabulary.

from collections.abc import Callable

import torch
from torch import Tensor

TokenChoice = Callable[[Tensor], Tensor]
"""Maps logits (B, V) to the next token of each text (B,)."""


def most_likely(logits_BV: Tensor) -> Tensor:
    """Greedy decoding."""
    return logits_BV.argmax(-1)


class NucleusSampler:
    """Samples from the nucleus with a generator of its own: training's random state is never read nor advanced.

    Texts that are decoded together draw in turn, so a text is repeatable if it is decoded separately.
    """

    def __init__(self, temperature: float, top_p: float, seed: int, device: torch.device) -> None:
        """Start the generator; `temperature` is above 0, `top_p` from 0 (most likely token) to 1 (every token)."""
        assert temperature > 0, "temperature 0 is greedy decoding"
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Draw the next token of each text."""
        # The largest logit becomes 0, so that no temperature overflows.
        scaled_BV = (logits_BV.float() - logits_BV.float().amax(-1, keepdim=True)) / self._temperature
        if self._top_p >= 1:
            return self._draw(scaled_BV.softmax(-1))
        sorted_BV, tokens_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
        p_BV = sorted_BV.softmax(-1)  # (1)
        outside_BV = p_BV.cumsum(-1) - p_BV >= self._top_p  # (2)
        outside_BV[:, 0] = False
        ranks_B = self._draw(p_BV.masked_fill(outside_BV, 0.0))
        return tokens_BV.gather(-1, ranks_B[:, None])[:, 0]

    def _draw(self, weights_BV: Tensor) -> Tensor:
        return torch.multinomial(weights_BV, 1, generator=self._generator)[:, 0]
