"""The order of the house: who may import whom, how long a file may be, and that the wheel holds every package."""

import ast
import statistics
import tomllib
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "transformers_dspark"

# Low to high: a module imports only from modules before it. Packages count as one module.
LADDER = [
    "kernels",
    "_compat",
    "environment",
    "configuration_dspark",
    "checkpoints",
    "generation_config",
    "packaging",
    "masks_dspark",
    "backbone_dspark",
    "sparse_dspark",
    "heads_dspark",
    "borrowed_dspark",
    "proposal_dspark",
    "modeling_dspark",
    "inspection",
    "exporting",
    "sampling",
    "scheduling",
    "round_size",
    "calibration",
    "telemetry",
    "ceiling",
    "round_statistics",
    "recalibration",
    "strict",
    "lending",
    "graphs",
    "windows",
    "target",
    "ragged_ops",
    "ragged_context",
    "scans",
    "mixers",
    "window_layers",
    "recurrent",
    "rewinding",
    "compressed",
    "cache",
    "attention",
    "profiling",
    "drift",
    "step_costs",
    "processors",
    "batch",
    "static_round",
    "linear_ops",
    "quicker",
    "captured",
    "captured_loop",
    "decoding",
    "divergence",
    "candidates",
    "assisted",
    "lone_prompt",
    "generate_dspark",
    "slot",
    "integration",
    "training",
    "evaluation",
    "cli",
    "__main__",
]
# The front door: everything may ask it for the version; it names every public module, but loads none by itself.
FRONT_DOOR = "__init__"


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, at its top or inside a function."""
    here = ["transformers_dspark", *path.relative_to(PACKAGE).with_suffix("").parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = here[: -node.level] if node.level else []
            stem = start + (node.module.split(".") if node.module else [])
            names = [[*stem, alias.name] for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "transformers_dspark" and len(name) > 1}
    return {name for name in found if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()}


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_the_ladder(path: Path) -> None:
    module = module_of(path)
    if module == FRONT_DOOR:
        return
    assert module in LADDER, f"{module} has no place on the ladder yet: give it one in LADDER"
    above = imports_of(path) - {module} - set(LADDER[: LADDER.index(module)])
    assert not above, f"{path.name} imports {sorted(above)}, which stand above {module}"


def test_the_ladder_test_sees_imports() -> None:
    assert {"cli"} <= imports_of(PACKAGE / "__main__.py")


def test_modules_for_the_hub_stand_alone() -> None:
    """They are copied beside the weights of a checkpoint, where `trust_remote_code` finds no sibling packages."""
    files = sorted(PACKAGE.glob("*_dspark.py"))
    assert {"configuration_dspark", "modeling_dspark"} < {path.stem for path in files}
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        relative = {node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and node.level}
        assert all(module.endswith("_dspark") and "." not in module for module in relative), (path.name, relative)
        absolute = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        absolute |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and not node.level}
        assert not [name for name in absolute if name.startswith("transformers_dspark")], path.name


def test_private_names_of_others_stand_in_one_module() -> None:
    """An attribute with an underscore, reached through another object, is one that this package defines itself."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    own, reached = set(), []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                by_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                if by_self and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                elif not by_self and not isinstance(node.value, ast.Call):  # a call: `super()._apply`
                    reached.append((path.name, node.attr))
    assert not [(name, attr) for name, attr in reached if attr not in own and name != "_compat.py"]


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert statistics.median(lines.values()) < 200
    assert not [str(path) for path, count in lines.items() if count > 500]


def test_no_drawers_for_everything() -> None:
    assert not [str(path) for path in SOURCES if path.name in ("utils.py", "base.py", "helpers.py", "common.py")]


def test_the_wheel_holds_every_package() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        ".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in SOURCES if path.name == "__init__.py"
    }
    mapped = {name for name in setuptools["package-dir"] if name}
    assert set(setuptools["packages"]) == folders | mapped
    assert all((ROOT / folder / "__init__.py").exists() for name, folder in setuptools["package-dir"].items() if name)
