"""Training over several ranks, in every way to lay a model over them, against one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import tiny_models
from tests.ranks import run_ranks
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.protocol import Batch, Json, Sample
from trainer_svc.megatron.settings import ParallelSettings, WorkerSettings

pytestmark = pytest.mark.timeout(600)

STEPS = 3
TOLERANCE = 1e-5
DEADLINE_SECONDS = 500.0

MINIBATCHES = {"train": {"minibatches": 2}}

MODELS: dict[str, tuple[str, Json, Json]] = {
    "llama": ("llama", {}, MINIBATCHES),
    # SmolLM2's shape: 9 heads in 3 groups, and the output layer tied to the embedding.
    "nine_heads": (
        "llama_tied",
        {"hidden_size": 72, "intermediate_size": 96, "num_attention_heads": 9, "head_dim": 8}
        | {"num_key_value_heads": 3},
        {},
    ),
    # Stages of a pipeline that have nothing to train.
    "first_layer": ("llama", {}, {"lora": {"target_modules": ["*.layers.0.*"]}}),
    "last_layer": ("llama", {}, {"lora": {"target_modules": ["*.layers.3.*"]}}),
    "dora": ("llama_tied", {}, {"lora": {"type": "dora"}}),
    "experts": (
        "qwen3_moe",
        {},
        MINIBATCHES | {"lora": {"target_modules": ["linear_*", "router"]}},
    ),
    "experts_shared": ("qwen3_moe", {}, {"lora": {"experts": "shared"}}),
    "latent": ("deepseek_v3", {}, {}),
}
"""Short name: architecture in `tiny_models`, changes to its config and to the settings."""

SIZES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}

LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "llama": ("dp2", "tp2", "tp2 sp", "pp2", "pp2 vpp2"),
        "first_layer": ("pp2 vpp2",),
        "last_layer": ("pp2",),
        "dora": ("tp2",),
        "experts": ("dp2", "tp2", "pp2", "ep2", "tp2 ep2", "etp2", "tp2 etp2"),
        "experts_shared": ("tp2", "ep2", "tp2 etp2"),
        "latent": ("tp2", "pp2", "ep2"),
    },
    3: {"nine_heads": ("tp3",)},
    4: {
        "llama": ("tp2 pp2", "tp2 dp2", "pp2 dp2", "pp2 vpp2 dp2"),
        "experts": ("pp2 ep2", "tp2 ep2 dp2", "tp2 pp2 ep2", "ep2 etp2"),
        "experts_shared": ("ep2 dp4",),
        "latent": ("tp2 pp2 ep2", "pp2 vpp2 ep2"),
    },
}
"""By number of ranks and model: parallel sizes; data parallelism is what they leave."""

CASES = [
    (ranks, model, layout)
    for ranks, models in LAYOUTS.items()
    for model, layouts in models.items()
    for layout in layouts
]


def parallel_settings(layout: str) -> ParallelSettings:
    """Of `tp2 pp2 sp`, say."""
    raw: dict[str, Any] = {}
    for part in layout.split():
        key, size = part.rstrip("0123456789"), part.lstrip("abcdefghijklmnopqrstuvwxyz")
        if key == "sp":
            raw["sequence_parallel"] = True
        elif key != "dp":
            raw[SIZES[key]] = int(size)
    return ParallelSettings.model_validate(raw)


def worker_settings(root: Path, model: str, layout: str = "") -> WorkerSettings:
    own = MODELS[model][2]
    # Adam divides by the gradient: where that is rounding noise, so would the update be.
    train = {"micro_batch_tokens": 40, "kl_coef": 0.01, "eps": 1e-6}
    # The norm of a row that two ranks share is rounded otherwise: magnitudes start alike only if
    # they are loaded.
    loaded = root / f"one {model}" / "peft" if layout and model == "dora" else None
    return WorkerSettings.model_validate(
        {
            "model_dir": root / model,
            "dtype": "float32",
            "num_threads": 1,
            "parallel": parallel_settings(layout),
            "adapter_path": loaded,
            "lora": {"rank": 4, "alpha": 8, "b_init": "normal"} | own.get("lora", {}),
            "train": train | own.get("train", {}),
        }
    )


def samples_of(group: int) -> list[Sample]:
    """Three completions of one prompt; of one group none has an advantage."""
    found = []
    for number in range(3):
        length = 3 + (group + 2 * number) % 5
        ids = tuple((7 * group + 11 * number + 5 * i) % 90 for i in range(length))
        advantage = (1.0, -0.5, 0.25)[(group + number) % 3]
        found.append(
            Sample(
                prompt_ids=tuple(range(90 - 6 * group, 94 - 5 * group)),
                completion_ids=ids,
                rollout_logprobs=(-4.5,) * length,
                advantage=0.0 if group == 2 else advantage,
            )
        )
    return found


GROUPS = 4
BATCH = Batch(samples=tuple(s for group in range(GROUPS) for s in samples_of(group)))


def train(settings: WorkerSettings, directory: Path) -> Json:
    """Export, measure, make three steps, measure and export."""
    trainer = MegatronTrainer(settings)
    seed = torch.initial_seed()
    seen: set[int] = set()
    if trainer.base.chunks[0].pre_process:
        trainer.base.chunks[0].embedding.register_forward_pre_hook(
            lambda module, args, kwargs: seen.update(groups_in(kwargs["input_ids"])),
            with_kwargs=True,
        )
    trainer.export(directory / "start", base_fingerprint="base")
    trainer.exporter.to_peft_dir(directory / "peft")
    before = trainer.logprobs(BATCH)
    groups = sorted(seen)
    steps = [trainer.step(BATCH) for _ in range(STEPS)]
    trainer.export(directory / "end", base_fingerprint="base")
    return {
        "groups": groups,
        "seed": seed,
        "before": before,
        "steps": steps,
        "after": trainer.logprobs(BATCH),
    }


def groups_in(row: Tensor) -> set[int]:
    """Groups whose prompt stands in a row of tokens (1, T)."""
    text = " ".join(map(str, row.flatten().tolist()))
    prompts = [samples_of(group)[0].prompt_ids for group in range(GROUPS)]
    return {g for g, ids in enumerate(prompts) if f" {' '.join(map(str, ids))} " in f" {text} "}


@dataclass(frozen=True)
class Job:
    """All layouts of so many ranks, one after another."""

    root: Path
    num_ranks: int


def run_job(job: Job) -> None:
    for model, layouts in LAYOUTS[job.num_ranks].items():
        for layout in layouts:
            directory = case_dir(job.root, job.num_ranks, model, layout)
            found = train(worker_settings(job.root, model, layout), directory)
            (directory / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def case_dir(root: Path, num_ranks: int, model: str, layout: str) -> Path:
    return root / f"{num_ranks} {model} {layout}"


@pytest.fixture(scope="module")
def one_rank(ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models, and what one rank made of each."""
    root = tmp_path_factory.mktemp("ranks")
    for model, (architecture, config, _) in MODELS.items():
        tiny_models.save(architecture, root / model, num_layers=4, **config)
        (root / f"one {model}").mkdir()
        found = train(worker_settings(root, model), root / f"one {model}")
        (root / f"one {model}" / "0.json").write_text(json.dumps(found))
    return root


