"""What a turn of a conversation costs as its history grows, what families' templates do, what is tested.

A turn is one `Conversation.reply`: an observation or a tool's result of some 50 tokens is rendered, encoded
and put into the ledger, an engine answers at once with some 50 tokens that are given, and those are read.
Times are CPU time of the process, the median of several conversations; the lengths take turns, so that what
else the machine does is shared, and before each measured turn another conversation has a few, for making 32k
tokens of history at once leaves the processor's caches empty (the turn that follows then costs a third
more, the one after that nothing). google-tunix and transformers, which encode the whole conversation at each
turn, are measured beside it with the same tokenizer.json, in a virtual environment under --venvs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from families_table import ADD, Row, load_fetcher, markdown, rows_of
from peers.in_venv import run_in_venv
from table import Table

from gymllm.agent import EpisodeContext
from gymllm.engine import FinishReason, GenerateRequest, Generation
from gymllm.memory import collect_rarely
from gymllm.message import Message
from gymllm.timeline import Timeline
from gymllm_agents import ChatFormat, Conversation, ConversationConfig, Tokenizer
from gymllm_agents.parser_choice import choose_parser

ROOT = Path(__file__).parents[1]
LONG, LONG_TURNS = 32_768, 9
WARM_UPS = 3
GOAL = 1.2
"""Most that a turn may cost, in turns after a history of one."""

QUESTION = "Find the way out of the maze. You are at the entrance, and it is dark."
OBSERVATION = (
    "You are in a corridor of 3 doors. The first is locked, the second opens to the north, and behind "
    "the third you hear water. On the floor lies a note: 'turn left twice, then take the stairs'. "
)
SAID = (
    "The note tells me to turn left twice, so I go to the second door, which opens to the north. "
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
THOUGHT = "<think>\nThe note is likely right, and the locked door can wait.\n</think>\n\n"

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A family and what is said in it."""

    family: str
    answer: str
    tools: bool = False
    """Each new message is a tool's result."""
    on_rewrite: str = "segment"
    peers_parser: str = ""
    """Which of google-tunix's parsers writes this family's form; empty: it is not compared."""
    grows: str = ""
    """Why a turn is expected to grow with the history."""

    @property
    def title(self) -> str:
        kind = "tools" if self.tools else "no tools"
        return f"{self.family}, {kind}" + (f", {self.grows}" if self.grows else "")


SCENES = (
    Scene(family="qwen3", tools=True, answer=SAID + CALL, peers_parser="qwen"),
    Scene(family="qwen2.5", answer=SAID * 2, peers_parser="qwen"),
    Scene(family="llama3.2", answer=SAID * 2, peers_parser="llama"),
    Scene(family="qwen3", answer=THOUGHT + SAID, on_rewrite="keep"),
)
GROWING = (
    Scene(family="qwen3", answer=THOUGHT + SAID, grows="it drops earlier thoughts, segments"),
    Scene(
        family="mistral-nemo",
        tools=True,
        answer=SAID,
        grows="it moves the list of tools, segments",
    ),
)


@dataclass(frozen=True, kw_only=True)
class History:
    """What came before a turn."""

    turns: int
    times: int = 1
    """How often the observation stands in each message but the first."""


class GivenAnswer:
    """An engine that has its answer ready."""

    context_length, version = 1_000_000, 0

    def __init__(self, ids: Sequence[int]) -> None:
        count = len(ids)
        self._generation = Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(count, np.float32),
            versions=np.zeros(count, np.int32),
            finish_reason=FinishReason.STOP,
        )
        self.prompt_tokens = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.prompt_tokens = len(request.prompt_ids)
        return self._generation

    async def aclose(self) -> None:
        """There is nothing to close."""


