"""The split that torchtitan makes: layers counted, not timed."""

from __future__ import annotations

from distsim.errors import PartitionError
from distsim.stage_balance.cost import check_count


def default_split(layers: int, stages: int, input_weight: int = 1, output_weight: int = 1) -> tuple[int, ...]:
    """Return how many of ``layers`` each of ``stages`` holds, as torchtitan splits a language model.

    The embedding, on the first stage, counts as ``input_weight`` layers, the final norm and the output
    head, on the last, as ``output_weight``. All these are divided evenly, the remainder one each to the
    first stages. A first or last stage may hold no layer. (torchtitan, ``pipeline_parallel.py``,
    ``generate_llm_fqn_per_model_part``, 2025.)

    Raises :class:`PartitionError` for fewer than one stage, numbers that are negative or not whole, more
    stages than layers with the weights, and a weight over what the smallest stage holds.

    >>> default_split(6, 4), default_split(12, 4), default_split(16, 4)
    ((1, 2, 2, 1), (3, 4, 3, 2), (4, 5, 4, 3))
    """
    check_count("stages", stages)
    for name, number in (
        ("layers", layers),
        ("input_weight", input_weight),
        ("output_weight", output_weight),
    ):
        check_count(name, number, 0)
    if stages == 1:
        return (layers,)
    total = layers + input_weight + output_weight
    counted = f"{layers} layers, input_weight={input_weight} and output_weight={output_weight}"
    least, more = divmod(total, stages)
    if least == 0:
        raise PartitionError(
            f"{stages} stages, but only {total} to divide ({counted}), so some would be empty; use at most "
            f"{max(total, 1)} stages"
        )
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
        if weight > least:
            raise PartitionError(
                f"{name}={weight} is more than the {least} that the smallest of {stages} stages holds "
                f"({counted}); use fewer stages or a smaller weight"
            )
    sizes = [least + (stage < more) for stage in range(stages)]
    sizes[0] -= input_weight
    sizes[-1] -= output_weight
    return tuple(sizes)
