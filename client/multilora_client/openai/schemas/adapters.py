"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from multilora_client.openai.schemas.base import ModelName, Strict, only
from multilora_client.openai.schemas.sampling import Digest


class LoadRequest(Strict):
    """lora_path: a directory or a repository that one of the server's own sources covers.

    expected_digest: of the version of a loaded adapter that the new one replaces.
    """

    lora_name: Annotated[ModelName, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: Annotated[bool, only(False)] = False
    is_3d_lora_weight: Annotated[bool, only(False)] = False
    base_model_name: str | None = None
    expected_digest: Digest | None = None


class UnloadRequest(Strict):
    """lora_int_id: vLLM's own number, which vLLM itself does not look at. expected_digest: of the version that goes."""

    lora_name: Annotated[ModelName, Field(min_length=1)]
    lora_int_id: int | None = None
    expected_digest: Digest | None = None
