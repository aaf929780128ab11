"""A real Trainer in every mode, with somebody who reads or writes weights between steps: the bits of in order.

Copies up are late and weights in flight are NaN, so whoever reads a weight too early shows.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_offload import compat

compat.register()
MODES = {
    "overlapped": "schedule=overlapped",
    "streamed": "schedule=overlapped,stream_gradients=true",
    "speculative": "schedule=overlapped,stream_gradients=true,shadow_bytes=2000000",
}
LATE = "poison=true,threads=1,bucket_bytes=16384,link_latency_us=10000"


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def run(lab: Any, mode: str, callback: Any = None, **args: Any) -> Any:
    given = "schedule=in_order,threads=1" if mode == "in_order" else f"{MODES[mode]},{LATE}"
    more = {"callbacks": [callback]} if callback is not None else {}
    chosen = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, **args}
    trainer = lab.trainer(more=more, optim_args=given, **chosen)
    trainer.train()
    return trainer


def agree(tools: Any, expected: Any, found: Any) -> None:
    """Logged losses, norms and evaluations to the last digit, the weights and the state bit for bit."""
    for keys in (("loss", "grad_norm"), ("eval_loss",)):
        logged = tools.history(found, *keys)
        assert logged == tools.history(expected, *keys)
        assert all(math.isfinite(value) for entry in logged for value in entry)
    assert len(tools.history(found, "loss", "grad_norm")) == found.state.global_step
    assert tools.same_bits(tools.weights(found.model), tools.weights(expected.model))
    assert tools.same_bits(tools.state_of(found.optimizer), tools.state_of(expected.optimizer))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_accumulation_clipping_and_the_logged_norm(lab: Any, tools: Any, mode: str, bf16: bool) -> None:
    expected, found = (run(lab, m, bf16=bf16) for m in ("in_order", mode))
    agree(tools, expected, found)
    norms = [norm for (norm,) in tools.history(found, "grad_norm")]
    assert any(norm > 1.0 for norm in norms), "clipping bites"
    assert found.optimizer.optimizer.schedule == "+".join(
        ["overlapped", "streamed", "speculative"][: 1 + list(MODES).index(mode)]
    )


def test_evaluation_and_a_checkpoint_after_every_step(lab: Any, tools: Any, mode: str) -> None:
    args = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    expected, found = (run(lab, m, bf16=True, **args) for m in ("in_order", mode))
    agree(tools, expected, found)
    assert len(tools.history(found, "eval_loss")) == 3


class Reads(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append({name: p.detach().clone() for name, p in model.named_parameters()})


class Generates(Reads):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.eval()
        ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
        model.train()
        self.seen.append({"ids": ids})


class Edits(Reads):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.lm_head.weight.data.mul_(0.5)  # moves no version counter
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.add_(0.01)


class Merging(Trainer):
    """Merges the adapters, looks, and takes them out again: in the middle of training, where no callback waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def look(self) -> None:
        self.seen.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        model.merge_adapter()
        self.look()
        model.unmerge_adapter()
        return super().training_step(model, *args, **kwargs)


class Sending(Merging):
    """Sends the weights to vLLM, as TRL's online trainers do before they generate."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        from trl.generation.vllm_generation import VLLMGeneration

        with contextlib.suppress(AttributeError):  # vLLM itself is not here; the wait comes before it is missed
            object.__new__(VLLMGeneration).sync_weights()
        self.look()
        return Trainer.training_step(self, model, *args, **kwargs)


def both(lab: Any, tools: Any, mode: str, kind: type[Reads], **args: Any) -> None:
    """The same run in order and in `mode`, each with a callback of this kind."""
    callbacks = kind(), kind()
    expected, found = (run(lab, m, c, **args) for m, c in zip(("in_order", mode), callbacks))
    agree(tools, expected, found)
    assert len(callbacks[0].seen) == len(callbacks[1].seen)
    assert all(tools.same_bits(a, b) for a, b in zip(callbacks[0].seen, callbacks[1].seen))


@pytest.mark.parametrize("kind", [Reads, Generates])
def test_a_callback_that_reads(lab: Any, tools: Any, mode: str, kind: type[Reads]) -> None:
    both(lab, tools, mode, kind)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_callback_that_edits(
    lab: Any, tools: Any, mode: str, bf16: bool, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """The masters follow, and the warning counts: every weight of two matrices, in each step but the first."""
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        both(lab, tools, mode, Edits, bf16=bf16)
    warned = [int(r.args[0]) for r in caplog.records if "were changed from outside" in r.message]
    assert len(warned) == 2 * 3
    most = 96 * 32 + 64 * 32
    assert warned[:3] == warned[3:] and all(most * 0.9 < count <= most for count in warned)


@pytest.mark.parametrize("kind", [Merging, Sending])
def test_adapters_merged_and_weights_sent(lab: Any, tools: Any, mode: str, kind: type[Merging]) -> None:
    peft = pytest.importorskip("peft")
    if kind is Sending:
        pytest.importorskip("trl.generation.vllm_generation")

    def lora() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(
            lab.model(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        )

    expected, found = (run(lab, m, model=lora(), kind=kind) for m in ("in_order", mode))
    agree(tools, expected, found)
    assert len(expected.seen) == len(found.seen) == 8
    assert all(tools.same_bits(a, b) for a, b in zip(expected.seen, found.seen))
