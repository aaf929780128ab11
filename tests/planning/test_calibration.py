"""The file a calibration is kept in: what comes back, what is refused, and where it lies."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_offload import calibration, environment
from hf_offload.calibration import Calibration, Engine, Link, UnitCost
from hf_offload.cpus import find_cpus
from hf_offload.errors import ConfigError
from hf_offload.simulation import HostCost, LinkCost

MACHINE = {"processor": "Some CPU", "usable_cores": 2, "gpu": None, "versions": {"numba": "0.68.0", "torch": "2.13.0"}}
MODEL = {"name": "a model/of mine", "digest": "0123456789ab"}


def made(**changes: Any) -> Calibration:
    given: dict[str, Any] = {
        "machine": MACHINE,
        "model": MODEL,
        "units": (
            UnitCost(params=1000, wire="bfloat16", forward=(0.5, 0.25), backward=(1.0, 0.5)),
            UnitCost(params=3000, wire="float32", forward=(0.0, 0.125), backward=(0.0, 0.25)),
        ),
        "seq_len": 8,
        "rows": (1, 2),
        "threads": 2,
        "state_dtype": "float32",
        "host": HostCost(step=1e-9, guess=2e-9),
        "link": Link(
            transport="host",
            emulates=True,
            down=LinkCost(per_byte=0, core_per_byte=1e-10, latency=1e-5),
            up=LinkCost(per_byte=0, core_per_byte=2e-10),
            emulation_s=5e-5,
        ),
        "engine": Engine(step_s=1e-3, bucket_s=1e-4, fetch_s=3e-4, idle_s=2e-4),
        "rates": {"device beside host": 0.5},
        "spread": {"norm": 0.01},
        "made": 1e9,
    }
    return Calibration(**{**given, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new folder" / "c.json"
    calibration.save(made(), path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hf_offload" / "calibration"


def test_what_was_saved_comes_back(file: Path) -> None:
    assert calibration.load(file, MACHINE, MODEL) == made()
    assert [path.name for path in file.parent.iterdir()] == ["c.json"], "nothing is left beside it"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"processor": "Other"}, "processor 'Some CPU' there, 'Other' here"),
        ({"usable_cores": 64}, "usable_cores 2 there, 64 here"),
        ({"gpu": "H200"}, "gpu None there, 'H200' here"),
        ({"versions": {"numba": "0.70.0", "torch": "2.13.0"}}, "numba 0.68.0 there, 0.70.0 here"),
        ({"versions": {"numba": "0.68.0"}}, "torch 2.13.0 there, None here"),
    ],
)
def test_another_machine_is_refused_with_what_differs(file: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="made on another machine") as caught:
        calibration.load(file, {**MACHINE, **change}, MODEL)
    assert words in str(caught.value)
    assert "hf-offload plan --calibrate" in str(caught.value)


def test_another_model_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"was made for 'a model/of mine'.*not for 'b'"):
        calibration.load(file, MACHINE, {"name": "b", "digest": "other"})
    assert calibration.load(file, MACHINE) == made(), "whatever it was made for"


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        *path, last = (int(part) if part.isdigit() else part for part in name.split("."))
        for part in path:
            data = data[part]
        data[last] = value

    return change


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.pop(name) and None


@pytest.mark.parametrize(
    "damage",
    [
        *(without(name) for name in ("format", "units", "host", "link", "engine", "rates", "rows", "made")),
        lambda data: data["engine"].pop("idle_s"),
        changed("units", []), changed("units", {}), changed("units.0", 3),
        changed("units.0.params", -1), changed("units.0.forward", [1]), changed("units.0.backward", ["a", 1]),
        changed("host.step", -1), changed("host.step", "1e-9"), changed("host.step", float("nan")),
        changed("host.speed", 1.0), changed("link.down", 3), changed("engine.step_s", True), changed("rates", [1]),
        changed("rows", [0, 2]), changed("threads", 1.5), changed("machine", "mine"), changed("spread", None),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(file: Path, damage: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(file.read_text())
    damage(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"the file is damaged \(.+\)\. Delete it\. Measure this machine"):
        calibration.load(file, MACHINE, MODEL)


@pytest.mark.parametrize("other", [1, 3, None, "two"])
def test_a_file_of_another_version_is_refused(file: Path, other: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": other}))
    with pytest.raises(
        ConfigError, match=r"json': another version of hf_offload wrote it \(format .+\)\. Measure this machine"
    ):
        calibration.load(file, MACHINE, MODEL)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"null", b"[" * 100_000, b'{"format": 2}', b"\xff\xfe\x00"])
def test_what_is_no_calibration_at_all_is_refused(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"damaged|cannot be read"):
        calibration.load(file, MACHINE)


def test_no_file_and_no_folder_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        calibration.load(tmp_path / "none.json", MACHINE)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*Give --calibration FILE"):
        calibration.save(made(), tmp_path / "file" / "c.json")


def test_it_is_found_by_model_and_machine(cache: Path) -> None:
    assert calibration.find(MODEL, MACHINE) is None
    path = calibration.path_for(MODEL, MACHINE)
    assert path.parent == cache
    calibration.save(made(), path)
    assert calibration.find(MODEL, MACHINE) == made()
    assert calibration.find({**MODEL, "name": "the same by another name"}, MACHINE) == made()
    assert calibration.find({**MODEL, "digest": "other"}, MACHINE) is None


def test_one_from_another_machine_alone_is_refused_and_beside_ours_is_passed_over(cache: Path) -> None:
    there = {**MACHINE, "usable_cores": 64}
    calibration.save(made(machine=there), calibration.path_for(MODEL, there))
    with pytest.raises(ConfigError, match="usable_cores 64 there, 2 here"):
        calibration.find(MODEL, MACHINE)
    calibration.save(made(), calibration.path_for(MODEL, MACHINE))
    assert calibration.find(MODEL, MACHINE) == made()


def test_the_folder_is_the_systems_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    below = Path("hf_offload") / "calibration"
    for given, base in (("/x/cache", Path("/x/cache")), ("relative", Path.home() / ".cache"), ("", None)):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert calibration.folder() == (base or Path.home() / ".cache") / below


def test_no_home_and_another_user_s_folder_are_told_as_any_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs look here when they have ended: what is not a ConfigError would cost them their summary."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", closed)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        calibration.find({"digest": "d", "name": "n"}, MACHINE)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ConfigError, match="HOME=None: not set"):
        calibration.find({"digest": "d", "name": "n"}, MACHINE)


def test_the_fingerprint_is_plain_data_and_names_what_it_must() -> None:
    here = calibration.fingerprint()
    assert json.loads(json.dumps(here)) == here
    assert here["usable_cores"] == len(os.sched_getaffinity(0))
    assert here["cpu_quota"] == find_cpus().quota
    assert {"hf_offload", "torch", "numba"} <= set(here["versions"])
    assert calibration.differences(here, here) == []


def test_a_run_that_sees_one_of_a_machine_s_gpus_finds_what_was_measured_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for names in (["H200", "H200"], ["H200"], ["L4"], []):
        monkeypatch.setattr(environment, "gpus", lambda names=names: [(name, 1) for name in names])
        seen.append(calibration.fingerprint())
    every, one, other, none = seen
    assert every == one and calibration.differences(one, none) == ["gpu 'H200' there, None here"]
    assert calibration.differences(one, other) == ["gpu 'H200' there, 'L4' here"]


def test_every_field_is_in_the_file(file: Path) -> None:
    assert set(json.loads(file.read_text())) == {"format", *(f.name for f in dataclasses.fields(Calibration))}
