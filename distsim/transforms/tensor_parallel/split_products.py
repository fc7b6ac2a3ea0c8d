"""Products in chunks, beside the collectives over tensor-parallel ranks that bring together their rows.

With ``sp=on`` each rank has a part of the rows that a product by columns reads, and of those that a product
by rows makes. Gathered first and scattered after, they would keep the product waiting. Split, it runs on the
parts as they come (Wang et al. 2023, "Overlap communication with dependent computation via decomposition"):

- an all-gather of rows becomes a ring: the rank multiplies its own part, meanwhile passes it on and gets that
  of the rank before, which it multiplies next, and so on (Transformer Engine's ``ring_exchange`` of
  ``qkv_fprop``, ``fc1_fprop``, ``proj_dgrad`` and ``fc2_dgrad``, from memory; torch's async TP,
  ``_pipelined_all_gather_and_consume``);
- a product whose rows are reduce-scattered runs chunk by chunk, as many as there are ranks or as divide a
  rank's rows below that, each scattered while the next is multiplied (Transformer Engine's ``pipeline`` of
  ``proj_fprop`` and ``fc2_fprop``).

What else reads the rows gets them whole, in a buffer into which the parts arrive, as results are written
where they belong (:mod:`distsim.ops.chunks`). The gradient of an input is scattered beside that of the
weight, its rows gathered again for that beside the gradient of the input (Transformer Engine's ``bulk``), as
without. A cast of the rows, and a bias that the product's kernel adds, are split with it.

Chunks run on several streams in turn, so that the tiles of one fill what another leaves of a wave
(Transformer Engine, ``_stream_compute[i % _stream_compute.size()]``; torch's ``backend_stream``): each says
how many there are (``beside``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distsim.cache import Cache
from distsim.errors import IRError
from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Function, Literal, Mesh, Op, Value, substitute
from distsim.ir.registry import output_types
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes
from distsim.ops import operator, sharding_rule, signature_of, work
from distsim.ops.parts import Parts
from distsim.ops.sharding_rule import factors_of
from distsim.program.block import RewrittenOps, StageBlocks, called, rewritten_stages
from distsim.transforms.kernels.policies import Kernels, fusible, is_epilogue, is_pointwise

DIRECT = {"direct": 1}
"""Of what chunks move: kernels write to their peers' memory, without NCCL (Transformer Engine's
comm_gemm_overlap/userbuffers; torch's _symmetric_memory)."""

_SPLIT = Cache[Function, RewrittenOps | None]("functions whose products are split, by function and policy", 4)


