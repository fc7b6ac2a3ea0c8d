"""How tokens choose their experts, and so how many parts of these they reach.

By loads that are equal, a token that chooses ``top_k`` of ``experts`` reaches, of m equal parts of them (the
nodes, or ranks, that have them),

    D(m) = m (1 - P(no expert of a part is chosen)).

If it chooses among all, that probability is the product over i < top_k of (E - E/m - i) / (E - i). If it
chooses among the experts of ``limit`` of ``groups`` groups of neighbours (node-limited routing, DeepSeek-V2
and V3; ``topk_group`` of ``n_group``) it is the mean over how many of the chosen groups the part has.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple


class TokenChoice(NamedTuple):
    """How a token chooses: ``top_k`` of ``experts``, of ``limit`` of ``groups`` groups of these.

    Its text is the kind of the collective that takes tokens to their experts.

    >>> print(TokenChoice(8, 256, 8, 4))
    tokens to 8 of 256 in 4 of 8
    """

    top_k: int
    experts: int
    groups: int = 1
    limit: int = 1

    def __str__(self) -> str:
        return f"tokens to {self.top_k} of {self.experts} in {self.limit} of {self.groups}"

    @staticmethod
    def of(kind: str) -> TokenChoice | None:
        """Return the choice of which a kind of collective is the text; None for another kind."""
        found = re.fullmatch(r"tokens to (\d+) of (\d+) in (\d+) of (\d+)", kind)
        if found is None:
            return None
        top_k, experts, limit, groups = map(int, found.groups())
        return TokenChoice(top_k, experts, groups, limit)

    def reached(self, parts: int) -> float:
        """Return how many of so many equal parts of the experts a token reaches, on average.

        Parts that neither are within groups nor have whole ones are as if it chose among all.

        >>> [round(TokenChoice(8, 256, 8, 4).reached(parts), 2) for parts in (1, 4, 8, 64)]
        [1.0, 2.93, 3.63, 7.36]
        >>> round(TokenChoice(8, 256).reached(8), 2)
        5.29
        """
        own, groups, limit = self.experts / parts, self.groups, self.limit
        usable = self.experts * limit // groups
        if parts % groups == 0:  # a part is within a group
            missed = 1 - limit / groups * (1 - self._missed(usable, own))
        elif groups % parts == 0:
            held = groups // parts
            others, every = groups - held, math.comb(groups, limit)
            chances = [
                math.comb(held, n) * math.comb(others, limit - n) / every for n in range(min(held, limit) + 1)
            ]
            missed = sum(
                chance * self._missed(usable, n * own / held) for n, chance in enumerate(chances) if chance
            )
        else:
            missed = self._missed(self.experts, own)
        return parts * (1 - missed)

    def bytes_of_ranks(self, nbytes: float, ranks: int) -> float:
        """Return the bytes of tokens, once for each rank that they reach; ``nbytes``: for each expert."""
        return nbytes / self.top_k * self.reached(ranks)

    def _missed(self, usable: int, own: float) -> float:
        """Return the probability that of the usable experts none of some is chosen."""
        return math.prod([max(usable - own - n, 0.0) / (usable - n) for n in range(self.top_k)])
