"""Search in a folder: what is found, in which order, and what is left out."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys

import pytest

from gymllm.errors import ConfigError
from gymllm_agents import local_search
from gymllm_agents.tools import search


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "animals.txt").write_text(
        "Cats sleep a lot.\nThey hunt mice.\n\nDogs bark.\nA dog guards the house.\n"
    )
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "cooking.md").write_text("\ufeff# Soup\n\nBoil the Gemüse and add salt.\n")
    return tmp_path


async def ask(tool, query: str) -> str:
    return (await tool({"query": query})).text


@pytest.mark.asyncio
async def test_passages_are_found_by_their_words(folder):
    tool = local_search(folder, passage_chars=40)
    assert (await ask(tool, "dogs?")).splitlines() == [
        "animals.txt:4",
        "Dogs bark.",
        "A dog guards the house.",
    ]
    assert await ask(tool, "hunting mouse MICE") == (
        "animals.txt:1\nCats sleep a lot.\nThey hunt mice."
    )
    assert (
        await ask(tool, "gemuse") == "deep/er/cooking.md:1\n# Soup\n\nBoil the Gemüse and add salt."
    )
    assert await ask(tool, "whale") == "Nothing found for: whale"
    assert tool.name == "search"


@pytest.mark.asyncio
async def test_the_better_match_comes_first_and_ties_go_by_name(tmp_path):
    (tmp_path / "b.txt").write_text("red apple")
    (tmp_path / "a.txt").write_text("red apple")
    (tmp_path / "c.txt").write_text("red red apple tree apple")
    (tmp_path / "d.txt").write_text("the sky is blue")
    (tmp_path / "e.txt").write_text("so is the sea")
    (tmp_path / "f.txt").write_text("and a green pear")
    (tmp_path / "g.txt").write_text("and a plum")
    tool = local_search(tmp_path, k=3)
    files = [block.split(":")[0] for block in (await ask(tool, "red apple")).split("\n\n")]
    assert files[0] == "c.txt"
    assert files[1:] == ["a.txt", "b.txt"]
    assert (await ask(local_search(tmp_path, k=1), "red apple")).startswith("c.txt:1\n")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "query", ['"', "a OR", "NEAR(a b)", "text: x", "cats*", "-dog", "'; DROP TABLE", "(", "^soup"]
)
async def test_nothing_in_a_query_is_syntax(folder, query):
    result = await local_search(folder)({"query": query})
    assert "syntax" not in result.text
    assert result.failed == (query in ('"', "("))


@pytest.mark.asyncio
async def test_queries_of_any_size_and_kind(folder):
    tool = local_search(folder)
    assert (await tool({"query": "dog " * 100_000})).text.startswith("animals.txt:1")
    assert (await tool({"query": "🐕 \ud83d"})).text == "Error: the query has no words to look for."
    assert (await tool({"query": "_ dog"})).text.startswith("animals.txt:1")
    assert (await tool({"query": 3})).failed


@pytest.mark.asyncio
async def test_what_is_no_text_is_left_out(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.txt").write_text("dog secret")
    (folder / "picture.bin").write_bytes(b"dog\0\1")
    (folder / "latin.txt").write_bytes("dög dog".encode("latin-1"))
    (folder / "huge.txt").write_text("dog " * 1000)
    (folder / ".hidden").write_text("dog")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.txt").write_text("dog")
    (folder / "link.txt").symlink_to(outside / "secret.txt")
    (folder / "links").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (folder / "broken").symlink_to(folder / "nowhere")
    (folder / "empty.txt").touch()
    os.mkfifo(folder / "pipe.txt")
    found = await ask(local_search(folder, max_file_bytes=1000), "dog secret")
    assert [line for line in found.splitlines() if line.endswith(":1")] == ["animals.txt:1"]


@pytest.mark.asyncio
async def test_long_lines_and_results_are_bounded(tmp_path):
    (tmp_path / "long.txt").write_text("word " * 10_000)
    passages = (await ask(local_search(tmp_path, passage_chars=100), "word")).split("\n\n")
    assert len(passages) == 5
    assert all(len(passage) <= 100 + len("long.txt:1\n") for passage in passages)
    short = await ask(local_search(tmp_path, passage_chars=100, max_result_chars=50), "word")
    assert "characters left out" in short


@pytest.mark.asyncio
async def test_an_index_is_made_once_and_shared_and_then_freed(folder, monkeypatch):
    made: list[object] = []
    texts = search._texts
    monkeypatch.setattr(search, "_texts", lambda settings: made.append(settings) or texts(settings))
    first, second = local_search(folder), local_search(folder / "deep" / "..", k=1)
    assert len(made) == 1
    answers = await asyncio.gather(*(ask(first, "dog") for _ in range(20)))
    assert len(set(answers)) == 1
    del first
    assert (await ask(second, "dog")) == answers[0]
    del second
    gc.collect()
    local_search(folder)
    assert len(made) == 2


def test_bad_folders_and_settings_are_refused(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match="can't be searched: No such file"):
        local_search(folder / "nowhere")
    with pytest.raises(ConfigError, match="it is not a folder"):
        local_search(folder / "animals.txt")
    with pytest.raises(ConfigError, match="has no text to search"):
        local_search(empty)
    with pytest.raises(ConfigError, match="k of 'search' must be >= 1"):
        local_search(folder, k=0)
    with pytest.raises(ConfigError, match="passage_chars"):
        local_search(folder, passage_chars=3)


def test_importing_the_agents_brings_no_search():
    program = (
        "import sys, gymllm_agents; sys.exit(bool({'bm25s', 'jax', 'mcp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
