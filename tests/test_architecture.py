"""The plan of the house, checked on the source: floors, circles, sizes, names of classes."""

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "distsim"

FLOORS = {
    "ir": 1,
    "schedule": 1,
    "plan": 1,
    "console": 1,
    "token_choice": 1,
    "errors": 1,
    "cache": 1,
    "compile": 1,
    "resizing": 2,
    "ops": 2,
    "hardware": 2,
    "models": 2,
    "program": 3,
    "interpret": 3,
    "cost": 3,
    "importer": 3,
    "simulation": 4,
    "calibration": 4,
    "transforms": 5,
    "device_placement": 5,
    "stage_balance": 5,
    "compose": 6,
    "report": 7,
    "plan_search": 8,
    "truth": 8,
    "executor": 9,  # hands names on to the DistIR notebooks; nothing in the library imports it
    "study": 9,
    "suggestions": 1,
    "extras": 1,
    "cli": 9,
    "commands": 9,
    "__main__": 9,
    "distsim": 9,  # distsim/__init__.py hands the names on
}

# Packages from which notebooks import: what their __init__ hands on may stand above them. The library
# imports their modules.
FRONTS = {"distsim.transforms": 6}

# What is to be mended. These lists may only shrink.
CIRCLES = {  # (module, what it imports) in a circle of modules
    ("distsim.program.program", "distsim.program.write_out"),
    ("distsim.simulation.explain.explain", "distsim.simulation.simulation"),
}
LAYERS = {  # (module, what it imports) against the order of the folders of their package
    *CIRCLES,
    ("distsim.simulation.tasks.block_matrix", "distsim.simulation.maxplus.kernels"),
    ("distsim.simulation.tasks.recurrence", "distsim.simulation.maxplus.kernels"),
}
MANY_PARAMETERS = {
    "distsim.simulation.maxplus.kernels.evaluate",
    "distsim.stage_balance.search.choices",
}
OWN_CACHES = {  # modules that keep what they made in some way of their own
    "distsim.cost.cost_model",
    "distsim.device_placement.optimal.search",  # whether the loops are compiled
    "distsim.program.passes.backward_halves",
    "distsim.program.bind",
    "distsim.program.passes.overlap_pairs",
    "distsim.simulation.maxplus.engine",
    "distsim.simulation.memory.plan",
    "distsim.simulation.memory.table_changes",
    "distsim.simulation.memory.walk",
}
SHARED_NAMES: set[str] = set()

MOST_ENTRIES, MOST_PARAMETERS = 15, 8
CATALOGUES = {"distsim", "distsim.ops"}  # the floors of the house, and the operators


SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


@cache
def trees() -> dict[str, ast.Module]:
    """Read when a test asks, and let go after the last: seconds, and a million objects."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of each tree: five tests look through them."""
    return {name: [*ast.walk(tree)] for name, tree in trees().items()}


def top(module: str) -> str:
    """The package or module right under distsim that a module belongs to; a front stands for itself."""
    if module in FRONTS:
        return module
    return module.split(".")[1] if "." in module else module


def statements(node: ast.AST, at_import_time: bool) -> Iterator[ast.stmt]:
    """Import statements below `node`; at import time means outside functions and TYPE_CHECKING."""
    for child in [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]:
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        skipped = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        )
        if not (at_import_time and skipped):
            yield from statements(child, at_import_time)


