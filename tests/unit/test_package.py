"""What importing kvstrata costs and shows."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvstrata
from kvstrata import errors
from kvstrata.engine.tiny import make_tiny

HEAVY = ("torch", "vllm", "numpy", "yaml", "msgspec", "typer", "rich", "hypothesis")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, kvstrata; print([m for m in {HEAVY} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_command_loads_no_torch() -> None:
    code = "import sys, kvstrata.cli.main; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_public_names_are_sorted_and_there() -> None:
    assert kvstrata.__all__ == sorted(kvstrata.__all__)
    for name in kvstrata.__all__:
        doc = getattr(kvstrata, name).__doc__
        assert doc
        assert not doc.startswith(f"{name}("), "a dataclass without a docstring of its own"


def test_every_error_is_exported_and_has_one_root() -> None:
    found = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert found <= set(kvstrata.__all__)
    assert all(issubclass(getattr(errors, name), errors.KVStrataError) for name in found)


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("a.b", "is wrong", "something else"),
        errors.TierTimeout("disk", "no answer in 5s", [b"key"]),
        errors.LayoutError("text"),
    ],
)
def test_errors_cross_process_borders(error: errors.KVStrataError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_readmes_examples_run(tmp_path: Path) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    planning, engine = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    make_tiny("qwen3_next", tmp_path / "models" / "tiny")

    def run(example: str) -> str:
        command = [sys.executable, "-c", example]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout

    assert run(planning).startswith("1584 (GroupLoad(")
    said = run(engine).splitlines()
    assert len(said) == 9
    assert said[-1].endswith("] 992")
