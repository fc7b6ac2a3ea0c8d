"""How the documentation is built: ``sphinx-build -W docs build/docs``."""

import importlib
import inspect
import re
import sys
import types

from sphinx.pycode import ModuleAnalyzer

import distsim

project = "distsim"
author = "the distsim authors"
version = release = distsim.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
highlight_language = "text"  # of blocks that name none: what a command prints
html_theme = "furo"
html_title = f"distsim {version}"
default_role = "literal"  # docstrings write `x` for code
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}

ASKED = re.compile(r"^@names ([\w.]+)$", re.MULTILINE)
"""A line of a page in whose place stand the names that a package hands on."""


def names_of(packages):
    """Return what autodoc makes of the public names of packages; a name of two stands with the first."""
    seen, pages = set(), []
    for package in packages:
        module, lines = importlib.import_module(package), []
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if inspect.ismodule(value) or name == "__version__":
                continue
            if callable(value) and not isinstance(value, types.GenericAlias):
                if value not in seen:
                    kind = "class" if inspect.isclass(value) else "function"
                    lines.append(f".. auto{kind}:: {package}.{name}")
                    seen.add(value)
            else:
                lines.append(f".. autodata:: {home(name, value)}.{name}\n   :no-value:")
        pages.append("\n".join(["```{eval-rst}", *lines, "```"]))
    return pages


def home(name, value):
    """Return the module that says what a value of that name is."""
    for module, loaded in list(sys.modules.items()):
        holds = module.startswith("distsim.") and vars(loaded).get(name) is value
        if holds and ("", name) in ModuleAnalyzer.for_module(module).find_attr_docs():
            return module
    raise LookupError(f"{name} has no docstring where it is defined; write one")


def setup(app):
    """Have pages list public names."""

    def write(_, __, source):
        made = iter(names_of(ASKED.findall(source[0])))
        source[0] = ASKED.sub(lambda _: next(made), source[0])

    app.connect("source-read", write)
