"""Trajectories as JSON lines, exact to the token, and as one HTML page to read.

The JSON form keeps ids, mask, log-probabilities and versions, so that what was trained on can be
looked at, counted again or trained on again. The page needs nothing beside itself: no script, style
or font from elsewhere; it opens from a mail or a file server.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from gymllm import spaces
from gymllm.errors import ConfigError
from gymllm.ledger import Segment
from gymllm.message import Message, ToolCall
from gymllm.task import Task
from gymllm.trajectory import Ending, Trajectory, Turn

_MESSAGE_FIELDS = ("role", "content", "reasoning", "tool_call_id", "name", "raw")
_CHAT = spaces.Message(images=True)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")


def to_json(trajectory: Trajectory, **extra: int | float | str) -> str:
    """One trajectory as one line of JSON.

    Args:
        trajectory: Any, failed ones too.
        extra: Further keys, which reading back leaves out ("step").
    """
    record: dict[str, object] = {
        **extra,
        "task": {
            "index": trajectory.task.index,
            "id": trajectory.task.id,
            "seed": trajectory.task.seed,
            "options": dict(trajectory.task.options),
        },
        "member": trajectory.member,
        "attempt": trajectory.attempt,
        "agent": trajectory.agent,
        "ending": trajectory.ending.value,
        "reason": trajectory.reason,
        "reward": _number(trajectory.reward),
        "started_ns": trajectory.started_ns,
        "ended_ns": trajectory.ended_ns,
        "metrics": {name: _number(value) for name, value in trajectory.metrics.items()},
        "messages": [_message_to_json(message) for message in trajectory.messages],
        "turns": [{**turn._asdict(), "reward": _number(turn.reward)} for turn in trajectory.turns],
        "segments": [
            {
                "ids": segment.ids.tolist(),
                "mask": segment.mask.tolist(),
                # The shortest decimal that reads back to the same float32.
                "logprobs": [float(str(value)) for value in segment.logprobs],
                "versions": segment.versions.tolist(),
            }
            for segment in trajectory.segments
        ],
    }
    line = json.dumps(record, ensure_ascii=False, allow_nan=False, default=repr)
    # UTF-8 can't hold a lone surrogate, which a decoder of broken bytes may leave behind.
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def from_json(line: str) -> Trajectory:
    """The trajectory that `to_json` wrote.

    Options of the task that aren't JSON come back as their repr.

    Raises:
        ConfigError: The line isn't one.
    """
    try:
        record = json.loads(line)
        return Trajectory(
            task=Task(**record["task"]),
            member=record["member"],
            attempt=record["attempt"],
            agent=record.get("agent", ""),  # files from before there were several lack it
            ending=Ending(record["ending"]),
            reason=record["reason"],
            reward=_float(record["reward"]),
            started_ns=record["started_ns"],
            ended_ns=record["ended_ns"],
            metrics={name: _float(value) for name, value in record["metrics"].items()},
            messages=tuple(_message_from_json(message) for message in record["messages"]),
            turns=tuple(_turn(turn) for turn in record["turns"]),
            segments=tuple(
                Segment(
                    ids=np.array(segment["ids"], np.int32),
                    mask=np.array(segment["mask"], np.int32),
                    logprobs=np.array(segment["logprobs"], np.float32),
                    versions=np.array(segment["versions"], np.int32),
                )
                for segment in record["segments"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        shown = line if len(line) <= 60 else line[:57] + "..."
        raise ConfigError(f"not a trajectory: {shown!r} ({error!r}).") from error


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes a file of trajectories, one a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(to_json(trajectory) + "\n" for trajectory in trajectories)


def append_jsonl(path: Path, trajectory: Trajectory) -> None:
    """Adds one line to a file of trajectories, which is made if need be."""
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(trajectory) + "\n")


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Every trajectory of a file, in its order; a last line torn by a crash is left out.

    Raises:
        ConfigError: Another line isn't a trajectory; says which.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield from_json(line)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def _escaped(text: str, *, quote: bool = False) -> str:
    """For a page. Control characters, which a model may write, are shown as their pictures (U+2400)."""
    return html.escape(_CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])), text), quote=quote)


def write_html(
    path: Path,
    trajectories: Iterable[Trajectory],
    *,
    title: str,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Writes conversations as one page: filtered by reward, ending and text; light or dark.

    Args:
        path: The file.
        trajectories: What to show, in this order.
        title: The page's heading.
        facts: A few lines about them, shown at the top ("reward" -> "0.61 ± 0.05").
    """
    shown = list(trajectories)
    endings = sorted({_ending(trajectory) for trajectory in shown})
    options = "".join(f"<option>{_escaped(ending)}</option>" for ending in endings)
    listed = "".join(
        f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>"
        for name, value in (facts or {}).items()
    )
    page = _PAGE.format(
        title=_escaped(title),
        style=_STYLE,
        script=_SCRIPT,
        facts=f"<dl>{listed}</dl>" if listed else "",
        endings=options,
        episodes="".join(_episode(trajectory) for trajectory in shown),
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def _episode(trajectory: Trajectory) -> str:
    ending = _ending(trajectory)
    failed = trajectory.ending is Ending.FAILED
    reward = "" if failed else f"{trajectory.reward:.3g}"
    who = f" · {_escaped(trajectory.agent)}" if trajectory.agent else ""
    tone = "bad" if failed else "good" if trajectory.reward > 0 else "none"
    messages = "".join(
        f'<div class="message {_escaped(message.role, quote=True)}">'
        f"<b>{_escaped(message.role)}</b><pre>{_escaped(message.said)}</pre></div>"
        for message in trajectory.messages
    )
    rows = "".join(
        f"<tr><td>{number}</td><td><code>{_escaped(turn.action)}</code>"
        f"{' <em>not readable</em>' if turn.invalid_action else ''}</td>"
        f"<td>{turn.reward:.3g}</td><td>{turn.prompt_tokens}</td><td>{turn.generated_tokens}</td>"
        f"<td>{turn.tool_calls or ''}"
        f"{f' ({turn.tool_errors} bad)' if turn.tool_errors else ''}</td>"
        f"<td>{turn.engine_s:.2f}</td><td>{turn.env_s:.2f}</td></tr>"
        for number, turn in enumerate(trajectory.turns, start=1)
    )
    return (
        f'<details data-ending="{_escaped(ending, quote=True)}"'
        f' data-reward="{"" if failed else trajectory.reward}"><summary>'
        f'<span class="reward {tone}">{reward or "failed"}</span>'
        f"<span>{_escaped(trajectory.task.id)} · member {trajectory.member}{who}</span>"
        f"<span>{_escaped(ending)}</span>"
        f"<span>{len(trajectory.turns)} turns · {trajectory.tokens} tokens, "
        f"{trajectory.generated_tokens} generated</span></summary>"
        f"{messages}<details><summary>turns</summary><div class=scroll><table><tr><th>turn"
        f"<th>action<th>reward<th>prompt<th>generated<th>tools<th>engine s<th>env s</tr>{rows}</table></div>"
        f"</details></details>\n"
    )


def _ending(trajectory: Trajectory) -> str:
    reason = trajectory.reason.partition("\n")[0]
    shown = reason if len(reason) <= 80 else reason[:77] + "..."
    return f"{trajectory.ending.value}: {shown}" if shown else trajectory.ending.value


def _message_to_json(message: Message) -> dict[str, object]:
    """What is in a message, fields that are empty left out."""
    record = {
        name: value
        for name in _MESSAGE_FIELDS
        if (value := getattr(message, name)) or name == "content"
    }
    if message.parts:
        record["parts"] = _CHAT.to_jsonable([spaces.message(message.role, *message.parts)])[0][
            "content"
        ]
    if message.tool_calls:
        record["tool_calls"] = [asdict(call) for call in message.tool_calls]
    return record


def _message_from_json(record: dict[str, Any]) -> Message:
    held = _CHAT.from_jsonable([{"role": record["role"], "content": record.get("parts", ())}])
    record["parts"] = tuple(
        part["text"] if part["type"] == "text" else part["image"] for part in held[0]["content"]
    )
    record["tool_calls"] = tuple(ToolCall(**call) for call in record.get("tool_calls", ()))
    return Message(**record)


def _turn(record: dict[str, Any]) -> Turn:
    record["reward"] = _float(record["reward"])
    return Turn(**record)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _float(value: object) -> float:
    return math.nan if value is None else float(cast(float, value))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><header><h1>{title}</h1>{facts}
<form onsubmit="return false">
<label>reward from <input type="number" step="any" name="low"></label>
<label>to <input type="number" step="any" name="high"></label>
<label>ending <select name="ending"><option value="">any</option>{endings}</select></label>
<label>text <input type="search" name="text"></label>
<label>order <select name="order"><option value="">as played</option>
<option value="-1">best first</option><option value="1">worst first</option></select></label>
<output></output></form></header>
<main>{episodes}</main><script>{script}</script></body></html>
"""

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2024;--dim:#667;--paper:#fff;--raised:#f5f6f8;--line:#dde0e5;
--good:#17723f;--bad:#b3261e;--accent:#2f6fd0}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--dim:#9aa2ad;--paper:#16181c;--raised:#1f2227;
--line:#343941;--good:#5ecb8a;--bad:#ff8a80;--accent:#7fb0ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:0 1rem 4rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
header{position:sticky;top:0;background:var(--paper);padding:.8rem 0;border-bottom:1px solid
var(--line); z-index:1} h1{font-size:1.2rem;margin:0 0 .4rem}
dl{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;margin:0 0 .6rem}dl div{display:flex;gap:.4rem}
dt,summary span:nth-child(n+3),.message b{color:var(--dim)}dd{margin:0}
form{display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:center;color:var(--dim);font-size:.9rem}
input,select{font:inherit;color:inherit;background:var(--raised);border:1px solid var(--line);
border-radius:4px;padding:.1rem .3rem}input[type=number]{width:5rem}output{margin-left:auto}
summary{cursor:pointer;padding:.35rem .2rem} main>details{border-bottom:1px solid var(--line)}
main>details>summary{display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.reward{min-width:3.5rem;font-variant-numeric:tabular-nums;font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)} .message{margin:.4rem 0;padding:.4rem
.7rem;border-left:3px solid var(--line);background:var(--raised); border-radius:0 4px 4px 0}
.message.assistant{border-color:var(--accent);margin-left:1.5rem}.message b{font-size:.8rem}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;margin:.3rem 0 1rem}
td,th{padding:.15rem .6rem;text-align:left;border-bottom:1px solid var(--line)}em{color:var(--bad)}
"""

_SCRIPT = """
const form=document.querySelector("form"),main=document.querySelector("main"),
 all=[...main.children];
function show(){
 const low=parseFloat(form.low.value),high=parseFloat(form.high.value),
  text=form.text.value.toLowerCase(),order=parseInt(form.order.value);
 let count=0;
 for(const e of all){
  const reward=e.dataset.reward===""?NaN:parseFloat(e.dataset.reward);
  e.hidden=!(!(reward<low)&&!(reward>high)&&(isNaN(low)&&isNaN(high)||!isNaN(reward))
   &&(!form.ending.value||e.dataset.ending===form.ending.value)
   &&(!text||e.textContent.toLowerCase().includes(text)));
  count+=!e.hidden;
 }
 const r=e=>e.dataset.reward===""?NaN:parseFloat(e.dataset.reward);
 const sorted=order?[...all].sort((a,b)=>isNaN(r(a))-isNaN(r(b))||order*(r(a)-r(b))||0):all;
 main.append(...sorted);
 form.querySelector("output").textContent=count+" of "+all.length;
}
form.addEventListener("input",show);show();
"""
