"""The refusal of plans that do not fit: the numbers, and only what would help."""

from __future__ import annotations

import re

import pytest

from hf_offload.errors import HostMemoryError
from hf_offload.planner import pinned_ring_bytes
from hf_offload.preflight import (
    FewerParameters,
    Saves,
    SmallerRing,
    WayOut,
    allocating,
    check_host_budget,
    check_node_budget,
)
from support.hosttree import GB, KIB, MEMINFO, machine, own_limits, tree, v2

STATE = {"master": 4 * GB, "exp_avg": 4 * GB, "exp_avg_sq": 4 * GB}


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(HostMemoryError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_a_budget_that_fits_passes(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": MEMINFO})
    left = 50_000_000 * KIB
    check_host_budget({"master": left - 1, "pinned ring": 1}, left, root)
    check_host_budget({}, 1, root)
    with pytest.raises(HostMemoryError):
        check_host_budget({"master": left, "pinned ring": 1}, None, root)


def test_where_nothing_is_known_nothing_is_refused(tmp_path):
    check_host_budget({"master": 10**18}, None, tmp_path)
    check_node_budget({"master": 10**18}, 8, 0, tmp_path)


def test_a_refusal_tells_every_line_the_sum_what_is_left_and_the_source(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job\n", **v2("job", 8 * GB, 5 * GB)}
    need = {"master": 28 * GB, "exp_avg": 28 * GB, "exp_avg_sq": 28 * GB, "pinned ring": 268_435_456}
    text = refusal(check_host_budget, need, None, tree(tmp_path, files))
    for name, count in need.items():
        assert any(name in line and f"{count / 1e9:.2f} GB ({count} bytes)" in line for line in text.splitlines())
    assert "84.27 GB (84268435456 bytes)" in text
    assert "of 8.00 GB (8000000000 bytes) only 3.00 GB (3000000000 bytes) are left" in text
    assert "cgroup memory.max of /job" in text


def test_a_refusal_by_the_users_cap_names_the_setting():
    ways = [FewerParameters(1000, 12), Saves("set stream_gradients=false", 1)]
    text = refusal(check_host_budget, {"master": 12000, "gradient store": 1}, 11500, ways=ways)
    assert text.startswith("max_host_bytes=11500: ")
    assert "Raise max_host_bytes to at least 12001; or train at most 958 parameters" in text
    assert "stream_gradients" not in text, "it saves a byte and not 501"
    assert 12 * 958 + 1 <= 11500 < 12 * 959 + 1


# ---- what would help, and what would not


def cgroup(limit: int, used: int) -> dict[str, str]:
    return {"proc/self/cgroup": "0::/job\n", **v2("job", limit, used)}


@pytest.mark.parametrize(
    ("files", "helps", "does_not"),
    [
        pytest.param(machine(10 * GB, 64 * GB), ["End other programs", "a machine with more memory"], [], id="busy"),
        pytest.param(machine(10 * GB, 11 * GB), ["Use a machine with more memory"], ["other programs"], id="small"),
        pytest.param(
            {**machine(10 * GB, 64 * GB), **own_limits(anon=53 * GB)}, ["Use a machine with more"], ["other programs"],
            id="we ourselves fill it",
        ),
        pytest.param(
            {**machine(50 * GB), **cgroup(8 * GB, 1 * GB)}, ["Raise the memory limit of the container or job"],
            ["other programs", "a machine with"], id="the container",
        ),
        pytest.param(
            {**machine(50 * GB), **cgroup(20 * GB, 9 * GB)},
            ["End other programs in the container or job; or raise the memory limit"], ["a machine with"],
            id="a busy container",
        ),
        pytest.param(
            {**machine(11 * GB, 11 * GB), **cgroup(8 * GB, 1 * GB)}, ["Use a machine with more memory"],
            ["limit of the container", "other programs"], id="a container on a machine that is too small itself",
        ),
        pytest.param({**machine(50 * GB), **own_limits(memory=9 * GB)}, ["Raise this process's own limit (ulimit -v"],
                     ["a machine", "programs"], id="ulimit"),
        pytest.param(
            {"proc/meminfo": MEMINFO + "CommitLimit: 9000000 kB\nCommitted_AS: 0 kB\n",
             "proc/sys/vm/overcommit_memory": "2"},
            ["vm.overcommit_ratio"], ["a machine", "other programs"], id="no overcommit",
        ),
    ],
)  # fmt: skip
def test_the_limit_itself(tmp_path, files, helps, does_not):
    text = refusal(check_host_budget, STATE, None, tree(tmp_path, files)).splitlines()[0]
    assert all(words in text for words in helps), text
    assert not any(words in text for words in does_not), text


def after(text: str, slots: int, bucket: int) -> int:
    """Bytes of the ring when what `text` says has been done."""
    found = {name: int(value) for name, value in re.findall(r"(ring_slots|bucket_bytes)=(\d+)", text)}
    return pinned_ring_bytes(found.get("bucket_bytes", bucket), found.get("ring_slots", slots))


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket", [1000, 100_000, 32 << 20])
def test_a_smaller_ring_is_as_large_as_fits(slots, bucket):
    whole = pinned_ring_bytes(bucket, slots)
    for over in sorted({1, whole // 3, whole // 2, whole * 9 // 10, whole - 1, whole, 2 * whole}):
        text = SmallerRing(slots, bucket).text(over)
        if text is None:
            assert whole - over < 4 * 65_600, "no bucket smaller than that is of use"
            continue
        smaller = after(text, slots, bucket)
        assert smaller <= whole - over, text
        waste = 2 * bucket if "bucket_bytes" not in text else 4 * 64
        assert smaller + waste + 128 > whole - over, text


def test_what_saves_too_little_is_not_named():
    ways: list[WayOut] = [Saves("set a=0", 10), FewerParameters(5, 12), SmallerRing(4, 1 << 20)]
    assert [w.text(10) is not None for w in ways] == [True, True, True]
    assert [w.text(11) is not None for w in ways] == [False, True, True]
    assert [w.text(60) is not None for w in ways] == [False, False, True]
    assert [w.text(8 << 20) is not None for w in ways] == [False, False, False]
    assert FewerParameters(5, 12).text(13) == "train at most 3 parameters (freeze some, or use LoRA)"


# ---- several ranks


def test_ranks_of_one_node_add_up(tmp_path):
    root = tree(tmp_path, machine(47 * GB))
    check_host_budget(STATE, None, root)
    check_node_budget(STATE, 1, 0, root)
    check_node_budget(STATE, 3, 0, root)
    text = refusal(check_node_budget, STATE, 4, 0, root, [FewerParameters(10**9, 12)])
    assert "4 ranks share this node" in text and "12.00 GB (12000000000 bytes) for each" in text
    assert "48.00 GB (48000000000 bytes) together" in text and "only 47.00 GB" in text
    assert "Run at most 3 ranks on a node; or train at most 979,166,6" in text
    assert [line.split("  ")[1] for line in text.splitlines()[-2:]] == ["sum, one rank", "4 ranks"]


def test_not_one_rank_fits_beside_another(tmp_path):
    text = refusal(check_node_budget, STATE, 2, 0, tree(tmp_path, machine(12 * GB)))
    assert "Run at most 1 rank on a node" in text


def test_every_limit_that_ranks_share_counts_and_no_other(tmp_path):
    """Each rank has its own ulimit, however tight; the container is for all."""
    own = own_limits(memory=13 * GB)
    check_node_budget(STATE, 4, 0, tree(tmp_path / "own", {**machine(50 * GB), **own}))
    both = {**machine(50 * GB), **own, **cgroup(40 * GB, 0)}
    assert "cgroup memory.max of /job" in refusal(check_node_budget, STATE, 4, 0, tree(tmp_path / "job", both))


@pytest.mark.parametrize("quicker", [0, 1, 3])
def test_what_quicker_ranks_have_taken_before_this_one_looks_does_not_count_twice(tmp_path, quicker):
    """Of 4 ranks that fit exactly, some have pinned their rings already."""
    ring = GB // KIB * KIB
    need = {**STATE, "pinned ring": ring}
    exactly = 4 * (12 * GB + ring) // KIB * KIB + KIB
    check_node_budget(need, 4, ring, tree(tmp_path, machine(exactly - quicker * ring)))


def test_a_plan_too_large_for_the_node_is_refused_by_the_first_and_by_the_last_rank(tmp_path):
    """The head start that is allowed for is the ring's: what is too large by more is seen whoever was quicker."""
    need = {**STATE, "pinned ring": GB}
    for quicker in range(4):
        root = tree(tmp_path / str(quicker), machine(52 * GB - 3 * GB - KIB - quicker * GB))
        assert "4 ranks" in refusal(check_node_budget, need, 4, GB, root)


def test_ranks_whose_progress_is_not_known_are_compared_with_all_there_is(tmp_path):
    """At binding: the others may have theirs already."""
    root = tree(tmp_path, machine(12 * GB, 48 * GB))
    check_node_budget(STATE, 4, None, root)
    assert "5 ranks" in refusal(check_node_budget, STATE, 5, None, root)


# ---- the system says no though it seemed to fit


def test_an_allocation_that_fails_is_ours():
    text = refusal(_allocate, {"master": 7 * GB})
    assert "refused memory" in text and "Unable to allocate 7 GB" in text
    assert "are left" in text and "master  7.00 GB (7000000000 bytes)" in text and "ulimit -a" in text
    with pytest.raises(ZeroDivisionError), allocating({}):
        1 / 0  # noqa: B018


def _allocate(need: dict[str, int]) -> None:
    with allocating(need):
        raise MemoryError("Unable to allocate 7 GB")
