"""The wheel carries Triton's model repository, which lies beside this folder."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODEL_REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"


class WithModelRepository(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "multilora_engine" / MODEL_REPOSITORY.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(MODEL_REPOSITORY, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithModelRepository})
