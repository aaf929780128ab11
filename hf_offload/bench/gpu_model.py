"""A Llama-like model of random weights with about as many parameters as asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_offload import planner

VOCAB = 32_000
ASPECT = 64
"""Elements of the hidden state per layer, about, as in models of 1 to 8 billion parameters."""
ROOM = 0.85
"""Part of the device's memory that the planned bytes may fill; the rest is for what no plan counts."""


@dataclass(frozen=True)
class Llama:
    """Shape of the model: counts and elements. The embedding and the head are not tied."""

    hidden: int
    layers: int
    vocab: int

    @property
    def intermediate(self) -> int:
        return self.hidden * 11 // 4

    @property
    def head_dim(self) -> int:
        return 128 if self.hidden >= 1024 else 32

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.heads // 4 if self.heads % 4 == 0 else self.heads

    @property
    def layer_params(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + 2 * self.vocab * self.hidden + self.hidden

    def for_planner(self) -> planner.Shape:
        return planner.Shape(
            layers=self.layers, hidden=self.hidden, intermediate=self.intermediate, heads=self.heads,
            kv_heads=self.kv_heads, head_dim=self.head_dim, vocab=self.vocab,
        )  # fmt: skip


def shape_for(params: int, vocab: int = VOCAB) -> Llama:
    """The shape with the usual proportions among those within 3 % of `params`; else the one nearest in size."""
    found = []
    for hidden in [*range(64, 1024, 64), *range(1024, 16_385, 256)]:
        one = Llama(hidden, 1, vocab)
        layers = max(2, round((params - one.params) / one.layer_params) + 1)
        shape = Llama(hidden, layers, vocab)
        off = abs(shape.params / params - 1)
        found.append((max(off, 0.03), abs(layers - hidden / ASPECT), hidden, shape))
    return min(found, key=lambda entry: entry[:3])[3]


def build(
    shape: Llama, seq_len: int, device: str, seed: int = 0, attention: str = "sdpa", dtype: torch.dtype = torch.bfloat16
) -> Any:
    """The model on `device`, its weights made there in `dtype`, for training."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=seq_len, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(device).train()


def set_checkpointing(model: Any, on: bool) -> None:
    """Keep each block's input only and compute the block once more in backward, or not."""
    # transformers is renaming gradient_checkpointing to activation_checkpointing
    new = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        getattr(model, f"{new}_checkpointing_enable")(**{f"{new}_checkpointing_kwargs": {"use_reentrant": False}})
    else:
        getattr(model, f"{new}_checkpointing_disable")()


def needs_checkpointing(shape: Llama, batch: int, seq_len: int, device_bytes: int | None) -> bool:
    """Whether, by the planner, 16 bytes a parameter, all activations and the logits are too much for the device.

    One answer for all variants at a batch size: they must do the same work.
    """
    if device_bytes is None:
        return False
    work = planner.Workload(batch=batch, seq_len=seq_len)
    planned = shape.for_planner()
    need = 16 * shape.params + planner.CUDA_CONTEXT_BYTES
    need += planner.activation_bytes(planned, work, False) + planner.logits_bytes(planned, work)
    return need > ROOM * device_bytes
