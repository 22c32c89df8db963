"""Any OpenAI-compatible model on gymllm/SWE-v0: `gymllm-eval` with the settings beside this file.

    python examples/swe_agent.py --model gpt-5-mini --episodes 24
    python examples/swe_agent.py --model Qwen/Qwen3-8B --url http://localhost:8000/v1
    python examples/swe_agent.py --model NAME --url URL --env.kwargs.tasks my_tasks.jsonl --concurrency 8

The key is taken from OPENAI_API_KEY. All other flags are those of gymllm-eval. What it prints at the end:
the share of tasks that were resolved, with its 95 % interval, how the episodes ended, and where the
transcripts lie.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gymllm_trainers.cli import evaluate

SETTINGS = Path(__file__).with_suffix(".yaml")


def main(arguments: list[str]) -> int:
    """Adds the settings, and says that the model is a server's."""
    words = list(arguments)
    for place, word in enumerate(words):
        if word == "--model" and place + 1 < len(words):
            words[place + 1] = f"openai:{words[place + 1].removeprefix('openai:')}"
        elif word.startswith("--model="):
            words[place] = f"--model=openai:{word.removeprefix('--model=').removeprefix('openai:')}"
    return evaluate(["--config", str(SETTINGS), *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
