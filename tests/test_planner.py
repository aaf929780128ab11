"""The planner's arithmetic: the design's worked example, the thresholds, and the formulas against what torch keeps."""

from __future__ import annotations

import json

import pytest

from hf_offload import planner
from hf_offload.planner import Counts, Machine, Shape, Workload

MIB = 1 << 20
SEVEN = Counts(trainable_16=7_000_000_000)
SMALL = Shape(layers=3, hidden=256, intermediate=688, heads=8, kv_heads=2, head_dim=32, vocab=300)


def make(counts: Counts = SEVEN, **changes: object) -> planner.Plan:
    given: dict[str, object] = {
        "workload": Workload(),
        "machine": Machine(link_gb_s=16),
        "bucket_bytes": 32 << 20,
        "ring_slots": 4,
    }
    return planner.make(counts, **{**given, **changes})  # type: ignore[arg-type]


def test_worked_example_of_the_design() -> None:
    figures = planner.as_json(make())
    sizes = {key: figures["bytes"][key] for key in ("gpu_without", "gpu_with", "host", "link_per_step")}
    expected = {"gpu_without": 112, "gpu_with": 28, "host": 84, "link_per_step": 28}
    assert sizes == {key: gb * 10**9 for key, gb in expected.items()}
    assert all(type(value) is int for value in figures["bytes"].values())
    assert figures["params"] == 7 * 10**9
    assert figures["seconds"]["link"] == 1.75
    assert figures["seconds"]["link_full_duplex"] == 0.875
    json.dumps(figures)


def test_host_lines_are_master_and_moments_of_four_bytes_and_the_ring_beside_them() -> None:
    lines = {line.name: line.host for line in make().state + make().other}
    assert lines["master"] == lines["exp_avg"] == lines["exp_avg_sq"] == 28 * 10**9
    assert lines["pinned_ring"] == 2 * 4 * (32 << 20)


def test_the_ring_does_not_grow_with_the_model() -> None:
    rings = [{line.name: line.host for line in make(Counts(trainable_16=n)).other}["pinned_ring"] for n in (1, 10**12)]
    assert rings[0] == rings[1]


def test_host_step_takes_28_bytes_per_parameter_over_the_bandwidth() -> None:
    assert make(machine=Machine(host_bw_gb_s=150)).seconds.host_step == pytest.approx(28 * 7e9 / 150e9)


@pytest.mark.parametrize("params", [10**6, 7 * 10**9])
def test_thresholds_of_the_design_whatever_the_size(params: int) -> None:
    plan = make(Counts(trainable_16=params), machine=Machine(link_gb_s=16, host_bw_gb_s=150, tflops=500))
    assert plan.hide["host_step"].forward == pytest.approx(14 * 500e12 / 150e9)
    assert plan.hide["host_step"].backward_and_forward == pytest.approx(14 / 3 * 500e12 / 150e9)
    assert plan.hide["link"].forward == pytest.approx(2 * 500e12 / 16e9)
    assert plan.hide["both"] == plan.hide["link"], "the link is the slower of the two here"


def test_at_the_threshold_nothing_is_exposed_and_below_it_the_rest_is_spread_over_the_micro_batches() -> None:
    machine = Machine(link_gb_s=1e3, host_bw_gb_s=140, tflops=1)
    threshold = 14 * 1e12 / 140e9  # 100 tokens
    at = make(workload=Workload(batch=1, seq_len=round(threshold)), machine=machine)
    assert at.seconds.exposed_overlapped == pytest.approx(0, abs=1e-9)
    half = make(workload=Workload(seq_len=round(threshold / 2), accumulation=8), machine=machine).seconds
    assert half.exposed_overlapped == pytest.approx(half.host_step / 2)
    assert half.exposed_per_micro_batch == pytest.approx(half.host_step / 16)
    assert half.exposed_in_order == half.host_step + half.link


def test_checkpointing_computes_the_forward_once_more() -> None:
    plain, again = (make(workload=Workload(checkpointing=on)).seconds for on in (False, True))
    assert again.backward == pytest.approx(plain.backward + plain.forward)


def test_fp32_weights_are_their_own_masters_on_the_gpu() -> None:
    plan = planner.as_json(make(Counts(trainable_32=1000)))
    assert plan["bytes"]["gpu_without"] == 16_000
    assert plan["bytes"]["gpu_with"] == 8_000
    assert plan["bytes"]["host"] == 12_000
    assert plan["bytes"]["link_per_step"] == 8_000
    assert planner.host_step_bytes(Counts(trainable_32=1000)) == 32_000