@cache
def imports(module: str, at_import_time: bool) -> list[tuple[int, str]]:
    """(line, module) for each module of distsim that `module` imports, submodules told from names."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    found: list[tuple[int, str]] = []
    for statement in statements(trees()[module], at_import_time):
        if isinstance(statement, ast.Import):
            found += [(statement.lineno, alias.name) for alias in statement.names]
            continue
        source = statement.module or ""
        if statement.level:
            base = package.split(".")[: len(package.split(".")) - statement.level + 1]
            source = ".".join([*base, *filter(None, [source])])
        for alias in statement.names:
            submodule = f"{source}.{alias.name}"
            found.append((statement.lineno, submodule if submodule in MODULES else source))
    return [(line, name) for line, name in found if name.split(".")[0] == "distsim"]


def outside(tree: ast.AST) -> set[str]:
    """The top packages that are neither Python's nor distsim, imported anywhere, also by import_module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and "import_module" in vars(node.func).values():
            found.update(arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
    tops = {name.split(".")[0] for name in found}
    return tops - set(sys.stdlib_module_names) - {"distsim"}


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("imports go in a circle: " + " <- ".join(error.args[1]))


def test_every_package_has_a_floor():
    assert {top(module) for module in MODULES} <= {*FLOORS, *FRONTS}


def test_imports_only_point_down():
    floors = {**FLOORS, **FRONTS}
    upward = [
        f"{MODULES[module].relative_to(ROOT)}:{line}: {top(module)} (floor {floors[top(module)]}) "
        f"imports {target} (floor {floors[top(target)]})"
        for module in MODULES
        for line, target in imports(module, at_import_time=False)
        if floors[top(target)] > floors[top(module)]
    ]
    assert upward == []


def test_the_library_does_not_import_what_is_there_for_notebooks():
    fronts = {"executor", *FRONTS}
    assert [
        (module, target)
        for module in MODULES
        for _, target in imports(module, at_import_time=False)
        if top(target) in fronts - {top(module)} and FLOORS.get(top(module)) != FLOORS["cli"]
    ] == []


def test_every_import_names_a_module_that_exists():
    unknown = [
        f"{module}:{line}: {target}"
        for module in MODULES
        for line, target in imports(module, at_import_time=False)
        if target not in MODULES
    ]
    assert unknown == []


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["dask"]]
    declared = {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in dependencies}
    owners = packages_distributions()
    imported = {name for tree in trees().values() for name in outside(tree)}
    assert {"numba", "numpy", "google"} <= imported  # also those that a function imports
    missing = {
        name
        for name in imported
        if declared.isdisjoint(owner.replace("-", "_") for owner in owners.get(name, [name]))
    }
    assert missing == set()


def everything(module: str) -> set[str]:
    """What a module imports, anywhere in it, but for what is to be mended."""
    return {name for _, name in imports(module, at_import_time=False)} - {module}


def layers(package: str, left_out: set[tuple[str, str]] = frozenset()) -> dict[str, set[str]]:
    """What each folder and module of a package imports of the others."""
    graph: dict[str, set[str]] = {}

    def place(module: str) -> str:
        return module.removeprefix(f"{package}.").split(".")[0]

    inside = [module for module in MODULES if module.startswith(f"{package}.") and module not in FRONTS]
    for module in inside:
        targets = {name for name in everything(module) if name in inside and (module, name) not in left_out}
        graph.setdefault(place(module), set()).update({place(name) for name in targets} - {place(module)})
    return graph


PACKAGES = [module for module, path in MODULES.items() if path.name == "__init__.py"]


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_and_modules_of_a_package_have_an_order(package):
    assert_no_circle(layers(package, LAYERS))


def test_modules_do_not_import_each_other_in_a_circle():
    """Not inside of a function, and not behind TYPE_CHECKING."""
    graph = {m: {name for name in everything(m) if (m, name) not in CIRCLES} for m in MODULES}
    assert_no_circle(graph)


def test_every_exception_is_still_needed():
    there = {(module, name) for module in MODULES for name in everything(module)}
    assert LAYERS - there == set()
    assert MANY_PARAMETERS - set(parameters()) == set()
    assert SHARED_NAMES - set(shared_names()) == set()
    for pair in LAYERS:
        package = next(p for p in PACKAGES[::-1] if all(name.startswith(f"{p}.") for name in pair))
        with pytest.raises(pytest.fail.Exception):
            assert_no_circle(layers(package, LAYERS - {pair}))


