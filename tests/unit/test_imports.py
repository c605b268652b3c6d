from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "megatron", "transformers")


def modules(folder: str) -> list[str]:
    names = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / folder).rglob("*.py")]
    return sorted(".".join(name.parts).removesuffix(".__init__") for name in names)


def imported_packages(path: Path) -> set[str]:
    """Top-level packages of every absolute import in a file, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def loaded_by(names: list[str]) -> list[str]:
    """Which heavy packages a fresh interpreter holds after importing the modules."""
    code = "\n".join(
        [
            "import sys",
            *(f"import {name}" for name in names),
            f"print(*(name for name in {HEAVY!r} if name in sys.modules))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_common_loads_no_heavy_package() -> None:
    assert loaded_by(modules("common")) == []


def test_demo_loads_no_heavy_package() -> None:
    assert loaded_by(modules("trainer_svc/demo")) == []


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("common", {"megatron", "vllm"}),
        ("trainer_svc", {"rollout_svc", "vllm"}),
        ("rollout_svc", {"megatron", "trainer_svc"}),
    ],
)
def test_folder_never_imports(folder: str, forbidden: set[str]) -> None:
    offences = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in (ROOT / folder).rglob("*.py")
        if (found := imported_packages(path) & forbidden)
    }
    assert offences == {}