@pytest.mark.parametrize(("held", "state", "traffic"), [("float32", 12, 28), ("bfloat16", 8, 20)])
def test_state_in_fewer_bytes_takes_less_of_the_host_and_of_its_bandwidth(held: str, state: int, traffic: int) -> None:
    plan = make(Counts(trainable_16=1000), state_dtype=held)
    assert planner.as_json(plan)["bytes"]["host"] == 1000 * state
    assert plan.seconds.host_step == pytest.approx(1000 * traffic / 150e9)
    assert sum(line.gpu_without for line in plan.state) == 16_000, "who does not offload holds fp32"


def test_int8_state_has_a_scale_byte_for_each_128_of_m_and_of_v() -> None:
    plan = make(Counts(trainable_16=1280), state_dtype="int8")
    assert planner.as_json(plan)["bytes"]["host"] == 1280 * 6 + 20
    assert planner.host_step_bytes(Counts(trainable_16=1280), "int8") == 1280 * 16 + 40


def test_frozen_weights_are_a_line_of_their_own_and_count_in_the_compute_alone() -> None:
    lora = Counts(trainable_32=10**6, frozen=10**9, frozen_bytes=2 * 10**9)
    plan = make(lora)
    assert planner.as_json(plan)["bytes"]["gpu_with"] == 8 * 10**6
    assert {line.name: line.gpu_with for line in plan.other}["frozen_weights"] == 2 * 10**9
    assert plan.link_bytes == 8 * 10**6
    assert plan.seconds.forward == pytest.approx(2 * lora.total * 4096 / 500e12)
    assert plan.seconds.backward == pytest.approx((2 * lora.total + 2 * 10**6) * 4096 / 500e12)


def test_fit_compares_all_lines_with_what_there_is() -> None:
    plan = make(machine=Machine(gpu_bytes=29 * 10**9, host_bytes=84 * 10**9))
    assert plan.fit.gpu_need == 28 * 10**9 + planner.CUDA_CONTEXT_BYTES
    assert plan.fit.gpu is True
    assert plan.fit.host is False, "12 bytes per parameter fit, the pinned ring does not"
    assert make().fit.gpu is None


def test_activations_and_logits_are_lines_only_where_the_shape_is_known() -> None:
    assert {"activations", "logits"}.isdisjoint(line.name for line in make().other)
    work = Workload(batch=2, seq_len=64, checkpointing=True)
    lines = {line.name: line.gpu_with for line in make(shape=SMALL, workload=work).other}
    assert lines["activations"] == planner.activation_bytes(SMALL, work, checkpointing=True)
    assert lines["logits"] == 12 * 2 * 64 * 300


def test_nothing_trainable_is_our_callers_mistake() -> None:
    with pytest.raises(ValueError, match="trainable"):
        make(Counts(frozen=10, frozen_bytes=20))


