"""Damaged ONNX files, each read and used as a user's commands would: what each of them comes to.

A file ends in a result, in an error of the library (``limit`` where it says that the file passes one of its
limits), or is a defect: another exception, a warning, a crash, more than :data:`MEMORY` or :data:`SECONDS`.
What no check foresaw and only the last resort of the import caught (an IndexError behind a library error, a
MemoryError, an error without a reason) is a defect too. Of each kind of defect one file is kept; it and its
number, which makes it again with the same seed, are printed::

    python experiments/fuzz_files.py --count 10000 --seed 1
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

import onnx
from fuzz_damage import damaged
from fuzz_models import light_models, node_models, own_models

from distsim.compose import parallelize
from distsim.errors import DistsimError, ModelLimitError
from distsim.executor import CostModel, Simulator, UncostedOperatorWarning
from distsim.hardware import load_cluster
from distsim.importer import import_from_onnx, symbolic_dimensions
from distsim.ir import pformat
from distsim.plan import Plan
from distsim.report import summarize
from distsim.transforms import Adam, add_loss, differentiate, outline

MEMORY = 5 << 30
"""Address space of the process that reads the files, in bytes: the 4 GiB that ``importer.limits`` states, and
what is mapped before the first file."""

SECONDS = 10.0
"""What one file may take; 20 ms is usual."""

PLANS = (
    "dp=1",
    "dp=1",
    "dp=2",
    "tp=2",
    "pp=2,microbatches=2",
    "dp=2,tp=2",
    "dp=2,zero=3",
)


@dataclass
class Record:
    """What the files came to: ``result``, ``limit``, a type of error or ``DEFECT``.

    ``reasons``: the errors by their first words; ``defects``: kind -> number of the first file that has it.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    defects: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        total = sum(self.outcomes.values())
        lines = [f"{total} files, {self.seconds:.0f} s, {len(self.defects)} kinds of defects"]
        lines += [f"{count:8d}  {outcome}" for outcome, count in self.outcomes.most_common()]
        return "\n".join(lines)


def fuzz_files(
    count: int, seed: int, folder: Path, others: bool = True, models: Sequence[Path] = ()
) -> Record:
    """Damage ``count`` models, use each, and keep a file of each kind of defect in ``folder``.

    ``others``: the models of onnx's own tests of operators too, some 1,800, which take 4 s to make;
    ``models``: files of more sound models.
    """
    record, start, number = Record(), time.perf_counter(), 0
    options = [*(["--others"] if others else []), *(["--models", *map(str, models)] if models else [])]
    while number < count:
        for at, (kind, reason, detail) in _worker(seed, number, count, folder, options):
            number = at + 1
            record.outcomes[kind] += 1
            record.reasons[f"{kind}: {reason}"] += 1
            if kind == "DEFECT" and reason not in record.defects:
                record.defects[reason] = at
                kept = folder / f"defect_{seed}_{at}"
                kept.with_suffix(".onnx").write_bytes(_case(folder, seed).read_bytes())
                kept.with_suffix(".txt").write_text(f"{reason}\n{detail}", encoding="utf-8")
    record.seconds = time.perf_counter() - start
    return record


Outcome = tuple[str, str, str]
"""Kind, reason, and for a defect the traceback."""


def _worker(
    seed: int, first: int, count: int, folder: Path, options: Sequence[str]
) -> Iterator[tuple[int, Outcome]]:
    """Yield number and outcome of file after file, until a file ends the process or all are done."""
    command = [sys.executable, __file__, "--work", str(first), "--seed", str(seed), "--count", str(count)]
    command += ["--folder", str(folder), *options]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, 0, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        wait = SECONDS + 60  # the imports and the models, before the first file
        for number in range(first, count):
            ready = select.select([process.stdout], [], [], wait)[0]
            said = process.stdout.readline() if ready else b""
            if not said:
                process.kill()
                text = process.stderr.read().decode(errors="replace")
                if not _case(folder, seed).exists():  # it did not come to the first file
                    raise SystemExit(text)
                where = re.search(r"/(distsim/[^\n]*)", text)
                how = f"exit status {process.wait()}" if ready else f"more than {SECONDS:.0f} s"
                yield number, ("DEFECT", f"{how} in {where[1] if where else '?'}", text[-6000:])
                return
            yield number, tuple(json.loads(said))
            process.stdin.write(b"\n")  # the file may go
            wait = SECONDS


# What the process does that reads the files


