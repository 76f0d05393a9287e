"""Builds the native file calls into the package, where there is a compiler and what it needs.

Without them the package is complete all the same, and moves files with calls in Python.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

FOLDER = "src/kvstrata/tiers"
LIBRARY = f"{FOLDER}/_file_io.abi3.so"
EXTENSION = Extension(
    "kvstrata.tiers._file_io",
    sources=[f"{FOLDER}/{name}.c" for name in ("_file_io", "_xxh3", "_xxh3_avx2")],
    depends=[f"{FOLDER}/{name}.h" for name in ("_xxh3", "_xxh3_body")],
    extra_compile_args=["-std=c11", "-O2", "-g0", "-Wall", "-Wextra", "-Wno-cast-function-type"],
    py_limited_api=True,
    optional=True,
)


class NativeFileCalls(BuildHookInterface[Any]):
    """Compiles in place, and tells the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build the library, or warn."""
        library = Path(self.root, LIBRARY)
        library.unlink(missing_ok=True)
        compile_in_place(self.root)
        if not library.exists():
            self.app.display_warning("built without native file calls: see what the compiler says")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"


def compile_in_place(root: str) -> None:
    """Build the library beside its sources, if that is possible."""
    project = Distribution(
        {"name": "kvstrata", "package_dir": {"": "src"}, "ext_modules": [EXTENSION]}
    )
    project.src_root = root
    command = build_ext(project)
    command.inplace = True
    with tempfile.TemporaryDirectory() as folder:
        command.build_temp = command.build_lib = folder
        command.ensure_finalized()
        command.run()
