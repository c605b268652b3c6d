"""The base model: a Megatron `GPTModel` with a Hugging Face directory's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError
from trainer_svc.megatron import device, parallel
from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.architectures import BaseConfig, read_base_config

_ROW_PARALLEL = (names.PROJ, names.FC2)


def build_model(model_dir: Path, *, dtype: torch.dtype) -> GPTModel:
    """Build this rank's part of the model, frozen, with its weights loaded.

    Needs `parallel.start`. Stored weights convert to `dtype` by one rounding, or exactly where
    `dtype` is as wide. Logits come gathered over the tensor-parallel ranks.

    Raises:
        ConfigError: the directory is missing or incomplete, or holds an unknown model.
    """
    base = read_base_config(model_dir)
    model = GPTModel(
        base.to_megatron(dtype=dtype, tensor_parallel_size=parallel.tp_size()),
        _layer_spec(base),
        base.vocab_size,
        base.max_sequence_length,
        parallel_output=False,
        share_embeddings_and_output_weights=base.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=base.rotary_base,
    )
    model.to(device=device.compute_device(), dtype=dtype).requires_grad_(False)
    with open_weights(model_dir) as weights:
        load_weights(model, weights, heads=base.heads)
    return model


def hidden_states(model: GPTModel, tokens: Tensor) -> Tensor:
    """Final hidden states (seq, batch, hidden) of token ids (batch, seq), before the logits."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    hidden: Tensor = model.decoder(
        hidden_states=model.embedding(input_ids=tokens, position_ids=positions),
        attention_mask=None,
        rotary_pos_emb=model.rotary_pos_emb(tokens.shape[1]),
    )
    return hidden


def output_logits(model: GPTModel, hidden: Tensor) -> Tensor:
    """Logits (..., vocab) in float32 of hidden states (..., hidden), over the whole vocabulary.

    The product itself is in float32: logits reach 30, where bfloat16 has steps of 1/8, and that
    rounding is most of what trainer and rollout disagree about (arXiv 2506.13585, section 3.2).
    """
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    logits: Tensor = model.output_layer(hidden.float(), weight=weight.float())[0]
    return logits


class Weights:
    """Tensors of a Hugging Face directory by name, read when asked for."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    def read(self, name: str) -> Tensor:
        """One whole tensor as it is stored.

        Raises:
            ConfigError: the directory has no such tensor.
        """
        if name not in self._files:
            raise ConfigError(f"model_dir: the weights have no tensor {name}; download them again")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@contextmanager
def open_weights(model_dir: Path) -> Iterator[Weights]:
    """Open all safetensors files of a directory for the time of a `with` block."""
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"model_dir: found no *.safetensors in {model_dir}; convert the weights")
    with ExitStack() as stack:
        files = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            files.update(dict.fromkeys(file.keys(), file))
        yield Weights(files)


@torch.no_grad()
def load_weights(model: GPTModel, weights: Weights, *, heads: names.Heads) -> None:
    """Fill every parameter of this rank's part of the model."""
    for name, parameter in model.named_parameters():
        parts = [weights.read(hf_name) for hf_name in names.hf_names(name)]
        parameter.copy_(_shard(name, parts, heads=heads))


def _shard(name: str, parts: list[Tensor], *, heads: names.Heads) -> Tensor:
    """This rank's part of one Megatron parameter, from whole Hugging Face tensors."""
    rank, size = parallel.tp_rank(), parallel.tp_size()
    inside = names.split_layer(name)
    linear = inside[1].rpartition(".")[0] if inside else ""
    if linear in _ROW_PARALLEL:
        return parts[0].chunk(size, dim=1)[rank]
    if linear in names.LINEARS:
        return names.shard_rows(
            linear, names.fuse(linear, parts, heads=heads), rank=rank, size=size
        )
    return parts[0] if "norm" in name else parts[0].chunk(size)[rank]


def _layer_spec(base: BaseConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=base.architecture.qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = device.TorchAttention
    return spec
