"""The runs of nanotron's sweep: those that presets are fitted to, and the others."""

from pathlib import Path

from distsim.truth import read_rows


def test_what_is_fitted_of_the_sweep_is_of_the_half_that_was_looked_at():
    folder = Path(__file__).parents[1] / "experiments" / "measured"
    fitted, others = (read_rows([folder / f"nanotron_{name}.csv"]) for name in ("one_stage", "sweep"))
    assert {row["split"] for row in fitted} == {"look"}
    assert {(row["pp"], int(row["tp"]) <= 8) for row in fitted} == {("1", True)}
    assert {row["id"] for row in fitted}.isdisjoint(row["id"] for row in others)
    assert len(fitted) + len(others) == 984
