"""Loading, special tokens and chat templates, checked against transformers where it has a say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helicore.tokenizer import Tokenizer

MESSAGES = [
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "naïve?"},
]


@pytest.fixture
def folder(byte_level_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(byte_level_folder, tmp_path / "copy"))


def configure(folder: Path, **changes: object) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return Tokenizer(folder)


def load_reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    text = "def f():\n\treturn '☕ 🐍'"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>" + text
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode_token(0) == "<bos>"
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_ids_agree_with_transformers(byte_level_folder: Path, tokenizer: Tokenizer) -> None:
    reference = load_reference(byte_level_folder)
    for text in ("def f(x):\n", "<user>the fox<eos>", "  ☕ żółw  ", ""):
        assert tokenizer.encode(text) == reference(text).input_ids
        ids = reference(text).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_add_bos_token_is_honoured_when_the_file_does_not_add_it(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["post_processor"] = None
    path.write_text(json.dumps(data))
    assert configure(folder).encode("fox")[0] != 0
    added = configure(folder, add_bos_token=True)
    assert added.encode("fox")[:2] == [0, added.encode("fox", add_special_tokens=False)[0]]
    assert added.encode("<bos>fox").count(0) == 1


def test_truncation_stored_in_the_file_is_not_applied(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(data))
    assert len(Tokenizer(folder).encode("the quick brown fox jumps over")) > 3


@pytest.mark.parametrize("bad", [5, None, b"x", "\ud800"])
def test_what_is_not_text_is_refused(tokenizer: Tokenizer, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^text\[0\]"):
        tokenizer.encode(bad)


# Files


def test_a_missing_tokenizer_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json.*skip_tokenizer_init"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 5}'])
def test_a_broken_tokenizer_file_is_named(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer(folder)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\xfa"])
def test_a_broken_tokenizer_config_is_named(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        Tokenizer(folder)


def test_a_tokenizer_that_is_code_is_refused_unless_trusted(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    auto_map = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    with pytest.raises(ValueError, match=r"trust_remote_code=True.*skip_tokenizer_init"):
        configure(folder, auto_map=auto_map)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer(folder, trust_remote_code=True)


# Chat


def test_chat_text_agrees_with_transformers(byte_level_folder: Path, tokenizer: Tokenizer) -> None:
    reference = load_reference(byte_level_folder)
    for prompt in (False, True):
        assert tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt
        ) == reference.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=False)


TEMPLATES = {
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m['content'] }}{% endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "whitespace": "  {% if true %}\n  x\n  {% endif %}\n y {{ messages|length }}\n",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ messages[-1].content.strip() }}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "variables": "{{ tools is none }}{{ flag | default('no') }}{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_dialect_agrees_with_transformers(
    byte_level_folder: Path, tokenizer: Tokenizer, name: str
) -> None:
    source = TEMPLATES[name]
    reference = load_reference(byte_level_folder)
    expected = reference.apply_chat_template(
        MESSAGES, chat_template=source, tokenize=False, flag="yes"
    )
    assert (
        tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=False, chat_template=source, flag="yes"
        )
        == expected
    )


def test_a_template_can_refuse_with_its_own_words(tokenizer: Tokenizer) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"chat_template.*roles must alternate"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(tokenizer: Tokenizer, source: str) -> None:
    try:
        text = tokenizer.apply_chat_template(MESSAGES, chat_template=source)
    except ValueError as error:
        assert "chat_template" in str(error)  # noqa: PT017 (an empty text is as good)
    else:
        assert text == ""


def test_a_template_that_does_not_parse_names_the_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="chat_template does not parse: line 2"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="\n{% for %}")


def test_templates_come_from_a_file_a_string_or_a_named_list(folder: Path) -> None:
    def render(tokenizer: Tokenizer, **options: Any) -> str:
        return tokenizer.apply_chat_template(MESSAGES, **options)

    named = [
        {"name": "default", "template": "default"},
        {"name": "tool_use", "template": "tools"},
        {"name": "short", "template": "short"},
    ]
    tokenizer = configure(folder, chat_template=named)
    assert render(tokenizer) == "default"
    assert render(tokenizer, tools=[{"type": "function"}]) == "tools"
    assert render(tokenizer, chat_template="short") == "short"
    assert render(configure(folder, chat_template="config")) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert render(Tokenizer(folder)) == "file"


def test_no_template_is_an_error_that_says_what_to_do(folder: Path) -> None:
    tokenizer = configure(folder, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="chat_template is needed"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages must hold at least one"),
        ("hi", "messages must be a list"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        (
            [*MESSAGES, {"role": "user", "content": [{"type": "image", "url": "x"}]}],
            r"messages\[3\]\.content\[0\] must be a text part",
        ),
    ],
)
def test_bad_messages_are_refused_by_their_place(
    tokenizer: Tokenizer, messages: Any, where: str
) -> None:
    with pytest.raises(ValueError, match=where):
        tokenizer.apply_chat_template(messages)


def test_text_parts_are_joined(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    assert "<user>a\nb" in text


def test_the_final_message_can_be_left_open(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    text = tokenizer.apply_chat_template(MESSAGES, chat_template=template, **options)
    assert text.endswith("[naïve?")
    with pytest.raises(ValueError, match="continue_final_message"):
        tokenizer.apply_chat_template(MESSAGES, continue_final_message=True)
