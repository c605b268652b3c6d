"""From examples with answers to samples: the prompt is masked, the answer is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from trainer_svc.megatron.protocol import Sample
from trainer_svc.rl.data import Example
from trainer_svc.rl.jsonl import read_jsonl
from trainer_svc.rl.prompts import PromptEncoder

_FIELD = "sft.data"


def read_samples(path: Path, *, model_dir: Path) -> list[Sample]:
    """The examples of a JSONL file, in its order.

    Each has `messages`, whose last is the assistant's, or `prompt` and `completion`. That last
    message, or the completion, is what is learnt, to the token that ends it.

    Raises:
        ConfigError: naming file, line and field of what cannot be used.
    """
    lines = read_jsonl(path, field=_FIELD)
    encoder = AnswerEncoder(model_dir)
    return [
        encoder.sample(example, where=f"{_FIELD}: {path}:{number}") for number, example in lines
    ]


class AnswerEncoder(PromptEncoder):
    """Encodes prompts as the loop does, and answers as the policy has to sample them.

    An answer ends with the token that ends it for a rollout, whatever a chat template puts after
    it; one that has none gets the tokenizer's.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises `ConfigError` when neither tokenizer nor configuration names an end token."""
        super().__init__(model_dir)
        ends, own = _end_ids(model_dir), self._tokenizer.eos_token_id
        if own is None and not ends:
            raise ConfigError(f"model: {model_dir} names no eos_token_id, so no answer would end")
        self._end = min(ends) if own is None else own
        self._ends = ends | {self._end}

    def sample(self, example: Example, *, where: str) -> Sample:
        """The example with advantage 1, its weight, and without a rollout's log-probabilities.

        Args:
            where: what an error's message begins with.
        """
        if "messages" in example:
            where = f"{where}: messages"
            prompt_ids, answer_ids = self._chat(example["messages"], where=where)
        elif "prompt" in example and "completion" in example:
            prompt_ids, answer_ids = self._text(example, where=where)
            where = f"{where}: completion"
        else:
            raise ConfigError(
                f"{where}: found the keys {sorted(example)}; give `messages`, or `prompt` and "
                "`completion`"
            )
        answer_ids = self._ended(answer_ids, where=where)
        return Sample(
            prompt_ids=tuple(prompt_ids),
            completion_ids=tuple(answer_ids),
            rollout_logprobs=(0.0,) * len(answer_ids),
            advantage=1.0,
        )

    def _chat(self, messages: Any, *, where: str) -> tuple[list[int], list[int]]:
        import jinja2

        _check_messages(messages, where=where)
        try:
            prompt_ids = self.encode({"messages": messages[:-1]})
            prompt = self._render(messages[:-1], add_generation_prompt=True)
            whole = self._render(messages, add_generation_prompt=False)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{where}: the model's chat template refuses them: {error}") from None
        if not whole.startswith(prompt):
            raise ConfigError(
                f"{where}: the model's chat template does not continue the prompt it renders with "
                "the last message; give `prompt` and `completion`, as text"
            )
        whole_ids = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        return prompt_ids, self._continuation(prompt_ids, whole_ids, whole[len(prompt) :])

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        )

    def _text(self, example: Example, *, where: str) -> tuple[list[int], list[int]]:
        for key in ("prompt", "completion"):
            if not isinstance(example[key], str) or not example[key]:
                raise ConfigError(f"{where}: {key}: found {example[key]!r}; give some text")
        prompt_ids = self.encode({"prompt": example["prompt"]})
        whole_ids = self._tokenizer(example["prompt"] + example["completion"])["input_ids"]
        return prompt_ids, self._continuation(prompt_ids, whole_ids, example["completion"])

    def _continuation(self, prompt_ids: list[int], whole_ids: list[int], answer: str) -> list[int]:
        """The answer's tokens; apart where one would reach over from the prompt's last."""
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            return list(whole_ids[len(prompt_ids) :])
        return list(self._tokenizer(answer, add_special_tokens=False)["input_ids"])

    def _ended(self, ids: list[int], *, where: str) -> list[int]:
        end = next((index for index, token in enumerate(ids) if token in self._ends), None)
        if end is None:
            return [*ids, self._end]
        rest = str(self._tokenizer.decode(ids[end + 1 :]))
        if rest.strip():
            raise ConfigError(
                f"{where}: the answer goes on after its end token "
                f"{self._tokenizer.decode(ids[end : end + 1])!r}: {rest[:40]!r}; remove that token"
            )
        return ids[: end + 1]


def _check_messages(messages: Any, *, where: str) -> None:
    if not isinstance(messages, list) or len(messages) < 2:
        raise ConfigError(f"{where}: give a list of at least a user's and an assistant's message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise ConfigError(f"{where}.{index}: give an object with `role` and `content`")
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise ConfigError(f"{where}.{index}.{key}: found {message[key]!r}; give some text")
    last = messages[-1]
    if last["role"] != "assistant":
        raise ConfigError(f"{where}: the last is of {last['role']!r}; end with the assistant's")
    if not isinstance(last["content"], str) or not last["content"]:
        raise ConfigError(
            f"{where}.{len(messages) - 1}.content: found {last['content']!r}; give some text"
        )


def _end_ids(model_dir: Path) -> set[int]:
    """The tokens at which a rollout stops, as the model's configuration names them."""
    found: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        named = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found += named if isinstance(named, list) else [named]
    return {token for token in found if token is not None}
