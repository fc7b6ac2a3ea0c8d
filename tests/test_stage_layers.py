"""The layers of each stage of a row: as its text says, as a framework cuts a model."""

import pytest

from distsim.truth import MissingFeatureError
from distsim.truth.stage_layers import StageSizes, _redistributed_last, stages_of


def test_layers_of_stages():
    sizes = StageSizes(32, 8, 3072, 128_000, 2048)
    assert sizes.head == pytest.approx(2 * 3072 * 128_000 / (24 * 3072**2 + 4 * 2048 * 3072))
    assumed: list[str] = []
    assert stages_of(sizes, "1f1b with layer redistribution", assumed) == "4-4-4-4-4-5-5-2"
    assert assumed == ["layers a stage 4-4-4-4-4-5-5-2"]
    assert stages_of(sizes, "final-stage layers=1", assumed) == "4-4-4-4-5-5-5-1"
    assert stages_of(sizes, "final-stage layers=4", assumed) == stages_of(sizes, "", assumed) == "layers"


@pytest.mark.parametrize(("vocab", "last"), [(256_000, 0), (128_000, 2), (64_000, 3), (32_000, 4)])
@pytest.mark.parametrize("seq", [2048, 4096])
def test_layers_that_are_redistributed(vocab, last, seq):
    """As many as eight published runs had (Vocabulary Parallelism, exp_one_host.csv)."""
    assert _redistributed_last(StageSizes(32, 8, 3072, vocab, seq)) == last


@pytest.mark.parametrize(
    ("layers", "stages", "hidden", "ffn", "cut"),
    [
        (32, 4, 4096, 14336, "9-9-8-6"),
        (16, 2, 2048, 8192, "11-5"),
        (32, 2, 4096, 14336, "18-14"),
        (16, 4, 2048, 8192, "6-5-5-0"),
    ],
)
def test_layers_that_are_cut_by_weights(layers, stages, hidden, ffn, cut):
    """What models/base.py of nanotron gives, run by hand; 131,072 words."""
    sizes = StageSizes(layers, stages, hidden, 131_072, 4096, ffn, by_weights=True)
    assumed: list[str] = []
    assert stages_of(sizes, "", assumed) == cut
    assert assumed == [f"layers a stage {cut}"]
    with pytest.raises(MissingFeatureError, match="stages of no layer"):
        stages_of(StageSizes(16, 8, 2048, 131_072, 4096, 8192, by_weights=True), "", [])
