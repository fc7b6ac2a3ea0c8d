"""Joint graphs for the tests of save-or-recompute, and what their values are in numbers."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from pathlib import Path

import pytest

from distsim.transforms.recompute.saves import (
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Phase,
    Saves,
    Tag,
    Trait,
)

with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(Path(__file__).parents[1] / "experiments"))
    merge_equal = importlib.import_module("merge_equal").merge_equal

CHEAP = Trait.ALLOWED | Trait.FUSIBLE
TRAITS = [CHEAP, CHEAP, Trait.COMPUTE_INTENSIVE, CHEAP | Trait.VIEW, Trait.NONE, Trait.COLLECTIVE]
TAGS = [None, None, None, None, *Tag]


def primal(name: str, nbytes: int = 4, traits: Trait = Trait.NONE) -> JointNode:
    return JointNode(name, nbytes=nbytes, role=NodeRole.PRIMAL, traits=traits)


def tangent(name: str, nbytes: int = 4) -> JointNode:
    return JointNode(name, nbytes=nbytes, role=NodeRole.TANGENT)


def chain(length: int, nbytes: int = 8, traits: Trait = CHEAP, per_region: int | None = None) -> JointGraph:
    """x -> f0 -> f1 -> ...; the gradient of f_i reads f_i's input."""
    nodes = [primal("x", nbytes), tangent("dy", nbytes)]
    values = [0]
    for i in range(length):
        region = None if per_region is None else i // per_region
        node = JointNode(f"f{i}", (values[-1],), nbytes, phase=Phase.FORWARD, traits=traits, region=region)
        nodes.append(node)
        values.append(len(nodes) - 1)
    gradient = 1
    for i in reversed(range(length)):
        nodes.append(JointNode(f"g{i}", (gradient, values[i]), nbytes, phase=Phase.BACKWARD, traits=CHEAP))
        gradient = len(nodes) - 1
    return JointGraph(tuple(nodes), (values[-1], gradient), 1)


def joint_graph(seed: int, most: int = 12, tags: bool = True) -> JointGraph:
    """A random forward graph of up to ``most`` ops, pairs among them, and backward ops that read some."""
    rng = random.Random(seed)
    nodes = [primal("x", 64), primal("w", 32, Trait.FREE), tangent("dy", 64)]
    forward = [0, 1]
    for i in range(rng.randint(1, most)):
        node = JointNode(
            f"f{i}",
            tuple(rng.sample(forward[-6:], rng.randint(1, 2))),
            nbytes=8 * rng.randint(1, 12),
            phase=Phase.FORWARD,
            tag=rng.choice(TAGS) if tags else None,
            traits=rng.choice(TRAITS),
            seconds=float(rng.randint(1, 50)),
            region=rng.choice([None, 0, 1]),
            key=rng.choice([None, "op"]),
        )
        nodes.append(node)
        forward.append(len(nodes) - 1)
        if rng.random() < 0.15:
            parent = len(nodes) - 1
            # The items carry the bytes; they have no tags, which might contradict the tuple's.
            nodes[parent] = replace(node, kind=NodeKind.TUPLE, nbytes=0, tag=None, traits=CHEAP, key=None)
            for item in range(2):
                name = f"f{i}.{item}"
                nodes.append(JointNode(name, (parent,), 8, phase=Phase.FORWARD, item=item, traits=CHEAP))
            forward[-1:] = [len(nodes) - 2, len(nodes) - 1]
    output = forward[-1]
    gradient, gradients = 2, []
    for i, value in enumerate(reversed(forward)):
        read = [gradient, value] if rng.random() < 0.6 else [gradient]
        nodes.append(JointNode(f"g{i}", tuple(read), 16, phase=Phase.BACKWARD, traits=CHEAP))
        gradient = len(nodes) - 1
        gradients.append(gradient)
    return JointGraph(tuple(nodes), (output, rng.choice(gradients), gradient), 1)


def numbers(graph: JointGraph, ops: tuple[int, ...], given: dict[int, int]) -> dict[int, int]:
    """The values of ``ops``, each an arbitrary function of its op and its inputs, which must be there."""
    values = dict(given)
    for position in ops:
        node = graph.nodes[position]
        what = node.key if node.key is not None else node.name
        values[position] = hash((what, node.item, *(values[each] for each in node.inputs)))
    return values


def computed(graph: JointGraph) -> list[int]:
    """The outputs of the joint graph, op by op."""
    given = {i: i for i, node in enumerate(graph.nodes) if node.role is not NodeRole.OP}
    ops = tuple(i for i, node in enumerate(graph.nodes) if node.role is NodeRole.OP)
    values = numbers(graph, ops, given)
    return [values[each] for each in graph.outputs if each is not None]


def computed_apart(saves: Saves) -> list[int]:
    """The outputs of the two passes, with nothing between them but the saved values."""
    graph = saves.graph
    forward = {i: i for i, node in enumerate(graph.nodes) if node.role is NodeRole.PRIMAL}
    values = numbers(graph, saves.forward, forward)
    backward = {i: i for i, node in enumerate(graph.nodes) if node.role is NodeRole.TANGENT}
    backward |= {each: values[each] for each in saves.saved}
    late = numbers(graph, saves.backward, backward)
    results = [values[each] for each in graph.forward_outputs if each is not None]
    return results + [late[each] for each in graph.backward_outputs if each is not None]
