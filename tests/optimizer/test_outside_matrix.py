"""Every way to write to weights that we know of, in every schedule: the next step is the one of plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from hf_offload.errors import OffloadError
from support.outside import EVERY, Pair, changed

Write = Callable[[nn.Module], None]


def weights(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.dim() == 2]


# ---- state dicts: hooks of the model tell of them


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict(changed(model.state_dict()))


def load_a_part(model: nn.Module) -> None:
    values = changed(model.state_dict())
    model.load_state_dict({name: values[name] for name in list(values)[2:4]}, strict=False)


def load_a_submodule(model: Any) -> None:
    model.head.load_state_dict(changed(model.head.state_dict()))


def load_a_container(model: Any) -> None:
    model.blocks.load_state_dict(changed(model.blocks.state_dict()))


# ---- in place: the version counter tells


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1.5)


@torch.no_grad()
def foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 1.5)


@torch.inference_mode()
def under_inference_mode(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1.5)


def nn_init(model: nn.Module) -> None:
    torch.manual_seed(3)
    for p in weights(model):
        nn.init.xavier_normal_(p)


@torch.no_grad()
def the_same_bits(model: nn.Module) -> None:
    for p in model.parameters():
        p.copy_(p.clone())


@torch.no_grad()
def not_a_number(model: nn.Module) -> None:
    for p in weights(model):
        p[1, 2], p[2, 1], p[3, 3] = float("nan"), float("inf"), float("-inf")


def while_frozen(model: nn.Module) -> None:
    for p in model.parameters():
        p.requires_grad_(False)
        p.mul_(1.5)
        p.requires_grad_(True)


# ---- other memory: the address tells


def new_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 1.5


def converted_there_and_back(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model.half()
    model.to(dtype)


def swapped(model: nn.Module) -> None:
    for p in model.parameters():
        p.data, _ = p.data.clone().mul_(1.5), p.data


def set_to(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.set_(p.data.clone().mul_(1.5))


def pruned_for_good(model: nn.Module) -> None:
    for module in [m for m in model.modules() if hasattr(m, "bias")]:
        prune.l1_unstructured(module, "weight", amount=0.3)
        prune.remove(module, "weight")


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.head, "weight", Doubled())


def parametrized_there_and_back(model: Any) -> None:
    parametrized(model)
    parametrize.remove_parametrizations(model.head, "weight")


# ---- past the version counter: only the checksum tells


def data_mul(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1.5)


def data_clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.5, 0.5)


def data_of_one_element(model: nn.Module) -> None:
    weights(model)[1].data[2, 3] = 0.25


def applied_init(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.apply(lambda m: m.weight.data.normal_(std=0.02) if hasattr(m, "weight") else None)


def as_bits(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.view(torch.int32 if p.dtype == torch.float32 else torch.int16).bitwise_xor_(1)


def from_another_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=data_mul, args=(model,))
    thread.start()
    thread.join()


def data_not_a_number(model: nn.Module) -> None:
    for p in weights(model):
        p.data[1, 2], p.data[2, 1] = float("nan"), float("inf")


def averaged_in_and_out(model: nn.Module) -> None:
    """EMA as diffusers has it: store, copy_to, restore. Nothing changes."""
    kept = [p.detach().cpu().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(p.data * 0.5)
    for p, k in zip(model.parameters(), kept):
        p.data.copy_(k.data)


def averaged_in(model: nn.Module) -> None:
    """torch.optim.swa_utils: the average is copied back into the model that goes on training."""
    average = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda mean, now, n: mean * 0.5 + now.to(mean.dtype) * 0.75
    )
    average.update_parameters(model)
    average.update_parameters(model)
    for p, a in zip(model.parameters(), average.module.parameters()):
        p.data.copy_(a.data)


def through_a_vector(model: nn.Module) -> None:
    """All parameters become views of one tensor."""
    values = nn.utils.parameters_to_vector(model.parameters()) * 1.5
    nn.utils.vector_to_parameters(values, model.parameters())


LOADS = (load_state_dict, load_a_part, load_a_submodule, load_a_container)
VERSIONED = (in_place, foreach, under_inference_mode, nn_init, the_same_bits, not_a_number, while_frozen)
MOVED = (new_data, swapped, set_to, through_a_vector)
REBUILT = (converted_there_and_back, pruned_for_good, parametrized, parametrized_there_and_back)
HIDDEN = (
    data_mul, data_clamp, data_of_one_element, applied_init, as_bits, from_another_thread, data_not_a_number,
    averaged_in_and_out, averaged_in,
)  # fmt: skip
FEW = (load_state_dict, in_place, new_data, data_mul)
"""One for each sign that a weight was written to."""
every_mode = pytest.mark.parametrize("mode", EVERY)


def each(*ways: Write) -> Any:
    return pytest.mark.parametrize("how", ways, ids=lambda how: how.__name__)


@every_mode
@each(*LOADS, *VERSIONED, *MOVED, *REBUILT, *HIDDEN)
def test_a_write_after_a_step(how: Write, mode: str) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.write(how)
    pair.steps(2)
    pair.check()


@every_mode
@pytest.mark.parametrize("wire", ["float16", "float32"])
@each(*FEW, not_a_number, as_bits, converted_there_and_back)
def test_a_write_in_another_format(how: Write, wire: str, mode: str) -> None:
    pair = Pair(mode, wire)
    pair.steps(3)
    pair.write(how)
    pair.steps(2)
    pair.check()


@every_mode
@each(*LOADS, *VERSIONED, *MOVED, *HIDDEN)
def test_a_write_between_backward_and_step(how: Write, mode: str) -> None:
    """What was stepped ahead on the old masters must not be taken."""
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.step(lambda: pair.write(how))
    pair.steps(2)
    pair.check()


@every_mode
@pytest.mark.parametrize("at", ["micro", "step"])
@each(*FEW)
def test_a_write_during_an_accumulation(how: Write, at: str, mode: str) -> None:
    pair = Pair(mode, "bfloat16", 3)
    pair.steps(3)
    pair.step(lambda: pair.write(how), at=at)
    pair.steps(2)
    pair.check()


@every_mode
@pytest.mark.parametrize("part", ["", "head", "blocks"])
def test_a_state_dict_is_loaded_without_any_wait(part: str, mode: str) -> None:
    """Nobody has asked for the weights in between, a `state_dict` either: what is under way must not win."""
    pair = Pair(mode, "bfloat16", link_latency_us=1000)
    values = changed(pair.other.get_submodule(part).state_dict())
    pair.steps(4)
    pair.write(lambda model: model.get_submodule(part).load_state_dict(values), wait=False)
    pair.steps(2)
    pair.check()


@pytest.mark.parametrize("mode", [m for m in EVERY if m != "delayed"])
@each(in_place, under_inference_mode, new_data)
def test_a_write_that_shows_needs_no_wait_between_backward_and_step(how: Write, mode: str) -> None:
    """The forward has waited for all weights."""
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.step(lambda: pair.write(how, wait=False))
    pair.steps(2)
    pair.check()


@every_mode
@pytest.mark.parametrize("grad", [True, False])
@each(*FEW, applied_init)
def test_a_write_after_the_first_forward_and_before_the_first_step(how: Write, grad: bool, mode: str) -> None:
    """With gradients on, that forward made the masters; nobody has had a reason to wait since."""
    pair = Pair(mode, "bfloat16")
    for model in (pair.model, pair.other):
        with torch.set_grad_enabled(grad):
            model(0)
    pair.write(how, wait=False)
    pair.twin = type(pair.twin)([{"params": pair.others, "lr": 1e-2}])
    pair.steps(2)
    pair.check()


@every_mode
@each(data_mul, data_of_one_element)
def test_a_write_after_reseed(how: Write, mode: str) -> None:
    """`reseed()` has waited for all: what is written next is noticed as after any such wait."""
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.write(data_mul)
    pair.optimizer.reseed()
    pair.follow()
    pair.write(how, wait=False)
    pair.steps(2)
    pair.check()


@every_mode
@each(*FEW)
def test_a_write_before_a_step_that_is_skipped(how: Write, mode: str) -> None:
    """A skipped step must not take the changed weights for ours."""
    pair = Pair(mode, "bfloat16", skip_nonfinite="always")
    pair.steps(3)
    pair.write(how)
    pair.backward()
    pair.params[0].grad = torch.full_like(pair.params[0], float("nan"))
    pair.optimizer.step()
    assert pair.optimizer.stats().skipped_steps == 1
    pair.optimizer.zero_grad()
    pair.other.zero_grad()
    pair.steps(2)
    pair.check()


@every_mode
def test_an_average_is_swapped_in_and_out_after_every_step(mode: str) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    for _ in range(2):
        pair.write(averaged_in_and_out)
        pair.step()
    pair.check()


@every_mode
def test_nan_that_was_written_is_told_of_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """NaN stays NaN: a later look at it must not take it for another change."""
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.write(not_a_number)
    for _ in range(3):
        pair.step()
        pair.optimizer.synchronize()
        pair.model.load_state_dict(pair.model.state_dict())
    assert len([r for r in caplog.records if "changed from outside" in r.message]) == 1


@pytest.mark.parametrize("mode", ["overlapped", "speculative", "delayed"])
def test_safetensors_and_accelerate_load_a_file(mode: str, tmp_path: Path) -> None:
    from accelerate import load_checkpoint_in_model
    from safetensors.torch import load_model, save_file

    def from_file(read: Callable[[nn.Module, str], Any]) -> Write:
        def how(model: nn.Module) -> None:
            path = tmp_path / "model.safetensors"
            save_file(changed(model.state_dict()), path)
            read(model, str(path))

        return how

    for read in (load_model, load_checkpoint_in_model):
        pair = Pair(mode, "bfloat16")
        pair.steps(3)
        pair.write(from_file(read), wait=False)
        pair.steps(2)
        pair.check()


@every_mode
@pytest.mark.parametrize("hidden", [True, False])
def test_a_write_to_what_is_frozen_for_some_steps(hidden: bool, mode: str) -> None:
    """Its state waits for it; when it is trained again it goes on from what was written."""
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.write(lambda model: model.head.requires_grad_(False))
    pair.step()
    pair.write(lambda model: (data_mul if hidden else in_place)(model.head))
    pair.step()
    pair.write(lambda model: model.head.requires_grad_(True), wait=False)
    pair.steps(2)
    pair.check()


@every_mode
@each(data_mul, data_of_one_element)
def test_what_is_written_past_the_version_counter_without_any_wait_is_lost_and_nothing_else(
    how: Write, mode: str
) -> None:
    """README's limit. The masters, the moments and the weights after the next step are those of the run without it."""
    pair = Pair(mode, "bfloat16")
    pair.steps(4)
    how(pair.model)
    pair.steps(2)
    pair.check()


