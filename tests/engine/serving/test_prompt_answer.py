"""The values of the outputs about a prompt."""

from __future__ import annotations

import numpy as np

from multilora_engine.sequences.prompt_log_probs import PromptLogProbs
from multilora_engine.serving.outputs import PromptAnswer, PromptTokens
from multilora_engine.text.tokenizer import Tokenizer


def told(token_ids: list[int], num_top: int, tokenizer: Tokenizer) -> PromptAnswer:
    """Token i has the log-prob -i; the likeliest ones in its place are itself and the token of the next id."""
    log_probs = PromptLogProbs(len(token_ids), num_top)
    values = -np.arange(1, len(token_ids), dtype=np.float32)
    tops = np.array([[i, i + 1] for i in token_ids[1:]])[:, :num_top]
    log_probs.append(values, np.stack([values, values - 1], axis=1)[:, :num_top], tops)
    return PromptTokens(token_ids, num_top, tokenizer.spell).answer(log_probs.to_bytes())


def test_every_token_has_its_id_its_bytes_and_the_likeliest_in_its_place(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode("é!", add_special_tokens=False)
    assert tokenizer.eos_id is not None
    prompt = [tokenizer.eos_id, *text]
    answer = told(prompt, 2, tokenizer)
    assert answer.prompt_ids.tolist() == prompt
    assert answer.prompt_log_probs.tolist() == [-float(i) for i in range(len(prompt))]
    assert answer.prompt_top_log_prob_ids is not None
    assert answer.prompt_top_log_prob_ids.tolist() == [[-1, -1], *([i, i + 1] for i in text)]
    assert answer.prompt_top_log_probs is not None
    assert answer.prompt_top_log_probs[1].tolist() == [-1.0, -2.0]
    assert answer.prompt_tokens[0].tolist() == [b"<|im_end|>", b"", b""]
    spelled = [token.decode().encode("latin-1") for token in answer.prompt_tokens[1:, 0]]
    assert b"".join(spelled) == "é!".encode()
    for row, token_id in zip(answer.prompt_tokens[1:], text, strict=True):
        assert row[2].decode().encode("latin-1") == tokenizer.token_bytes(token_id + 1)
    dtypes = [answer.prompt_ids, answer.prompt_log_probs, answer.prompt_top_log_prob_ids, answer.prompt_top_log_probs]
    assert [str(array.dtype) for array in dtypes] == ["int32", "float32", "int32", "float32"]
    assert all(array.flags.c_contiguous for array in dtypes)


def test_without_likeliest_tokens_their_outputs_are_left_out(tokenizer: Tokenizer) -> None:
    answer = told([5, 6, 7], 0, tokenizer)
    assert (answer.prompt_top_log_prob_ids, answer.prompt_top_log_probs) == (None, None)
    assert answer.prompt_tokens.shape == (3, 1)


def test_no_special_token_is_spelled_by_nothing(tokenizer: Tokenizer) -> None:
    names = {tokenizer.spell(i) for i in tokenizer.special_ids}
    assert b"" not in names
    assert len(names) == len(tokenizer.special_ids)
