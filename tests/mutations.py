"""Measure the power of the fast tests: break the package in small ways, and count what they notice.

    python tests/mutations.py map                 # an hour: which test runs which line
    python tests/mutations.py run --count 240     # applies mutations one by one, and prints a table
    python tests/mutations.py run --jobs 2        # on two cores

A mutation is a flipped sign or comparison, a constant that is off by one, two swapped arguments, a
negated condition, or a check that is dropped. They are drawn with a seed, evenly over the folders,
from lines that the tests run. Each mutation is applied in a copy of the repository, and only tests
that run its line are started, at most 60 of them, the quickest first.
This needs ``pip install coverage``.
"""

import argparse
import ast
import copy
import json
import multiprocessing
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from ranks import as_own_process, end_job

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
_FIRST_TESTS = 10  # the quickest of these: most mutations need no others
_PATIENCE = 100.0, 240.0  # seconds for the first tests and for the others, which may not end
_FORKS = multiprocessing.get_context("forkserver")
# What the package imports takes longer than most tests. The package itself must be the mutated one.
_FORKS.set_forkserver_preload(
    ["datasets", "matplotlib.pyplot", "torchao.optim", "torchtune.training", "transformers"]
)


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
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    # Outside of functions, a test that imports the module runs a line without testing it.
    inside = {id(node) for f in functions for part in f.body for node in ast.walk(part)} - in_text
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) not in lines or id(node) not in inside:
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
        command += [f"--junitxml={DATA / 'tests.xml'}"]
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "combine", f"--rcfile={settings}"], cwd=REPOSITORY, check=True)
    import coverage as library

    found: dict[str, dict[int, list[str]]] = {}
    measured = library.CoverageData(str(DATA / "coverage"))
    measured.read()
    for file in measured.measured_files():
        if not Path(file).is_relative_to(REPOSITORY):  # of another installation
            continue
        by_line = measured.contexts_by_lineno(file)
        rows = {line: sorted({c for c in names if c}) for line, names in by_line.items()}
        found[str(Path(file).relative_to(REPOSITORY))] = {k: v for k, v in rows.items() if v}
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(DATA / "tests.xml").iter("testcase"):
        name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name', '').split('[')[0]}"
        seconds[name] = max(seconds.get(name, 0.0), float(case.get("time", 0)))
    (DATA / "map.json").write_text(json.dumps({"tests": found, "seconds": seconds}))


def draw(count: int, seed: int) -> list[tuple[Mutation, list[str]]]:
    """Draw mutations evenly over the folders, each with tests of its line, quick ones first."""
    found, seconds = json.loads((DATA / "map.json").read_text()).values()
    rng, drawn = random.Random(seed), []
    for number, folder in enumerate(FOLDERS):
        every = []
        for path in sorted((REPOSITORY / "hestia_tune" / folder).rglob("*.py")):
            tests = found.get(str(path.relative_to(REPOSITORY)), {})
            mutations = mutations_of(path, {int(line) for line in tests})
            every += [(mutation, tests[str(mutation.line)]) for mutation in mutations]
        share = count // len(FOLDERS) + (number < count % len(FOLDERS))
        for mutation, tests in rng.sample(every, min(share, len(every))):
            some = rng.sample(tests, min(len(tests), _MOST_TESTS))
            drawn.append((mutation, sorted(some, key=lambda test: seconds.get(test, 0.0))))
    return drawn


def fails(copy_of: Path, tests: list[str], patience: float) -> bool:
    """Whether one of the tests fails in a copy of the repository, or does not end in time."""
    files, names = set(), set()
    for context in tests:  # such as test_qat.test_a_layer, or methods.test_x.Class.test_y
        parts = context.split(".")
        file = next((part for part in parts if part.startswith("test_")), parts[0])
        files.update(map(str, copy_of.glob(f"tests/**/{file}.py")))
        names.add(parts[-1])
    options = ["-x", "-q", "-p", "no:cacheprovider", "-k", " or ".join(sorted(names))]
    process = _FORKS.Process(target=_run_pytest, args=(str(copy_of), [*options, *sorted(files)]))
    process.start()
    process.join(patience)
    if process.exitcode is None:
        end_job(process)
        print(f"tests did not end in {patience:.0f} s, which counts as caught", flush=True)
        return True
    return process.exitcode == 1  # 5 would say that no test was found


def _run_pytest(copy_of: str, options: list[str]) -> None:
    """Run pytest on a copy of the repository, in a process that has not imported the package."""
    as_own_process({**os.environ, "PYTHONPATH": copy_of, "OMP_NUM_THREADS": "1"})
    os.chdir(copy_of)
    sys.path.insert(0, copy_of)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    import pytest

    sys.exit(pytest.main(options))


def is_caught(copy_of: Path, mutation: Mutation, tests: list[str]) -> bool:
    """Apply a mutation in a copy of the repository, and return whether a test fails."""
    file = copy_of / mutation.path
    before = file.read_text("utf-8")
    try:
        file.write_text(mutation.source, "utf-8")
        goes = (tests[:_FIRST_TESTS], tests[_FIRST_TESTS:])
        timed = zip(goes, _PATIENCE, strict=True)
        return any(fails(copy_of, some, patience) for some, patience in timed if some)
    finally:
        file.write_text(before, "utf-8")


def run(count: int, seed: int, jobs: int) -> None:
    """Apply mutations, print each that no test notices, and a table."""
    totals, caught = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        copies = queue.SimpleQueue()
        ignored = shutil.ignore_patterns(".git", ".mutations", "runs", "site", "__pycache__")
        for number in range(jobs):
            copies.put(Path(folder) / f"copy{number}")
            shutil.copytree(REPOSITORY, Path(folder) / f"copy{number}", ignore=ignored)

        def check(mutation: Mutation, tests: list[str]) -> bool:
            copy_of = copies.get()
            try:
                return is_caught(copy_of, mutation, tests)
            finally:
                copies.put(copy_of)

        drawn = draw(count, seed)
        random.Random(seed).shuffle(drawn)  # a run that is stopped has seen all folders
        with ThreadPoolExecutor(jobs) as pool:
            results = pool.map(check, *zip(*drawn, strict=True))
            for done, ((mutation, _), noticed) in enumerate(zip(drawn, results, strict=True), 1):
                place = Path(mutation.path).parts[1]
                totals[place] += 1
                caught[place] += noticed
                if not noticed:
                    place = f"{mutation.path}:{mutation.line}"
                    print(f"survived: {place} {mutation.kind}", flush=True)
                if done % 20 == 0:
                    print(f"{caught.total()} of {done} caught", flush=True)
    print("| folder | mutations | caught |", "|---|---:|---:|", sep="\n")
    for place in FOLDERS:
        print(f"| `{place}/` | {totals[place]} | {caught[place]} |")
    print(f"| all | {totals.total()} | {caught.total()} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("map", "run"))
    parser.add_argument("--count", type=int, default=240, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time, one core each")
    options = parser.parse_args()
    if options.what == "map":
        make_map()
    else:
        run(options.count, options.seed, options.jobs)