@pytest.fixture(scope="module")
def root_of(one_rank: Path) -> Callable[[int], Path]:
    """The same directory, with what so many ranks made in each of their layouts."""

    @cache
    def root_of(num_ranks: int) -> Path:
        for model, layouts in LAYOUTS[num_ranks].items():
            for layout in layouts:
                case_dir(one_rank, num_ranks, model, layout).mkdir()
        job, store = Job(one_rank, num_ranks), one_rank / f"store{num_ranks}"
        run_ranks(run_job, job, num_ranks=num_ranks, store=store, deadline_seconds=DEADLINE_SECONDS)
        return one_rank

    return root_of


@pytest.mark.parametrize(("num_ranks", "model", "layout"), CASES)
def test_ranks_export_the_same_bytes_and_learn_the_same(
    root_of: Callable[[int], Path], num_ranks: int, model: str, layout: str
) -> None:
    """faults.md 13: Megatron-Bridge#5634, experts wrong at expert-tensor-parallel above 1."""
    root = root_of(num_ranks)
    one, many = root / f"one {model}", case_dir(root, num_ranks, model, layout)
    assert (many / "start").read_bytes() == (one / "start").read_bytes()
    assert values(many / "start").ne(values(many / "end")).any()
    torch.testing.assert_close(values(many / "end"), values(one / "end"), rtol=0, atol=TOLERANCE)
    expected = json.loads((one / "0.json").read_text())
    for rank in range(num_ranks):
        found = json.loads((many / f"{rank}.json").read_text())
        for when in ("before", "after"):
            for mine, other in zip(found[when], expected[when], strict=True):
                assert mine == pytest.approx(other, abs=1e-4)
        for mine, other in zip(found["steps"], expected["steps"], strict=True):
            assert {**mine, "seconds": 0} == pytest.approx({**other, "seconds": 0}, abs=1e-4)


@pytest.mark.parametrize(("num_ranks", "layout"), [(2, "dp2"), (4, "tp2 dp2")])
def test_copies_of_the_model_see_different_samples(
    root_of: Callable[[int], Path], num_ranks: int, layout: str
) -> None:
    directory = case_dir(root_of(num_ranks), num_ranks, "llama", layout)
    found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    half = num_ranks // 2
    assert [rank["groups"] for rank in found] == [[0, 1]] * half + [[2, 3]] * half
    # Dropout: alike on the ranks that share a linear, other on another copy.
    assert [rank["seed"] for rank in found] == [0] * half + [1] * half


def values(flat: Path) -> Tensor:
    """All elements of an exported adapter."""
    return torch.frombuffer(bytearray(flat.read_bytes()), dtype=torch.float32)
