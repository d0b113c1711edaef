"""The house stands: links, floors, one path to each module, and an import that stays cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
WINGS = ("schedules", "verify", "runtime", "experiments", "paper_figures")
HEAVY = (
    *("bokeh", "cupy", "highspy", "matplotlib", "mpi4py", "networkx", "numba"),
    *("numpy", "pulp", "rich", "scipy", "z3"),
)
UNSAFE_MODULES = frozenset(("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"))
PICKLE_WRITERS = {"runtime/observe/torch_dump.py": "torchfrtrace reads nothing else"}
"""Files that write pickles for programs of others, and why; none may read one."""
OBJECT_CALLS = re.compile(
    r"\bcomm\.(bcast|gather|allgather|scatter|alltoall|reduce|allreduce|send|isend|recv|irecv|sendrecv)\("
    r"|\btorch\.load\("
)


def sources() -> list[Path]:
    """Every Python file of ours, by its real path, once."""
    found = [path for name in ("optcc", *WINGS) for path in _python_files(ROOT / name)]
    assert len(found) == len({path.resolve() for path in found})
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def wrong_imports(tree: ast.Module) -> list[str]:
    """Imports that would make a second copy of a module, or that read objects that can run code."""
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                wrong.append(f"line {node.lineno}: relative import")
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if top in WINGS and not (isinstance(node, ast.ImportFrom) and node.level):
                wrong.append(f"line {node.lineno}: import {name}: write optcc.{name}")
            if top in UNSAFE_MODULES:
                wrong.append(f"line {node.lineno}: import {name}: its files can run code")
    return wrong


@pytest.mark.parametrize("wing", WINGS)
def test_links_point_to_the_folders_at_the_top(wing: str) -> None:
    link = ROOT / "optcc" / wing
    assert link.is_symlink()
    assert link.readlink() == Path("..") / wing
    assert link.resolve() == ROOT / wing
    assert (ROOT / wing / "__init__.py").is_file()


def test_wrong_imports_are_recognised() -> None:
    text = "from . import a\nfrom ..b import c\nimport verify.lp\nfrom runtime import state\nimport pickle\n"
    assert [line.split(":")[0] for line in wrong_imports(ast.parse(text))] == [f"line {n}" for n in range(1, 6)]
    assert wrong_imports(ast.parse("from optcc.verify import lp\nimport optcc.runtime.state\nimport json\n")) == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_of_a_file(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = wrong_imports(ast.parse(text))
    if str(path.relative_to(ROOT)) in PICKLE_WRITERS:
        assert [each.partition(": ")[2] for each in wrong] == ["import pickle: its files can run code"]
        assert set(re.findall(r"\bpickle\.(\w+)", text)) == {"dumps"}
        wrong = []
    assert wrong == []
    assert OBJECT_CALLS.search(text) is None, "objects travel pickled: use the upper-case calls, on buffers"


OPTION = re.compile(r"(^|[\s(])--[a-z]")


def options_in_errors(tree: ast.Module) -> list[str]:
    """Texts of raised errors that name an option of the command line."""
    return [
        f"line {text.lineno}: {text.value}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
        for text in ast.walk(node.exc)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and OPTION.search(text.value)
    ]


def test_options_in_errors_are_recognised() -> None:
    text = 'raise InputError(f"--ports {ports!r}: no")\nraise InputError("a -- b")\nprint("--ports")\n'
    assert options_in_errors(ast.parse(text)) == ["line 1: --ports "]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_commands_know_options(path: Path) -> None:
    """A program that calls the library has no command line: `ArgumentError` names the argument, commands its option."""
    top = path.relative_to(ROOT).parts[0]
    if top in ("experiments", "paper_figures") or "commands" in path.parts or path.name == "cli.py":
        return
    text = path.read_text(encoding="utf-8")
    assert re.search("--[a-z]", text) is None or options_in_errors(ast.parse(text)) == []


def test_floors_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    assert lint.is_file(), "import-linter is part of optcc[dev]"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    loaded = _loaded_by("import optcc")
    assert "optcc" in loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded & set(HEAVY))


def test_a_job_begins_with_numpy_alone() -> None:
    """Each rank of a job pays for what is imported; solvers, compilers and SciPy are imported by what needs them."""
    loaded = _loaded_by("import optcc; optcc.init")
    assert loaded & set(HEAVY) == {"numpy"}


def test_heavy_packages_would_be_seen() -> None:
    assert "numpy" in _loaded_by("import optcc.plan")


def test_importing_is_cheap() -> None:
    """`import optcc` costs less than `import numpy`, measured in turns in one run."""
    best = {"optcc": float("inf"), "numpy": float("inf")}
    for _ in range(5):
        for name in best:
            start_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, check=True, timeout=120)
            best[name] = min(best[name], time.perf_counter() - start_s)
    assert best["optcc"] < best["numpy"]


def test_one_path_to_each_module() -> None:
    """A wing imported by its full name does not also appear under its bare one."""
    loaded = _loaded_by("; ".join(f"import optcc.{wing}" for wing in WINGS))
    assert loaded.isdisjoint(WINGS)


def modules() -> dict[str, Path]:
    """Every module of ours by its full name."""
    named = {}
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts if parts[0] == "optcc" else ("optcc", *parts)).removesuffix(".__init__")] = path
    return named


def imports_between(texts: Mapping[str, str]) -> nx.DiGraph:
    """An edge from each module to each module that it imports at all: at the top, in a function, or for its types."""
    graph = nx.DiGraph()
    graph.add_nodes_from(texts)
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                said = [f"{node.module}.{alias.name}" for alias in node.names]
                found = {each if each in texts else node.module for each in said}
            elif isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            else:
                continue
            graph.add_edges_from((name, each) for each in found if each in texts)
    return graph


def circles(graph: nx.DiGraph) -> list[list[str]]:
    """Groups of modules that all import one another, in one or more steps."""
    groups = [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]
    return sorted(groups + [[name] for name in nx.nodes_with_selfloops(graph)])


def test_circles_are_recognised() -> None:
    texts = {
        "a": "from b import x",
        "b": "def f():\n    import c.d",
        "c.d": "if TYPE_CHECKING:\n    from a import y",
        "c": "from c import d\nimport e",
        "e": "",
    }
    assert circles(imports_between(texts)) == [["a", "b", "c.d"]]
    assert circles(imports_between({"a": "import a"})) == [["a"]]


def test_no_module_imports_itself_round_a_circle() -> None:
    """Names that `optcc` exports are loaded on first use; nothing else may need what needs it."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    assert len(texts) > 100
    assert circles(imports_between(texts)) == []


def test_no_two_public_classes_share_a_name() -> None:
    named: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(module)
    assert len(named) > 200
    assert {name: found for name, found in named.items() if len(found) > 1} == {}
