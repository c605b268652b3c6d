"""From the turns of a chat to token ids, by the model's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from common.errors import InvalidField
from rollout_svc.engine import Message


def chat_token_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Render `messages` by the template of a Hugging Face tokenizer, ready for the answer.

    Raises:
        InvalidField: the tokenizer has no template, or its template refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidField("chat: this model has no chat template; send text or token_ids")
    turns = [{"role": turn.role, "content": turn.content} for turn in messages]
    try:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        reason = " ".join(str(error).split())
        raise InvalidField(f"chat: the model's template refuses it: {reason}") from error
    return list(ids)
