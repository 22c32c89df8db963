"""One turn of google-tunix and of transformers' chat template, at several lengths of history.

A turn of google-tunix is what its learner's loop does between two generations, with its own agents, parsers
and tokenizer adapter: it renders the whole conversation and encodes all of that (`chat_parser.parse`, then
the sampler's `tokenize`), decodes the answer, and encodes the new messages once more for the trainer
(`tokenize_and_generate_masks`). Threads, locks and the engine are left out. A turn of transformers is
`apply_chat_template` over the whole conversation and the decoding of the answer.

python tunix_turns.py MODEL_FOLDER, SCENE as JSON: {"parser", "tools", "question", "observation", "answer",
"histories": {name: [turns, how often an observation stands in each]}, "repeats"}
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import transformers
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.agentic import utils
from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.agents.tool_agent import ToolAgent
from tunix.rl.agentic.parser.chat_template_parser import parser as parsers

PARSERS = {
    "qwen": parsers.QwenChatTemplateParser,
    "llama": parsers.LlamaChatTemplateParser,
}


class Conversation:
    """An episode's text."""

    def __init__(self, tokenizer: Any, scene: dict[str, Any]) -> None:
        self.scene = scene
        self.tokenizer = TokenizerAdapter(tokenizer)
        self.parser = PARSERS[scene["parser"]](tokenizer)
        self.agent = ToolAgent("", "qwen") if scene["tools"] else ModelAgent("")
        self.agent.reset()
        self.agent.update_from_env({"question": scene["question"]}, 0.0, False, {})
        self.answer = tokenizer.encode(scene["answer"], add_special_tokens=False)
        self.turns = 0

    def prompt(self) -> Any:
        """What the sampler gets."""
        text = self.parser.parse(
            messages=self.agent.chat_completions, add_generation_prompt=True, is_first_msg=True
        )
        ids = self.tokenizer.encode(text)
        first = [self.tokenizer.bos_id()] if self.tokenizer.bos_id() else []
        return np.array(self.tokenizer.dedup_bos_ids(first + ids), np.int32)

    def turn(self, observation: str) -> Any:
        """Encodes the prompt, reads the answer, appends the observation to it."""
        prompt = self.prompt()
        answer = self.tokenizer.decode(self.answer)
        self.agent.update_from_model(answer)
        shown = {"tool_outputs": {"call": observation}} if self.scene["tools"] else observation
        self.agent.update_from_env(shown, 0.0, False, {})
        _, new = utils.get_recent_assistant_user_messages(self.agent.chat_completions)
        ids, masks = utils.tokenize_and_generate_masks(
            new,
            tokenizer=self.tokenizer,
            parser=self.parser,
            contains_first_msg=False,
            contains_generation_msg=True,
        )
        np.array(ids), np.array(masks)
        return prompt

    def play(self, observation: str, turns: int) -> None:
        """Turns that nothing is measured of, and so not encoded either."""
        for _ in range(turns):
            self.agent.update_from_model(self.scene["answer"])
            shown = {"tool_outputs": {"call": observation}} if self.scene["tools"] else observation
            self.agent.update_from_env(shown, 0.0, False, {})


def apply_template(tokenizer: Any, conversation: Conversation) -> Any:
    """The whole conversation, by the model's own template."""
    messages = conversation.agent.chat_completions
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokenizer.decode(conversation.answer)
    return ids


def main(folder: str, scene: dict[str, Any]) -> dict[str, float]:
    """Median microseconds of CPU and the prompt's length, by name of the history."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    measured: dict[str, list[float]] = {}
    lengths: dict[str, float] = {}
    warm_up = Conversation(tokenizer, scene)
    for _ in range(3):
        apply_template(tokenizer, warm_up)
        warm_up.turn(scene["observation"])
    for _ in range(scene["repeats"]):
        for name, (turns, times) in scene["histories"].items():
            conversation = Conversation(tokenizer, scene)
            conversation.play(scene["observation"] * times, turns - 1)
            conversation.play(scene["observation"], 1)
            started = time.process_time_ns()
            apply_template(tokenizer, conversation)
            measured.setdefault(f"transformers {name}", []).append(time.process_time_ns() - started)
            started = time.process_time_ns()
            prompt = conversation.turn(scene["observation"])
            measured.setdefault(f"tunix {name}", []).append(time.process_time_ns() - started)
            lengths[f"tokens {name}"] = len(prompt)
    return {name: statistics.median(ns) / 1000 for name, ns in measured.items()} | lengths


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
