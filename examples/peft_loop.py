"""GRPO on a Hugging Face PEFT model, its completions sampled by a Refit fleet.

    refit model smollm2 --out models/smollm2
    refit rollout --set model=models/smollm2 --set trainer_address=127.0.0.1:50051 \
        --set max_lora_rank=8 &
    python examples/peft_loop.py --model models/smollm2 --steps 20

The reward is the share of ASCII letters. Every step prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import string
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer_svc.library import AdapterPublisher, Completion

PROMPTS = ["Write some letters.", "Spell a word."]
GROUP_SIZE = 8
MAX_TOKENS = 12
LEARNING_RATE = 5e-3


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE
    )
    with AdapterPublisher(model=args.model, port=args.port) as publisher:
        for step in range(1, args.steps + 1):
            version = publisher.publish(
                get_peft_model_state_dict(model), model.peft_config["default"]
            )
            publisher.wait(version)
            groups = publisher.generate(prompts, n=GROUP_SIZE, max_tokens=MAX_TOKENS)
            rewards = torch.tensor([[reward(c.text) for c in group] for group in groups])
            row = {
                "step": step,
                "version": version.version,
                "digest": version.digest().hex(),
                "made_by": sorted({c.version for group in groups for c in group}),
                "reward": round(rewards.mean().item(), 3),
            }
            print(json.dumps(row), flush=True)
            train(model, optimizer, prompts, groups, rewards)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    prompts: list[list[int]],
    groups: list[list[Completion]],
    rewards: torch.Tensor,
) -> None:
    """One on-policy step; `rewards` is (prompts, completions of each)."""
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / spread
    optimizer.zero_grad()
    for prompt, group, weights in zip(prompts, groups, advantages, strict=True):
        for completion, weight in zip(group, weights, strict=True):
            loss = -weight * logprob(model, prompt, completion) / rewards.numel()
            loss.backward()
    optimizer.step()


def reward(text: str) -> float:
    """The share of characters that are ASCII letters, 0 to 1."""
    return sum(c in string.ascii_letters for c in text) / max(len(text), 1)


def logprob(model: torch.nn.Module, prompt: list[int], completion: Completion) -> torch.Tensor:
    """Mean log-probability of the completion's tokens under the policy as it is now."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    taken = torch.tensor(completion.token_ids).unsqueeze(1)
    chosen: torch.Tensor = logits.log_softmax(dim=-1).gather(1, taken)
    return chosen.mean()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory of the base model")
    parser.add_argument("--port", type=int, default=50051, help="where replicas subscribe")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
