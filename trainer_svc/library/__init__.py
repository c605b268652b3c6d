"""Refit for anybody's training loop: `AdapterPublisher`."""

from trainer_svc.library.completion import Completion
from trainer_svc.library.published import Published
from trainer_svc.library.publisher import AdapterPublisher

__all__ = ["AdapterPublisher", "Completion", "Published"]
