"""Models of a few lines under the names and declarations of the fronts, for tests of what stands before a server."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

_DECLARATIONS = Path(__file__).parents[2] / "model_repository"

_UNARY = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([self.describe(request)]) for request in requests]

        def describe(self, request):
            weights = pb_utils.get_input_tensor_by_name(request, "lora_weights")
            said = json.loads(request.parameters()) | {"bytes": weights.as_numpy().nbytes if weights else 0}
            times = pb_utils.get_input_tensor_by_name(request, "max_tokens")
            text = json.dumps(said) * (times.as_numpy().item() if times else 1)
            return pb_utils.Tensor("text_output", np.array([[text.encode()]], dtype=object))
"""

_STREAM = """
    import time
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                self.answer(request, request.get_response_sender())

        def answer(self, request, sender):
            self.say(sender, b"Ahoy")
            # Triton wakes no model when its request is cancelled: the model has to ask.
            while self.is_endless(request) and not request.is_cancelled():
                time.sleep(0.01)
            self.say(sender, b"Bye")
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

        def is_endless(self, request):
            return pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy().item() == 0

        def say(self, sender, text):
            tensor = pb_utils.Tensor("text_output", np.array([[text]], dtype=object))
            sender.send(pb_utils.InferenceResponse([tensor]))
"""


def write_small_models(repository: Path) -> Path:
    """`generation_unary` answers in JSON: the request's parameters and the `bytes` of its adapter, `max_tokens` times.

    `generation` says two words; with max_tokens 0 the second one only when the request is cancelled, and nothing to
    anybody else until then.
    """
    for name, model in {"generation_unary": _UNARY, "generation": _STREAM}.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(textwrap.dedent(model))
        shutil.copy(_DECLARATIONS / name / "config.pbtxt", repository / name)
    return repository