class Players:
    """Conversations of one scene."""

    def __init__(self, scene: Scene, tokenizer: Tokenizer) -> None:
        tools = [ADD] if scene.tools else []
        self.scene, self.tokenizer = scene, tokenizer
        self.chat = ChatFormat(
            tokenizer,
            tools=tools,
            on_rewrite=scene.on_rewrite,  # type: ignore[arg-type]
            report=False,
        )
        self.parser = choose_parser(self.chat, tools)
        ids = tokenizer.encode(scene.answer, allow_special=True)
        self.engine = GivenAnswer([*ids, self.chat.stop_token_ids[0]])
        self.config = ConversationConfig(max_new_tokens=1000)
        self.calls = bool(tools) and CALL in scene.answer
        self.other = self.start()

    def start(self) -> Conversation:
        """A new one, in which the question was answered."""
        context = EpisodeContext(engine=self.engine, seed=0, name="play", timeline=Timeline())
        talk = Conversation(self.chat, self.config, context, parser=self.parser)
        finish(talk.reply(Message(role="user", content=QUESTION)))
        return talk

    def after(self, history: History) -> Conversation:
        """One with so much history."""
        talk = self.start()
        for _ in range(history.turns - 1):
            reply = finish(talk.reply(self.message(talk, OBSERVATION * history.times)))
            assert not reply.limit
            assert bool(reply.calls) == self.calls
        return talk

    def message(self, talk: Conversation, text: str) -> Message:
        """An observation, or the result of the last call."""
        if not self.calls:
            return Message(role="user", content=text)
        call_id = talk.messages()[-1].tool_calls[-1].id
        return Message(role="tool", content=text, name="add", tool_call_id=call_id)

    def timed_turn(self, history: History) -> float:
        """Microseconds of CPU of a turn after a history."""
        talk = self.after(history)
        message = self.message(talk, OBSERVATION)
        for _ in range(WARM_UPS):
            finish(self.other.reply(self.message(self.other, OBSERVATION)))
        if self.scene.grows:
            self.other = self.start()
        started = time.process_time_ns()
        finish(talk.reply(message))
        return (time.process_time_ns() - started) / 1000

    def timed_encoding(self) -> float:
        """Microseconds of CPU that the tokenizer takes for the new text alone."""
        started = time.process_time_ns()
        self.tokenizer.encode(OBSERVATION, allow_special=False)
        return (time.process_time_ns() - started) / 1000

    def histories(self) -> dict[str, History]:
        """By what is said of them; the last two have 32k tokens."""
        lengths = [self.length(History(turns=turns)) for turns in (8, 64)]
        turns = math.ceil((LONG - lengths[1]) / (lengths[1] - lengths[0]) * 56) + 64
        observation = len(self.tokenizer.encode(OBSERVATION, allow_special=False))
        times = math.ceil(LONG / (LONG_TURNS - 1) / observation)
        return {
            "1 turn": History(turns=1),
            "8 turns": History(turns=8),
            "64 turns": History(turns=64),
            "32k tokens, many turns": History(turns=turns),
            "32k tokens, 8 long ones": History(turns=LONG_TURNS, times=times),
        }

    def length(self, history: History) -> int:
        """Tokens of the prompt of a turn after it."""
        talk = self.after(history)
        finish(talk.reply(self.message(talk, OBSERVATION)))
        return self.engine.prompt_tokens


