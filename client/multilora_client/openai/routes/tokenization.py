"""/tokenize and /detokenize, as vLLM has them: the server's own tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from multilora_client.errors import InvalidRequest
from multilora_client.openai.front import Caller, TheFront
from multilora_client.openai.schemas.tokenization import DetokenizeRequest, TokenizeRequest
from multilora_client.openai.tools.prompt import told_instead
from multilora_client.options import ChatOptions

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, caller: Caller, front: TheFront) -> dict[str, Any]:
    caller.model(body.model or front.catalogue.base)
    model = await front.describe_model(caller)
    client = front.client_of(caller)
    try:
        token_ids = await client.tokenize(body.prompt, add_special_tokens=body.special_tokens, **body.chat())
    except InvalidRequest as error:
        messages = told_instead(body.tools_told(), error)
        token_ids = await client.tokenize(**(body.chat() | ChatOptions(messages=messages, tools=None)))
    return {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids, "token_strs": None}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, caller: Caller, front: TheFront) -> dict[str, Any]:
    caller.model(body.model or front.catalogue.base)
    return {"prompt": await front.client_of(caller).detokenize(body.tokens) if body.tokens else ""}
