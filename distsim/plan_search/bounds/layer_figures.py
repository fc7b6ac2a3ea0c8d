"""What is known of the layers of a plan: for how long they keep a device busy or wait, and what they save."""

from __future__ import annotations

from typing import NamedTuple


class StageWork(NamedTuple):
    """What a microbatch takes of the compute stream on a stage, in ``seconds``; how many ``layers`` the stage
    has, the bytes that it has ``saved`` when backward begins, and those that are ``pending`` between halves
    of a backward pass, 0: not known."""

    seconds: float
    layers: int
    saved: int
    pending: int = 0


class HalfWork(NamedTuple):
    """The seconds of a ``layer`` of a stage for whose gradient another one waits: of its forward pass, and of
    both halves of its backward pass; and those by which one that follows another in its stage is later than
    that (``between``)."""

    layer: float
    between: float


class LayerPassage(NamedTuple):
    """What a microbatch takes at least from what a layer receives to what it sends, ``ahead`` in its forward
    pass, ``behind`` in its backward pass; and the most that computes after it has sent a gradient (``late``).

    A layer that follows another one in its stage begins to compute when that has sent, and this was received:
    by so much later than the other's last product at least, in the ``forward`` and in the ``backward`` pass.
    """

    ahead: float
    behind: float
    late: float
    forward: float = 0.0
    backward: float = 0.0

    @property
    def between(self) -> float:
        """The seconds for which a stage with one layer more waits, forward and backward."""
        return self.forward + self.backward


class LayerExtras(NamedTuple):
    """What of a layer depends on more of a plan than how it divides a microbatch.

    Bytes on a rank, before they are divided over those that have the same: of parameters that a
    microbatch has ``gathered``, of gradients that it has ``reduced`` over these ranks, of the sums of
    gradients that are ``held`` from one to the next, and of ``sums`` that are reduced once a step. And the
    seconds by which its calls are longer with all that they compute of parameters, as casts, and of what no
    product follows from (``beside``). 0: not known."""

    gathered: float = 0.0
    reduced: float = 0.0
    held: float = 0.0
    sums: float = 0.0
    beside: float = 0.0

    def least(self, other: LayerExtras) -> LayerExtras:
        """Return what holds of both."""
        return LayerExtras(*map(min, self, other))


class LayerWork(NamedTuple):
    """``seconds`` for which a microbatch takes the compute stream, those that it is ``computing``, those of
    them in the ``forward`` passes of layers and in the ``products`` of these, those for which forward passes
    of layers are ``waiting`` for collectives, and the bytes that the ``layers``, so many, have ``saved`` when
    backward begins; all summed over the ``stages``.

    ``layer`` are the seconds of one of the layers, forward and backward, and ``head`` those of the products
    outside of layers, if they are those of one operand of one op, and of what a loss makes of that: they are
    on one stage. ``sums`` are those for which a device adds the gradients of a layer to what microbatches
    before have left. 0: not known.
    ``passage`` is the way through a layer, where each takes in what the one before makes, before it begins to
    compute; the ``stages`` count for how long layers of theirs wait for each other. ``backward`` are the
    seconds of products in backward passes of layers, ``outside`` those of products outside of layers.
    ``pending`` are bytes of all layers that are held between
    two halves of a backward pass, if it is made in halves; ``halves`` is what a layer takes then. ``extras``
    are what more of a plan than that decides of a layer.
    """

    seconds: float
    computing: float
    forward: float
    products: float
    waiting: float
    saved: int
    layers: int
    layer: float = 0.0
    head: float = 0.0
    stages: tuple[StageWork, ...] = ()
    passage: LayerPassage | None = None
    sums: float = 0.0
    backward: float = 0.0
    outside: float = 0.0
    pending: int = 0
    halves: HalfWork | None = None
    extras: LayerExtras = LayerExtras()

    @property
    def work(self) -> float:
        """The seconds of all products of a microbatch."""
        return self.products + self.backward + self.outside

    def in_halves(self, waits: bool) -> LayerWork:
        """Return what holds where backward passes are in two halves: all that is computed, in more kernels.

        Collectives of backward may run beside other halves; forward passes are the same, and wait as before
        (``waits``), unless another pass computes meanwhile.
        """
        seconds = self.computing + (self.waiting if waits else 0.0)
        layer = (seconds - self.head) / self.layers if self.layer and self.head and self.layers else 0.0
        known = self.passage
        passage = known and LayerPassage(known.ahead, 0.0, 0.0, known.forward if waits else 0.0)
        head = self.head if layer else 0.0
        work = LayerWork(seconds, self.computing, 0.0, 0.0, 0.0, 0, self.layers)
        halves = self.halves if waits and layer else None
        return work._replace(layer=layer, head=head, stages=self.stages, passage=passage, halves=halves)

    def of_layers(self, count: int) -> LayerWork:
        """Return what so many of these layers do, each the same, and what is beside them; no stages."""
        most, layers = count / self.layers, self.layers
        beside = self.seconds - layers * self.layer
        return self._replace(
            seconds=count * self.layer + beside,
            computing=most * (self.computing - beside) + beside,
            forward=most * self.forward,
            products=most * self.products,
            waiting=most * self.waiting,
            saved=self.saved * count // layers,
            pending=self.pending * count // layers,
            layers=count,
            backward=most * self.backward,
            stages=(),
        )

    def least(self, other: LayerWork) -> LayerWork:
        """Return what holds of both."""
        return LayerWork(
            min(self.seconds, other.seconds),
            min(self.computing, other.computing),
            min(self.forward, other.forward),
            min(self.products, other.products),
            min(self.waiting, other.waiting),
            min(self.saved, other.saved),
            self.layers,
            min(self.layer, other.layer),
            min(self.head, other.head),
            self.stages or other.stages,
            _least_passage(self.passage, other.passage),
            min(self.sums, other.sums),
            min(self.backward, other.backward),
            min(self.outside, other.outside),
            min(self.pending, other.pending) or max(self.pending, other.pending),
            _least_half(self.halves, other.halves),
            self.extras.least(other.extras),
        )


def _least_half(one: HalfWork | None, two: HalfWork | None) -> HalfWork | None:
    """Return what holds of both; plans that cut no backward pass, or not that of every layer, do not tell."""
    if one is None or two is None:
        return one or two
    return HalfWork(*map(min, one, two))


def _least_passage(one: LayerPassage | None, two: LayerPassage | None) -> LayerPassage | None:
    """Return what holds of both; stages of one layer each have no way from one to the next to tell of."""
    if one is None or two is None:
        return one or two
    return LayerPassage(
        min(one.ahead, two.ahead),
        min(one.behind, two.behind),
        max(one.late, two.late),
        min(one.forward, two.forward),
        min(one.backward, two.backward),
    )
