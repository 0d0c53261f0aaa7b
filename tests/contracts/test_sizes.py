"""Files, functions and nesting stay small enough to be read in one go; names say what a file holds."""

import ast
from collections.abc import Iterator

from tests.contracts.sources import CODE, PACKAGES, python_files, relative, syntax

FILE_LINES = 400
FUNCTION_LINES = 60
DATAFLOW_LINES = 80
NESTING = 3
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def lines(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(file:line name, node) of every function of the repository."""
    for path in python_files(*CODE):
        for node in ast.walk(syntax(path)):
            if isinstance(node, FUNCTIONS):
                yield f"{relative(path)}:{node.lineno} {node.name}", node


def nesting(node: ast.AST) -> int:
    """Deepest stack of blocks below a node; inner functions count for themselves, an elif counts as its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def test_files_stay_under_400_lines():
    long = [f"{relative(path)}: {lines(path)}" for path in python_files(*CODE) if lines(path) >= FILE_LINES]
    assert not long, "\n".join(long)


def test_functions_stay_under_60_lines():
    sizes = {place: node.end_lineno - node.lineno + 1 for place, node in functions()}
    long = [f"{place}: {size}" for place, size in sizes.items() if size >= FUNCTION_LINES]
    assert not long, "\n".join(long)


def test_blocks_nest_at_most_three_deep():
    deep = [f"{place}: {nesting(node)}" for place, node in functions() if nesting(node) > NESTING]
    assert not deep, "\n".join(deep)


def test_a_dataflow_fits_on_a_page():
    long = [
        f"{relative(path)}: {lines(path)}" for path in python_files("engine/dataflows") if lines(path) > DATAFLOW_LINES
    ]
    assert not long, "\n".join(long)


def test_no_file_has_a_name_that_says_nothing():
    assert not [relative(path) for path in python_files(*PACKAGES) if path.stem in VAGUE_NAMES]


def test_package_files_are_empty():
    full = [relative(path) for path in python_files(*CODE) if path.name == "__init__.py" and path.read_text().strip()]
    assert not full, "import names from the module that defines them"


def test_nesting_is_counted_as_a_reader_sees_it():
    flat = "if a:\n  x\nelif b:\n  x\nelif c:\n  x\nelif d:\n  x"
    deep = "for a in b:\n  if c:\n    with d:\n      while e:\n        x"
    assert nesting(ast.parse(flat)) == 1
    assert nesting(ast.parse(deep)) == 4
