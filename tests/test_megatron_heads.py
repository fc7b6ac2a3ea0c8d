"""Heads of Megatron-LM's scripts: how many of their dimensions turn, and where that is no question."""

import pytest

from distsim.errors import ImportModelError, PlanError
from distsim.importer.configs import read_megatron_args

FEW = "--num-layers 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 1 --vocab-size 128"


def sizes(tmp_path, *more: str):
    path = tmp_path / "args.txt"
    path.write_text("\n".join([FEW, *more]), encoding="utf-8")
    return read_megatron_args(path)


@pytest.mark.parametrize(
    ("more", "turned"),
    [
        ("--hidden-size 64 --num-attention-heads 4 --use-rotary-position-embeddings", None),
        ("--hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --rotary-percent 0.5", 8),
        ("--hidden-size 60 --num-attention-heads 4 --position-embedding-type rope --rotary-percent 0.3", 4),
        ("--hidden-size 60 --num-attention-heads 4", None),  # positions are learned
        ("--hidden-size 60 --num-attention-heads 4 --rotary-percent 0.5", None),
        ("--hidden-size 64 --num-attention-heads 4 --kv-channels 1", None),
    ],
)
def test_a_part_of_a_head_turns_where_positions_are_rotary(tmp_path, more, turned):
    assert sizes(tmp_path, more).sizes.attention.rotary_dims == turned


@pytest.mark.parametrize(
    ("more", "turned"),
    [
        ("--position-embedding-type rope", (True,)),
        ("--position-embedding-type none", (False,)),
        ("--position-embedding-type rope --no-rope-freq 0", (True,)),
        ("--position-embedding-type rope --no-rope-freq 2", (True, False)),
        ("--position-embedding-type rope --no-rope-freq [1]+[0]*1", (False, True)),
    ],
)
def test_some_layers_have_no_positions(tmp_path, more, turned):
    found = sizes(tmp_path, "--hidden-size 64 --num-attention-heads 4", more)
    assert found.sizes.positions.turned == turned
    assert not [note for note in found.notes if "rope" in note or "position" in note]


def test_layers_that_no_pattern_fits_are_refused(tmp_path):
    rope = "--hidden-size 64 --num-attention-heads 4 --position-embedding-type rope"
    for pattern in (3, "[1]"):
        with pytest.raises(ImportModelError, match=r"--no-rope-freq=.* must be a divisor of 2 layers"):
            sizes(tmp_path, rope, f"--no-rope-freq {pattern}")
    learned = sizes(tmp_path, "--hidden-size 64 --num-attention-heads 4 --no-rope-freq 1")
    assert "--no-rope-freq: of no effect without rotary positions, or in latent attention" in learned.notes


def test_a_share_that_is_none_of_a_head_is_refused(tmp_path):
    rope = "--hidden-size 64 --num-attention-heads 4 --position-embedding-type rope"
    with pytest.raises(ImportModelError, match=r"--rotary-percent=0.2 must be .* even number of its 16"):
        sizes(tmp_path, rope, "--rotary-percent 0.2")
    with pytest.raises((ImportModelError, PlanError), match="even"):
        sizes(tmp_path, rope.replace("64", "60"))


def test_of_latent_attention_the_share_is_said_to_be_none(tmp_path):
    latent = "--hidden-size 64 --num-attention-heads 4 --multi-latent-attention --rotary-percent 0.5"
    notes = sizes(tmp_path, latent).notes
    assert any(note.startswith("--rotary-percent: what turns of latent attention") for note in notes)
