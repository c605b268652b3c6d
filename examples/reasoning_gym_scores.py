"""Scores the policy on reasoning-gym's tasks while it trains, by any OpenAI client's means.

    pip install --no-deps -r requirements/examples.txt
    refit rollout --set model=models/smollm2 --set trainer_address=127.0.0.1:50051 \
        --set openai_port=8000 &
    python examples/reasoning_gym_scores.py --url http://127.0.0.1:8000/v1 --tasks 64

Prints a JSON line for each version that answered: how many tasks, and their mean reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from openai import AsyncOpenAI
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

CONCURRENCY = 16


async def main() -> None:
    args = arguments()
    tasks = reasoning_gym.create_dataset(args.dataset, size=args.tasks, seed=args.seed)
    places = asyncio.Semaphore(CONCURRENCY)
    async with AsyncOpenAI(base_url=args.url, api_key=args.token) as client:

        async def play(task: Mapping[str, Any]) -> tuple[str, float]:
            async with places:
                version, answer = await ask(client, args, task["question"])
            return version, tasks.score_answer(answer, entry=task)

        played = await asyncio.gather(*map(play, tasks))
    rewards = defaultdict(list)
    for version, reward in played:
        rewards[version].append(reward)
    for version, scores in sorted(rewards.items()):
        row = {"model": version, "tasks": len(scores), "reward": round(statistics.mean(scores), 3)}
        print(json.dumps(row), flush=True)


async def ask(
    client: AsyncOpenAI, args: argparse.Namespace, question: str
) -> tuple[str, str | None]:
    """The version that answered, and its answer."""
    completion = await client.chat.completions.create(
        model=args.model,
        messages=[
            {"role": "system", "content": SYSTEM_PROMPTS["direct"]},
            {"role": "user", "content": question},
        ],
        max_tokens=args.max_tokens,
    )
    text = completion.choices[0].message.content or ""
    return completion.model, extract_answer(text) or text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="the replica's OpenAI endpoint, with /v1")
    parser.add_argument("--model", default="default", help="ADAPTER, ADAPTER@VERSION or base")
    parser.add_argument("--token", default="none", help="bearer token, where the replica wants one")
    parser.add_argument("--dataset", default="basic_arithmetic", help="reasoning-gym's name of it")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
