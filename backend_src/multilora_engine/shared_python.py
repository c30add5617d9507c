"""What the stubs of Triton's Python backend need of this Python: its shared library, and paths that they can open.

Run as a program, with nothing but Python installed, it names what is missing.
"""

from __future__ import annotations

import sys
import sysconfig
from ctypes.util import find_library
from pathlib import Path

from multilora_engine.errors import ConfigError

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

_SYSTEM_LIBRARY_ROOTS = (Path("/lib"), Path("/usr/lib"))


def python_executable() -> str:
    """This environment's Python. In a Triton stub `sys.executable` is no Python."""
    return str(Path(sys.prefix) / "bin" / "python3")


def libpython_directory() -> Path | None:
    """The folder of this interpreter's shared library, None where the dynamic linker finds it anyway.

    Raises ConfigError when there is none: the stub embeds Python, so it cannot start without.
    """
    library = f"libpython{PYTHON_VERSION}.so.1.0"
    for folder in (Path(sysconfig.get_config_var("LIBDIR") or "/lib"), Path(sys.base_prefix) / "lib"):
        is_system = any(folder.is_relative_to(root) for root in _SYSTEM_LIBRARY_ROOTS)
        if (folder / library).is_file() and not is_system:
            return folder
    if find_library(f"python{PYTHON_VERSION}") is None:
        raise ConfigError(
            f"{library} was not found, which the Python backend loads; on Debian and Ubuntu: "
            f"apt-get install libpython{PYTHON_VERSION}, or take a Python that has its own, such as uv's: "
            f'PYTHON="$(uv python find {PYTHON_VERSION})"'
        )
    return None


def check_paths_are_ascii() -> None:
    """Raises ConfigError where the stubs cannot find this process's packages.

    Their file names are ASCII, whatever the locale says.
    """
    for folder in (str(Path(__file__).parent), sys.prefix, sys.base_prefix):
        if not folder.isascii():
            raise ConfigError(
                f"{folder}: Triton's Python backend finds packages only in paths of ASCII characters; clone or install "
                "into another folder"
            )


if __name__ == "__main__":
    try:
        check_paths_are_ascii()
        libpython_directory()
    except ConfigError as error:
        sys.exit(str(error))
