"""What an agent can do at a terminal: the tools' schemas, by mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gymllm.tool_calls import ToolSchema


def _schema(
    name: str, description: str, required: Sequence[str] = (), **properties: Mapping[str, object]
) -> ToolSchema:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


BASH = _schema(
    "bash",
    "Runs a command in a bash that stays: directory, variables and background jobs outlive a command. "
    "There is no network and no terminal.",
    ["command"],
    command={"type": "string", "description": "What bash is to run."},
)
KEYS = _schema(
    "keys",
    "Types on the terminal, waits until the screen is quiet, and shows it.",
    ["keys"],
    keys={
        "type": "array",
        "items": {"type": "string"},
        "description": "Names of keys as tmux has them (Enter, Escape, Tab, BSpace, Space, Up, PageDown, F1, "
        'C-c, M-x), and texts, each typed as it is: ["ls -l", "Enter"]. Nothing is added: to run a command, '
        "press Enter.",
    },
    wait_s={
        "type": "number",
        "description": "Longest to wait for the screen to be quiet, in seconds; 5 unless said otherwise.",
    },
    quiet_s={
        "type": "number",
        "description": "For how long nothing must change; 0.1 unless said otherwise.",
    },
)
SCREEN = _schema(
    "screen",
    "Shows the screen again, after a wait if asked, with lines that have scrolled off its top if asked.",
    wait_s={"type": "number", "description": "Seconds to wait first, unless the screen changes."},
    scrollback={
        "type": "integer",
        "description": "How many lines from above the screen, up to 200.",
    },
)
SUBMIT = _schema(
    "submit", "Ends the work and hands it in, as it is. A script then checks what was done."
)
SHELL_TOOLS = (BASH, SUBMIT)
SCREEN_TOOLS = (KEYS, SCREEN, SUBMIT)
