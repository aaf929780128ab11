"""State dicts of bfloat16 and int8 state: what is in them, and what becomes of each where state is held otherwise."""

from __future__ import annotations

import io
import logging
import zipfile
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam
from hf_offload.engine.moments import INT8_NAMES, in_floats
from support.optimizer import frozen_state_dict, make_params, offload, same_bits, train

COMPACT = ("bfloat16", "int8")
SHAPES = [(), (0, 3), (7,), (3, 100), (128,)]


def made(state_dtype: str, shapes: Any = SHAPES, **more: Any) -> tuple[list[Any], OffloadAdam]:
    params = make_params(torch.bfloat16, shapes)
    return params, offload(params, settings={"state_dtype": state_dtype, "threads": 1}, lr=1e-2, **more)


def trained(state_dtype: str, shapes: Any = SHAPES) -> dict[str, Any]:
    params, optimizer = made(state_dtype, shapes)
    with optimizer:
        train(optimizer, params, range(3))
        return frozen_state_dict(optimizer)


def test_contents() -> None:
    params = make_params(torch.bfloat16, SHAPES)
    wide = trained("bfloat16")["state"]
    narrow = trained("int8")["state"]
    for i, p in enumerate(params):
        assert list(wide[i]) == ["step", "exp_avg", "exp_avg_sq", "master"]
        assert {wide[i][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
        assert list(narrow[i]) == ["step", *INT8_NAMES, "master"]
        assert {narrow[i][name].dtype for name in INT8_NAMES} == {torch.uint8}
        assert all(narrow[i][name].shape == p.shape for name in ("exp_avg_codes", "exp_avg_sq_codes", "master"))
        assert all(narrow[i][name].shape == (-(-p.numel() // 128),) for name in ("exp_avg_scale", "exp_avg_sq_scale"))


@pytest.mark.parametrize(("state_dtype", "each"), [("bfloat16", 8), ("int8", 6)])
def test_a_saved_file_holds_what_the_state_takes_and_no_more(state_dtype: str, each: int) -> None:
    buffer = io.BytesIO()
    torch.save(trained(state_dtype, [(10,)] * 300), buffer)
    with zipfile.ZipFile(buffer) as file:
        stored = sum(info.file_size for info in file.infolist() if "/data/" in info.filename)
    assert stored == each * 3000 + 4 * 300 + (2 * 300 if state_dtype == "int8" else 0)


@pytest.mark.parametrize("saved", ["float32", *COMPACT])
@pytest.mark.parametrize("here", ["float32", *COMPACT])
def test_what_is_held_in_another_way_is_converted_and_it_is_said(
    saved: str, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Into more bytes the values are the same, to the bit; and back they are those that were saved."""
    file = trained(saved)
    params, optimizer = made(here)
    with optimizer, caplog.at_level(logging.WARNING, "hf_offload"):
        optimizer.load_state_dict(file)
        converted = f"exp_avg_sq of 5 parameters was {saved} in the loaded state and is {here} here"
        assert (converted in caplog.text) == (saved != here)
        order = ["float32", *COMPACT]
        more = order.index(here) <= order.index(saved)
        assert ("the values are the same" in caplog.text) == (more and saved != here)
        for i, p in enumerate(params):
            old, new = in_floats(file["state"][i]), in_floats(dict(optimizer.state[p].items()))
            assert more == all(torch.equal(old[n].float(), new[n].float()) for n in old) or old["exp_avg"].numel() <= 1
            for n, values in old.items():  # half a unit of the last place; int8's subnormals: of the largest
                near, least = (
                    (2**-4, max(values.abs().flatten().tolist(), default=0.0) * 2**-17)
                    if here == "int8"
                    else (2**-8, 0.0)
                )
                torch.testing.assert_close(new[n].float(), values.float(), rtol=near, atol=least)
        train(optimizer, params, [3])


def test_codes_of_another_order_in_memory_are_not_copied_as_they_lie() -> None:
    """Blocks follow the memory: what was saved of a channels_last parameter has other blocks than a contiguous one."""
    found: list[dict[str, Any]] = []
    by_channel = 8.0 ** torch.arange(4).view(1, 4, 1, 1)
    values = torch.randn((1, 4, 16, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    for order in (torch.channels_last, torch.contiguous_format):
        params = [nn.Parameter(values.to(memory_format=order))]
        with offload(params, settings={"state_dtype": "int8"}) as optimizer:
            if not found:
                params[0].grad = (values * by_channel).bfloat16().to(memory_format=order)
                optimizer.step()
                found.append(frozen_state_dict(optimizer)["state"][0])
                whole = frozen_state_dict(optimizer)
            optimizer.load_state_dict(whole)
            found.append(dict(frozen_state_dict(optimizer)["state"][0]))
            assert optimizer.state[params[0]]["exp_avg_codes"].stride() == params[0].stride()
    saved, same, other = found
    assert all(same_bits(saved[name], same[name]) for name in INT8_NAMES)
    for name, expected in in_floats(saved).items():
        largest = expected.abs().max().item()
        torch.testing.assert_close(in_floats(other)[name], expected, rtol=2**-4, atol=largest * 2**-17)
    assert not torch.equal(other["exp_avg_codes"], saved["exp_avg_codes"]), "some block has another largest value"


def test_a_loaded_state_is_a_copy() -> None:
    file = trained("int8")
    _, optimizer = made("int8")
    with optimizer:
        optimizer.load_state_dict(file)
        kept = frozen_state_dict(optimizer)["state"]
        for entry in file["state"].values():
            for name in INT8_NAMES:
                entry[name].fill_(77)
        for i, entry in optimizer.state_dict()["state"].items():
            assert all(same_bits(entry[name], kept[i][name]) for name in INT8_NAMES)


def test_a_state_without_an_entry_starts_anew() -> None:
    file = trained("int8")
    params, optimizer = made("int8")
    with optimizer:
        train(optimizer, params, range(2))
        del file["state"][3]
        optimizer.load_state_dict(file)
        entry = dict(optimizer.state[params[3]].items())
        assert not any(entry[name].any() for name in INT8_NAMES) and entry["step"] == 0
