"""TRL's GRPO trainer, its completions sampled by a Refit fleet instead of its own vLLM.

    refit model smollm2 --out models/smollm2
    refit rollout --set model=models/smollm2 --set trainer_address=127.0.0.1:50051 \
        --set max_lora_rank=8 &
    python examples/trl_grpo.py --model models/smollm2 --steps 20

The reward is the share of ASCII letters. Every step prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import string
import tempfile
from typing import Any

from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from transformers import (
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from trainer_svc.library import AdapterPublisher, Published

GROUP_SIZE = 8


class Refit(TrainerCallback):
    """Publishes the policy before the first and after every optimizer step; samples from it."""

    def __init__(self, publisher: AdapterPublisher) -> None:
        self._publisher = publisher
        self._version: Published
        self._row: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._publish(kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._publish(kwargs["model"])

    def _publish(self, model: PeftModel) -> None:
        self._version = self._publisher.publish(
            get_peft_model_state_dict(model), model.peft_config["default"]
        )

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: it passes every prompt `num_generations` times, side by side."""
        n = trainer.num_generations
        prompt_ids = [
            trainer.processing_class.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            for messages in prompts[::n]
        ]
        self._publisher.wait(self._version)
        groups = self._publisher.generate(
            prompt_ids,
            n=n,
            max_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
        )
        completions = [completion for group in groups for completion in group]
        self._row = {
            "version": self._version.version,
            "digest": self._version.digest().hex(),
            "made_by": sorted({c.version for c in completions}),
        }
        return {
            "prompt_ids": [ids for ids in prompt_ids for _ in range(n)],
            "completion_ids": [list(c.token_ids) for c in completions],
            "logprobs": [list(c.logprobs) for c in completions],
        }

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if "reward" in (logs := kwargs["logs"]):
            row = {"step": state.global_step, **self._row, "reward": round(logs["reward"], 3)}
            print(json.dumps(row), flush=True)


def letters(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float | None]:
    """The share of characters that are ASCII letters, 0 to 1."""
    texts = [messages[0]["content"] for messages in completions]
    return [sum(c in string.ascii_letters for c in text) / max(len(text), 1) for text in texts]


def main() -> None:
    args = arguments()
    questions = [f"Write some letters, number {number}." for number in range(100)]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    )
    with (
        AdapterPublisher(model=args.model, port=args.port) as publisher,
        tempfile.TemporaryDirectory() as scratch,
    ):
        refit = Refit(publisher)
        trainer = GRPOTrainer(
            model=args.model,
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            reward_funcs=letters,
            args=config(scratch, steps=args.steps),
            train_dataset=dataset,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
            rollout_func=refit.rollout,
            callbacks=[refit],
        )
        trainer.train()


def config(output_dir: str, *, steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=2 * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=12,
        learning_rate=5e-3,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory of the base model")
    parser.add_argument("--port", type=int, default=50051, help="where replicas subscribe")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
