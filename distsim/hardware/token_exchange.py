"""Tokens sent to the ranks of their experts, once to each node: what DeepEP does in place of an all-to-all.

A token whose experts lie on fewer nodes than there are goes once to each of these, to the rank in the
sender's place, which hands it on to each rank of its node that has any of its experts (DeepSeek-V3,
DeepSeek-AI 2024, section 3.2.2; deepseek-ai/DeepEP). Both legs run at once, a chunk behind the other. Where a
token reaches D(m) of m equal parts of the experts (:meth:`distsim.token_choice.TokenChoice.reached`) and S
are the bytes of the rows of its ``top_k`` experts, of all tokens of a rank, one of n ranks on m nodes sends

    (m-1)/m D(m) S/top_k   to other nodes,      (1 - m/n) D(n) S/top_k   within its node,

and the exchange takes the longer of the two, and the latencies of both. The way back, where what the experts
of a node made of a token is added up first, is the same mirrored.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.hardware.routes import Hop, Route, latency_of_messages, ring_hops
from distsim.token_choice import TokenChoice


class TokenFlow(NamedTuple):
    """An exchange of tokens: its seconds, of which ``latency`` move nothing, and bytes on hops."""

    seconds: float
    latency: float
    loads: tuple[tuple[tuple[Hop, ...], float], ...]


def token_exchange(choice: TokenChoice, nbytes: float, route: Route) -> TokenFlow | None:
    """Return how tokens of ``nbytes``, as rows for all their experts, go over a route with several nodes.

    None where it does not have equally many ranks, and several, in each of several nodes: there a token goes
    to each rank that it reaches, as in an all-to-all.
    """
    inner, outer = route.inner, route.outer
    if inner is None or outer is None:
        return None
    legs = [
        (outer, choice.bytes_of_ranks(nbytes, outer.size)),
        (inner, choice.bytes_of_ranks(nbytes, route.size)),
    ]
    moved = [(part, size * (part.size - 1) / part.size) for part, size in legs]
    latency = sum(latency_of_messages(part.size - 1, part.latency) for part, _ in moved)
    loads = tuple([(ring_hops(part.family), size) for part, size in moved])
    return TokenFlow(latency + max(size / part.bandwidth for part, size in moved), latency, loads)
