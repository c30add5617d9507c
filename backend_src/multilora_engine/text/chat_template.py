"""`compile_fault`: whether a chat template is one, without the second that importing transformers takes."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multilora_engine.log_lines import one_line

_MAX_FAULT_CHARS = 300


class _GenerationBlocks(Extension):
    """transformers' `{% generation %}`, which marks the model's own text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_fault(text: str) -> str:
    """Why a template does not compile, in a line; "" if it does. Nothing of the template is run."""
    # Not optimised: the optimiser would compute constants such as 9 ** 9 ** 9.
    environment = ImmutableSandboxedEnvironment(optimized=False, extensions=[_GenerationBlocks, loopcontrols])
    try:
        compile(environment.compile(text, raw=True), "<chat template>", "exec")
    except Exception as error:  # its parser and Python's compiler raise many types
        return one_line(f"{type(error).__name__}: {error}", _MAX_FAULT_CHARS)
    return ""
