"""The wheel carries Triton's model repository and the sample adapters, which lie beside this folder."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CLONE = Path(__file__).resolve().parents[1]
LEFT_OUT = ("__pycache__", "data", "README.md")
"""`data` has the examples that the sample adapters learnt from."""


class WithSharedFolders(build_py):
    def run(self) -> None:
        super().run()
        samples = ["adapters"] if (CLONE / "adapters").is_dir() else []  # Images are built without samples.
        for name in [] if self.editable_mode else ["model_repository", *samples]:
            target = Path(self.build_lib) / "multilora_engine" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(CLONE / name, target, ignore=shutil.ignore_patterns(*LEFT_OUT))


setup(cmdclass={"build_py": WithSharedFolders})