@pytest.fixture(scope="module")
def small_llama():  # type: ignore[no-untyped-def]
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SMALL.vocab,
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.intermediate,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def kept_bytes(model, batch: int, seq_len: int) -> int:  # type: ignore[no-untyped-def]
    """Bytes that autograd really keeps for the backward, parameters and buffers left out, each storage once."""
    import torch

    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    ids = torch.randint(0, SMALL.vocab, (batch, seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")  # the method's new name is not in 5.8
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_formula_against_what_autograd_keeps(small_llama, checkpointing: bool) -> None:  # type: ignore[no-untyped-def]
    work = Workload(batch=2, seq_len=128)
    small_llama.gradient_checkpointing_disable()
    if checkpointing:
        small_llama.gradient_checkpointing_enable()
    measured = kept_bytes(small_llama, work.batch, work.seq_len)
    # Of the logits, 4 bytes each are kept between forward and backward: the log-softmax.
    planned = planner.activation_bytes(SMALL, work, checkpointing) + 4 * work.tokens * SMALL.vocab
    if checkpointing:  # the one layer that the backward holds in full is not there yet
        planned -= work.tokens * planner.layer_activation_bytes(SMALL)
    assert planned == pytest.approx(measured, rel=0.02)


def test_logits_take_twelve_bytes_each_at_the_peak() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")

    def peak(vocab: int) -> int:
        config = transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.randint(0, vocab, (1, 256))
        memory = tracker.MemTracker()
        memory.track_external(model)
        with memory:
            model(input_ids=ids, labels=ids).loss.backward()
        snapshot = memory.get_tracker_snapshot("peak")[torch.device("cpu")]
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        return int(snapshot["Total"]) - weights

    per_logit = (peak(16000) - peak(8000)) / (256 * 8000)
    assert per_logit == pytest.approx(planner.LOGIT_PEAK_BYTES, rel=0.02)


# ---- streamed gradients


def test_streamed_gradients_are_on_the_host() -> None:
    plan = planner.as_json(make(streaming=planner.Streaming(on_device=4 * 32 * MIB, shadow_bytes=14 * 10**9)))
    lines = {line["name"]: line for line in plan["lines"]}
    assert lines["gradients"]["gpu_with"] == 4 * 32 * MIB and lines["gradients"]["host"] == 14e9
    assert lines["shadow"]["host"] == 14e9
    assert plan["bytes"]["host"] == (12 + 2) * 7e9 and plan["bytes"]["gpu_with"] == 14e9 + 4 * 32 * MIB
    assert plan["bytes"]["host_total"] == (12 + 2 + 2) * 7e9 + plan["bytes"]["pinned_ring"]


def test_streamed_gradients_go_down_after_each_micro_batch() -> None:
    streaming = planner.Streaming(on_device=1)
    for accumulation in (1, 4):
        plan = make(workload=Workload(accumulation=accumulation), streaming=streaming)
        assert plan.link_bytes == (2 * accumulation + 2) * 7e9
        assert make(workload=Workload(accumulation=accumulation)).link_bytes == 4 * 7e9


def test_gradients_added_up_in_float32_take_4_bytes_and_a_small_model_streams_no_more_than_it_has() -> None:
    streaming = planner.Streaming(on_device=10**12, accumulate_bytes=4)
    lines = {line.name: line for line in make(streaming=streaming).state}
    assert lines["gradients"].host == 4 * 7e9 and lines["gradients"].gpu_with == 2 * 7e9


# ---- state that stays on the GPU


def test_state_that_stays_moves_from_the_host_to_the_gpu_and_off_the_link() -> None:
    plan, without = make(device_state_bytes=42 * 10**9), make()
    assert plan.resident == 3_500_000_000
    figures, before = planner.as_json(plan), planner.as_json(without)
    assert figures["device_state"] == {"params": 3_500_000_000, "bytes": 42 * 10**9, "fraction": 0.5}
    assert before["device_state"]["params"] == 0
    assert figures["bytes"]["gpu_with"] == (28 + 42) * 10**9 and figures["bytes"]["host"] == 42 * 10**9
    assert plan.link_bytes == without.link_bytes / 2
    assert plan.seconds.link == without.seconds.link / 2 and plan.seconds.host_step == without.seconds.host_step / 2
    assert plan.seconds.compute == without.seconds.compute
    everything = make(device_state_bytes=10**15)
    assert everything.resident == 7 * 10**9 and everything.link_bytes == 0 and everything.seconds.host_step == 0.0
    assert everything.seconds.exposed_in_order == 0.0


def test_fp32_and_16_bit_weights_stay_alike() -> None:
    counts = Counts(trainable_16=300, trainable_32=100)
    assert planner.leaving(counts, 200) == Counts(trainable_16=150, trainable_32=50)
    assert planner.leaving(counts, 400).trainable == 0


@pytest.mark.parametrize(("gpu_gb", "part"), [(48, 0.20), (80, 0.56), (141, 1.0), (24, 0.0)])
def test_auto_is_what_a_gpu_has_left_less_a_margin(gpu_gb: int, part: float) -> None:
    """Of 7e9 parameters: 28 GB of weights and gradients, 1 GB of context, and a twentieth are gone."""
    machine = Machine(gpu_bytes=gpu_gb * 10**9, host_bytes=85 * 10**9)
    plan = make(machine=machine, device_state_bytes=None)
    assert plan.resident / 7e9 == pytest.approx(part, abs=0.005)
    if 0.0 < part < 1.0:
        assert plan.fit.gpu_need == pytest.approx(0.95 * gpu_gb * 1e9, abs=24)
    assert plan.fit.host_need == make(machine=machine).fit.host_need, "all of it begins there"


def test_auto_counts_the_gradients_that_no_longer_leave() -> None:
    streaming = planner.Streaming(on_device=10**9)
    machine = Machine(gpu_bytes=48 * 10**9)
    plan = make(machine=machine, streaming=streaming, device_state_bytes=None)
    assert plan.resident == int((0.95 * 48e9 - 14e9 - 1e9 - planner.CUDA_CONTEXT_BYTES) / 14)
    assert plan.fit.gpu_need == pytest.approx(0.95 * 48e9, abs=28)
    lines = {line.name: line for line in plan.state}
    assert lines["gradients"].gpu_with == 10**9 + 2 * plan.resident
    assert lines["gradients"].host == 2 * (7 * 10**9 - plan.resident)


def test_auto_needs_to_know_the_gpu() -> None:
    with pytest.raises(ValueError, match="without its size"):
        make(device_state_bytes=None)
