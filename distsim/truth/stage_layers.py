"""How many layers each stage of a row's pipeline holds, as its columns say it or leave it open."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distsim.truth.row import MissingFeatureError, Row, number


@dataclass(frozen=True)
class StageSizes:
    """What decides how layers are cut: their number, the stages, and sizes of the model."""

    layers: int
    stages: int
    hidden: int
    vocab: int
    seq: int

    @staticmethod
    def of(row: Row, stages: int) -> StageSizes:
        """Return those of a row."""
        sizes = (number(row, column, 0) for column in ("hidden", "vocab", "seq"))
        return StageSizes(number(row, "n_layers"), stages, *sizes)

    @property
    def head(self) -> float:
        """How many layers the output head is worth: FLOPs by Narayanan et al. 2021, equation 2.

        A layer has 24 h^2 + 4 s h a token, the head 2 h V (forward).
        """
        return 2 * self.vocab / (24 * self.hidden + 4 * self.seq)


def stages_of(sizes: StageSizes, text: str, assumed: list[str]) -> str:
    """Return ``stages`` of a plan, from what the text of a row says of layers, and else equally many a stage.

    Where they do not divide, the embedding and the head may count as layers. Raises
    :class:`MissingFeatureError` where they do not divide either.
    """
    last = re.search(r"final-stage layers ?[=:] ?([0-9]{1,4})\b", text)
    if last:
        return _with_last(sizes, int(last[1]))
    if "redistribut" in text:
        # Vocabulary Parallelism (Yeung et al. 2025), section 6: the longest stage is made as short as can be.
        return _with_last(sizes, _least_last(sizes), assumed)
    if sizes.layers % sizes.stages == 0:
        return "layers"
    if (sizes.layers + 2) % sizes.stages == 0:
        return "default"
    raise MissingFeatureError(
        f"the layers of each of {sizes.stages} stages, as {sizes.layers} layers do not divide"
    )


def _least_last(sizes: StageSizes) -> int:
    """Return how many layers the last stage holds for the longest stage to be the shortest."""
    others = sizes.stages - 1

    def longest(last: int) -> float:
        return max(-(-(sizes.layers - last) // others), last + sizes.head)

    most = sizes.layers // sizes.stages
    return min(range(most + 1), key=lambda last: (longest(last), -last))


def _with_last(sizes: StageSizes, last: int, assumed: list[str] | None = None) -> str:
    rest, others = sizes.layers - last, sizes.stages - 1
    if not others or last < 1 or rest < others:
        raise MissingFeatureError(
            f"stages of no layer: {last} of {sizes.layers} on the last of {sizes.stages}"
        )
    more = rest % others
    counts = [rest // others + 1] * more + [rest // others] * (others - more) + [last]
    if len(set(counts)) == 1:
        return "layers"
    text = "-".join(map(str, counts))
    if assumed is not None:
        assumed.append(f"layers a stage {text}")
    return text
