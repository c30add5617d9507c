"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from multilora_client.openai.errors import invalid
from multilora_client.openai.questions import Question
from multilora_client.openai.schemas.base import TokenIds, only
from multilora_client.openai.schemas.guides import single_guide
from multilora_client.openai.schemas.sampling import MAX_TOP_LOGPROBS, Sampling, log_probs, prompt_log_probs
from multilora_client.options import GenerateOptions

_MAX_TOKENS = 16  # OpenAI's default
_MAX_CHOICES = 2048  # of all prompts together

Prompt = str | TokenIds
_SINGLE: TypeAdapter[Prompt] = TypeAdapter(Prompt, config=ConfigDict(strict=True))


def _listed(given: Any) -> list[Prompt]:
    """The prompts. Raises PydanticCustomError in words of its own, since each of the four forms would complain."""
    prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    try:
        return [_SINGLE.validate_python(prompt) for prompt in prompts]
    except ValidationError:
        raise invalid(
            "must be a text, a list of texts, a list of token ids, or a list of such lists, and no list may be empty"
        ) from None


class CompletionRequest(Sampling):
    """prompt: one or several, each a text or token ids. Choice i of prompt p has the index p * n + i."""

    prompt: Annotated[list[Prompt], BeforeValidator(_listed), Field(max_length=_MAX_CHOICES)]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    suffix: Annotated[str, only("")] = ""

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if (num_choices := len(self.prompt) * self.n) > _MAX_CHOICES:
            numbers = f"{len(self.prompt)} prompts with n {self.n} are {num_choices} choices"
            raise invalid(f"{numbers}, at most {_MAX_CHOICES} are made at once", "prompt")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid("max_tokens 0 goes with echo or prompt_logprobs only", "max_tokens")
        return self

    @model_validator(mode="after")
    def _check_guides(self) -> Self:
        single_guide(self.guides())
        return self

    @property
    def includes_logprobs(self) -> bool:
        return self.logprobs is not None

    def questions(self) -> list[Question]:
        length = GenerateOptions(max_tokens=_MAX_TOKENS if self.max_tokens is None else self.max_tokens)
        options = length | self.sampling() | single_guide(self.guides()) | log_probs(self.logprobs)
        return [
            Question(prompt, options | self._told_of_prompt(i) | {"add_special_tokens": self.add_special_tokens})
            if isinstance(prompt, str)
            else Question(None, options | self._told_of_prompt(i) | {"input_ids": prompt})
            for i, prompt in enumerate(self.prompt)
        ]

    def text_of(self, prompt_index: int) -> str | None:
        """The text of this prompt that the server computes; None where only its tokens tell."""
        prompt = self.prompt[prompt_index]
        return prompt if isinstance(prompt, str) and self.truncate_prompt_tokens is None else None

    def _told_of_prompt(self, prompt_index: int) -> GenerateOptions:
        """An echo needs the log-probs that are asked for, or the tokens, which come with any."""
        needs_tokens = self.echo and self.text_of(prompt_index) is None
        return prompt_log_probs(self.prompt_logprobs, self.logprobs if self.echo else None, 0 if needs_tokens else None)
