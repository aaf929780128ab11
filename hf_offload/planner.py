"""The arithmetic of offloading, as pure functions: bytes on the GPU and the host, seconds, and what can hide.

Stdlib only, so that a plan costs milliseconds. Ψ is the number of trainable parameters, 1 GB is 1e9 bytes. Nothing
here measures anything: what a function needs to know about a machine it takes as an argument.

Where the formulas come from:

- 16 Ψ and 4 Ψ bytes on the GPU, 12 Ψ on the host, 4 Ψ over the link: a 16-bit weight and gradient (2 + 2 bytes) and
  fp32 master, m and v (4 + 4 + 4), as in ZeRO-Offload (Ren et al. 2021). fp32 weights are their own masters, so they
  take 4 + 4 bytes on the GPU with offload and 16 without.
- The host step reads master, m, v and the gradient once and writes master, m, v and the weight once: 24 bytes plus
  twice the element on the wire, 28 Ψ for 16-bit weights, over the host's memory bandwidth.
- A forward of T tokens takes 2NT floating-point operations, a backward 2NT for the activations' gradients and 2ΨT for
  the weights' (Kaplan et al. 2020; N counts every parameter, frozen ones too). With N = Ψ the sizes cancel: the host
  step hides behind a forward of T >= 14 FLOPS/BW tokens, behind backward and forward at T >= 14/3 FLOPS/BW.
- Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", which counts
  each tensor autograd keeps for the backward; see `activation_bytes` for what differs here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

GB = 1e9

CUDA_CONTEXT_BYTES = 1_000_000_000
"""What a process holds on a GPU before its first tensor: the driver's context with every loaded kernel (0.3-0.6 GB on
current GPUs) and cuBLAS's workspace. The upper end of what is commonly seen, so that a plan that fits holds."""