def finish(coroutine: Coroutine[None, None, _Value]) -> _Value:
    """The result of one that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


# Rows


def turn_rows(table: Table, players: Players, repeats: int) -> dict[str, float]:
    """Rows of our own turns; microseconds by name of the history."""
    scene = players.scene
    histories = players.histories()
    if scene.grows:
        histories = {name: h for name, h in histories.items() if h.turns <= 64 and h.times == 1}
    for _ in range(3):
        players.timed_turn(histories["8 turns"])
    measured: dict[str, list[float]] = {name: [] for name in histories}
    encoding: list[float] = []
    for _ in range(repeats):
        for name, history in histories.items():
            measured[name].append(players.timed_turn(history))
        encoding.append(players.timed_encoding())
    medians = {name: statistics.median(times) for name, times in measured.items()}
    first = medians["1 turn"]
    for name, middle in medians.items():
        tokens = players.length(histories[name])
        table.add(f"{scene.title}: a turn after {name} ({tokens:,} tokens)", middle, "us")
        if name != "1 turn":
            goal = "" if scene.grows or name == "8 turns" else f"<= {GOAL}"
            table.add("... in turns after 1 turn", middle / first, "", goal)
    what = f"{scene.title}: encoding the text of the observation alone"
    table.add(what, statistics.median(encoding), "us")
    return medians


def peer_rows(
    table: Table,
    players: Players,
    ours: Mapping[str, float],
    venvs: Path,
    folder: Path,
    repeats: int,
) -> None:
    """Rows of what encodes whole conversations, and how much more that takes than `ours`."""
    scene = players.scene
    histories = players.histories()
    told = {
        "parser": scene.peers_parser,
        "tools": scene.tools,
        "question": QUESTION,
        "observation": OBSERVATION,
        "answer": scene.answer,
        "histories": {name: [h.turns, h.times] for name, h in histories.items()},
        "repeats": repeats,
    }
    got = run_in_venv(venvs, "tunix", folder, json.dumps(told), script="tunix_turns.py")
    if isinstance(got, str):
        table.add(f"google-tunix, transformers: {scene.title}", f"not measured: {got}")
        return
    for peer, shown in (("tunix", "google-tunix"), ("transformers", "apply_chat_template")):
        for name in histories:
            tokens = round(got[f"tokens {name}"])
            what = f"{shown}: {scene.title}: a turn after {name} ({tokens:,} tokens)"
            table.add(what, got[f"{peer} {name}"], "us")
            table.add("... in turns of ours", got[f"{peer} {name}"] / ours[name])


def family_rows(table: Table, families: Mapping[str, Path], stand_ins: frozenset[str]) -> None:
    """What families' templates do, as a table and a count."""
    rows: list[Row] = []
    for name, folder in families.items():
        rows += rows_of(name, Tokenizer.from_folder(folder), stand_in=name in stand_ins)
    print("\n".join(markdown(rows)))
    table.add("families, with and without tools", len(rows))
    table.add("... that extend their own prefix", sum(not row.rewrites for row in rows))


def test_rows(table: Table) -> None:
    """How many tests there are, and how many examples those make that hypothesis writes."""
    command = [sys.executable, ROOT / "benchmarks" / "count_tests.py", ROOT / "tests" / "agents"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        table.add("tests of agents", f"not counted: {done.stderr.strip().splitlines()[-1]}")
        return
    counted = json.loads(done.stdout.splitlines()[-1])
    table.add("tests of agents, parsers and tools", counted["tests"])
    for file, tests in sorted(counted["properties"].items()):
        table.add(f"property tests in {file}", tests)
        table.add("... examples of one run, at most", counted["examples"][file])


def main() -> None:
    """Prints the tables and their JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of each, under a minute")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    cache = Path("~/.cache/gymllm/benchmarks").expanduser()
    parser.add_argument("--venvs", type=Path, default=cache, help="where peers are installed")
    arguments = parser.parse_args()
    quick, table = arguments.quick, Table()
    collect_rarely()  # as gymllm-train and gymllm-eval do
    fetcher = load_fetcher()
    cache = fetcher.fetch(report=lambda line: None)
    families = {name: cache / name for name in fetcher.FAMILIES}
    for scene in SCENES:
        folder = families[scene.family]
        players = Players(scene, Tokenizer.from_folder(folder))
        ours = turn_rows(table, players, 3 if quick else 31)
        if scene.peers_parser and arguments.peers:
            peer_rows(table, players, ours, arguments.venvs, folder, 1 if quick else 9)
    for scene in GROWING:
        players = Players(scene, Tokenizer.from_folder(families[scene.family]))
        turn_rows(table, players, 1 if quick else 5)
    stand_ins = frozenset(name for name, family in fetcher.FAMILIES.items() if family.stand_in)
    family_rows(table, families, stand_ins)
    test_rows(table)
    table.print_json()


if __name__ == "__main__":
    main()
