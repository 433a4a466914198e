"""Imports run downward only; what is forbidden is forbidden inside functions too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONNECTORS = ROOT / "hs_connectors" / "src"

# lowest first; a module may import its own layer and the ones below
CORE_LAYERS = (
    {"types", "errors"},
    {"supervisor", "store", "provenance", "locks"},
    {"processes"},
    {"engine", "formats", "verifier", "losses", "metrics"},
    {"states", "data"},
    {"algorithms", "training", "registry"},
    {"build", "drafts", "training_process", "convert"},
    {"evaluation"},
    {"lifecycle"},
    {"serving"},
    {"config", "keys", "bench", "summary"},
    {"preflight", "remote", "run", "spending"},
    {"stages"},
)
TOP_LAYERS = ("speculators_core", "tasks", "flows", "deployments")
CONNECTOR_LAYERS = (
    {"contract", "errors", "codecs", "checksums"},
    {"record", "probe"},
    {"backends", "wrappers", "spool", "upkeep"},
    {"registry", "testing"},
    {"vllm"},
)


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports_of(path: Path) -> list[str]:
    """Absolute dotted names that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def importers(package: str, *folders: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in sources(*folders)
        if any(name == package or name.startswith(package + ".") for name in imports_of(path))
    }


def layer_of(part: str, layers: tuple[set[str], ...]) -> int:
    for level, names in enumerate(layers):
        if part in names:
            return level
    pytest.fail(f"{part!r} is in no layer: add it to the list above, where it belongs")


@pytest.mark.parametrize("path", sources("speculators_core"), ids=lambda p: str(p.relative_to(ROOT)))
def test_core_imports_downward(path: Path) -> None:
    parts = path.relative_to(ROOT / "speculators_core").with_suffix("").parts
    if parts == ("__init__",):
        return
    own = layer_of(parts[0], CORE_LAYERS)
    for name in imports_of(path):
        head, *rest = name.split(".")
        assert head not in {"tasks", "flows", "deployments", "infra"}, f"{path}: {name}"
        if head == "speculators_core" and rest:
            assert layer_of(rest[0], CORE_LAYERS) <= own, f"{path} imports upward: {name}"
        if head == "hs_connectors":
            assert rest and rest[0] in {"contract", "registry", "errors", "probe"}, (
                f"{path}: {name} is not part of the seam"
            )


@pytest.mark.parametrize("path", sources("tasks", "flows"), ids=lambda p: str(p.relative_to(ROOT)))
def test_shell_imports_downward(path: Path) -> None:
    own = TOP_LAYERS.index(path.relative_to(ROOT).parts[0])
    for name in imports_of(path):
        head = name.split(".")[0]
        assert head not in TOP_LAYERS or TOP_LAYERS.index(head) <= own, f"{path} imports upward: {name}"


@pytest.mark.parametrize("path", sorted(CONNECTORS.rglob("*.py")), ids=lambda p: str(p.relative_to(CONNECTORS)))
def test_connectors_import_downward(path: Path) -> None:
    parts = path.relative_to(CONNECTORS / "hs_connectors").with_suffix("").parts
    if parts == ("__init__",):
        return
    own = layer_of(parts[0], CONNECTOR_LAYERS)
    for name in imports_of(path):
        head, *rest = name.split(".")
        assert head not in {"speculators_core", "tasks", "flows"}, f"{path}: {name}"
        if head == "hs_connectors" and rest:
            assert layer_of(rest[0], CONNECTOR_LAYERS) <= own, f"{path} imports upward: {name}"


def test_vllm_stays_in_its_room() -> None:
    everywhere = importers("vllm", "speculators_core", "tasks", "flows", "deployments", "hs_connectors")
    assert {p for p in everywhere if "hs_connectors/vllm/" not in p} == set()


def test_prefect_stays_above_the_core() -> None:
    assert importers("prefect", "speculators_core", "hs_connectors") == set()


def test_mlflow_stays_in_its_adapters() -> None:
    found = importers("mlflow", "speculators_core", "tasks", "flows", "deployments", "hs_connectors")
    assert {p for p in found if not p.startswith("tasks/adapters/")} == set()


def test_no_algorithm_knows_another_nor_is_named_outside() -> None:
    folder = ROOT / "speculators_core" / "algorithms"
    names = {p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("_")}
    for name in names:
        for path in (folder / name).rglob("*.py"):
            for other in names - {name}:
                assert not any(f"algorithms.{other}." in f"{used}." for used in imports_of(path)), (
                    f"{path} knows {other}"
                )
    for path in sources(
        "speculators_core/training", "speculators_core/data", "speculators_core/losses", "tasks", "flows"
    ):
        strings = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        assert not (names & {s for s in strings if isinstance(s, str)}), f"{path} names an algorithm"


def test_nothing_is_unpickled() -> None:
    """But for weights that a user explicitly lets a conversion open, and then by the restricted unpickler alone."""
    asked = ROOT / "speculators_core" / "convert" / "source.py"
    assert asked.read_text().count("torch.load(path") == asked.read_text().count("weights_only=True)\n") == 1
    for path in sources("speculators_core", "tasks", "flows", "hs_connectors"):
        if path == asked:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("pickle", "load"), ("pickle", "loads")}, (
                    path
                )


def test_long_children_have_a_supervisor() -> None:
    """A child that is started by hand outlives a parent that is killed."""
    own = {"processes.py", "supervisor.py", "engine/runtime.py"}  # runtime: one short question, with a time limit
    found = importers("subprocess", "speculators_core", "tasks", "flows", "deployments")
    assert {path.removeprefix("speculators_core/") for path in found} - own == set()


def test_a_child_of_a_test_gets_its_environment_from_one_place() -> None:
    """`os.environ` holds what earlier tests settled: a child that inherits it depends on their order."""
    spread = re.compile(r"\*\*os\.environ|os\.environ \||dict\(os\.environ\)|os\.environ\.(copy|items)\(\)")
    own = {"environment.py", "test_hub.py", "test_imports.py"}  # test_hub: keeps everything but the proxies
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if path.name not in own and spread.search(path.read_text())
    ]
    assert found == []