MASTER_BYTES = MOMENT_BYTES = 4
STATE_BLOCK = 128
"""Elements that share a scale byte, for m and for v each, where they are held as int8."""
STATE_BYTES = MASTER_BYTES + 2 * MOMENT_BYTES
DEVICE_MARGIN, DEVICE_MARGIN_BYTES = 0.05, 1 << 30
"""What `device_state_bytes="auto"` leaves of a GPU: so much of its memory, and no less than so many bytes. Longer
batches than the first ones, cuBLAS's workspaces and the allocator's fragments take of it."""
CACHE_LINE = 64
LOGIT_PEAK_BYTES = 12
"""Bytes per logit at the peak, in the loss's backward: the fp32 log-softmax, its gradient and the gradient of the
fp32 logits. In the forward it is 2 + 4 + 4: the 16-bit logits, their fp32 copy and the log-softmax."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters by how they are held. Tied weights count once.

    Attributes:
        trainable_16, trainable_32: trainable parameters with 16-bit and with fp32 weights.
        frozen: parameters that are never updated; frozen_bytes: what they take on the device.
    """

    trainable_16: int = 0
    trainable_32: int = 0
    frozen: int = 0
    frozen_bytes: int = 0

    @property
    def trainable(self) -> int:
        return self.trainable_16 + self.trainable_32

    @property
    def total(self) -> int:
        return self.trainable + self.frozen

    @property
    def wire_bytes(self) -> int:
        """Bytes of all trainable weights (or of all their gradients) as they lie on the device."""
        return 2 * self.trainable_16 + 4 * self.trainable_32


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the activations of a decoder-only transformer depend on.

    Attributes:
        layers, heads, kv_heads, vocab: counts.
        hidden, intermediate, head_dim: elements.
        gated: whether the MLP multiplies two projections (SwiGLU) or has one (GELU).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step: `accumulation` micro-batches of `batch` rows of `seq_len` tokens."""

    batch: int = 1
    seq_len: int = 4096
    accumulation: int = 1
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the plan is made for.

    Attributes:
        link_gb_s: host-device link, 1e9 bytes/s in each direction.
        host_bw_gb_s: host memory bandwidth, 1e9 bytes/s, reads and writes together.
        tflops: what the GPU reaches in training, 1e12 floating-point operations per second.
        gpu_bytes, host_bytes: memory there is; None where it is not known.
    """

    link_gb_s: float = 16.0
    host_bw_gb_s: float = 150.0
    tflops: float = 500.0
    gpu_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Gradients that leave during backward, as the settings of those names say.

    Attributes:
        on_device: gradients that are on the GPU at one time: a ring of buckets and what has not left yet, bytes.
        accumulate_bytes: bytes an element takes in the host's store; None: as on the wire.
        shadow_bytes: host memory for speculation.
    """

    on_device: int
    accumulate_bytes: int | None = None
    shadow_bytes: int = 0


@dataclass(frozen=True)
class Held:
    """How Adam's state is held.

    Attributes:
        state_dtype: of m and v on the host.
        resident: parameters whose state, in fp32, stays on the GPU and is stepped there.
    """

    state_dtype: str = "float32"
    resident: int = 0


HELD = Held()


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes of one kind of tensor: on the GPU without and with offload, and on the host with it."""

    name: str
    gpu_without: int = 0
    gpu_with: int = 0
    host: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Hide:
    """Tokens a micro-batch must have for something to hide behind the GPU's work."""

    forward: float
    backward_and_forward: float


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one optimizer step.

    Attributes:
        link: gradients down, then weights up; link_full_duplex: both directions at once.
        host_step: the Adam pass at the host's memory bandwidth.
        forward, backward: of ONE micro-batch.
        compute: all micro-batches of the step.
        exposed_in_order: link and host step, one after the other, nothing hidden.
        exposed_overlapped: what the next forward cannot hide of the longer of the two.
        exposed_per_micro_batch: that, spread over the accumulated micro-batches.
    """

    link: float
    link_full_duplex: float
    host_step: float
    forward: float
    backward: float
    compute: float
    exposed_in_order: float
    exposed_overlapped: float
    exposed_per_micro_batch: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether it fits. None: one of the two figures is not known. The host's need is that of all ranks on a node, with
    state that is on the host at first only."""

    gpu_need: int
    gpu_have: int | None
    gpu: bool | None
    host_need: int
    host_have: int | None
    host: bool | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything `hf-offload plan` says, as data."""

    counts: Counts
    workload: Workload
    machine: Machine
    shape: Shape | None
    state: tuple[Line, ...]
    other: tuple[Line, ...]
    activations: dict[str, int] = field(default_factory=dict)
    link_bytes: int
    seconds: Seconds
    hide: dict[str, Hide]
    fit: Fit
    ranks_per_node: int = 1
    resident: int = 0
    """Parameters whose state stays on the GPU and is stepped there."""


def moment_bytes(params: int, state_dtype: str) -> int:
    """Bytes of m, or of v, of so many parameters; as int8 at least: each parameter begins a block of its own."""
    if state_dtype == "int8":
        return params + -(-params // STATE_BLOCK)
    return params * {"float32": 4, "bfloat16": 2}[state_dtype]


def state_lines(counts: Counts, streaming: Streaming | None = None, held: Held = HELD) -> tuple[Line, ...]:
    """Weights, gradients and Adam's state: the table of 16 Ψ, 4 Ψ and 12 Ψ bytes; streamed, of 2 Ψ and 14 Ψ."""
    psi, wire = counts.trainable, counts.wire_bytes
    moments = MOMENT_BYTES * psi
    own_master = MASTER_BYTES * counts.trainable_16
    there, host = MASTER_BYTES * held.resident, MASTER_BYTES * (psi - held.resident)
    moment = moment_bytes(psi - held.resident, held.state_dtype)
    return (
        Line(name="weights", gpu_without=wire, gpu_with=wire),
        _gradients(wire, leaving(counts, held.resident), streaming),
        Line(name="master", gpu_without=own_master, gpu_with=there, host=host, note="fp32 weights"),
        Line(name="exp_avg", gpu_without=moments, gpu_with=there, host=moment, note="first moment m"),
        Line(name="exp_avg_sq", gpu_without=moments, gpu_with=there, host=moment, note="second moment v"),
    )


def _gradients(wire: int, gone: Counts, streaming: Streaming | None) -> Line:
    """`gone`: those whose gradients leave."""
    if streaming is None:
        return Line(name="gradients", gpu_without=wire, gpu_with=wire)
    wire_gone, each = gone.wire_bytes, streaming.accumulate_bytes
    return Line(
        name="gradients",
        gpu_without=wire,
        gpu_with=wire - wire_gone + min(wire_gone, streaming.on_device),
        host=wire_gone if each is None else each * gone.trainable,
        note="streamed: some buckets on the GPU",
    )


