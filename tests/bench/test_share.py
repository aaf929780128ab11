"""`python -m hf_offload.bench.share`: what it counts, and that bits agree. Times are not looked at."""

from __future__ import annotations

import json

import pytest

from hf_offload.bench import share
from hf_offload.errors import ConfigError


def test_half_of_the_state_on_the_device_halves_what_travels_and_what_the_host_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setting = share.Setting(params=1 << 15, tensor_params=1 << 10, steps=2, threads=1)
    found = share.run(setting)
    assert found["same_bits"] and list(found["shares"]) == ["none", "half", "all"]
    for name, part in (("none", 0.0), ("half", 0.5), ("all", 1.0)):
        row, ratios = found["shares"][name], found["ratios"][name]
        assert row["device_state_bytes"] == part * 12 * setting.params
        assert row["d2h_bytes"] == row["h2d_bytes"] == (1 - part) * 2 * setting.params
        assert ratios["link_bytes"] == ratios["host_state_bytes"] == 1 - part
        assert (row["host_step_seconds"] > 0) == (name != "all")
    assert "link x 0.500" in share._text(found)
    assert json.loads(json.dumps(found)) == found


def test_other_bits_are_told_by_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter("aab")
    monkeypatch.setattr(share.Contender, "digest", lambda self: next(digests))
    monkeypatch.setattr(share.Setting, "tensor_params", 100)
    assert share.main(["--params", "1e3", "--steps", "1", "--threads", "1"]) == 1


def test_a_setting_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="steps=0: below 1"):
        share.Setting(steps=0)
    assert share.main(["--steps", "0"]) == 2 and "steps=0" in capsys.readouterr().err
