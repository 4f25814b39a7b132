"""What pyproject.toml cannot say: the pages that messages point to are installed, and a wheel can leave the core out.

The pages of docs/ are copied to `launcher/pages` of the wheel, so that `ddp-launch docs` finds them without a checkout.
DDP_LAUNCH_CORE=0 builds the wheel for machines that the compiled one does not fit: pure Python, without a compiler.
With DDP_LAUNCH_CORE=required a core that cannot be compiled is an error, where it is usually left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

_PAGES = "launcher/pages"
_CORE = os.environ.get("DDP_LAUNCH_CORE", "1")


class WithPages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout has them in docs/
            for page in _pages():
                self.copy_file(str(page), self._inside(page))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *map(self._inside, _pages())]

    def _inside(self, page: Path) -> str:
        folder = Path(self.build_lib, _PAGES)
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / page.name)


class WithCore(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        for extension in self.extensions:
            extension.optional = extension.optional and _CORE != "required"


class PerhapsPure(Distribution):
    def has_ext_modules(self) -> bool:
        """The core is written for Linux."""
        return _CORE != "0" and sys.platform == "linux" and super().has_ext_modules()


def _pages() -> list[Path]:
    return sorted(Path("docs").glob("*.md"))


setup(cmdclass={"build_ext": WithCore, "build_py": WithPages}, distclass=PerhapsPure)
