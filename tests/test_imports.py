"""Who may import whom, and which modules stay free of torch and transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("pipeline", "workers", "tasks", "qevict", "lorekv", "kvcache", "perf")
METHODS = {"tasks", "qevict", "lorekv", "kvcache.baselines"}
MAY_IMPORT = {
    "pipeline": {"workers", "kvcache", *METHODS},
    "workers": {"kvcache", *METHODS},
    "tasks": set(),
    "qevict": {"kvcache"},
    "lorekv": {"kvcache"},
    "kvcache.baselines": {"kvcache"},
    "kvcache": set(),
}
"""``pipeline -> workers -> {tasks, qevict, lorekv, kvcache.baselines} -> kvcache``; measurements may use all."""
HEAVY = {"torch", "transformers"}
LIGHT = ("pipeline", "tasks", "kvcache.baselines", "qevict.method", "lorekv.method", "kvcache.method", "kvcache.budget")
"""Planning reads these."""
STRANGERS = {
    "kvcache": {"ray", "mlflow", "pyarrow", "pandas", "pydantic"},
    "qevict": {"ray", "mlflow", "pyarrow", "pandas", "pydantic"},
    "lorekv": {"ray", "mlflow", "pyarrow", "pandas", "pydantic"},
    "tasks": {"ray", "mlflow", "pyarrow"},
}


def modules() -> list[str]:
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def source(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """Full names: ``from kvcache import baselines`` is ``kvcache.baselines``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(node: ast.AST) -> Iterator[str]:
    """What importing a module imports: not what its functions do, nor what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield from imported(child)
        yield from at_import(child)


def room(module: str) -> str:
    return "kvcache.baselines" if f"{module}.".startswith("kvcache.baselines.") else module.partition(".")[0]


@pytest.mark.parametrize("module", [name for name in modules() if room(name) != "perf"])
def test_imports_follow_the_arrows(module: str) -> None:
    own = room(module)
    for node in ast.walk(source(module)):
        for name in imported(node):
            other = room(name)
            if name.partition(".")[0] in ROOMS:
                assert other == own or other in MAY_IMPORT[own], f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in modules() if name.partition(".")[0] in STRANGERS])
def test_methods_and_tasks_know_nothing_of_the_platform(module: str) -> None:
    strangers = STRANGERS[module.partition(".")[0]]
    found = {name.partition(".")[0] for node in ast.walk(source(module)) for name in imported(node)}
    assert not found & strangers


def stands_for(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("module", [name for name in modules() if any(stands_for(name, light) for light in LIGHT)])
def test_planning_imports_no_torch(module: str) -> None:
    found = {name.partition(".")[0] for name in at_import(source(module))}
    assert not found & HEAVY


def test_importing_the_driver_side_leaves_torch_out() -> None:
    code = (
        "import sys, pipeline.cli, pipeline.plan, pipeline.spec, pipeline.commands, pipeline.show\n"
        "from kvcache.method import method_class, method_names\n"
        "[method_class(name) for name in method_names()]\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imported: {done.stderr}"


def test_the_rule_sees_what_it_should() -> None:
    text = (
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\ndef f():\n    import g\nclass H:\n    import i\n"
    )
    assert list(at_import(ast.parse(text))) == ["a.b", "c.d", "i"]
