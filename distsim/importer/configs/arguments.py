"""The arguments of Megatron-LM as a file has them: a shell script, a list of arguments, YAML or JSON.

Names are those of the command line (megatron/training/arguments.py), each with ``--`` before it. YAML may be
that of Megatron-LM's own tests (``MODEL_ARGS``), of its ``--yaml-cfg``, or of NeMo, whose names for the same
things are translated.

Tables as YAML writes them, of names, scalars and lists: the part of it that training files use.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from distsim.errors import ImportModelError
from distsim.importer.configs.shell import Script
from distsim.importer.decoders.config_fields import MAX_CONFIG_BYTES, read_config
from distsim.importer.tensors import read_bytes

TELLING = ("--num-layers", "--hidden-size", "--tensor-model-parallel-size", "--micro-batch-size")
"""By which a command is known for one that starts Megatron-LM."""

_SAME = {
    **{
        "encoder-seq-length": "seq-length",
        "num-moe-experts": "num-experts",
        "encoder-num-layers": "num-layers",
    },
    **{"model-parallel-size": "tensor-model-parallel-size", "layernorm-epsilon": "norm-epsilon"},
    **{"activations-checkpoint-granularity": "recompute-granularity", "layernorm-type": "normalization"},
    **{"activations-checkpoint-method": "recompute-method", "gated-linear-unit": "swiglu"},
    **{"activations-checkpoint-num-layers": "recompute-num-layers", "gradient-clip-val": "clip-grad"},
    **{"virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank"},
    **{"num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers"},
    **{
        "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
        "rotary-percentage": "rotary-percent",
    },
    **{"checkpoint-activations": "recompute-activations", "use-flash-attention": "use-flash-attn"},
}
"""Other names of arguments: of older versions, of TransformerConfig, and of NeMo."""


_ASIDE = (
    *("ENV_VARS", "TEST_TYPE", "METRICS", "LAUNCHER", "data", "exp_manager", "name", "defaults", "sched"),
    *("accelerator", "max_steps", "mcore_gpt", "pre_process", "post_process", "megatron_amp_O2", "logger"),
    *(
        "use_scaled_init_method",
        "max_epochs",
        "enable_checkpointing",
        "log_every_n_steps",
        "grad_allreduce_chunk_size_mb",
    ),
    *(
        "val_check_interval",
        "limit_val_batches",
        "limit_test_batches",
        "enable_model_summary",
        "restore_from_path",
    ),
)
"""Names of YAML that bear on nothing here."""


class MegatronArguments(NamedTuple):
    """Arguments by name with their values; the script that they are for; and GPUs that it is started on."""

    table: dict[str, object]
    script: str
    devices: int | None
    notes: tuple[str, ...] = ()


def read_arguments(path: str | os.PathLike[str]) -> MegatronArguments:
    """Return the arguments in a file, which is read and not run.

    Raises :class:`ImportModelError` for a file without Megatron-LM's arguments.
    """
    origin = os.fspath(path)
    if origin.endswith(".json"):
        table = read_config(path)
        inner = table.get("args")
        return _of_tables({"args": cast(object, inner)} if isinstance(inner, dict) else table)
    try:
        text = read_bytes(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ImportModelError(f"{path} is not text in UTF-8: {error.reason}") from error
    if "\0" in text:
        raise ImportModelError(f"{path} is not text: it holds bytes that are no characters")
    found = (
        _of_tables(read_indented(text, origin)) if origin.endswith((".yaml", ".yml")) else _of_script(text)
    )
    if not any(name in found.table for name in TELLING):
        also = f"; it includes {', '.join(found.notes)}, which is not read" if found.notes else ""
        raise ImportModelError(
            f"{path} has no command with Megatron-LM's arguments, such as {' or '.join(TELLING[:2])}{also}"
        )
    return found


# --- scripts ------------------------------------------------------------------------------------------------


def _of_script(text: str) -> MegatronArguments:
    script = Script.of(text)
    commands = [_split(words) for words in script.commands]
    lists = [words for words in commands if words and words[0].startswith("--")]
    known = [words for words in commands if _telling(words) and words not in lists]
    if known:
        words = max(known, key=lambda words: (_telling(words), len(words)))
    elif any(_telling(words) for words in lists):
        words = [word for each in lists for word in each]
    else:  # a fragment that sets variables for a script that includes it
        values = [_split(value) for value in script.variables.values()]
        words = [word for each in values if any(w.startswith("--") for w in each) for word in each]
    first = next((number for number, word in enumerate(words) if word in TELLING), len(words))
    programs = [number for number, word in enumerate(words[:first]) if word.endswith(".py")]
    at = programs[-1] if programs else -1
    program = words[at] if programs else ""
    before, own = words[: max(at, 0)], words[at + 1 :]
    return MegatronArguments(_table(own), program, _devices(before), tuple(script.sourced))


def _telling(words: Sequence[str]) -> int:
    return sum(name in words for name in TELLING)


def _split(words: Sequence[str]) -> list[str]:
    """Return words with those apart that hold several: of ``"--option value"``, or of ``bash -c "..."``."""
    found: list[str] = []
    for word in words:
        if re.match(r"\s*--\S+\s", word) or re.search(r"\s--[a-z]", word):
            try:
                found += shlex.split(word)
            except ValueError:  # quotes that do not close
                found += word.split()
        else:
            found.append(word)
    return found


def _table(words: Sequence[str]) -> dict[str, object]:
    """Return the values by name: true for an option alone, a list for one with several.

    As in argparse the last one of several counts.
    """
    table: dict[str, object] = {}
    for name, values in _options(words):
        held = [number_of(value) for value in values]
        table[name] = True if not held else held[0] if len(held) == 1 else held
    return table


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                yield name, values
            plain, equals, value = word.partition("=")
            name, values = _named(plain), [value] if equals else []
        elif name:
            values.append(word)


def _named(name: str) -> str:
    plain = name.lstrip("-").replace("_", "-").lower()
    return f"--{_SAME.get(plain, plain)}" if plain else ""


def _devices(words: Sequence[str]) -> int | None:
    """Return how many GPUs a launcher starts on, where it says both nodes and those of each."""
    table = _table(words)
    nodes, each = table.get("--nnodes"), table.get("--nproc-per-node")
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None


# --- tables -------------------------------------------------------------------------------------------------


def _of_tables(table: Mapping[str, object]) -> MegatronArguments:
    """Return the arguments of a table, those of the tables in it among them."""
    found: dict[str, object] = {}
    for name, value in _leaves(table, 0):
        if isinstance(value, str) and value.startswith("${"):
            continue  # as another field, which says it
        if value is not None and value is not False:
            found[_named(name)] = value
        elif value is False:
            _negate(found, name)
    _translate(found)
    nodes, each = found.pop("--num-nodes", None), found.pop("--devices", None)
    devices = nodes * each if isinstance(nodes, int) and isinstance(each, int) else None
    return MegatronArguments(found, "", devices)


def _leaves(table: Mapping[str, object], depth: int) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if name.startswith("_") or name in _ASIDE:
            continue
        if name == "tokenizer" and isinstance(value, dict):
            yield "tokenizer-model", cast(Mapping[str, object], value).get("type")
            continue
        if name == "optim" and isinstance(value, dict):
            yield (
                "use-distributed-optimizer",
                "distributed" in str(cast(Mapping[str, object], value).get("name")),
            )
            continue
        if isinstance(value, dict) and depth < 10:
            yield from _leaves(cast(Mapping[str, object], value), depth + 1)
        else:
            yield name, value


def _negate(found: dict[str, object], name: str) -> None:
    """Say what a switch that is off means where Megatron-LM's command line says it by another."""
    off = {
        "add-bias-linear": "--disable-bias-linear",
        "bias": "--disable-bias-linear",
        "share-embeddings-and-output-weights": "--untie-embeddings-and-output-weights",
    }.get(name.lstrip("-").replace("_", "-"))
    if off:
        found[off] = True


