import textwrap
from pathlib import Path

import pytest

MODEL = """
    import os

    import triton_python_backend_utils as pb_utils


    class ConfigError(Exception):
        pass


    class TritonPythonModel:
        def initialize(self, args):
            if reason := os.environ.get("ECHO_FAILURE"):
                raise ConfigError(reason)

        def execute(self, requests):
            values = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in values]
"""

CONFIG = """
    backend: "python"
    input [ { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } ]
    output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
    instance_group [ { kind: KIND_CPU } ]
"""


@pytest.fixture
def echo_repository(tmp_path: Path) -> Path:
    """A model repository with one Python model that answers what it is asked; ECHO_FAILURE makes its load fail."""
    version = tmp_path / "repository" / "echo" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(textwrap.dedent(MODEL))
    (version.parent / "config.pbtxt").write_text(textwrap.dedent(CONFIG))
    return tmp_path / "repository"
