"""Chat templates: messages to prompt text, in the dialect of Hugging Face checkpoints.

A template comes from a checkpoint or a user, so it is untrusted code: it runs in Jinja's immutable
sandbox. Nothing here knows about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from helicore.checking import describe

Message: TypeAlias = Mapping[str, Any]
"""{"role": str, "content": str | list of {"type": "text", "text": str}, ...}."""


class _GenerationBlock(jinja2.ext.Extension):
    """Keeps the body of {% generation %}...{% endgeneration %}, which marks trained text."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class ChatTemplate:
    """One compiled template. Immutable; safe to share between threads.

    Args:
      source: Jinja text.
      name: how error messages call it, for instance "chat_template".
    """

    def __init__(self, source: str, name: str = "chat_template") -> None:
        if not isinstance(source, str):
            raise ValueError(f"{name} must be a string of Jinja text, got {describe(source)}")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._name = name
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{name} does not parse: line {error.lineno}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{name} does not parse: it is nested too deeply") from error

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt text of one conversation; ValueError with the template's words on failure."""
        try:
            return self._template.render(messages=list(messages), **variables)
        except (
            jinja2.TemplateError,
            TypeError,
            AttributeError,
            KeyError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ValueError(f"{self._name} refused these messages: {error}") from error


def check_messages(messages: object, where: str = "messages") -> list[dict[str, Any]]:
    """Validated copies of one conversation's messages, text parts joined into one string each."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise ValueError(f"{where} must be a list of messages, got {describe(messages)}")
    if not messages:
        raise ValueError(f"{where} must hold at least one message, got an empty list")
    return [_check_message(message, f"{where}[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{where} must be a mapping with 'role' and 'content', got {describe(message)}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role must be a non-empty string, got {describe(role)}")
    checked = dict(message)
    content = message.get("content")
    if content is None and ("tool_calls" in message or "reasoning_content" in message):
        return checked
    checked["content"] = _check_content(content, f"{where}.content")
    return checked


def _check_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(
            f"{where} must be a string or a list of text parts, got {describe(content)}"
        )
    texts = []
    for position, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise ValueError(
                f"{where}[{position}] must be a text part ({{'type': 'text', 'text': ...}}), "
                f"got {describe(part)}"
            )
        texts.append(text)
    return "\n".join(texts)
