"""How many layers each stage of a row's pipeline holds, as its columns say it or leave it open."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from distsim.truth.row import MissingFeatureError, Row, number


@dataclass(frozen=True)
class StageSizes:
    """What decides how layers are cut: their number, the stages, and sizes of the model.

    ``by_weights``: where a text says nothing, layers and head are cut by their weights, as nanotron does.
    """

    layers: int
    stages: int
    hidden: int
    vocab: int
    seq: int
    ffn: int = 0
    by_weights: bool = False

    @staticmethod
    def of(row: Row, stages: int, by_weights: bool = False) -> StageSizes:
        """Return those of a row."""
        hidden, vocab, seq, ffn = (number(row, column, 0) for column in ("hidden", "vocab", "seq", "ffn"))
        by_weights = by_weights and ffn > 0
        return StageSizes(number(row, "n_layers"), stages, hidden, vocab, seq, ffn, by_weights)

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
    last = re.search(
        r"final-stage layers ?[=:] ?([0-9]{1,4})\b|last stage of ([0-9]{1,4}) (?:layers?|blocks?)\b", text
    )
    if last:
        return _with_last(sizes, int(last[1] or last[2]))
    if "redistribut" in text:
        # Vocabulary Parallelism (Yeung et al. 2025), section 6: stages are to be as long as each other.
        return _with_last(sizes, _redistributed_last(sizes), assumed)
    if sizes.by_weights:
        return _by_weights(sizes, assumed)
    if sizes.layers % sizes.stages == 0:
        return "layers"
    if (sizes.layers + 2) % sizes.stages == 0:
        return "default"
    raise MissingFeatureError(
        f"the layers of each of {sizes.stages} stages, as {sizes.layers} layers do not divide"
    )


def _by_weights(sizes: StageSizes, assumed: list[str]) -> str:
    """Return the layers of each stage as nanotron cuts a model (models/base.py, ``build_model``).

    A layer costs 4 h^2 + 3 h f, as if all of attention's products were h by h, the head h V, the embedding
    nothing; a stage takes blocks until what was taken is more than its share. The last one may have the head
    alone.
    """
    layer = 4 * sizes.hidden**2 + 3 * sizes.hidden * sizes.ffn
    total = sizes.layers * layer + sizes.hidden * sizes.vocab
    counts, stage, taken = [0] * sizes.stages, 0, 0
    for _ in range(sizes.layers):
        counts[stage] += 1
        taken += layer
        stage += taken * sizes.stages > total * (stage + 1)
    if not all(counts[:-1]) or stage < sizes.stages - 1:
        raise MissingFeatureError(
            f"stages of no layer: nanotron cuts {sizes.layers} layers into {counts}, with the head on stage "
            f"{stage + 1} of {sizes.stages}"
        )
    if len(set(counts)) == 1:
        return "layers"
    text = "-".join(map(str, counts))
    assumed.append(f"layers a stage {text}")
    return text


def _redistributed_last(sizes: StageSizes) -> int:
    """Return how many layers the last stage holds: what the head leaves of a stage's share, rounded up.

    So are the final-stage layers of the eight runs of which stages were timed (its exp_one_host.csv).
    """
    return max(math.ceil((sizes.layers + sizes.head) / sizes.stages - sizes.head), 0)


def _with_last(sizes: StageSizes, last: int, assumed: list[str] | None = None) -> str:
    rest, others = sizes.layers - last, sizes.stages - 1
    if not others or rest < others:
        raise MissingFeatureError(
            f"stages of no layer: {last} of {sizes.layers} on the last of {sizes.stages}"
        )
    more = rest % others  # what is left goes to the stages before the last (their transformer_block.py)
    counts = [rest // others] * (others - more) + [rest // others + 1] * more + [last]
    if len(set(counts)) == 1:
        return "layers"
    text = "-".join(map(str, counts))
    if assumed is not None:
        assumed.append(f"layers a stage {text}")
    return text
