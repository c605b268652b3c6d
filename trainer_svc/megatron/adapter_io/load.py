"""An adapter from a PEFT directory back into the model: the inverse of an export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.adapter import ExpertLayout, Manifest
from common.peft_dir import CONFIG_FILE, read_peft_dir
from trainer_svc.megatron.adapter_io.checks import check_fits
from trainer_svc.megatron.adapter_io.flat import tensors_of
from trainer_svc.megatron.adapter_io.places import Piece, leaves, pieces
from trainer_svc.megatron.adapter_io.rows import join_part, own_part
from trainer_svc.megatron.lora.layers import LoraLinear, lora_linears
from trainer_svc.megatron.lora.plan import AdapterPlan
from trainer_svc.megatron.model.build import BaseModel

ADAPTER_DIR = "adapter"
"""Of a checkpoint, the part that is a PEFT directory."""


@torch.no_grad()
def load_adapter(
    base: BaseModel, path: Path, *, plan: AdapterPlan, adapter: str = "default"
) -> None:
    """Set every tensor of an adapter from a PEFT directory, or a checkpoint, with just these.

    Each rank takes its own parts, so all of them must be able to read the directory. The experts'
    factors may lie in any layout.

    Raises:
        ConfigError: a file is missing or malformed.
        Incompatible: type, rank, scale, modules or shapes differ from the settings', or modules
            that share a factor in the model have different ones.
    """
    directory = path if (path / CONFIG_FILE).is_file() else path / ADAPTER_DIR
    found = read_peft_dir(
        directory if (directory / CONFIG_FILE).is_file() else path, base_fingerprint=""
    )
    tensors = tensors_of(found.manifest.tensors, memoryview(bytearray(found.buffer)))
    of_plan = pieces(plan, base.config, experts=_expert_layout(found.manifest))
    check_fits(path, found.manifest, tensors, plan=plan, pieces=of_plan)
    for linear in lora_linears(base.chunks):
        for number, pair in enumerate(linear.pairs(adapter)):
            for leaf in leaves(plan):
                of_leaf = of_plan[linear.site_number, number, leaf]
                value = _value(linear, number, leaf, of_leaf, tensors)
                getattr(pair, leaf).copy_(value)


def _expert_layout(manifest: Manifest) -> ExpertLayout:
    layouts = {spec.layout for spec in manifest.tensors}
    packed = (ExpertLayout.PACKED, ExpertLayout.FLAT, ExpertLayout.SWAPPED)
    return next((e for e in packed if layouts & set(e.factors)), ExpertLayout.PER_EXPERT)


def _value(
    linear: LoraLinear,
    pair_number: int,
    leaf: str,
    of_leaf: Sequence[Piece],
    tensors: Mapping[str, Tensor],
) -> Tensor:
    """This rank's part of one tensor."""
    site, size = linear.site, linear.size
    pair = site.pairs[pair_number]
    index = dist.get_group_rank(linear.group, dist.get_rank())
    parts = [
        own_part(site, pair, leaf, place.view(tensors[place.name]), index=index, size=size)
        for place in (piece.places[0] for piece in of_leaf)
    ]
    return join_part(site, pair, leaf, parts, size=size, heads=linear.heads)
