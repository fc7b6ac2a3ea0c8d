"""Generated problems and functions for the tests of partitions, and their rules, checked independently."""

from __future__ import annotations

import random

from distsim.device_placement import Item, PartitionDevice, Problem
from distsim.ir import FunctionMaker
from distsim.ir.type import Float, Tensor


def random_problem(seed, most_ops=14):
    """Outside inputs among ops that read recent items; some ops are embeddings, next to each other."""
    chance = random.Random(seed)
    items = [Item("x0", (), 4 * chance.randint(1, 8), 0, is_op=False)]
    items[0] = outside(items[0].name, items[0].output_bytes)
    sparse = False
    for number in range(chance.randint(1, most_ops)):
        if chance.random() < 0.2:
            items.append(outside(f"x{number + 1}", 4 * chance.randint(1, 8)))
        window = range(max(0, len(items) - chance.choice([1, 3, 8])), len(items))
        inputs = tuple(dict.fromkeys(chance.choice(window) for _ in range(chance.randint(1, 3))))
        made = 4 * chance.randint(1, 12)
        sparse = sparse != (chance.random() < 0.2)
        held = made + 4 * chance.randint(20, 60) * sparse + 4 * chance.choice([0, 0, 10, 30])
        latencies = float(chance.randint(0, 20)), float(chance.randint(0, 20))
        items.append(Item(f"op{number}", inputs, made, held, *latencies, True, sparse))
    return Problem(tuple(items), (len(items) - 1,))


def outside(name, size):
    return Item(name, (), size, size, is_op=False)


def random_devices(seed, problem, equal=False):
    """Two to six devices that hold the problem one to three times, at times as many again."""
    chance = random.Random(seed)
    count = chance.randint(2, 6)
    each = problem.total_bytes / count * chance.choice([1.1, 1.5, 2.0, 3.0])
    sizes = [int(each * (1 if equal else chance.choice([0.7, 1, 1, 1.3]))) for _ in range(count)]
    sizes += sizes if chance.random() < 0.3 else []
    return [PartitionDevice(f"d{i}", size, i) for i, size in enumerate(sizes)]


def broken_rules(result, devices):
    """Return the rules of partitions that a result breaks, found from its ops, items and devices alone."""
    items, broken = result.problem.items, []
    homes = {}
    for part in result.parts:
        for op in part.ops:
            homes.setdefault(op, []).append(part.index)
    ops = [n for n, item in enumerate(items) if item.is_op]
    broken += [f"op {op} is in {homes.get(op)}" for op in ops if len(homes.get(op, ())) != 1]
    edges = {(homes[i][0], homes[op][0]) for op in ops for i in items[op].inputs if i in homes}
    edges = {(a, b) for a, b in edges if a != b}
    left = set(range(len(result.parts)))
    while free := {part for part in left if not any(b == part and a in left for a, b in edges)}:
        left -= free
    broken += [f"circle among {left}"] if left else []
    for part in result.parts:
        held = set(part.ops) | {i for op in part.ops for i in items[op].inputs if not items[i].is_op}
        come = {i for op in part.ops for i in items[op].inputs} - held
        need = sum(items[i].total_bytes for i in held) + sum(items[i].output_bytes for i in come)
        single = len(result.parts) == 1  # a single part holds the inputs that nothing reads, too
        if need != part.bytes and not (single and part.bytes >= need):
            broken.append(f"part {part.index} says {part.bytes} bytes and needs {need}")
        if not part.ops or not part.devices or len(set(part.devices)) != len(part.devices):
            broken.append(f"part {part.index} has ops {part.ops} on {part.devices}")
        for name, seen in (
            ("parents", {a for a, b in edges if b == part.index}),
            ("children", {b for a, b in edges if a == part.index}),
        ):
            if set(getattr(part, name)) != seen:
                broken.append(f"part {part.index} says {name} {getattr(part, name)}, they are {seen}")
    for device in devices:
        held = {i for part in result.parts if device in part.devices for i in part.items}
        come = {i for op in held for i in items[op].inputs} - held
        need = sum(items[i].total_bytes for i in held) + sum(items[i].output_bytes for i in come)
        if need > device.memory:
            broken.append(f"{device.name} holds {need} of {device.memory} bytes")
    return broken


def longest_by_ways(result):
    """Return the graph latency by following every way over the parts, and within each part, one by one."""
    items = result.problem.items
    users = result.problem.readers

    def inside(op, part):
        below = [inside(user, part) for user in users[op] if user in part.ops]
        return items[op].latency + max(below, default=0.0)

    def over(part):
        own, ways = max(inside(op, part) for op in part.ops), [0.0]
        for number in part.children:
            child = result.parts[number]
            read = {i for op in child.ops for i in items[op].inputs} & set(part.items)
            moved = sum(items[i].output_bytes for i in read)
            apart = child.devices != part.devices
            ways.append(over(child) + (moved / result.transfer_rate if apart else 0.0))
        return own + max(ways)

    return max(over(part) for part in result.parts)


def random_function(seed, ops=16):
    """Adds, products and activations over values of one shape; some inputs and results are outputs too."""
    chance = random.Random(seed)
    maker = FunctionMaker(f"random{seed}")
    values = [maker.add_input_value(f"x{i}", Tensor(Float(), (3, 3))) for i in range(3)]
    for number in range(ops):
        kind = chance.choice(["Add", "Mul", "MatMul", "Relu", "Tanh", "Split"])
        window = values[-chance.choice([2, 6, 12]) :]
        inputs = [chance.choice(window) for _ in range(1 if kind in ("Relu", "Tanh", "Split") else 2)]
        if kind == "Split":
            first, second = maker.add("Concat", [inputs[0], inputs[0]], {"axis": 0})[0], None
            first, second = maker.add("Split", [first], {"axis": 0, "num_outputs": 2})
            values += [second, first]
        else:
            values.append(maker.add(kind, inputs, None, (), [f"v{number}"])[0])
    read = {value for op in maker.ops for value in op.inputs}
    outputs = [v for v in values if v not in read] + chance.sample(values, 2)
    maker.set_outputs(list(dict.fromkeys(outputs)))
    return maker.finalize()
