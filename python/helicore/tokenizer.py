"""Text to token ids and back: tokenizer.json, its special tokens and its chat template.

Only files are read; a tokenizer that needs code from the checkpoint is refused. Streaming decoders
for one sequence are in executor/detokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from helicore.chat_template import ChatTemplate, Message, check_messages
from helicore.checking import describe

_CONFIG = "tokenizer_config.json"
_DEFAULT_TEMPLATE = "default"
_TOOL_TEMPLATE = "tool_use"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {describe(value)}")
    return value


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template name -> Jinja text. A chat_template.jinja file wins over tokenizer_config.json."""
    templates: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        templates[_DEFAULT_TEMPLATE] = declared
    elif isinstance(declared, list):
        for position, entry in enumerate(declared):
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise ValueError(
                    f"{folder / _CONFIG}: chat_template[{position}] must have 'name' and 'template'"
                )
            templates[str(entry["name"])] = str(entry["template"])
    elif declared is not None:
        raise ValueError(
            f"{folder / _CONFIG}: chat_template must be a string or a list, "
            f"got {describe(declared)}"
        )
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates[_DEFAULT_TEMPLATE] = single.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates


def _needs_remote_code(folder: Path, config: Mapping[str, Any]) -> bool:
    auto_map = config.get("auto_map")
    has_code = isinstance(auto_map, dict) and "AutoTokenizer" in auto_map
    return has_code and not (folder / "tokenizer.json").is_file()


def _load_backend(folder: Path, config: Mapping[str, Any], trusted: bool) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if _needs_remote_code(folder, config):
        way_out = "give token ids ({'prompt_token_ids': [...]}) with skip_tokenizer_init=True"
        if not trusted:
            raise ValueError(
                f"the tokenizer in {folder} needs code of the checkpoint, which is run only with "
                f"trust_remote_code=True; or {way_out}"
            )
        raise ValueError(
            f"the tokenizer in {folder} has no tokenizer.json and its own Python code cannot be "
            f"run here; save it once as tokenizer.json with its library, or {way_out}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {folder}; add it, or pass skip_tokenizer_init=True and token ids"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception on a malformed file
        raise ValueError(f"{path} is not a valid tokenizer file: {error}") from error


class Tokenizer:
    """A loaded tokenizer. Immutable after construction; encode and decode are thread-safe.

    Args:
      folder: a checkpoint folder with tokenizer.json and, optionally, tokenizer_config.json,
        special_tokens_map.json and chat_template.jinja.
      trust_remote_code: see LLM.
    Raises FileNotFoundError or ValueError that name the file and the field.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        config_path = folder / _CONFIG
        config = _read_json(config_path) if config_path.is_file() else {}
        self.folder = folder
        self._backend = _load_backend(folder, config, trust_remote_code)
        # Truncation and padding stored in the file are training settings.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens = self._read_special_tokens(config)
        self._add_bos = config.get("add_bos_token") is True
        self._templates = _read_templates(folder, config)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.decode_token = lru_cache(maxsize=65536)(self._decode_token)
        self._compile = lru_cache(maxsize=16)(ChatTemplate)

    def _read_special_tokens(self, config: Mapping[str, Any]) -> dict[str, str]:
        map_path = self.folder / "special_tokens_map.json"
        sources = [config]
        if map_path.is_file():
            sources.append(_read_json(map_path))
        found: dict[str, str] = {}
        for source in sources:
            for name, value in source.items():
                text = value.get("content") if isinstance(value, dict) else value
                if name.endswith("_token") and isinstance(text, str):
                    found.setdefault(name, text)
        return found

    # Vocabulary

    @property
    def backend(self) -> tokenizers.Tokenizer:
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; a model may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def special_id(self, name: str) -> int | None:
        """The id of "bos_token", "eos_token", "pad_token", ...; None when there is none."""
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @property
    def bos_token_id(self) -> int | None:
        return self.special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.special_id("eos_token")

    # Text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        for position, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"text[{position}] must be a string, got {describe(text)}")
            # Lone surrogates have no UTF-8; the library would fail with words about its buffer.
            if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError(
                    f"text[{position}] holds a lone surrogate, which is not valid text"
                )
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        rows = [list(item.ids) for item in encoded]
        if add_special_tokens and self._add_bos and self.bos_token_id is not None:
            bos = self.bos_token_id
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        return rows

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Ids beyond the vocabulary give no text."""
        try:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError):
            raise ValueError(
                f"token_ids must be integers in [0, 2**32 - 1], got {describe(token_ids)}"
            ) from None

    def _decode_token(self, token_id: int) -> str:
        return self._backend.decode([token_id], skip_special_tokens=False)

    # Chat

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def chat_template_source(
        self, override: str | None = None, *, tools: Sequence[Any] | None = None
    ) -> str:
        """The Jinja text to use.

        `override` (text, or the name of a template of the checkpoint), else the one for tools when
        tools are given, else the default.
        """
        if override is not None:
            if not isinstance(override, str):
                raise ValueError(f"chat_template must be a string, got {describe(override)}")
            return self._templates.get(override, override)
        if tools and _TOOL_TEMPLATE in self._templates:
            return self._templates[_TOOL_TEMPLATE]
        if _DEFAULT_TEMPLATE in self._templates:
            return self._templates[_DEFAULT_TEMPLATE]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise ValueError(f"chat_template must be one of {names}: {self.folder} has no default")
        raise ValueError(
            f"chat_template is needed: the tokenizer in {self.folder} has none; "
            "pass chat_template=<Jinja text> or use generate()"
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of one conversation; encode it with add_special_tokens=False.

        continue_final_message leaves the last message open, so that the model goes on with it.
        Further keywords reach the template as variables.
        """
        checked = check_messages(messages)
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message must be False when add_generation_prompt is True, "
                "got both True"
            )
        if tools is not None and (
            not isinstance(tools, Sequence) or isinstance(tools, (str, bytes))
        ):
            raise ValueError(f"tools must be a list of descriptions, got {describe(tools)}")
        template = self._compile(self.chat_template_source(chat_template, tools=tools))
        text = template.render(
            checked,
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) if tools else None,
            **{**self._special_tokens, **variables},
        )
        if continue_final_message:
            return _cut_after(text, str(checked[-1].get("content") or "").strip())
        return text


def _cut_after(text: str, last: str) -> str:
    position = text.rfind(last)
    if not last or position < 0:
        raise ValueError(
            "continue_final_message must be False: the template does not render the last message "
            "as it is"
        )
    return text[: position + len(last)]