def split_products(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages with products split, if ``kernels`` says so.

    Those that share Functions share them still.
    """
    if not kernels.split:
        return tuple(stages)
    return rewritten_stages(stages, lambda function: split(function, kernels))


def split(function: Function, kernels: Kernels) -> RewrittenOps | None:
    """Return a function with its products split, those of callees too; None where there are none."""
    return _SPLIT.get(function, kernels, lambda: _split(function, kernels))


def _split(function: Function, kernels: Kernels) -> RewrittenOps | None:
    ops = called(function, lambda callee: split(callee, kernels))
    return RewrittenOps.of(function, ops, [*_Chunking(function, ops, kernels).ops()])


class MovedRows(NamedTuple):
    """What a collective moves: the rows, in a dimension divided in pieces, over ``ranks`` of an axis."""

    axis: str
    ranks: int
    dim: int
    pieces: Parts

    @staticmethod
    def of(op: Op, op_type: str) -> MovedRows | None:
        """Return what a collective of this type over tensor-parallel ranks moves; None for another op."""
        if op.op_type != op_type or len(op.inputs) != 1 or not over_tensor(op.attributes["axis"]):
            return None
        mesh = as_tensor(op.inputs[0].type, op.inputs[0].name).device
        ranks = mesh.axis_size(op.attributes["axis"]) if isinstance(mesh, Mesh) else 1
        found = MovedRows(op.attributes["axis"], ranks, op.attributes["dim"], op.attributes.get("pieces"))
        return found if ranks > 1 else None

    def attributes(self, dim: int, **more: object) -> Attributes:
        """Return the attributes of an op that takes or puts such rows in a dimension of a value."""
        pieces = {} if self.pieces is None else {"pieces": self.pieces}
        return Attributes({"dim": dim, **pieces, **more})


class _Chunking:
    """The products of one function, in chunks."""

    def __init__(self, function: Function, ops: Sequence[Op], kernels: Kernels) -> None:
        self.given, self.kernels = ops, kernels
        self.kept = set(function.outputs)
        self.maker = {value: place for place, op in enumerate(ops) for value in op.outputs}
        self.readers: dict[Value, list[int]] = {}
        for place, op in enumerate(ops):
            for value in dict.fromkeys(op.inputs):
                self.readers.setdefault(value, []).append(place)
        self.instead: dict[int, list[tuple[Op, int]]] = {}

    def ops(self) -> Iterator[tuple[Op, int]]:
        """Yield the ops, each with the place of the one that it is of."""
        for op_type, split_at in (("MPIAllgather", self._gathered), ("MPIReduceScatter", self._scattered)):
            for place, op in enumerate(self.given):
                rows = MovedRows.of(op, op_type)
                if rows is not None:
                    split_at(place, rows)
        for place, op in enumerate(self.given):
            yield from self.instead.get(place, [(op, place)])

    def _replace(self, at: int, places: Sequence[int], made: list[tuple[Op, int]]) -> None:
        """Have ``made`` stand at a place, and nothing at the other ``places``."""
        self.instead |= {place: list[tuple[Op, int]]() for place in places} | {at: made}

    # --- rows that are gathered: a ring -------------------------------------------------------------

    def _gathered(self, gather: int, rows: MovedRows) -> None:
        """Put a ring in the place of the first product that reads gathered rows."""
        whole = self.given[gather].outputs[0]
        dims = {whole: rows.dim}
        chosen = self._by_rows(whole, dims)
        if not chosen or min(self.readers[whole]) < chosen[0]:
            return
        asked = [value for value in dims if self._is_read(value, chosen)]
        made, so_far = _Made(), dict[Value, Value]()
        part = self.given[gather].inputs[0]
        every = Attributes(
            {"value": Literal(np.arange(rows.ranks)), "device": as_tensor(part.type, part.name).device}
        )
        ranks = made.add(gather, Op("Constant", (), (), every))
        for step in range(rows.ranks):
            last, following = step + 1 == rows.ranks, part
            if not last:
                shift = Op("MPIShift", (part,), (), Attributes({"axis": rows.axis, **DIRECT}))
                following = made.add(gather, replace(shift, name=self.given[gather].name))
            back = Attributes({"axis": rows.axis, "pieces": (rows.ranks,), "back": step})
            owner = made.add(gather, Op("LocalPlaces", (ranks,), (), back))
            own = {whole: part}
            for place in chosen:
                chunk = _of_chunk(self.given[place], own, dims, rows.ranks)
                own[self.given[place].outputs[0]] = made.add(place, chunk)
            for value in asked:
                put = rows.attributes(dims[value], count=rows.ranks)
                before = (so_far[value],) if value in so_far else ()
                op = Op("PutPart", (own[value], owner, *before), (), put)
                so_far[value] = made.add(self.maker[value], op, value if last else None)
            part = following
        self._replace(chosen[0], (gather, *chosen), made.ops)

    def _by_rows(self, whole: Value, dims: dict[Value, int]) -> list[int]:
        """Return the places of the ops that are split by gathered rows, in order; none without a product.

        ``dims`` is given the dimension that has the rows of what they make.
        """
        chosen: list[int] = []
        ahead = {whole}  # of products
        for place in range(self.maker[whole] + 1, len(self.given)):
            op = self.given[place]
            read = [value for value in op.inputs if value in dims]
            dim = _row_dim(op, read[0], dims[read[0]]) if len(read) == 1 else None
            if dim is None or place in self.instead:
                continue
            (made,) = op.outputs
            casts = read[0] in ahead and self._is_cast(op, dim)
            if not (casts or (_is_product(op) if read[0] in ahead else self._is_bias(op, read[0]))):
                continue
            start = chosen[0] if chosen else place
            if any(self.maker.get(value, -1) >= start for value in op.inputs if value not in dims):
                continue
            chosen.append(place)
            dims[made] = dim
            ahead |= {made} if casts else set()
        return chosen if any(_is_product(self.given[place]) for place in chosen) else []

    def _is_cast(self, op: Op, dim: int) -> bool:
        """Whether an op works element by element on what a product then multiplies row by row."""
        if self.kernels.dtensors or not (fusible(op) and is_pointwise(signature_of(op))):
            return False
        readers = [self.given[place] for place in self.readers.get(op.outputs[0], ())]
        return any(_is_product(each) and _row_dim(each, op.outputs[0], dim) is not None for each in readers)

    def _is_bias(self, op: Op, product: Value) -> bool:
        """Whether an op adds the bias of a product in the product's kernel."""
        kernels, first = self.kernels, self.given[self.maker[product]]
        if not (kernels.epilogues and _is_product(first) and is_epilogue(first, op)):
            return False
        if product in self.kept or len(self.readers[product]) > 1:
            return False
        readers = [self.given[place] for place in self.readers.get(op.outputs[0], ())]
        joins = kernels.joins
        return joins is None or not any(fusible(each) and joins(op, each) for each in readers)

    def _is_read(self, value: Value, chosen: Sequence[int]) -> bool:
        """Whether more than the ops that are split need a value."""
        return value in self.kept or not set(self.readers.get(value, ())) <= set(chosen)

    # --- rows that are scattered: chunk by chunk ----------------------------------------------------

    def _scattered(self, scatter: int, rows: MovedRows) -> None:
        """Split a product whose rows are scattered, unless it is a gradient."""
        summed, result = self.given[scatter].inputs[0], self.given[scatter].outputs[0]
        place = self.maker.get(summed, -1)
        if place < 0 or place in self.instead or self.readers[summed] != [scatter] or summed in self.kept:
            return
        product = self.given[place]
        found = [
            (value, dim)
            for value in dict.fromkeys(product.inputs)
            for dim in range(as_tensor(value.type, value.name).rank)
            if _row_dim(product, value, dim) == rows.dim
        ]
        size = as_tensor(summed.type, summed.name).shape[rows.dim] // rows.ranks
        count = max(n for n in range(1, rows.ranks + 1) if size % n == 0)
        if (
            not _is_product(product)
            or operator(product.op_type).gradient is None
            or len(found) != 1
            or count == 1
        ):
            return
        ((value, dim),) = found
        made, whole = _Made(), tuple[Value, ...]()
        for chunk in range(count):
            part = rows.attributes(dim, axis=rows.axis, chunk=chunk, count=count)
            taken = made.add(place, Op("RankRows", (value,), (), part))
            product_of = _of_chunk(product, {value: taken}, {summed: rows.dim}, count)
            plain = Attributes({"axis": rows.axis, "dim": rows.dim, **DIRECT})
            own = replace(self.given[scatter], inputs=(made.add(place, product_of),), attributes=plain)
            put = Attributes({"dim": rows.dim, "chunk": chunk, "count": count})
            op = Op("PutChunk", (made.add(scatter, own), *whole), (), put)
            whole = (made.add(scatter, op, result if chunk + 1 == count else None),)
        self._replace(scatter, (place,), made.ops)


class _Made:
    """Ops in the place of others, and of which each of them is."""

    def __init__(self) -> None:
        self.ops: list[tuple[Op, int]] = []

    def add(self, source: int, op: Op, result: Value | None = None) -> Value:
        """Add an op with a new value of its type, or with one that has readers; return what it makes."""
        inputs = tuple([value.type for value in op.inputs])
        (type_,) = output_types(op.op_type, op.attributes, inputs, (), op.version)
        name = op.inputs[0].name if op.inputs else op.op_type.lower()
        value = Value(op.outputs[0].name if op.outputs else name, type_) if result is None else result
        if value.type != type_:
            raise IRError(f"{value.name} is {value.type}; chunks of it make {type_}")
        self.ops.append((replace(op, outputs=(value,)), source))
        return value


def _of_chunk(op: Op, own: Mapping[Value, Value], dims: Mapping[Value, int], count: int) -> Op:
    """Return an op on a chunk of the rows, ``own`` being what it has of them: one part of ``count``."""
    rule, (made,) = sharding_rule(signature_of(op)), op.outputs
    shape, attributes = [*as_tensor(made.type, made.name).shape], op.attributes
    shape[dims[made]] //= count
    if rule is not None and rule.localize is not None:
        attributes = rule.localize(attributes, (tuple(shape),))
    if _is_product(op):
        attributes = Attributes({**attributes, "beside": count})
    return replace(op, inputs=substitute(op.inputs, own), attributes=attributes)


def _is_product(op: Op) -> bool:
    """Whether an op is a product of matrices, as of a layer's weights."""
    demand = work(signature_of(op)) if fusible(op) and len(op.outputs) == 1 else None
    return demand is not None and demand.matrix


def _row_dim(op: Op, value: Value, dim: int) -> int | None:
    """Return the dimension of an op's one output that depends row by row on one of an operand, if any."""
    if op.subfunctions or len(op.outputs) != 1 or op.inputs.count(value) != 1:
        return None
    rule = sharding_rule(signature_of(op))
    label = None if rule is None else rule.inputs[op.inputs.index(value)][dim]
    if (
        rule is None
        or not isinstance(label, str)
        or {label} & {*rule.whole, *rule.mean, *rule.decompositions}
    ):
        return None
    carried = [each for dims in rule.inputs for each in dims if label in factors_of(each)]
    places = [place for place, each in enumerate(rule.outputs[0]) if label in factors_of(each)]
    if len(carried) != 1 or len(places) != 1 or rule.outputs[0][places[0]] != label:
        return None
    return places[0]
