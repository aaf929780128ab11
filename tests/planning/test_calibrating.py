"""From options and runs to a calibration: what it is kept by, and what is told of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import calibrating, calibration
from hf_offload.config import OffloadConfig
from hf_offload.planning import Asked
from hf_offload.subjects import facts


class Tiny(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(2))
        self.is_activation_checkpointing = False


def digest(model: nn.Module, config: OffloadConfig | None = None, **more: Any) -> str:
    return str(facts("name", model, more.pop("device", "cpu"), config or OffloadConfig(), **more)["digest"])


def test_a_calibration_is_kept_by_what_its_figures_depend_on() -> None:
    plain = digest(Tiny())
    assert digest(Tiny(torch.float32), wire="bfloat16") == plain, "cast when training begins"
    assert facts("another", Tiny(), "cpu", OffloadConfig())["digest"] == plain
    assert digest(Tiny(), OffloadConfig(schedule="delayed", bucket_bytes=1 << 16, ring_slots=2)) == plain
    frozen, checkpointed = Tiny(), Tiny()
    frozen.blocks[0].weight.requires_grad_(False)
    checkpointed.is_activation_checkpointing = True
    others = [digest(Tiny(torch.float32)), digest(Tiny(), device="cuda"), digest(Tiny(), OffloadConfig(threads=1)),
              digest(frozen), digest(checkpointed)]  # fmt: skip
    assert len({plain, *others}) == 6


def test_what_several_ranks_take_is_not_told() -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=2))
    spec: Any = None
    told = calibrating.of_run("m", trainer, spec, {"seconds_per_step": 1.0})
    assert told == {"missing": "2 ranks add up their gradients, which was not measured"}


@pytest.mark.parametrize(("link", "transport", "found"), [(None, "auto", 3.0), (5.0, "auto", 5.0), (5.0, "cuda", None)])
def test_the_link_of_the_options_wins_where_one_can_be_emulated(
    link: float | None, transport: str, found: float | None
) -> None:
    given = {} if transport == "cuda" else {"link_gb_s": 3.0}
    assert calibrating.with_link(OffloadConfig(transport=transport, **given), link).link_gb_s == found


def test_nothing_is_looked_up_where_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrating, "_asked_for", lambda *given: pytest.fail("a model is built for nothing"))
    plan: Any = None
    asked = Asked(recipe="quickstart")
    assert calibrating.for_plan(asked, plan, False, None, lambda text: None) == (None, None)
    calibration.folder().mkdir(parents=True)
    (calibration.folder() / "another-model.json").touch()
    for number in (Asked(params="7e9"), Asked(recipe="quickstart", trainable="1e5")):
        assert calibrating.for_plan(number, plan, False, None, lambda text: None) == (None, None)
