"""The `model` of an answer whose tokens another version made than the one it was admitted to."""

from __future__ import annotations

import json
from dataclasses import dataclass

from starlette.types import Message, Send

from rollout_svc.openai_api.admission import Admission
from rollout_svc.openai_api.models import model_name


@dataclass(slots=True)
class Renaming:
    """Passes an answer on, with the newest version's name in the place of the first one's.

    vLLM writes one name into all of an answer; under swap rule `continue` a later version goes on
    with it. A quoted key and value cannot be part of any text in JSON, whose quotes are escaped.
    """

    admission: Admission
    send: Send

    async def __call__(self, message: Message) -> None:
        if self.admission.newest != self.admission.first:
            message = self._renamed(message)
        await self.send(message)

    def _renamed(self, message: Message) -> Message:
        if message["type"] == "http.response.start":
            # The body will have another length.
            headers = [item for item in message["headers"] if item[0] != b"content-length"]
            return {**message, "headers": headers}
        names = (self.admission.model, model_name(self.admission.newest))
        old, new = (f'"model":{json.dumps(name, ensure_ascii=False)}'.encode() for name in names)
        return {**message, "body": message.get("body", b"").replace(old, new)}
