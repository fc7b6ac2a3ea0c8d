"""How many parameters a decoder has: all of them, those that a token meets, those of the embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distsim.ir.type import as_tensor
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes


@dataclass(frozen=True)
class ParameterCount:
    """The parameters of a decoder.

    ``active_params``: without the experts that a token is not sent to; the embedding counts in full.
    ``embedding_params``: those of the table of tokens, which may be the output head's too.
    """

    params: int
    active_params: int
    embedding_params: int


def count_parameters(sizes: DecoderSizes) -> ParameterCount:
    """Count the parameters of a decoder: those of its function, which is built for two tokens.

    >>> from distsim.models.parts.attention import GroupedHeads
    >>> count_parameters(DecoderSizes(2, 16, 32, GroupedHeads(4, 2)))
    ParameterCount(params=8784, active_params=8784, embedding_params=512)
    """
    function = decoder(sizes, 1, min(2, sizes.positions.context))
    counts = {v.name: math.prod(as_tensor(v.type, v.name).shape) for v in function.parameters}
    routed = sum(count for name, count in counts.items() if ".experts." in name)
    total, active = sum(counts.values()), 0
    if sizes.experts is not None:
        active = routed * sizes.experts.top_k // sizes.experts.experts
    return ParameterCount(total, total - routed + active, sizes.vocab * sizes.hidden)
