"""Bugs of compact state (`state_dtype`), each planted into a copy of the code. Part of the list of planted.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.planting import Planted, main

DTYPES, LOADED = (f"{name}.py::test_" for name in ("engine/test_state_dtypes", "optimizer/test_compact_state_dict"))
BITS = DTYPES + "bits_depend_neither_on_schedule_nor_on_buckets_nor_on_threads[int8]"
TWIN = "contracts/test_design_6.py::test_no_gradient_of_an_earlier_micro_batch_is_lost[in_order-bfloat16-int8-x3]"
TWIN_OF_BFLOAT16 = TWIN.replace("in_order", "overlapped").replace("int8", "bfloat16")
KERNEL = "kernels/test_compact.py::test_bits_equal_the_twins[int8-bfloat16-ordinary]"
ARENA, MOMENTS, FORMATS, COMPACT = "engine/arena.py", "engine/moments.py", "engine/formats.py", "kernels/cpu/block.py"

# fmt: off
PLANTED = (
    # ---- the noise
    Planted("noise that ignores the step", TWIN, ARENA, "firsts, turns[at])", "firsts, 0 * turns[at] + 1)"),
    Planted("noise that ignores the step, bfloat16", TWIN_OF_BFLOAT16, ARENA, "firsts, turns[at])",
            "firsts, 0 * turns[at] + 1)"),
    Planted("noise that ignores the parameter's number", TWIN, ARENA, "self._numbers[at]",
            "0 * at"),
    Planted("noise that ignores the block", BITS, ARENA, "firsts, turns[at])", "0 * firsts, turns[at])"),
    Planted("noise that ignores the seed", DTYPES + "the_seed_is_the_only_thing_that_moves_the_rounding[int8]", ARENA,
            "self._rounding.seed,", "0,"),
    Planted("noise of the arena's order instead of param_groups'",
            DTYPES + "a_parameter_that_is_bound_later_rounds_as_one_that_was_there[int8]", "engine/engine.py",
            "[numbers.get(id(p), -1) for p in lot.params]", "range(len(lot.params))"),
    Planted("a guess is accepted under other noise",
            DTYPES + "a_guess_that_was_rounded_with_other_noise_is_a_miss[int8]", "engine/speculation.py",
            "return same and np.array_equal(self.noise, work.noise())", "return same"),
    # ---- blocks and buckets
    Planted("buckets are not cut at blocks", BITS, "engine/plan.py", "return high - (high - start) % block",
            "return high"),
    Planted("a bucket that is cut has the scales of the parameter's first blocks", BITS, ARENA,
            "[bucket.pieces[0].param] + bucket.pieces[0].start // self.kind.block", "[bucket.pieces[0].param]"),
    Planted("m is rounded to nearest", KERNEL, COMPACT, "m_scale.encode_m(m, u >> 12)",
            "m_scale.encode_m(m, u * 0 + 0x80000)"),
    Planted("v is rounded to nearest", KERNEL, COMPACT, "v_scale.encode_v(v, u & DROPPED)",
            "v_scale.encode_v(v, u * 0 + 0x80000)"),
    # ---- loading
    Planted("int8 codes are loaded without their scales",
            DTYPES + "resuming_gives_the_bits_of_the_run_that_never_stopped[int8-overlapped]", MOMENTS,
            "for name in names:\nviews[name].copy_(entry[name])",
            "for name in CODES:\n    views[name].copy_(entry[name])"),
    Planted("codes are loaded as if they were the values",
            LOADED + "what_is_held_in_another_way_is_converted_and_it_is_said[float32-int8]", MOMENTS,
            "for name, values in in_floats(entry).items():",
            "for name, values in zip(names, (entry.get(f\"{n}_codes\", entry.get(n)) for n in names)):"),
    Planted("floats are loaded as if they were codes",
            LOADED + "what_is_held_in_another_way_is_converted_and_it_is_said[int8-float32]", MOMENTS,
            "_encode(in_floats(entry), views, p)",
            "for name, code in zip(MOMENTS, CODES):\n    views[code].copy_(in_floats(entry)[name].to(torch.uint8))"),
    Planted("codes are copied though the elements lie in another order",
            LOADED + "codes_of_another_order_in_memory_are_not_copied_as_they_lie", MOMENTS,
            "names_in(entry) == names and _same_order(entry, views)", "names_in(entry) == names"),
    Planted("a parameter without an entry keeps its scales", LOADED + "a_state_without_an_entry_starts_anew", MOMENTS,
            "for name in names_in(views):\nviews[name].zero_()",
            "for name in names_in(views):\n    views[name].zero_() if name not in SCALES else None"),
    # ---- figures
    Planted("figures count 4 bytes a moment", DTYPES + "figures_and_budget_count_what_is_held[int8-2]", ARENA,
            "return state_bytes(self.kind,", "return state_bytes(FLOAT32,"),
    Planted("the budget counts 12 bytes a parameter", DTYPES + "figures_and_budget_count_what_is_held[bfloat16-4]",
            "engine/budget.py", "need = state_bytes(self._kind,", "need = state_bytes(FORMATS[\"float32\"],"),
    Planted("the scales are not counted", DTYPES + "figures_and_budget_count_what_is_held[int8-2]", FORMATS,
            "moment = kind.moment_bytes * sum(numels) + scales", "moment = kind.moment_bytes * sum(numels)"),
)
# fmt: on

if __name__ == "__main__":
    sys.exit(main(PLANTED, sys.argv[1:]))
