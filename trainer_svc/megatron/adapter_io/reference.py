"""The base alone as an adapter, so that replicas serve it by name like any other: all zeros."""

from __future__ import annotations

from dataclasses import replace

from common.adapter import Dtype, Layout, Manifest, plan, seal
from trainer_svc.megatron.adapter_io.lora_config import exact_config
from trainer_svc.megatron.adapter_io.places import entries, pieces
from trainer_svc.megatron.lora.plan import AdapterPlan
from trainer_svc.megatron.model.base_config import BaseConfig

_PLAIN = {
    "type": "lora",
    "rank": 1,
    "alpha": 1.0,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def reference_manifest(
    adapter: AdapterPlan, *, base: BaseConfig, base_fingerprint: str, dtype: Dtype
) -> Manifest:
    """An adapter of rank 1 on the modules of `adapter`; its buffer is `total_bytes` zeros.

    Tensors of one shape are aliases of one, so it is some kilobytes whatever the model's size.
    """
    narrow = _of_rank_1(adapter)
    own = pieces(narrow, base, experts=narrow.settings.expert_layout)
    first: dict[tuple[Layout, tuple[int, ...]], str] = {}
    tensors = []
    for entry in entries(own, dtype=dtype):
        owner = first.setdefault((entry.layout, entry.shape), entry.name)
        tensors.append(replace(entry, alias_of="" if owner == entry.name else owner))
    manifest = Manifest(base_fingerprint, exact_config(narrow, own), plan(tensors))
    return replace(manifest, tensors=seal(manifest.tensors, reference_buffer(manifest)))


def reference_buffer(manifest: Manifest) -> memoryview:
    """The flat buffer of `reference_manifest`."""
    return memoryview(bytes(manifest.total_bytes))


def _of_rank_1(adapter: AdapterPlan) -> AdapterPlan:
    sites = tuple(
        replace(
            site,
            pairs=tuple(replace(pair, rank=1, alpha=1.0, use_rslora=False) for pair in site.pairs),
        )
        for site in adapter.sites
    )
    return AdapterPlan(adapter.settings.model_copy(update=_PLAIN), sites)
