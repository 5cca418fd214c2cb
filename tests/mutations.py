"""Measure the power of the fast tests: break the package in small ways, and count what they notice.

    python tests/mutations.py map                 # an hour: which test runs which line
    python tests/mutations.py run --count 240     # applies mutations one by one, and prints a table

A mutation is a flipped sign or comparison, a constant that is off by one, two swapped arguments, a
negated condition, or a check that is dropped. They are drawn with a seed, evenly over the folders,
from lines that the tests run. Each mutation is applied in a copy of the repository, and only the
tests that run its line are started, so an undetected one has survived all tests that could see it.
This needs ``pip install coverage``.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("methods", "qat", "sensitivity", "tensors", "export", "training", "data")
DATA = REPOSITORY / ".mutations"
_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.FloorDiv: ast.Mult}
_MOST_TESTS = 60  # of one mutation; they are drawn if more tests run its line


@dataclass(frozen=True)
class Mutation:
    """A change of one expression or statement.

    Attributes:
        path: The file, relative to the repository.
        line: The first line of the changed node.
        kind: What is changed, such as "comparison".
        source: The whole changed file.
    """

    path: str
    line: int
    kind: str
    source: str


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield (kind, changed copy) of a node. None: the statement is dropped."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            new.ops = [_COMPARISONS[type(op)]()]
            yield "comparison", new
        case ast.BinOp(op=op) if type(op) in _OPERATORS and not isinstance(new.left, ast.Constant):
            new.op = _OPERATORS[type(op)]()
            yield "operator", new
        case ast.UnaryOp(op=ast.USub()) if not isinstance(new.operand, ast.Constant):
            yield "sign", new.operand
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", new.operand
        case ast.Constant(value=bool()):
            new.value = not new.value
            yield "switch", new
        case ast.Constant(value=int()):
            new.value += 1
            yield "off by one", new
        case ast.Call(args=[first, second, *_]) if not isinstance(second, ast.Starred):
            if ast.dump(first) != ast.dump(second) and not isinstance(first, ast.Starred):
                new.args[:2] = [second, first]
                yield "swapped arguments", new
        case ast.If(body=[ast.Raise()], orelse=[]):
            yield "dropped check", None


def mutations_of(path: Path, lines: set[int]) -> Iterator[Mutation]:
    """Yield every mutation of a file on some of its lines."""
    text = path.read_text("utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data, tree = text.encode(), ast.parse(text)
    in_text = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Raise)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) not in lines or id(node) in in_text:
            continue
        for kind, changed in changes(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            code = "pass" if changed is None else ast.unparse(changed)
            if isinstance(changed, ast.expr):
                code = f"({code})"
            source = (data[:begin] + code.encode() + data[end:]).decode()
            name = str(path.relative_to(REPOSITORY))
            yield Mutation(path=name, line=node.lineno, kind=kind, source=source)


def make_map() -> None:
    """Run the fast tests, and write which test functions run each line."""
    DATA.mkdir(exist_ok=True)
    settings = DATA / "coveragerc"
    settings.write_text(
        f"[run]\nsource = hestia_tune\nparallel = true\ndata_file = {DATA / 'coverage'}\n"
        "dynamic_context = test_function\nconcurrency = multiprocessing,thread\n"
    )
    with tempfile.TemporaryDirectory() as folder:  # a module that every worker imports at its start
        hook = Path(folder) / "sitecustomize.py"
        hook.write_text("import coverage\ncoverage.process_startup()\n")
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile"]
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "combine", f"--rcfile={settings}"], cwd=REPOSITORY, check=True)
    import coverage as library

    found: dict[str, dict[int, list[str]]] = {}
    measured = library.CoverageData(str(DATA / "coverage"))
    measured.read()
    for file in measured.measured_files():
        by_line = measured.contexts_by_lineno(file)
        rows = {line: sorted({c for c in names if c}) for line, names in by_line.items()}
        found[str(Path(file).relative_to(REPOSITORY))] = {k: v for k, v in rows.items() if v}
    (DATA / "map.json").write_text(json.dumps(found))


def draw(count: int, seed: int) -> list[tuple[Mutation, list[str]]]:
    """Return mutations, evenly over the folders, with the tests that run their lines."""
    found = json.loads((DATA / "map.json").read_text())
    rng, drawn = random.Random(seed), []
    for number, folder in enumerate(FOLDERS):
        every = []
        for path in sorted((REPOSITORY / "hestia_tune" / folder).rglob("*.py")):
            tests = found.get(str(path.relative_to(REPOSITORY)), {})
            mutations = mutations_of(path, {int(line) for line in tests})
            every += [(mutation, tests[str(mutation.line)]) for mutation in mutations]
        share = count // len(FOLDERS) + (number < count % len(FOLDERS))
        drawn += rng.sample(every, min(share, len(every)))
    return drawn


def is_caught(copy_of: Path, mutation: Mutation, tests: list[str], seed: int) -> bool:
    """Apply a mutation in a copy of the repository, and return whether a test fails."""
    file = copy_of / mutation.path
    before = file.read_text("utf-8")
    chosen = random.Random(seed).sample(tests, min(len(tests), _MOST_TESTS))
    by_file = defaultdict(set)
    for context in chosen:  # such as test_qat.test_a_layer, or methods.test_x.Class.test_y
        parts = context.split(".")
        name = next((part for part in parts if part.startswith("test_")), parts[0])
        by_file[name].add(parts[-1])
    files = [p for name in by_file for p in copy_of.glob(f"tests/**/{name}.py")]
    names = sorted({name for found in by_file.values() for name in found})
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-k", " or ".join(names), *map(str, files)]
    environment = os.environ | {"PYTHONPATH": str(copy_of), "OMP_NUM_THREADS": "1"}
    try:
        file.write_text(mutation.source, "utf-8")
        done = subprocess.run(
            command, cwd=copy_of, env=environment, capture_output=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(before, "utf-8")
    return done.returncode == 1  # 5 would say that no test was found


def run(count: int, seed: int) -> None:
    """Apply mutations, print each that no test notices, and a table."""
    totals, caught = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy_of = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".mutations", "runs", "site", "__pycache__")
        shutil.copytree(REPOSITORY, copy_of, ignore=ignored)
        for mutation, tests in draw(count, seed):
            place = Path(mutation.path).parts[1]
            totals[place] += 1
            noticed = is_caught(copy_of, mutation, tests, seed)
            caught[place] += noticed
            if not noticed:
                print(f"survived: {mutation.path}:{mutation.line} {mutation.kind}", flush=True)
    print("| folder | mutations | caught |", "|---|---:|---:|", sep="\n")
    for place in FOLDERS:
        print(f"| `{place}/` | {totals[place]} | {caught[place]} |")
    print(f"| all | {totals.total()} | {caught.total()} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("map", "run"))
    parser.add_argument("--count", type=int, default=240, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    options = parser.parse_args()
    make_map() if options.what == "map" else run(options.count, options.seed)