@pytest.mark.parametrize("mode", [m for m in EVERY if m != "delayed"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the model takes no tensor
@pytest.mark.parametrize("where", ["forward", "backward", "gradient"])
def test_a_write_in_a_hook(where: str, mode: str) -> None:
    """In the middle of forward or backward, when some buckets may have been stepped ahead already."""
    pair = Pair(mode, "bfloat16", 2)
    pair.steps(3)

    def hook(model: Any) -> Any:
        if where == "forward":
            return model.head.register_forward_hook(lambda *_: in_place(model))
        if where == "backward":
            return model.blocks[1].register_full_backward_pre_hook(lambda *_: in_place(model))
        return model.blocks[1].bias.register_hook(lambda _: in_place(model))

    hooks = [hook(model) for model in (pair.model, pair.other)]
    pair.step()
    for each_hook in hooks:
        each_hook.remove()
    pair.steps(2)
    pair.check()


# ---- what cannot be followed is refused, before anything is stepped; then the remedy works


@torch.inference_mode()
def inference_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 1.5


def shared_memory(model: Any) -> None:
    model.head.weight.data = model.blocks[0].weight.data


def other_order(model: Any) -> None:
    model.head.weight.data = model.head.weight.data.t().contiguous().t()


def memory_of_its_own(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone(memory_format=torch.contiguous_format)


@every_mode
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (inference_data, "inference tensor.*p.data = p.data.clone"),
        (shared_memory, "two parameters share memory"),
        (other_order, "memory format changed"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_refused_harms_nothing(how: Write, says: str, mode: str) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(4)
    pair.write(how)
    pair.model(0).backward()
    for _ in range(2):
        with pytest.raises(OffloadError, match=says):
            pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.write(memory_of_its_own, wait=False)
    pair.steps(2)
    pair.check()
