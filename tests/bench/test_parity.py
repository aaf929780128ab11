"""The parity benchmark runs, and OffloadAdam stays near the reference where plain bf16 AdamW does not."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from hf_offload.bench import parity

TINY = [
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "data.block_size=32",
]


def test_offload_follows_the_reference_and_bf16_adamw_does_not():
    runs = parity.run("quickstart", TINY, steps=12, seeds=1, batch_size=4)["runs"]
    assert all(len(run["losses"][0]) == 12 for run in runs.values())
    assert runs["reference"]["losses"][0][-1] < runs["reference"]["losses"][0][0]
    ours, plain = runs["offload"]["largest_difference"][0], runs["adamw_bf16"]["largest_difference"][0]
    assert ours < plain / 4
