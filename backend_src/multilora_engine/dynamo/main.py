"""The command `multilora-dynamo`."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version

from multilora_engine.errors import ConfigError


def main() -> None:
    """Serve until a signal ends it. An error that an operator can cause is one line and exit status 1."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"multilora-dynamo {version('multilora-engine')}\n")
        return
    try:
        from dynamo.common.backend.run import run
    except ImportError as error:
        sys.exit(
            f"multilora-dynamo: {error}; install it: pip install './backend_src[dynamo]' in a clone, then "
            "pip install --no-deps ai-dynamo"
        )
    from multilora_engine.dynamo.worker import DynamoWorker

    try:
        run(DynamoWorker)
    except ConfigError as error:
        sys.exit(f"multilora-dynamo: {error}")
    # Dynamo's threads and its canary go on: a thread that calls Python while it ends would abort the process.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
