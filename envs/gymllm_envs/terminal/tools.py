"""What an agent can do at a terminal: the tools' schemas, by mode."""

from __future__ import annotations

from gymllm_envs.swe.tools import BASH, schema

KEYS = schema(
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
SCREEN = schema(
    "screen",
    "Shows the screen again, after a wait if asked, with lines that have scrolled off its top if asked.",
    wait_s={"type": "number", "description": "Seconds to wait first, unless the screen changes."},
    scrollback={
        "type": "integer",
        "description": "How many lines from above the screen, up to 200.",
    },
)
SUBMIT = schema(
    "submit", "Ends the work and hands it in, as it is. A script then checks what was done."
)
SHELL_TOOLS = (BASH, SUBMIT)
SCREEN_TOOLS = (KEYS, SCREEN, SUBMIT)
