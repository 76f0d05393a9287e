"""Builds the native calls into the package, where there is a compiler and what it needs.

Without them the package is complete all the same: it moves files with calls in Python, and chunks
with tensor operations.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext


def extension(folder: str, *names: str, headers: tuple[str, ...] = ()) -> Extension:
    """A module of one package, named for its first source."""
    path = f"src/kvstrata/{folder}"
    return Extension(
        f"kvstrata.{folder}.{names[0]}",
        sources=[f"{path}/{name}.c" for name in names],
        depends=[f"{path}/{name}.h" for name in headers],
        extra_compile_args=[
            *("-std=c11", "-O2", "-g0"),
            *("-Wall", "-Wextra", "-Wno-cast-function-type"),
        ],
        py_limited_api=True,
        optional=True,
    )


EXTENSIONS = (
    extension("tiers", "_file_io", "_xxh3", "_xxh3_avx2", headers=("_xxh3", "_xxh3_body")),
    extension("transfers", "_row_queue"),
)


class NativeCalls(BuildHookInterface[Any]):
    """Compiles in place, and tells the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build the libraries, or warn."""
        libraries = [library_of(module) for module in EXTENSIONS]
        for library in libraries:
            Path(self.root, library).unlink(missing_ok=True)
        compile_in_place(self.root)
        built = [library for library in libraries if Path(self.root, library).exists()]
        for library in sorted(set(libraries) - set(built)):
            self.app.display_warning(f"built without {library}: see what the compiler says")
        if not built:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].extend(built)
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"


def library_of(module: Extension) -> str:
    """Where a module's library lies, beside its sources."""
    return f"src/{module.name.replace('.', '/')}.abi3.so"


def compile_in_place(root: str) -> None:
    """Build the libraries beside their sources, as far as that is possible."""
    project = Distribution(
        {"name": "kvstrata", "package_dir": {"": "src"}, "ext_modules": list(EXTENSIONS)}
    )
    project.src_root = root
    command = build_ext(project)
    command.inplace = True
    with tempfile.TemporaryDirectory() as folder:
        command.build_temp = command.build_lib = folder
        command.ensure_finalized()
        command.run()
