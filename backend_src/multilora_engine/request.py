"""The records that cross the engine's door: a request in (`GenerationRequest`), tokens out (`TokenOutput`).

Both are frozen values made of plain Python types: structs, which msgspec carries between processes as they are, and
which are made in a tenth of the time that frozen dataclasses take.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from multilora_engine.lora.names import SetMember, TaskId, scoped_task_id

FinishReason = Literal["stop", "length", "cancelled"]


GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar"]


class Guide(msgspec.Struct, frozen=True):
    """The form that the answer must have: a JSON object or array, a JSON schema, a regular expression, or a grammar.

    text: the schema, expression (Rust's syntax) or grammar (GBNF with a `root`, or Lark with a `start`); unused for
    `json`.
    """

    type: GuideType
    text: str = ""

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is chosen, and when to stop.

    Greedy when `temperature` is 0 or `top_k` is 1. `top_k` 0, `top_p` 1 and `min_p` 0 mean no restriction. `seed` None
    draws one. `top_p_decay`, `top_p_min`, `top_p_reset_id`: after each token top_p is multiplied by the decay, down to
    the minimum, and set back when the token with the reset id was chosen (factual-nucleus sampling).

    repetition_penalty (1 is none) counts prompt and answer; presence_penalty and frequency_penalty (0 is none) count
    the answer. embedding_bias: (token id, addend of its logit). bad_token_sequences: never completed.

    forced_first_id: the answer's first token, whatever else the request says; a guide holds for the text after it.
    forced_last_id: in the same way, the last token of an answer that is as long as it may become.
    min_tokens: no end token before this many tokens. min_tokens_holds_stops: nor a stop, as vLLM has it: a stop that is
    one token is forbidden until then, and a stop that these tokens complete is text. end_id: None means the model's own
    end tokens, which are `end_ids` if there are any, else the checkpoint's; -1 means none.
    guide_after_thinking: the guide holds for the text after the thinking of a model that thinks (guides/thinking.py).
    guide: an end token is chosen only if the answer parses. If nothing can follow, the answer ends by itself, even
    before `min_tokens`.
    stop_words: matched on the generated text, and never emitted, not even in part. A stop word that spells special
    tokens is also matched on these tokens, which have no text. stop_token_sequences: stops by token ids, as in
    upstream's `stop_words_list`. include_stop_str_in_output: emit the stop all the same.
    max_tokens: 0 computes the prompt and answers with no token.

    return_log_probs: log-probabilities of the chosen tokens, by the model's own logits. num_top_log_probs: also of this
    many most probable tokens. return_context_logits: the logits after each token of the prompt.
    return_generation_logits: the logits from which each token of the answer was chosen. return_prompt_log_probs:
    log-probabilities of the prompt's tokens. num_prompt_top_log_probs: also of this many most probable tokens in their
    places.

    beam_width: above 1, this many of the likeliest answers that beam search finds (beam_search.py), in place of a drawn
    answer. They are ranked by the sum of their tokens' log-probs, after temperature, biases and penalties, divided by
    length ** length_penalty. early_stopping: 1 ends the search with `beam_width` ended answers. 0 ends it when the best
    beam, at its present length, would be no better than the worst of these answers. Any other value does so at the
    length that is best for the beam. beam_search_diversity_rate: added to a candidate's rank for each beam that is
    likelier than its own.
    """

    max_tokens: int
    min_tokens: int = 0
    min_tokens_holds_stops: bool = False
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 1.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    embedding_bias: tuple[tuple[int, float], ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    end_id: int | None = None
    end_ids: tuple[int, ...] = ()
    stop_words: tuple[str, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    guide: Guide | None = None
    guide_after_thinking: bool = False
    forced_first_id: int | None = None
    forced_last_id: int | None = None
    return_log_probs: bool = False
    num_top_log_probs: int = 0
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_prompt_log_probs: bool = False
    num_prompt_top_log_probs: int = 0
    beam_width: int = 1
    length_penalty: float = 0.0
    early_stopping: int = 1
    beam_search_diversity_rate: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def num_tokens_without_stops(self) -> int:
        """The tokens at the beginning of the answer in which no stop is looked for."""
        return self.min_tokens if self.min_tokens_holds_stops else 0

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether the answer tells of every token of the prompt, so that each must be computed."""
        return self.return_context_logits or self.return_prompt_log_probs

    @property
    def has_decay(self) -> bool:
        """Whether top_p changes with the answer."""
        return self.top_p_decay != 1.0 or self.top_p_min > self.top_p

    @property
    def must_read_each_token(self) -> bool:
        """Whether the host must have read a token before the next one is chosen.

        The host follows a guide's grammar, and compares the beams of a search. Logits of the prompt are read with their
        step. The device itself does penalties, bad words, `min_tokens` and the decay of top_p, so these need no wait.
        Stop words and stop tokens need none either: the host looks for them later, and drops the tokens beyond a stop.
        """
        return self.guide is not None or self.beam_width > 1 or self.return_context_logits


class Sender(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sender of a request, as far as the server can tell.

    tenant: the owner of its API key; empty without keys, and for the people who run the server.
    name: its work is charged to this, which may end it: the tenant, else the client that a proxy names, else empty.
    key_id: of the API key. requests_per_minute, tokens_per_minute: the limits of this key; None is no limit.
    weight: its share of the server when others wait, too, compared to theirs.
    is_unheard: it waits for one response, and Triton would not tell that it has hung up over HTTP.
    is_canary: the supervisor of the server asks whether it answers, which is nobody's request: it is not counted.
    """

    tenant: str = ""
    name: str = ""
    key_id: str = ""
    is_unheard: bool = False
    is_canary: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0

    @property
    def account(self) -> str:
        """Its turns, and its share of batch and queue, are those of all senders of this account: its name.

        Among senders who cannot be told apart, those whose end nobody may hear have one of their own, lest answers that
        nobody waits for take the others' places. No name has a control character.
        """
        return self.name or ("\0unheard" if self.is_unheard else "")

    @property
    def is_known(self) -> bool:
        """Whether it can be told from others."""
        return bool(self.name or self.key_id)


class GenerationRequest(msgspec.Struct, frozen=True):
    """One prompt, as the engine accepts it.

    request_id: unique inside the engine (the fronts make it; a client's own id need not be unique).
    lora_task_id: the adapter to use, None for the base model. It must be cached, or a source must have it.
    timeout_s: seconds from acceptance after which the engine ends the request, None for `request_timeout_s`.
    priority: smaller is served first, equal ones in order of arrival.
    lora_name: the client's name for the adapter of `lora_task_id`, empty if it gave none. An alias's name is replaced
        by a member's when the engine accepts the request.
    lora_session: requests by an alias with one session have one member, as long as the alias stays as it is. Empty:
        each call has a session of its own.
    adapter_tenant: the tenant that this adapter belongs to, empty for none.
    num_tokens_ahead: of the prompts and answers, at their longest, that came before it in the same request of a client.
    tells_perf: whether each output has its metrics so far, and not the last one alone.
    lora_start: the position in the prompt from which on the adapter computes; the base computes the tokens before that.
        None: what the adapter's traits say.
    lora_set: the adapter is the set of these members, as of `checked_members`, and `lora_task_id` its `set_task_id`.
    lora_path: the place of the adapter's files, which a source covers. The adapter that answers is the one at the path:
        another one under the id is replaced, or the request refused, as `lora_on_conflict` says. Empty: no matter where
        the adapter came from.
    chat_use: the `use_digest` by which a chat became the prompt and its options; the engine asks for another prompt
        where the version that answers has another use. UNWRITTEN: nothing is written yet. None: the prompt is no chat.
    source_token_ids: of an encoder-decoder model, the text that the encoder reads. The prompt is then the beginning of
        the decoder's text. Empty for all other models.
    lora_expected_digest: the digest of the adapter that must answer. Empty: any version of the adapter.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    lora_task_id: int | None = None
    timeout_s: float | None = None
    priority: int = 0
    lora_name: str = ""
    adapter_tenant: str = ""
    sender: Sender = Sender()
    num_tokens_ahead: int = 0
    tells_perf: bool = False
    lora_start: int | None = None
    lora_set: tuple[SetMember, ...] = ()
    lora_path: str = ""
    lora_session: str = ""
    source_token_ids: list[int] = []
    lora_expected_digest: str = ""
    chat_use: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the text that the request brings, as clients are told them: of the source if there is one."""
        return len(self.source_token_ids or self.prompt_token_ids)

    @property
    def task_id(self) -> TaskId | None:
        """The adapter to use, as the engine knows it."""
        return None if self.lora_task_id is None else scoped_task_id(self.adapter_tenant, self.lora_task_id)


UNWRITTEN = "unwritten"
"""`GenerationRequest.chat_use` of a chat whose prompt and options wait until the adapter's use is known."""


class TokenLogProb(msgspec.Struct, frozen=True):
    """Log-probability of a chosen token, and of the most probable ones, best first: (token id, log-probability)."""

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class PerfMetrics(msgspec.Struct, frozen=True):
    """Times of one request in nanoseconds since the epoch (0: did not happen), and the KV cache blocks it was given.

    The times are by the clock as it was set when they were told, so that the time between them was measured.
    Reused blocks came with keys and values of its tokens, new ones without; total is both. Blocks that it lost by
    preemption and was given again count each time.
    """

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    kv_cache_alloc_total_blocks: int = 0
    kv_cache_alloc_new_blocks: int = 0
    kv_cache_reused_blocks: int = 0


class BeamOutput(msgspec.Struct, frozen=True):
    """One of the answers of a beam search.

    log_probs: of each token. The search ranked by them and their sum.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    log_probs: list[TokenLogProb]
    cum_log_prob: float


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step's output for one request. Concatenating `token_ids` and `text` over a request gives the whole answer.

    token_ids: the tokens whose text is complete in this output; tokens that end inside a UTF-8 character, or that
        could still become a stop word, are held back until they are decided.
    text: their text, without the part that a stop word cuts off.
    finish_reason: set exactly once, on the last output of the request: `stop` (end token or stop word), `length`
        (max_tokens or the context is used up), `cancelled` (it was aborted). None before.
    error_code, error_message: set instead of a finish reason when the request failed (codes of errors.py).
    num_prompt_tokens, num_output_tokens: totals so far. num_cached_tokens: of the prompt's tokens, how many had their
        keys and values in the prefix cache when the request first started.
    lora_digest: digest of the adapter that answered, empty for the base model. lora_name: its name, of an alias the
        member's; empty where the request gave an id alone.
    log_probs: one per entry of `token_ids` when the request asked for them. cum_log_prob: their sum so far.
    generation_logits: likewise, float32 [tokens, vocab]. context_logits: of the prompt's next tokens,
        in outputs without tokens and in the first one with tokens; a front has a view of the message's memory.
    prompt_log_probs: of every token of the prompt, in the first output; rows of `prompt_log_probs.row_type`.
    perf: in the last output, and before it for a request that `tells_perf`.
    beams: all answers of a beam search, in its only output: best first, at most `beam_width`. Its reason is the
        best answer's, and num_output_tokens counts all of them.
    stop_word: that ended the answer, in the last output; empty for any other end, and for beams.
    asked_use: `AdapterTraits.use` of the adapter that is to answer: the front shall write the chat by it, and give the
        prompt. There is nothing else in such an output. None in any other.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    error_message: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    lora_digest: str = ""
    lora_name: str = ""
    log_probs: list[TokenLogProb] = []
    cum_log_prob: float = 0.0
    generation_logits: bytes = b""
    context_logits: bytes = b""
    prompt_log_probs: bytes = b""
    num_cached_tokens: int = 0
    perf: PerfMetrics | None = None
    beams: list[BeamOutput] = []
    stop_word: str = ""
    asked_use: str | None = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens that leave with this output, those of all beams included."""
        return sum(len(beam.token_ids) for beam in self.beams) if self.beams else len(self.token_ids)

    @property
    def is_of_prompt(self) -> bool:
        """Whether it tells of the prompt only, and there is more to come."""
        return not (self.token_ids or self.text or self.is_final)

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error_code is not None
