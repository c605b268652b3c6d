"""Chats through a real tokenizer and its template."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.errors import InvalidField
from rollout_svc.engine import Message
from rollout_svc.generation.chat import chat_token_ids

ALTERNATING = (
    "{% for turn in messages %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate:\\n user, assistant') }}"
    "{% endif %}{{ turn.role }} {{ turn.content }} {% endfor %}assistant"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["?", "user", "assistant", "hi", "yo"])}
    words_only = Tokenizer(models.WordLevel(words, unk_token="?"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words_only)
    fast.chat_template = template
    return fast


def test_a_chat_is_rendered_by_the_template_and_ready_for_the_answer() -> None:
    turns = [Message("user", "hi"), Message("assistant", "yo"), Message("user", "yo")]
    assert chat_token_ids(tokenizer(ALTERNATING), turns) == [1, 3, 2, 4, 1, 4, 2]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "chat: this model has no chat template; send text or token_ids"),
        (
            ALTERNATING,
            "chat: the model's template refuses it: roles must alternate: user, assistant",
        ),
        ("{{ missing.name }}", "chat: the model's template refuses it: 'missing' is undefined"),
    ],
)
def test_what_the_template_refuses_is_an_invalid_field(template: str | None, text: str) -> None:
    turns = [Message("user", "hi"), Message("user", "yo")]
    with pytest.raises(InvalidField, match=f"^{re.escape(text)}$"):
        chat_token_ids(tokenizer(template), turns)
