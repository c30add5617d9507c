"""A wheel with compiled operators is for one kind of machine, and all Pythons there; one without them is for all."""

from pathlib import Path

from setuptools import Distribution, setup

PREBUILT = Path(__file__).parent / "multilora_kernels" / "cpu" / "prebuilt"


class MaybeBinary(Distribution):
    def has_ext_modules(self) -> bool:
        return PREBUILT.is_dir()


setup(distclass=MaybeBinary, options={"bdist_wheel": {"py_limited_api": "cp311"}} if PREBUILT.is_dir() else {})