def leaving(counts: Counts, resident: int) -> Counts:
    """What the host steps, where the state of `resident` parameters stays on the GPU: 16-bit and fp32 ones alike."""
    if not resident:
        return counts
    left = counts.trainable - resident
    wide = counts.trainable_32 * left // counts.trainable
    return replace(counts, trainable_16=left - wide, trainable_32=wide)


def resident_params(counts: Counts, device_state_bytes: int | None, gpu_left: int, streamed: bool) -> int:
    """Parameters whose state stays on the GPU.

    Args:
        device_state_bytes: as the setting; None: as many as fit, which is "auto".
        gpu_left: bytes of the GPU that nothing else takes, and that are not the margin.
        streamed: whether gradients leave during backward; those of what stays do not.
    """
    if device_state_bytes is not None:
        return min(counts.trainable, device_state_bytes // STATE_BYTES)
    each = STATE_BYTES + (counts.wire_bytes / counts.trainable if streamed else 0)
    return min(counts.trainable, max(0, int(gpu_left / each)))


def pinned_ring_bytes(bucket_bytes: int, ring_slots: int) -> int:
    """Pinned host memory: a ring of `ring_slots` buckets each way, each of whole cache lines, whatever the model."""
    return 2 * ring_slots * -(-bucket_bytes // CACHE_LINE) * CACHE_LINE


def link_bytes_per_step(counts: Counts, accumulation: int = 1, streamed: bool = False) -> int:
    """Gradients to the host and weights back, once per optimizer step whatever the batch. Streamed gradients go down
    after each micro-batch."""
    return counts.wire_bytes * ((accumulation if streamed else 1) + 1)


def host_step_bytes(counts: Counts, state_dtype: str = "float32") -> int:
    """Host memory traffic of one Adam pass: master, m and v in and out, the gradient in and the weight out.

    28 bytes per parameter with 16-bit weights (20 with bfloat16 state, 16.03 with int8), 4 more with fp32 ones.
    """
    state = MASTER_BYTES * counts.trainable + 2 * moment_bytes(counts.trainable, state_dtype)
    return 2 * state + 2 * counts.wire_bytes


def layer_activation_bytes(shape: Shape) -> int:
    """Bytes that one layer keeps for its backward, per token. See `activation_bytes`."""
    norms = 2 * (8 * shape.hidden + 4)
    attention = 4 * shape.heads * shape.head_dim + 4 * shape.kv_heads * shape.head_dim + 4 * shape.heads
    mlp = (8 if shape.gated else 4) * shape.intermediate
    return norms + attention + mlp


def activation_bytes(shape: Shape, workload: Workload, checkpointing: bool) -> int:
    """Bytes kept between forward and backward of one micro-batch, without the logits.

    Korthikanti et al. 2022 count every tensor autograd keeps; per layer they find s*b*h*(34 + 5*a*s/h) bytes. Here,
    for 16-bit compute and transformers' Llama-like layers without dropout or padding:

    - No a*s^2 term: flash and memory-efficient attention (sdpa) keep q, the output (2 bytes each, all heads), k and v
      (2 bytes each, the kv heads of grouped-query attention) and the fp32 log-sum-exp (4 bytes a head).
    - A norm, run by transformers in fp32, keeps its fp32 input (4), the normalised value (2), its output, which is
      the next linear layer's input (2), and one fp32 scale a token (4 bytes): 8 h + 4. There are two of them.
    - A gated MLP keeps the gate, its activation, the up projection and their product: 4 tensors of 2 bytes; one
      without a gate keeps 2.
    - With checkpointing only each layer's input stays (2 h) and, during the backward, one layer in full.
    - After the last layer one more norm.
    """
    layer = layer_activation_bytes(shape)
    kept = 2 * shape.hidden * shape.layers + layer if checkpointing else layer * shape.layers
    return workload.tokens * (kept + 8 * shape.hidden + 4)


def logits_bytes(shape: Shape, workload: Workload) -> int:
    """Peak bytes of the logits and the loss: 12 * B * T * V, for a loss computed on all logits in fp32 at once."""
    return LOGIT_PEAK_BYTES * workload.tokens * shape.vocab


def seconds(counts: Counts, workload: Workload, machine: Machine, streamed: bool = False, held: Held = HELD) -> Seconds:
    """The times of one optimizer step. A bound: real ones add the first bucket's latency and what is not overlapped,
    and where state stays on the GPU the step of that, at 28 bytes a parameter of the GPU's own memory."""
    gone = leaving(counts, held.resident)
    link = link_bytes_per_step(gone, workload.accumulation, streamed) / (machine.link_gb_s * GB)
    host_step = host_step_bytes(gone, held.state_dtype) / (machine.host_bw_gb_s * GB)
    forward = workload.tokens * _forward_flops(counts) / (machine.tflops * 1e12)
    backward = workload.tokens * _backward_flops(counts, workload.checkpointing) / (machine.tflops * 1e12)
    exposed = max(0.0, max(link, host_step) - forward)
    return Seconds(
        link=link,
        link_full_duplex=link / 2,
        host_step=host_step,
        forward=forward,
        backward=backward,
        compute=workload.accumulation * (forward + backward),
        exposed_in_order=link + host_step,
        exposed_overlapped=exposed,
        exposed_per_micro_batch=exposed / workload.accumulation,
    )


def _forward_flops(counts: Counts) -> float:
    """Floating-point operations of a forward, per token."""
    return 2.0 * counts.total


def _backward_flops(counts: Counts, checkpointing: bool) -> float:
    """Floating-point operations of a backward, per token: frozen weights need no gradient of their own, and with
    checkpointing the forward is computed once more."""
    again = _forward_flops(counts) if checkpointing else 0.0
    return 2.0 * counts.total + 2.0 * counts.trainable + again


def tokens_to_hide(work_seconds: float, counts: Counts, tflops: float, checkpointing: bool = False) -> Hide:
    """Tokens of a micro-batch whose forward, or whose backward and forward, take as long as `work_seconds`."""
    rate = tflops * 1e12
    forward, backward = _forward_flops(counts), _backward_flops(counts, checkpointing)
    return Hide(forward=work_seconds * rate / forward, backward_and_forward=work_seconds * rate / (forward + backward))


def make(
    counts: Counts,
    *,
    workload: Workload,
    machine: Machine,
    shape: Shape | None = None,
    bucket_bytes: int,
    ring_slots: int,
    streaming: Streaming | None = None,
    state_dtype: str = "float32",
    ranks_per_node: int = 1,
    device_state_bytes: int | None = 0,
) -> Plan:
    """The whole plan.

    Args:
        shape: None where only the number of parameters is known; activations and logits are then not counted.
        bucket_bytes, ring_slots: of the `OffloadConfig`.
        streaming: None where gradients stay on the GPU until the step.
        state_dtype: how m and v are held on the host.
        ranks_per_node: processes that share the host's memory, each with a GPU. State is not sharded: each has its own.
        device_state_bytes: as the setting; None: "auto", as much as the GPU has room for. The host must have room for
            all state then: it begins there, and may come back.

    Raises:
        ValueError: there is no trainable parameter, or it is not known how much room the GPU has.
    """
    if counts.trainable < 1:
        raise ValueError("a plan needs at least one trainable parameter")
    activations: dict[str, int] = {}
    if shape is not None:
        activations = {
            "activations_full": activation_bytes(shape, workload, checkpointing=False),
            "activations_checkpointed": activation_bytes(shape, workload, checkpointing=True),
        }
    ring = [Line(name="pinned_ring", host=pinned_ring_bytes(bucket_bytes, ring_slots), note="whatever the model")]
    if streaming is not None and streaming.shadow_bytes:
        ring.append(Line(name="shadow", host=streaming.shadow_bytes, note="for speculation"))
    ring.append(Line(name="checkpoint", note="streamed: no copy"))
    other = (*ring, *_other_lines(counts, workload, shape))
    begins = state_lines(counts, streaming)
    left = _gpu_left(begins + other, machine) if device_state_bytes is None else 0
    held = Held(state_dtype, resident_params(counts, device_state_bytes, left, streaming is not None))
    state = state_lines(counts, streaming, held)
    times = seconds(counts, workload, machine, streaming is not None, held)
    longest = max(times.link, times.host_step)
    return Plan(
        counts=counts,
        workload=workload,
        machine=machine,
        shape=shape,
        state=state,
        other=other,
        activations=activations,
        link_bytes=link_bytes_per_step(leaving(counts, held.resident), workload.accumulation, streaming is not None),
        seconds=times,
        hide={
            what: tokens_to_hide(spent, counts, machine.tflops, workload.checkpointing)
            for what, spent in (("host_step", times.host_step), ("link", times.link), ("both", longest))
        },
        fit=_fit(state + other, (begins if device_state_bytes is None else state) + other, machine, ranks_per_node),
        ranks_per_node=ranks_per_node,
        resident=held.resident,
    )


def _gpu_left(lines: tuple[Line, ...], machine: Machine) -> int:
    if machine.gpu_bytes is None:
        raise ValueError("how much of the GPU is left cannot be told without its size")
    margin = max(DEVICE_MARGIN * machine.gpu_bytes, DEVICE_MARGIN_BYTES)
    return int(machine.gpu_bytes - margin) - sum(line.gpu_with for line in lines)


def _other_lines(counts: Counts, workload: Workload, shape: Shape | None) -> tuple[Line, ...]:
    lines: list[Line] = []
    if counts.frozen:
        frozen = counts.frozen_bytes
        lines.append(Line(name="frozen_weights", gpu_without=frozen, gpu_with=frozen, note="no gradient, no state"))
    if shape is not None:
        kept = activation_bytes(shape, workload, workload.checkpointing)
        note = "checkpointed" if workload.checkpointing else "not checkpointed"
        lines.append(Line(name="activations", gpu_without=kept, gpu_with=kept, note=note))
        logits = logits_bytes(shape, workload)
        lines.append(Line(name="logits", gpu_without=logits, gpu_with=logits, note="with the loss, fp32"))
    context = CUDA_CONTEXT_BYTES
    lines.append(Line(name="cuda_context", gpu_without=context, gpu_with=context, note="an upper estimate"))
    return tuple(lines)


def _fit(on_gpu: tuple[Line, ...], on_host: tuple[Line, ...], machine: Machine, ranks: int) -> Fit:
    gpu_need = sum(line.gpu_with for line in on_gpu)
    host_need = ranks * sum(line.host for line in on_host)
    return Fit(
        gpu_need=gpu_need,
        gpu_have=machine.gpu_bytes,
        gpu=None if machine.gpu_bytes is None else gpu_need <= machine.gpu_bytes,
        host_need=host_need,
        host_have=machine.host_bytes,
        host=None if machine.host_bytes is None else host_need <= machine.host_bytes,
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: bytes are integers, `gpu_*` and `host` are of the trainable parameters alone."""
    return {
        "params": plan.counts.trainable,
        "frozen_params": plan.counts.frozen,
        "device_state": {
            "params": plan.resident,
            "bytes": STATE_BYTES * plan.resident,
            "fraction": plan.resident / plan.counts.trainable,
        },
        "bytes": {
            "gpu_without": sum(line.gpu_without for line in plan.state),
            "gpu_with": sum(line.gpu_with for line in plan.state),
            "host": sum(line.host for line in plan.state),
            "link_per_step": plan.link_bytes,
            **{line.name: max(line.gpu_with, line.host) for line in plan.other},
            **plan.activations,
            "gpu_total_without": sum(line.gpu_without for line in plan.state + plan.other),
            "gpu_total_with": plan.fit.gpu_need,
            "host_total": sum(line.host for line in plan.state + plan.other),
            "host_total_node": plan.fit.host_need,
        },
        "lines": [asdict(line) for line in plan.state + plan.other],
        "seconds": asdict(plan.seconds),
        "tokens_to_hide": {what: asdict(hide) for what, hide in plan.hide.items()},
        "fits": asdict(plan.fit),
        "ranks_per_node": plan.ranks_per_node,
        "workload": {**asdict(plan.workload), "tokens_per_micro_batch": plan.workload.tokens},
        "machine": asdict(plan.machine),
        "shape": None if plan.shape is None else asdict(plan.shape),
    }
