"""SplitToSequence and SequenceAt where all is static: a Split, and what ONNX says they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adversarial_models import refused
from importer_models import assert_same, f32, info, save
from onnx import TensorProto, helper


def split(
    tmp_path: Any, sizes: Any = None, places: Any = (0, -1), source: str = "x", **attributes: Any
) -> Any:
    """Elements of a sequence of x, or of a constant c, each negated."""
    stored = {f"at{i}": np.array(place, np.int64) for i, place in enumerate(places)}
    stored |= {"c": f32(4, 6)}
    if sizes is not None:
        stored["sizes"] = np.array(sizes, np.int64)
    given = [source] if sizes is None else [source, "sizes"]
    nodes = [helper.make_node("SplitToSequence", given, ["s"], name="bad", **attributes)]
    for i in range(len(places)):
        nodes.append(helper.make_node("SequenceAt", ["s", f"at{i}"], [f"e{i}"], name="at"))
        nodes.append(helper.make_node("Neg", [f"e{i}"], [f"y{i}"]))
    outputs = [info(f"y{i}", None) for i in range(len(places))]
    return save(tmp_path / "m.onnx", nodes, [info("x", [4, 6])], outputs, stored)


@pytest.mark.parametrize(
    ("sizes", "attributes", "kinds"),
    [
        (None, {"axis": 0}, {"Split", "Neg"}),
        (None, {"axis": 1, "keepdims": 0}, {"Split", "Squeeze", "Neg"}),
        (2, {"axis": 1}, {"Split", "Neg"}),
        (4, {"axis": -1}, {"Split", "Neg"}),
        (4, {"axis": 1, "keepdims": 0}, {"Split", "Neg"}),
        ([1, 2, 3], {"axis": 1}, {"Split", "Neg"}),
        (4, {"axis": 0}, {"Neg"}),
    ],
)
def test_elements_of_a_static_sequence(
    tmp_path: Any, sizes: Any, attributes: dict[str, int], kinds: set[str]
) -> None:
    function = assert_same(split(tmp_path, sizes, **attributes), {"x": f32(4, 6)})
    assert {op.op_type for op in function.ops} == kinds
    assert sum(op.op_type == "Split" for op in function.ops) == ("Split" in kinds)
    assert_same(split(tmp_path, sizes, source="c", **attributes), {"x": f32(4, 6)})


def test_in_a_branch_that_is_decided(tmp_path: Any) -> None:
    inner = helper.make_graph(
        [helper.make_node("SequenceAt", ["s", "one"], ["e"])], "then", [], [info("e", None)]
    )
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner),
    ]
    stored = {"one": np.array(1), "yes": np.array(True)}
    assert_same(
        save(tmp_path / "m.onnx", nodes, [info("x", [4, 6])], [info("y", None)], stored), {"x": f32(4, 6)}
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"sizes": [1, 2], "axis": 1}, ("'bad'", "splits 6 entries into pieces of [1, 2]")),
        ({"sizes": [7, -1], "axis": 1}, ("'bad'", "pieces of [7, -1]")),
        ({"sizes": 0}, ("'bad'", "splits into pieces of 0")),
        ({"axis": 2}, ("'bad'", "splits along axis 2 of a tensor of shape [4, 6]")),
        ({"places": [4]}, ("'at'", "takes element 4 of a sequence of 4")),
    ],
)
def test_sequences_that_make_no_sense(tmp_path: Any, case: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(split(tmp_path, **case), *words)


def test_what_is_not_static_is_refused(tmp_path: Any) -> None:
    def model(nodes: list[Any], inputs: list[Any]) -> Any:
        return save(tmp_path / "m.onnx", nodes, [info("x", [4, 6]), *inputs], [info("y", None)])

    place = info("p", [], TensorProto.INT64)
    whole = helper.make_node("SplitToSequence", ["x"], ["s"], name="bad")
    at = helper.make_node("SequenceAt", ["s", "p"], ["y"], name="at")
    refused(model([whole, at], [place]), "'at'", "takes the element of a sequence that data say")
    by_data = helper.make_node("SplitToSequence", ["x", "p"], ["s"], name="bad")
    refused(model([by_data, at], [place]), "'bad'", "splits a tensor as its data say")
    other = helper.make_node("ConcatFromSequence", ["s"], ["y"], name="join", axis=0)
    refused(model([whole, other], []), "'join'", "reads 's', a sequence")
    long = helper.make_node("SplitToSequence", ["z"], ["s"], name="bad")
    refused(model([long, at], [place, info("z", [2**17])]), "'bad'", "131072 pieces", "65536 together")