def _translate(found: dict[str, object]) -> None:
    """Put NeMo's ways of saying things as Megatron-LM's."""
    precision = str(found.pop("--precision", ""))
    if re.fullmatch(r"bf16(-mixed|-true)?|16-mixed|16", precision):
        found["--bf16" if "bf16" in precision else "--fp16"] = True
    found.pop("--share-embeddings-and-output-weights", None)
    found.pop("--bias", None)
    found.pop("--add-bias-linear", None)
    if re.search(r"swiglu", str(found.get("--activation", ""))):
        found["--swiglu"] = True
    found.pop("--activation", None)
    groups, heads = found.get("--num-query-groups"), found.get("--num-attention-heads")
    if isinstance(groups, int) and groups != heads:
        found["--group-query-attention"] = True
    if found.get("--recompute-granularity") == "selective" and found.get("--recompute-method"):
        del found["--recompute-method"]
    normalization = found.get("--normalization")
    if isinstance(normalization, str):
        found["--normalization"] = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(
            normalization.lower(), normalization
        )


MAX_LINES, MAX_NESTED = 20_000, 20


def scalar_of(text: str) -> object:
    """Return a word as what it stands for: a number, true, false, nothing, a list in brackets, or text.

    >>> scalar_of("1e-5"), scalar_of("True"), scalar_of("[1, a]"), scalar_of("null")
    (1e-05, True, [1, 'a'], None)
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("[") and text.endswith("]") and "[" not in text[1:]:
        return [scalar_of(item) for item in text[1:-1].split(",") if item.strip()]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "none", "~", ""):
        return None
    return number_of(text)


def number_of(text: str) -> object:
    """Return a text as the number that it is, or as it is."""
    if re.fullmatch(r"[+-]?[0-9]{1,30}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(e[+-]?[0-9]{1,3})?", text, re.I | re.A):
        return float(text)
    return text


def read_indented(text: str, origin: str) -> dict[str, object]:
    """Return the table of a text in YAML, in which the last of several values counts.

    Raises :class:`ImportModelError` that names the line.
    """
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise ImportModelError(f"{origin} has more than {MAX_LINES} lines; a training's file is a page")
    whole: dict[str, object] = {}
    stack: list[tuple[int, dict[str, object]]] = [(-1, whole)]
    last: tuple[int, dict[str, object], str] | None = None  # a name that what is indented below belongs to
    before = 0
    for number, line in enumerate(lines, 1):
        plain = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        if not plain.strip() or plain.strip() == "---":
            continue
        indent = len(plain) - len(plain.lstrip(" "))
        item = re.match(r"\s*-(?:\s+(.*)|)$", plain)
        if item and last is not None and indent >= last[0]:
            held = last[1][last[2]]
            last[1][last[2]] = [*(held if isinstance(held, list) else []), scalar_of(item[1] or "")]
            continue
        match = re.match(r"\s*(\"[^\"]+\"|'[^']+'|[^\s:][^:]*):(?:\s+(.*)|)$", plain)
        if match is None and indent > before:
            continue  # of a text of several lines
        if match is None:
            raise ImportModelError(f"{origin}: line {number}, {plain.strip()[:60]!r}, is not name: value")
        if last is not None and indent > last[0] and last[1][last[2]] is None:
            inner: dict[str, object] = {}
            last[1][last[2]] = inner
            stack.append((last[0], inner))
        while stack[-1][0] >= indent:
            stack.pop()
        if len(stack) > MAX_NESTED:
            raise ImportModelError(f"{origin}: line {number} is nested more than {MAX_NESTED} deep")
        name = match[1].strip("\"'")
        table = stack[-1][1]
        before = indent
        table[name] = scalar_of(match[2] or "")
        last = (indent, table, name) if match[2] is None or not match[2].strip() else None
    return whole
