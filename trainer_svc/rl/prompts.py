"""From examples to token ids, with the base model's own tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from trainer_svc.rl.data import Example


class PromptEncoder:
    """Renders `messages` with the chat template, or takes `prompt` as plain text."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def encode(self, example: Example) -> list[int]:
        """Token ids of the prompt, ready for the first generated token.

        Raises:
            ConfigError: the example has neither key, or its prompt is empty.
        """
        if "messages" in example:
            ids = self._tokenizer.apply_chat_template(
                example["messages"], add_generation_prompt=True, return_dict=False
            )
        elif "prompt" in example:
            ids = self._tokenizer(example["prompt"])["input_ids"]
        else:
            raise ConfigError(
                f"rl.data: an example has the keys {sorted(example)}; give `messages` or `prompt`"
            )
        if not ids:
            raise ConfigError("rl.data: an example's prompt has no tokens; leave it out")
        return list(ids)
