"""What the tests of the command line share."""

import re
from pathlib import Path

from distsim.cli import main

ONNX_MLP = str(Path(__file__).parent / "data" / "mlp.onnx")
PROGRESS = re.compile(r".+ \.\.\. (done|failed), \d+\.\d\d s")


def run(capsys, *arguments: object) -> tuple[str, str]:
    """Run a command that must succeed; return its stdout and stderr."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out, err
