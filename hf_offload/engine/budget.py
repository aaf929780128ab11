"""What an optimizer will take of the host's memory, line by line, and the check before it takes it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_offload import preflight
from hf_offload.config import OffloadConfig
from hf_offload.engine.formats import FORMATS, MOMENTS, state_bytes
from hf_offload.engine.masters import waiting_bytes
from hf_offload.errors import HostMemoryError, explain
from hf_offload.planner import pinned_ring_bytes
from hf_offload.preflight import FewerParameters, Saves, SmallerRing, WayOut
from hf_offload.ranks import local_ranks


class Budget:
    """The host memory of one optimizer. Every rank of a run on this node takes as much: state is not sharded.

    `max_host_bytes` is a cap on this process alone, and on what has left the device: where the device is the CPU, what
    stays there is compared with the machine's memory only.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._kind = FORMATS[config.state_dtype]

    @property
    def slot_bytes(self) -> int:
        return max(self._config.bucket_bytes, 4 * self._kind.block)  # one fp32 element, or one block of them

    @property
    def ring_bytes(self) -> int:
        return pinned_ring_bytes(self.slot_bytes, self._config.ring_slots)

    @property
    def fixed(self) -> dict[str, int]:
        """Bytes of each line that does not depend on the parameters."""
        scratch = {"scratch": self.slot_bytes} if self._config.schedule == "delayed" else {}
        return {"pinned ring": self.ring_bytes, **scratch}

    def need(self, params: Sequence[Tensor]) -> dict[str, int]:
        """Bytes of each line that binding `params` takes, shadow left out."""
        need = state_bytes(self._kind, [p.numel() for p in params])
        if self._config.stream_gradients:
            need["gradient store"] = store_bytes(params, self._config.accumulate_dtype)
        return need

    def check_construction(self, params: Sequence[Tensor], here: int = 0) -> None:
        """Before the ring is reserved: everything, of all ranks.

        Args:
            params: those whose state leaves the device.
            here: bytes of state that stays on the device, where that is the CPU.

        All ranks of a run construct their optimizers at about the same time, and none touches state before its first
        forward: what is available then is what all of them have to share, but for the rings, which the quicker ones
        may have pinned. In the Trainer no rank can be further: wrapping the model in DDP, which waits for all, comes
        in between. In a loop of one's own a rank may be seeding its masters (4 bytes a parameter) already, not more:
        its first step needs everybody's gradients. That this be counted twice needs such a lead and a node that is
        all but full; a plan too large for the node is refused always. (Meeting the others here would tell exactly,
        and hang where one rank alone makes an optimizer.)

        Raises:
            HostMemoryError: it does not fit; nothing was allocated.
        """
        need = {**self.need(params), **self.fixed}
        self._check(need, params, 0, self._config.shadow_bytes, self.ring_bytes, here)

    def check_binding(self, fresh: Sequence[Tensor], taken: int, here: int = 0) -> None:
        """Before state for `fresh` is allocated.

        How far other ranks are, nothing tells: the first step of all, for one, lies between two of them. So this rank
        needs room for its own, and the need of all is compared with the whole of the node's memory.

        Args:
            taken: bytes of ours that exist, `fixed` left out. 0: the shadow is to come as well.
            here: as at construction.

        Raises:
            HostMemoryError: it does not fit; nothing was allocated.
        """
        shadow = 0 if taken else self._config.shadow_bytes
        self._check(self.need(fresh), fresh, taken + sum(self.fixed.values()), shadow, None, here)

    def _check(
        self, need: dict[str, int], params: Sequence[Tensor], taken: int, shadow: int, ahead: int | None, here: int
    ) -> None:
        ways = self._ways(need, params)
        self._compare(need, params, taken, ahead, ways, here)
        if shadow:
            try:
                self._compare({**need, "shadow": shadow}, params, taken, ahead, (_LessShadow(shadow),), here)
            except HostMemoryError as error:
                cause = "everything else fits, but not with this much shadow"
                remedy = "Lower shadow_bytes, or set it to 0"
                raise HostMemoryError(explain("shadow_bytes", shadow, cause, remedy) + f"\n{error}") from None

    def _compare(
        self, need: dict[str, int], params: Sequence[Tensor], taken: int, ahead: int | None, ways: Sequence[WayOut],
        here: int,
    ) -> None:  # fmt: skip
        cap = self._config.max_host_bytes
        whole = {"taken already": taken, **need} if taken else need
        if cap is not None and sum(whole.values()) > cap:
            preflight.check_host_budget(whole, cap, ways=ways)
        if here:
            need, whole = {**need, "state on the device": here}, {**whole, "state on the device": here}
        # Values that wait to become masters are freed one by one while the masters' memory is filled.
        master = need["master"] - waiting_bytes(params)
        # The node first: what it advises is enough for all ranks.
        preflight.check_node_budget({**whole, "master": master}, local_ranks(), ahead, ways=ways)
        preflight.check_host_budget({**need, "master": master}, None, ways=ways)

    def _ways(self, need: dict[str, int], params: Sequence[Tensor]) -> list[WayOut]:
        """What could be changed, the least harm first."""
        config, ways = self._config, list[WayOut]()
        if "pinned ring" in need:
            ways.append(SmallerRing(config.ring_slots, config.bucket_bytes))
        store = need.get("gradient store", 0)
        wire = store_bytes(params, "wire")
        if store > wire:
            ways.append(Saves("set accumulate_dtype='wire'", store - wire))
        if store:
            also = " and shadow_bytes=0" if config.shadow_bytes else ""
            ways.append(Saves(f"set stream_gradients=false{also} (gradients then stay on the device)", store))
        count = sum(p.numel() for p in params)
        if count:
            state = sum(need[name] for name in ("master", *MOMENTS))
            if not config.device_state_bytes:  # which takes float32 alone
                ways.extend(_fewer_bytes(config.state_dtype, [p.numel() for p in params]))
            ways.append(FewerParameters(count, -(-(state + store) // count)))
        return ways


def _fewer_bytes(held: str, numels: list[int]) -> list[WayOut]:
    """`state_dtype` in fewer bytes: not exact, so it comes last but for training less."""
    now = sum(state_bytes(FORMATS[held], numels).values())
    names = list(FORMATS)[list(FORMATS).index(held) + 1 :]
    return [Saves(f"set state_dtype={name!r} (m and v rounded)", now - sum(state_bytes(FORMATS[name], numels).values()))
            for name in names]  # fmt: skip


class _LessShadow:
    def __init__(self, shadow: int) -> None:
        self._shadow = shadow

    def text(self, over: int) -> str | None:
        left = self._shadow - over
        return f"set shadow_bytes={left}" if left > 0 else "set shadow_bytes=0"


def store_bytes(params: Sequence[Tensor], accumulate_dtype: str) -> int:
    """Host memory of the streamed gradients of `params`: as on the wire, or 4 bytes each where added up in fp32."""
    return sum(p.numel() * (p.element_size() if accumulate_dtype == "wire" else 4) for p in params)
