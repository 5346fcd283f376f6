"""What is installed, what importing it does, and what a wheel and a source archive hold."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest

import builds
import ring_reduce

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "ring_reduce": "ring_reduce",
    "kernels": "ring_reduce/kernels",
    "benchmarks": "ring_reduce/benchmarks",
}
HEAVY = ("torch", "triton", "cupy", "matplotlib", "sklearn")


def python(code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def package_files() -> set[str]:
    """The path in an installed tree of every module, by what lies in the source tree."""
    return {
        f"{installed}/{path.relative_to(ROOT / source)}"
        for source, installed in PACKAGES.items()
        for path in (ROOT / source).rglob("*.py")
    }


def modules() -> list[Path]:
    return sorted(path for source in PACKAGES for path in (ROOT / source).rglob("*.py"))


def test_importing_loads_no_framework(tmp_path: Path) -> None:
    loaded = python(f"import sys, ring_reduce; print([m for m in {HEAVY} if m in sys.modules])", tmp_path)
    assert loaded == "[]"


def test_the_mapped_packages_import(tmp_path: Path) -> None:
    """kernels/ and benchmarks/ lie outside ring_reduce/; from a directory that holds neither they must be found."""
    code = "import ring_reduce.kernels as k, ring_reduce.benchmarks as b; print(k.__name__, b.__name__)"
    assert python(code, tmp_path) == "ring_reduce.kernels ring_reduce.benchmarks"


def test_metadata() -> None:
    assert ring_reduce.__version__ == version("ring-reduce")
    assert metadata("ring-reduce")["Requires-Python"] == ">=3.10"
    needed = [line for line in requires("ring-reduce") or [] if "extra ==" not in line]
    assert sorted(needed) == ["numpy", "torch>=2.6"]


def test_types_are_shipped() -> None:
    package = Path(ring_reduce.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_core.pyi").is_file()


def test_the_stub_is_the_core() -> None:
    """Every name of _core.pyi is in the core, and every public name of the core in the stub."""
    stub = ast.parse((ROOT / "ring_reduce" / "_core.pyi").read_text())
    typed = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    typed |= {
        node.target.id
        for node in stub.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert typed == {name for name in dir(ring_reduce._core) if not name.startswith("_")}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without what was built, so that building leaves no trace here."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    return copy


def pip_wheel(source_tree: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(directory), str(source_tree)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RING_REDUCE_CUDA": "0"},  # which would take minutes where there is a GPU
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel(source_tree: Path, tmp_path: Path) -> None:
    """Built by pip, it holds all modules, types, license and core, and no source of the core nor a test."""
    wheels = builds.once("wheels", "wheels", tmp_path, lambda directory: pip_wheel(source_tree, directory))
    builds.stop_ahead()
    (wheel,) = wheels.glob("ring_reduce-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert package_files() <= names
    assert {"ring_reduce/py.typed", "ring_reduce/_core.pyi"} <= names
    assert any(name.startswith("ring_reduce/_core.") and name.endswith(".so") for name in names)
    assert any(name.endswith("LICENSE") for name in names)
    assert all(name.startswith(("ring_reduce/", "ring_reduce-")) for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".cu"))]


def test_source_archive(source_tree: Path, tmp_path: Path) -> None:
    """It holds all that a build needs: the modules, and every source and header of the core."""
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    archive = tmp_path / python(code, source_tree).splitlines()[-1]
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    core = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()}
    assert core <= names
    assert {str(path.relative_to(ROOT)) for path in modules()} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not [name for name in names if name.endswith(".so")]
