"""What an error has to say."""

import re

import pytest

from distsim.errors import DistsimError


def says(error: type[DistsimError], *parts: object):
    """The error is of this class, is the built-in it resembles, and is one line with all of the parts."""
    pattern = "".join(f"(?=.*{re.escape(str(part))})" for part in parts)
    return pytest.raises(error, match=rf"\A{pattern}.+\Z")
