"""Transformers with mixtures of experts in the manner of Mixtral (Jiang et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distsim.errors import PlanError
from distsim.ir import DType, Float32, Function, Mesh, Tensor
from distsim.models.decoder import LayerMaker, decoder
from distsim.models.llama import attention_block, check_heads
from distsim.models.mixture import Mixture, mixture
from distsim.models.routing import Routing, draw_routing
from distsim.models.sizes import builder, check_sizes


@dataclass(frozen=True)
class MoeSizes:
    """The sizes of a decoder with mixtures of experts; unless given, those of Mixtral 8x7B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    experts: int = 8
    top_k: int = 2
    shared: int = 0
    seq: int = 4096
    batch: int = 8
    vocab: int = 32000

    def __post_init__(self) -> None:
        check_sizes(layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads)
        check_sizes(seq=self.seq, batch=self.batch, vocab=self.vocab)
        check_heads(self.hidden, self.heads, self.kv_heads)

    @property
    def mixture(self) -> Mixture:
        """The sizes of each layer's mixture."""
        return Mixture(self.experts, self.top_k, self.ffn, self.shared)


@builder(MoeSizes)
def moe(
    sizes: MoeSizes,
    concentration: float | None = None,
    capacity: float | None = None,
    seed: int = 0,
    dtype: DType = Float32(),  # noqa: B008
    routings: Sequence[Routing] | None = None,
    mesh: Mesh | None = None,
) -> Function:
    """Return a decoder with mixtures of experts for feed-forwards, of :class:`MoeSizes` in order or by name.

    Inputs and output as those of :func:`distsim.models.llama`. Each of the ``experts`` is a SwiGLU
    feed-forward of width ``ffn``, each token goes to ``top_k`` of them and to ``shared`` more. The load of
    layer i is drawn with seed ``seed + i``, ``concentration`` and ``capacity`` (:func:`draw_routing`), or
    given: ``routings``, one a layer. Layers of equal load are Calls of one callee. On a ``mesh`` with an
    axis ``ep`` the function is that of its ranks: ``batch`` is local, each rank has its part of the experts,
    and gradients of what all ranks have are those of the rank's own sequences.

    >>> sizes = dict(layers=2, hidden=16, heads=4, kv_heads=2, ffn=8, seq=8, batch=2, vocab=32)
    >>> function = moe(experts=4, top_k=2, **sizes)
    >>> sum(value.type.size for value in function.parameters)
    5840
    """
    experts, width = sizes.mixture, sizes.hidden // sizes.heads
    loads = layer_routings(experts, sizes.layers, sizes.seq, concentration, capacity, seed, routings)
    x_type = Tensor(dtype, (sizes.batch, sizes.seq, sizes.hidden), mesh)

    def layer_of(load: Routing) -> Function:
        layer = LayerMaker("layer", x_type, width)
        x = attention_block(layer, sizes.heads, sizes.kv_heads)
        made = mixture(layer, layer.norm(x, "norm2", sizes.hidden), experts, load)
        return layer.finish(layer("Add", x, made, name="x2"))

    return decoder("moe", equal_once(loads, layer_of), sizes.vocab, width)


def layer_routings(
    sizes: Mixture,
    layers: int,
    seq: int,
    concentration: float | None,
    capacity: float | None,
    seed: int,
    routings: Sequence[Routing] | None,
) -> tuple[Routing, ...]:
    """Return the load of each of the layers: those given, or drawn ones.

    Raises :class:`PlanError` when as many are not given.
    """
    if routings is None:
        return tuple(
            draw_routing(sizes.experts, sizes.top_k, seq, concentration, capacity, seed + index)
            for index in range(layers)
        )
    if len(routings) != layers:
        raise PlanError(f"{len(routings)} routings for {layers} layers of experts; give one a layer")
    return tuple(routings)


def equal_once(loads: Sequence[Routing], layer_of: Callable[[Routing], Function]) -> list[Function]:
    """Return the layer of each load, made once for equal loads."""
    made: dict[tuple[int, ...], Function] = {}
    for load in loads:
        if load.slots not in made:
            made[load.slots] = layer_of(load)
    return [made[load.slots] for load in loads]
