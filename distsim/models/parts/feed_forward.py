"""Feed-forwards: two products with an activation between them, or three where one inner gates another."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.ir import Value
from distsim.models.parts.layer_maker import ACTIVATIONS, LayerMaker, check_activation
from distsim.models.sizes import check_sizes


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward of inner width ``ffn`` (None: 4 x hidden); ``gated``: two inner products, one activated.

    Gated with silu it is SwiGLU, with gelu GeGLU (Shazeer 2020).
    """

    ffn: int | None = None
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(ffn=1 if self.ffn is None else self.ffn)
        check_activation(self.activation)

    def width(self, hidden: int) -> int:
        """The inner width in a decoder of width ``hidden``."""
        return 4 * hidden if self.ffn is None else self.ffn


SWIGLU = FeedForward()
GATED_NAMES = ("gate", "up", "down")


def feed_forward(
    layer: LayerMaker,
    source: Value,
    sizes: FeedForward,
    names: tuple[str, str, str] = GATED_NAMES,
    prefix: str = "",
) -> Value:
    """Add a feed-forward; ``names`` are those of its products, of which one without a gate has no first.

    Names of parameters and values begin with ``prefix``.
    """
    hidden, width, bias = layer.hidden, sizes.width(layer.hidden), sizes.bias
    gate, up, down = (prefix + name for name in names)
    activated = prefix + ACTIVATIONS[sizes.activation][0].lower()
    if not sizes.gated:
        inner = layer.activated(layer.linear(source, up, hidden, width, bias), sizes.activation, activated)
    else:
        group = f"{prefix}gated"
        gate = layer.linear(source, gate, hidden, width, bias, group)
        gate = layer.activated(gate, sizes.activation, activated)
        inner = layer("Mul", gate, layer.linear(source, up, hidden, width, bias, group), name=group)
    return layer.linear(inner, down, width, hidden, bias)
