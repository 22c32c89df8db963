"""What each model family's template does, as rows: printed by `ledger.py`, kept in docs/agents.md.

Everything is found out by trial renders, as an agent does when it starts; nothing is written down here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gymllm_agents import PARSERS, ChatFormat, Tokenizer, ToolCallParser, make_parser
from gymllm_agents.parser_choice import choose_parser

ADD: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
HEADINGS = (
    "family", "tools listed", "extends its prefix", "rewrites after", "policies that serve",
    "replies read by", "a thought has a field", "the prompt opens a thought", "vocabulary",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One family, with or without a list of tools."""

    family: str
    tools: bool
    lists_tools: bool
    """Whether the template can list tools at all."""
    rewrites: str
    """What it does to earlier turns; empty: nothing."""
    after: tuple[str, ...]
    """Roles of new messages that make it do that."""
    parser: str
    has_thought_field: bool
    opens_thought: bool
    stand_in: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """As `HEADINGS` say."""
        listed = "yes" if self.tools else "no" if self.lists_tools else "no, it can't"
        return (
            self.family,
            listed,
            f"no: {self.rewrites}" if self.rewrites else "yes",
            ", ".join(self.after) or "-",
            "segment or keep" if self.rewrites else "none needed",
            self.parser,
            "yes" if self.has_thought_field else "no",
            "yes" if self.opens_thought else "no",
            "stand-in" if self.stand_in else "real",
        )


def rows_of(family: str, tokenizer: Tokenizer, *, stand_in: bool) -> list[Row]:
    """The family's rows: without tools, and with them where its template can list any."""
    lists_tools = tokenizer.template.supports_tools()
    rows: list[Row] = []
    for tools in ((), (ADD,)) if lists_tools else ((),):
        chat = ChatFormat(tokenizer, tools=tools, report=False)
        roles = ("user", "tool") if tools else ("user",)
        after = tuple(role for role in roles if chat.rewrites(role, thoughts=True))
        rows.append(
            Row(
                family=family,
                tools=bool(tools),
                lists_tools=lists_tools,
                rewrites=chat.trials.what_is_rewritten,
                after=after,
                parser=_name(choose_parser(chat, tools)),
                has_thought_field=chat.trials.shows_reasoning,
                opens_thought=chat.opens_thought,
                stand_in=stand_in,
            )
        )
    return rows


def markdown(rows: list[Row]) -> list[str]:
    """The lines of a table."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(row.cells for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def load_fetcher() -> ModuleType:
    """scripts/fetch_tokenizers.py, which downloads the vocabularies."""
    script = Path(__file__).parents[1] / "scripts" / "fetch_tokenizers.py"
    spec = importlib.util.spec_from_file_location("fetch_tokenizers", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _name(parser: ToolCallParser) -> str:
    named = {type(make_parser(name)): name for name in PARSERS}
    return named.get(type(parser), "thought")
