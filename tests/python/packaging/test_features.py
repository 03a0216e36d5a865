"""docs/features.md says what the code does: each expression in it is evaluated."""

from __future__ import annotations

import re
from pathlib import Path

import helicore
import pytest
from helicore import config, kv

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "features.md"
NAMES = {
    "kv": kv,
    **{name: getattr(helicore, name) for name in helicore.__all__},
    **{name: getattr(config, name) for name in ("EngineConfig",)},
}
ERRORS = {"ValueError": ValueError, "NotSupportedError": helicore.NotSupportedError}


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


SERVED, REFUSED = rows("Served"), rows("Not served yet")


@pytest.mark.parametrize(("feature", "expression"), SERVED, ids=[row[0] for row in SERVED])
def test_what_the_document_calls_served_is_accepted(feature: str, expression: str) -> None:
    assert eval(expression, dict(NAMES)) is not None, feature


@pytest.mark.parametrize(
    ("feature", "expression", "error"), REFUSED, ids=[row[0] for row in REFUSED]
)
def test_what_the_document_calls_refused_raises_the_named_error(
    feature: str, expression: str, error: str
) -> None:
    with pytest.raises(ERRORS[error]) as caught:
        eval(expression, dict(NAMES))
    assert type(caught.value) is ERRORS[error] or issubclass(type(caught.value), ERRORS[error])
    assert re.search(r"[a-z_]{3,}", str(caught.value)), feature


def test_both_tables_were_read() -> None:
    assert len(SERVED) >= 10
    assert len(REFUSED) >= 4
