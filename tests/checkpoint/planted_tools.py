"""Bugs of `hf-offload checkpoint` and of what it reads, each planted into a copy of the code, as in planted.py.

python tests/checkpoint/planted_tools.py [--jobs 2] [WORDS]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.planting import Planted, main

DEEPSPEED, CONVERT, VERIFY, HELD, RESUMED = (
    f"{name}::"
    for name in (
        "checkpoint/test_deepspeed.py", "checkpoint/test_convert.py", "checkpoint/test_verify.py",
        "checkpoint/test_held.py", "hf/test_convert.py",
    )
)  # fmt: skip
READER, CONVERTER, SOURCES, CHECKS, STATE, WEIGHTS, NAMES, TORCH, MOMENTS, SCRATCH = (
    f"checkpoint/{name}.py"
    for name in (
        "deepspeed",
        "convert",
        "sources",
        "verify",
        "adam_state",
        "weights",
        "names",
        "torch_file",
        "held",
        "scratch",
    )
)
MODEL = "checkpoint_model.py"
REFUSED = DEEPSPEED + "test_what_does_not_fit_is_refused"
REAL = DEEPSPEED + "test_a_real_checkpoint_is_read_as_deepspeed_reads_it"
MASTERS = CONVERT + "test_masters_become_the_weights_of_a_plain_adamw[dtype0]"
TO_AND_FRO = RESUMED + "test_adamw_resumes_as_offload_adam_and_again_as_adamw"

# fmt: off
PLANTED = (
    # ---- DeepSpeed
    Planted("round robin is taken for the optimizer's order", REAL + "[zero2_round_robin]", READER,
            "names = [name for _, name in sorted(zip(places, names))]"),
    Planted("gaps between parameters are overlooked", REFUSED, READER, "at += math.prod(shape) + gap",
            "at += math.prod(shape)"),
    Planted("where the ranks say that parameters lie is not compared", REFUSED, READER, "if here != there:",
            "if False:"),
    Planted("the moments change places", REAL + "[zero1_fp32_grads]", READER, "pieces = [flat[what][start",
            'pieces = [flat[{"exp_avg": "exp_avg_sq"}.get(what, what)][start'),
    Planted("a parameter with parts missing is read", REFUSED, READER,
            "if (held := sum(piece.numel() for piece in pieces)) != math.prod(shape):", "if False:"),
    Planted("ranks of two checkpoints are mixed", REFUSED, READER, "if len(steps) > 1:", "if False:"),
    Planted("a rank too few is read", REFUSED, READER, "if counts and counts[0] != ranks:", "if False:"),
    Planted("`latest` leads out of the folder", DEEPSPEED + "test_missing_and_foreign_files_are_named", READER,
            'Path(tag).name != tag or tag in ("", "..") or ', ""),
    Planted("a stub takes anything", DEEPSPEED + "test_a_stub_takes_nothing_but_what_it_stands_for", READER,
            "if any(type(value) is not int or value < 0 for value in (self.numel, self.start)):", "if False:"),
    Planted("pickles are executed", DEEPSPEED + "test_a_pickle_that_would_run_code_is_refused_and_does_not_run", TORCH,
            "weights_only=True, mmap=mapped", "weights_only=False, mmap=mapped"),
    Planted("L2 is taken for decoupled decay",
            DEEPSPEED + "test_the_kind_of_decay_of_deepspeeds_own_adams_is_read_from_its_configuration", READER,
            'config.get("adam_w_mode", True)', "True"),
    Planted("state without bias correction is read", REFUSED, READER,
            'if not settings.pop("bias_correction", True):', 'if not settings.pop("bias_correction", True) and False:'),
    Planted("masters that are somebody else's are converted",
            CONVERT + "test_masters_that_do_not_round_to_the_weights_mean_that_the_layout_is_not_understood", SOURCES,
            "_check_masters(folder, found)"),
    Planted("a single group is not split", CONVERT + "test_deepspeeds_single_group_is_split_as_the_trainer_does",
            SOURCES, "split = model.split(", "split = None and model.split("),
    Planted("the Trainer's schedule begins anew",
            RESUMED + "test_a_checkpoint_of_deepspeeds_own_scheduler_goes_on_at_its_step", SOURCES,
            '"last_epoch": taken,', '"last_epoch": 0,'),
    # ---- weights
    Planted("a tensor drags the whole file into what is saved",
            VERIFY + "test_weights_are_read_as_safetensors_reads_them_and_written_so_that_it_can", WEIGHTS,
            "part = torch.frombuffer(mapped, dtype=torch.uint8, offset=self.start, count=self.stop - self.start)",
            "part = torch.frombuffer(mapped, dtype=torch.uint8)[self.start : self.stop]"),
    Planted("a tensor is not aligned", VERIFY + "test_tensors_that_are_not_aligned_are_read", WEIGHTS,
            "if self.start % dtype.itemsize:", "if False:"),
    Planted("an index leads out of the folder", VERIFY + "test_an_index_that_names_files_elsewhere_is_refused", WEIGHTS,
            'or any(Path(name).name != name or name in (".", "..") for name in names)', ""),
    Planted("a truncated file passes",
            VERIFY + "test_without_a_manifest_files_that_contradict_themselves_are_named", WEIGHTS,
            "if end != size:", "if False:"),
    # ---- verify
    Planted("masters are not compared", VERIFY + "test_masters_that_do_not_round_to_their_weights_are_counted", CHECKS,
            "count += int((", "count += 0 * int(("),
    Planted("NaN in the state is not told", VERIFY + "test_values_that_are_not_finite_and_impossible_ones_are_counted",
            CHECKS, "if count:", "if False:"),
    Planted("the manifest is not compared",
            VERIFY + "test_every_damaged_file_is_named_and_a_whole_checkpoint_beside_it", CHECKS,
            "verdict.damages.extend(manifest.damages(folder, written, told=told))"),
    Planted("names of another model are believed", CONVERT + "test_names_of_another_model_are_not_believed", STATE,
            "return all(p.shape is None or p.shape == shapes.get(name) for p, name in pairs)", "return True"),
    Planted("accelerate's optimizer.bin is overlooked", VERIFY + "test_accelerates_name_of_the_file_is_known", STATE,
            'FILES = (OPTIMIZER, "optimizer.bin")', "FILES = (OPTIMIZER,)"),
    # ---- convert
    Planted("the masters' low bits are lost", MASTERS, CONVERTER, "self.fp32 = more if fp32_weights is None else",
            "self.fp32 = False if fp32_weights is None else"),
    Planted("stale masters overwrite weights",
            CONVERT + "test_weights_that_were_changed_after_training_are_kept", CONVERTER, "if not differ:",
            "if True:"),
    Planted("a tied weight's second name keeps 16 bits",
            CONVERT + "test_a_tied_weight_that_is_in_the_file_twice_becomes_the_master_twice", CONVERTER,
            "masters[name] = masters[twin]"),
    Planted("config.json still says bfloat16", MASTERS, CONVERTER, "_correct_config(folder)\nif", "if"),
    Planted("the shards' index keeps the old size", CONVERT + "test_sharded_weights_stay_sharded", CONVERTER,
            "_correct_index(folder)\n_correct", "_correct"),
    Planted("plain AdamW's state has masters", CONVERT + "test_deepspeed_becomes_either_kind", CONVERTER,
            'if name != "master"', "if True"),
    Planted("a damaged source becomes a whole checkpoint",
            CONVERT + "test_a_damaged_source_is_refused_and_nothing_is_written", CONVERTER,
            "_check_whole(folder)\nsource", "source"),
    Planted("the state is copied into memory",
            CONVERT + "test_what_is_written_is_the_mapped_source_and_no_copy", CONVERTER,
            'if name != "master"})', 'if name != "master" for t in (t.clone(),)})'),
    Planted("masters without a weight are dropped unasked",
            CONVERT + "test_masters_without_weights_are_not_dropped_unasked", CONVERTER,
            "any(row is None or row[0] != torch.float32", "any(row is not None and row[0] != torch.float32"),
    Planted("PEFT's names are not known", CONVERT + "test_an_adapters_weights_are_found_under_pefts_names", NAMES,
            'return parameter.replace(".modules_to_save.default.", ".").replace(".default.", ".")', "return parameter"),
    Planted("the Trainer's order of parameters is another", TO_AND_FRO, MODEL,
            "return [[name for name in names if name in decayed], [name for",
            "return [sorted(name for name in names if name in decayed), [name for"),
    # ---- state held as bfloat16 or int8
    Planted("too few scales are read", HELD + "test_a_damaged_entry_is_refused_by_name[a scale too few]", STATE,
            "if value.shape != (wanted,):", "if False:"),
    Planted("codes that are floats are read", HELD + "test_a_damaged_entry_is_refused_by_name[codes that are floats]",
            STATE, "value.dtype == torch.uint8 if codes else value.is_floating_point()", "True"),
    Planted("of moments that are there twice one is read",
            HELD + "test_a_damaged_entry_is_refused_by_name[both kinds at once]", STATE,
            "if names == INT8_NAMES and any(name in saved for name in MOMENTS):", "if False:"),
    Planted("inspect does not say that state is int8",
            HELD + "test_it_is_read_and_inspect_says_how_it_is_held[int8]", MOMENTS,
            'codes = dict.fromkeys(MOMENTS, "int8") if names_in(entry) == INT8_NAMES else {}', "codes = {}"),
    Planted("codes are taken for AdamW's where there are no masters",
            HELD + "test_codes_are_offload_adams_even_without_masters", STATE,
            "self.has_masters or any(held.names_in(p.entry) == INT8_NAMES for p in self.parameters())",
            "self.has_masters"),
    Planted("looking at codes imports the kernels", HELD + "test_inspecting_imports_no_kernels", MOMENTS,
            "from torch import Tensor", "from torch import Tensor\nfrom hf_offload.engine import moments"),
    Planted("NaN in int8 state is not told",
            HELD + "test_blocks_that_are_not_finite_and_scales_that_are_never_made_are_counted", MOMENTS,
            "entry[scale] == NOT_FINITE", "entry[scale] > NOT_FINITE"),
    Planted("a short block counts as a whole one",
            HELD + "test_blocks_that_are_not_finite_and_scales_that_are_never_made_are_counted", MOMENTS,
            "if count and bool(chosen[-1]) else 0", "if False else 0"),
    Planted("scales that are never made pass",
            HELD + "test_blocks_that_are_not_finite_and_scales_that_are_never_made_are_counted", CHECKS, "if unmade:",
            "if False:"),
    Planted("AdamW gets the codes", HELD + "test_through_adamw_and_back_the_values_are_the_same[int8]", CONVERTER,
            "any(t.itemsize < 4 for t in _moments(p))", "any(t.itemsize == 2 for t in _moments(p))"),
    Planted("AdamW gets moments of 16 bits",
            HELD + "test_through_adamw_and_back_the_values_are_the_same[bfloat16]", CONVERTER,
            "any(t.itemsize < 4 for t in _moments(p))", "any(t.itemsize == 1 for t in _moments(p))"),
    Planted("all parameters are decoded at once", HELD + "test_one_parameter_at_a_time_is_decoded", CONVERTER,
            "(t for p in small for t in held.in_float32(p.entry).values())",
            "[t for p in small for t in held.in_float32(p.entry).values()]"),
    Planted("what was decoded drags the whole scratch file along",
            HELD + "test_what_waits_in_a_scratch_file_comes_back_as_it_was", SCRATCH,
            "flat = torch.frombuffer(memory, dtype=place.dtype, offset=place.start, count=place.numel)",
            "all_of_it = torch.frombuffer(memory, dtype=torch.uint8)[place.start :]\n"
            "flat = all_of_it[: place.numel * place.dtype.itemsize].view(place.dtype)"),
    Planted("what was decoded lies in another order than the codes",
            HELD + "test_through_adamw_and_back_the_values_are_the_same[int8]", SCRATCH,
            "return torch.as_strided(flat, place.shape, place.stride)", "return flat.view(place.shape)"),
    Planted("a file of another kind of state is loaded unsaid",
            RESUMED + "test_a_resume_that_holds_state_in_another_way_converts_it_and_says_so[float32-int8]", "state.py",
            "_say_conversions(fits.entries, engine.kind)"),
    Planted("masters are rounded on the way", TO_AND_FRO, CONVERTER, "row[2]().float()})", "row[2]().bfloat16()})"),
)
# fmt: on

if __name__ == "__main__":
    sys.exit(main(PLANTED, sys.argv[1:]))
