"""The policy step that people write with Hugging Face and PEFT, to compare with."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from trainer_svc.megatron.protocol import Batch


class HuggingFaceTrainer:
    """LoRA on every linear, in float32 as PEFT makes it, under AdamW."""

    def __init__(
        self, model: Path, *, dtype: torch.dtype, rank: int, alpha: int, lr: float
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
        self._model = get_peft_model(base, lora).train()
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._adam = torch.optim.AdamW(self._parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, batch: Batch) -> None:
        """One padded batch, and logits of all its tokens."""
        rows = [torch.tensor(s.prompt_ids + s.completion_ids) for s in batch.samples]
        tokens = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        prompts = torch.tensor([len(s.prompt_ids) for s in batch.samples])[:, None]
        place = torch.arange(tokens.shape[1])
        logprobs = self._logprobs(tokens, mask=(place < lengths).long())
        completion = ((place >= prompts) & (place < lengths))[:, 1:]
        advantages = torch.tensor([s.advantage for s in batch.samples])[:, None]
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(0.8, 1.2)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        torch.autograd.backward((per_token * completion).sum() / completion.sum())
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adam.step()
        self._adam.zero_grad()

    def _logprobs(self, tokens: Tensor, *, mask: Tensor) -> Tensor:
        """Of every token but the first, (rows, width - 1)."""
        logits = self._model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        flat = logits.flatten(0, 1).float()
        losses = cross_entropy(flat, tokens[:, 1:].flatten(), reduction="none")
        return -losses.view(len(tokens), -1)
