"""Test the structure of the package: no import cycles and no upward imports."""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hestia_tune"
# Each entry imports only earlier entries. A file with a place of its own has a dot in its name.
ROOMS = [
    "errors",
    "components",
    "annealing",
    "files",
    "config",
    "devices",
    "distributed",
    "methods",
    "functional",
    "tensors",
    "blocks",
    "qat",
    "plots",
    "sensitivity",
    "data",
    "models",
    "losses",
    "bits",
    "export",
    "evaluation",
    "training",
    "reconstruction",
    "memory",
    "commands",
    "torchtune",
]
MODULES = {
    ".".join(("hestia_tune", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


def room_of(module: str) -> str | None:
    """Return the place of a module in the list, by its longest name there."""
    parts = module.split(".")[1:3]
    return next((n for n in (".".join(parts), *parts[:1]) if n in ROOMS), None)


def imports(path: Path) -> list[tuple[str, str]]:
    """Return (module, name) of every import of a name, and (module, "") of a whole module.

    Imports for type checkers only are left out.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import) and id(node) not in typing_only:
            found += [(alias.name, "") for alias in node.names]
    return found


def test_there_are_no_import_circles():
    graph = {
        name: {
            f"{module}.{item}" if f"{module}.{item}" in MODULES else module
            for module, item in imports(path)
            if module.startswith("hestia_tune") and module != name
        }
        for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # It raises a CycleError that names the cycle.


def test_nothing_imports_upwards_and_private_names_stay_at_home():
    for name, path in MODULES.items():
        room = room_of(name)
        for module, item in imports(path):
            if module.startswith("hestia_tune."):
                assert not item.startswith("_"), (name, module, item)
                other = room_of(module)
                if room and other:
                    assert ROOMS.index(other) <= ROOMS.index(room), (name, module)


def test_torchtune_is_imported_by_one_folder_that_nothing_imports():
    for name, path in MODULES.items():
        if not f"{name}.".startswith("hestia_tune.torchtune."):
            for module, item in imports(path):
                assert module.split(".")[0] != "torchtune", (name, module, item)
                whole = f"{module}.{item}."
                assert not whole.startswith("hestia_tune.torchtune."), (name, module, item)
