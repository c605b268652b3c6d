"""From the prompt of a request to token ids."""

from __future__ import annotations

import asyncio

from refit.v1 import rollout_pb2

from common.errors import InvalidField
from rollout_svc.engine import Engine, Message

_ROLES = ("system", "user", "assistant")
# Far above any text's, so that only what is hopeless is refused before it has been tokenized.
_CHARACTERS_PER_TOKEN = 64


async def prompt_token_ids(request: rollout_pb2.GenerateRequest, engine: Engine) -> tuple[int, ...]:
    """Tokenize where needed, beside the event loop, and check the result.

    Raises:
        InvalidField: no prompt, an unknown role, a token id the model lacks, too many tokens or
            characters, or a chat that the model's template refuses.
    """
    kind = request.WhichOneof("prompt")
    ids = tuple(await _encode(request, kind, engine))
    capabilities = engine.capabilities
    if not ids:
        raise InvalidField(f"{kind}: no tokens; give a prompt of at least one")
    if len(ids) >= capabilities.max_model_len:
        raise InvalidField(
            f"{kind}: {len(ids)} tokens; the model's context of {capabilities.max_model_len} must "
            "leave room for an answer, so shorten it"
        )
    if wrong := [token for token in ids if not 0 <= token < capabilities.vocab_size]:
        raise InvalidField(
            f"{kind}: token id {wrong[0]}; the model's ids are 0 to {capabilities.vocab_size - 1}"
        )
    return ids


async def _encode(
    request: rollout_pb2.GenerateRequest, kind: str | None, engine: Engine
) -> list[int]:
    match kind:
        case "token_ids":
            return list(request.token_ids.ids)
        case "text":
            _refuse_endless(kind, len(request.text), engine)
            return await asyncio.to_thread(engine.encode_text, request.text)
        case "chat":
            messages = _messages(request.chat)
            _refuse_endless(kind, sum(len(message.content) for message in messages), engine)
            return await asyncio.to_thread(engine.encode_chat, messages)
    raise InvalidField("prompt: missing; set one of token_ids, text and chat")


def _refuse_endless(kind: str, characters: int, engine: Engine) -> None:
    most = _CHARACTERS_PER_TOKEN * engine.capabilities.max_model_len
    if characters > most:
        raise InvalidField(
            f"{kind}: {characters} characters; more than {most} cannot fit the model's context of "
            f"{engine.capabilities.max_model_len} tokens, so shorten it"
        )


def _messages(chat: rollout_pb2.ChatMessages) -> list[Message]:
    if not chat.messages:
        raise InvalidField("chat.messages: empty; give at least one message")
    for message in chat.messages:
        if message.role not in _ROLES:
            raise InvalidField(
                f"chat.messages.role: {message.role!r}; use one of {', '.join(_ROLES)}"
            )
    return [Message(message.role, message.content) for message in chat.messages]
