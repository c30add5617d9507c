"""`GenerateOptions` and `ChatOptions`: the options of requests, as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

DEFAULT_MAX_TOKENS = 128


class Message(TypedDict):
    """One turn of a chat: `role` is system, user or assistant."""

    role: str
    content: str


class ChatOptions(TypedDict, total=False):
    """A chat in place of a prompt; None is as good as not given.

    messages: turns of a chat, to which the server applies the model's chat template; each is a Message or another
        form that the template understands.
    tools: beside `messages`, the functions that the model may call; templates without a place for them refuse.
    chat_template_kwargs: further values by the names that the template knows, such as `enable_thinking`.
    add_generation_prompt: whether the template opens the assistant's turn. True when not given.
    continue_final_message: whether the answer goes on with the last of `messages` instead of a new turn.
    """

    messages: Sequence[Mapping[str, object]] | None
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class GenerateOptions(ChatOptions, total=False):
    """The options that `generate` and `stream` take beside the prompt and the adapter; None is as good as not given.

    Exactly one of the prompt, `messages` and `input_ids` is required.

    input_ids: token ids of the prompt.
    decoder_text_input, decoder_input_ids: of a model with an encoder, which reads the prompt: the beginning of the
        answer, as text, or as token ids with the decoder's start token; the latter not at the ensembles.
    add_special_tokens: whether the tokenizer's special tokens, such as one that begins a text, are put around the
        prompt (the server's own setting when not given) or around what the chat template writes (False when not given).
    truncate_prompt_tokens: keep only this many tokens of the prompt, from its end; -1 keeps as many as leave room for
        `max_tokens`.
    max_tokens: most tokens to generate, 128 when not given; 0 only computes the prompt. min_tokens: least before an end
        token counts. min_tokens_holds_stops: and before a stop counts, as in vLLM; not at the ensembles.
    temperature, top_k, top_p, min_p: sampling. The server is greedy unless one of them is given; `top_k` 0 means no
        limit.
    repetition_penalty (1 is none), presence_penalty, frequency_penalty (0 is none): against repetition.
    logit_bias: for each token id, a number that is added to the token's logit.
    seed: makes sampling repeatable.
    num_return_sequences: the number of answers, in a Generation's `alternatives`. A chunk of a stream says by its
        `sequence_index` to which answer it belongs.
    beam_width: more than 1 is beam search for the likeliest answers; not for streams. length_penalty: answers rank by
        log-prob / length ** length_penalty. early_stopping, beam_search_diversity_rate: see the server's documentation;
        not at the ensembles.
    return_log_probs, num_top_log_probs: return the log-probs of the tokens, and of this many of the likeliest tokens.
    return_prompt_log_probs, num_prompt_top_log_probs: as above for the prompt's tokens, in an answer's `prompt`. The
        second option implies the first.
    return_context_logits, return_generation_logits: the model's own logits.
    stop_words: texts that end the answer. stop_token_ids: tokens that end the answer. Their text is not part of the
        answer, unless include_stop_str_in_output is true. bad_words: exact token sequences that are never generated.
    guide_type, guide: the form that the answer must have: `json` (without a guide), or `json_schema`, `regex` or
        `ebnf_grammar` with its text as the guide. guide_after_thinking: a model that thinks may do so first; not at the
        ensembles.
    default_options: the names of options whose values are the caller's own defaults: for a chat, an adapter's defaults
        come before them, see AdapterUse. Options that are not given yield to these anyway.
    lora_name: the adapter by the name under which the server has it, instead of by its id.
    lora_expected_digest: the digest that the adapter must have, as an answer's `lora_digest` tells it. Where the server
        has another version, the request is refused with NotFound.
    lora_session: requests by an alias with one session are answered by one of its adapters.
    lora_start: the position in the prompt, in tokens, from which on the adapter computes; the base computes the tokens
        before that. Not given: an activated adapter finds its invocation tokens, any other one computes all tokens.
    lora_set: the adapter as a sum of adapters that the server has: their weights, by task ids or names.
    end_id: the token that ends the answer instead of the model's own; -1 for none.
    priority: requests with a smaller number are served first; 0 when not given.
    timeout_s: seconds after which the server ends the request. The client waits one second longer, then raises
        TimedOut. Triton does not pass timeouts to HTTP streams, so there the client ends the request after timeout_s.
    request_id: a name by which `stop` ends the request; a random one when not given.
    traceparent: the W3C trace that the server's spans continue, if it makes spans: 00-TRACE-SPAN-FLAGS.
    on_behalf_of: the caller for whom a front asks, as the header x-multilora-client carries it.
    """

    input_ids: Sequence[int] | None
    decoder_text_input: str | None
    decoder_input_ids: Sequence[int] | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    max_tokens: int | None
    min_tokens: int | None
    min_tokens_holds_stops: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    num_return_sequences: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | None
    beam_search_diversity_rate: float | None
    return_log_probs: bool | None
    num_top_log_probs: int | None
    return_prompt_log_probs: bool | None
    num_prompt_top_log_probs: int | None
    return_context_logits: bool | None
    return_generation_logits: bool | None
    stop_words: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    bad_words: Sequence[str] | None
    guide_type: str | None
    guide: str | None
    guide_after_thinking: bool | None
    default_options: Sequence[str] | None
    lora_name: str | None
    lora_expected_digest: str | None
    lora_session: str | None
    lora_start: int | None
    lora_set: Mapping[int | str, float] | None
    end_id: int | None
    priority: int | None
    timeout_s: float | None
    request_id: str | None
    traceparent: str | None
    on_behalf_of: str | None


def check_names(options: ChatOptions, kind: type[ChatOptions]) -> None:
    """Raises TypeError as Python does. A misspelt option that was passed over would get the base model's answer."""
    if unknown := sorted(options.keys() - kind.__annotations__.keys()):
        hint = "; an adapter is given by adapter=ID or lora_name=" if any("lora" in name for name in unknown) else ""
        raise TypeError(f"there is no option {', '.join(unknown)}{hint}")