def _work(options: argparse.Namespace) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    models = [
        *own_models(),
        *light_models(),
        *(onnx.load(path, load_external_data=False) for path in options.models),
    ]
    others = list(node_models()) if options.others else []
    path = _case(options.folder, options.seed)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", UncostedOperatorWarning)
    for number in range(options.work, options.count):
        rng = random.Random(f"{options.seed}-{number}")
        path.write_bytes(damaged(rng.choice(others if others and rng.random() < 0.4 else models), rng))
        faulthandler.dump_traceback_later(0.9 * SECONDS)  # says where a file hangs
        print(json.dumps(outcome_of(path, rng)), flush=True)
        faulthandler.cancel_dump_traceback_later()
        sys.stdin.readline()  # until the file is kept


def _case(folder: Path, seed: int) -> Path:
    """Return where the file lies that is used now."""
    return folder / f"case_{seed}.onnx"


def outcome_of(path: Path, rng: random.Random) -> Outcome:
    """Return what a file comes to."""
    try:
        _use(path, rng)
    except DistsimError as error:
        unforeseen = _unforeseen(error)
        if unforeseen is not None:
            return _defect(f"{unforeseen} behind {type(error).__name__}", error)
        kind = "limit" if isinstance(error, ModelLimitError) else type(error).__name__
        return kind, _first_words(str(error)), ""
    except BaseException as error:
        return _defect(type(error).__name__, error)
    return "result", "", ""


def _use(path: Path, rng: random.Random) -> None:
    """Do with a file what the commands do; raise what they raise."""
    sizes = {name: rng.choice((1, 2, 4)) for name in symbolic_dimensions(path)}
    if rng.random() < 0.1:
        function, _ = import_from_onnx(path, load_values=True, bindings=sizes)
    else:
        function = import_from_onnx(path, bindings=sizes)
    pformat(function)
    outlined = outline(function)
    pformat(outlined)
    training = differentiate(add_loss(outlined if rng.random() < 0.5 else function), Adam())
    topology = load_cluster("dgx-a100")
    program = parallelize(training, Plan.parse(rng.choice(PLANS)), topology)
    summarize(Simulator(CostModel(topology)).simulate(program), 1, None)


def _unforeseen(error: BaseException) -> str | None:
    """Return the exception that no check foresaw behind a library error; None when there is none."""
    if not re.sub(r"^node .*? \([\w.]*\):?", "", str(error), flags=re.DOTALL).strip():
        return "no reason"
    text, cause = str(error), error.__cause__
    while cause is not None:
        name = type(cause).__name__
        if isinstance(cause, (MemoryError, RecursionError)) or f"{name}: " in text:
            return name  # a last resort names the type of what it caught, a check says what is wrong
        text, cause = str(cause), cause.__cause__
    return None


def _defect(kind: str, error: BaseException) -> Outcome:
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    frames = [*traceback.extract_tb(error.__traceback__), *traceback.extract_tb(root.__traceback__)]
    own = [frame for frame in frames if "/distsim/" in frame.filename]
    where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "?"
    text = "".join(traceback.format_exception(error))
    return "DEFECT", f"{kind} in {where}: {_first_words(str(root))}", text[-6000:]


def _first_words(text: str) -> str:
    """Return the beginning without names and numbers, so that equal reasons look equal."""
    text = re.sub(r"^node .*? \(([\w.]*)\):? ", r"\1: ", text[:2000], flags=re.DOTALL)
    return " ".join(re.sub(r"'[^']*'|[-\d.]+|\[[^]]*\]", "_", text).split()[:8])[:100]


def main() -> None:
    """Fuzz; print what the files came to and where the files of defects are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="how many files")
    parser.add_argument("--seed", type=int, default=0, help="of the damage")
    parser.add_argument("--folder", type=Path, help="where files of defects are kept (default: a new one)")
    parser.add_argument("--models", type=Path, nargs="+", default=[], help="files of more sound models")
    parser.add_argument("--reasons", type=int, default=0, help="print that many of the commonest errors")
    parser.add_argument("--others", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        _work(options)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fuzz_files_"))
    folder.mkdir(parents=True, exist_ok=True)
    record = fuzz_files(options.count, options.seed, folder, models=options.models)
    print(record)
    for reason, count in record.reasons.most_common(options.reasons):
        print(f"{count:8d}  {reason}")
    for reason, number in record.defects.items():
        print(f"DEFECT {reason}\n    {folder}/defect_{options.seed}_{number}.onnx")
    sys.exit(bool(record.defects))


if __name__ == "__main__":
    main()