def test_no_folder_has_too_many_entries():
    many = {
        package: entries
        for package in PACKAGES
        if package not in CATALOGUES
        and (entries := len([p for p in MODULES[package].parent.iterdir() if p.name != "__pycache__"]))
        > MOST_ENTRIES
    }
    assert many == {}


def parameters() -> dict[str, int]:
    """The functions of too many parameters, and how many each has; self and cls aside."""
    found: dict[str, int] = {}
    for module, every in nodes().items():
        for node in every:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [
                    each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                ]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count > MOST_PARAMETERS:
                    found[f"{module}.{node.name}"] = count
    return found


def test_no_function_has_too_many_parameters():
    assert {name: count for name, count in parameters().items() if name not in MANY_PARAMETERS} == {}


def shared_names() -> dict[str, list[str]]:
    """The names that several classes have, and where; that one is private to a module tells nobody apart."""
    found: dict[str, list[str]] = {}
    for module, every in nodes().items():
        for node in every:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_classes_share_a_name():
    assert {name: where for name, where in shared_names().items() if name not in SHARED_NAMES} == {}


def test_no_file_is_over_400_lines():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES
    }
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_function_is_over_70_lines():
    long = [
        f"{module}.{node.name}: {node.end_lineno - node.lineno + 1}"
        for module, every in nodes().items()
        for node in every
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 70
    ]
    assert long == []


def own_caches() -> set[str]:
    kinds = {"WeakKeyDictionary", "lru_cache", "cache", "popitem"}
    return {
        module
        for module, every in nodes().items()
        for node in every
        if (isinstance(node, ast.Name) and node.id in kinds - {"cache"})
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in {f"functools.{kind}" for kind in kinds})
        or (isinstance(node, ast.Attribute) and node.attr == "popitem")
    } - {"distsim.cache"}


def test_what_is_kept_is_kept_in_one_way():
    assert own_caches() == OWN_CACHES


def test_nothing_is_called_utils():
    assert [module for module in MODULES if {"util", "utils"} & set(module.split("."))] == []


def test_init_files_only_hand_names_on():
    """That of distsim itself when a name is first used: see ``tests/test_front_door.py``."""

    def hands_on(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Assign):
            return ast.unparse(statement.targets[0]) in ("__all__", "__version__")
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return is_docstring or isinstance(statement, ast.Import | ast.ImportFrom)

    other = [
        f"{path.relative_to(ROOT)}:{statement.lineno}: {ast.unparse(statement)[:60]}"
        for module, path in MODULES.items()
        if path.name == "__init__.py" and module != "distsim"
        for statement in trees()[module].body
        if not hands_on(statement)
    ]
    assert other == []


def test_library_code_asserts_nothing_and_stubs_nothing():
    found = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno}"
        for module, every in nodes().items()
        for node in every
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "NotImplementedError")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("statement", "module", "expected"),
    [
        ("import distsim.ir.type", "distsim.plan", "distsim.ir.type"),
        ("from distsim.schedule import action", "distsim.plan", "distsim.schedule.action"),
        ("from distsim.schedule import Action", "distsim.plan", "distsim.schedule"),
        ("from .action import Action", "distsim.schedule.warm_up", "distsim.schedule.action"),
        ("from .. import plan", "distsim.schedule.warm_up", "distsim.plan"),
        ("from .action import Action", "distsim.schedule", "distsim.schedule.action"),
        ("def f():\n    from distsim.plan import Plan", "distsim.schedule.action", "distsim.plan"),
    ],
)
def test_the_checks_see_every_kind_of_import(monkeypatch, statement, module, expected):
    monkeypatch.setitem(trees(), module, ast.parse(statement))
    anew = imports.__wrapped__
    assert anew(module, at_import_time=False) == [(statement.count("\n") + 1, expected)]
    assert (anew(module, at_import_time=True) == []) == statement.startswith("def")


def test_a_circle_is_reported_by_name():
    with pytest.raises(pytest.fail.Exception, match="a <- b <- a|b <- a <- b"):
        assert_no_circle({"a": {"b"}, "b": {"a"}})
