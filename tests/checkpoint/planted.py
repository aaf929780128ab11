"""Bugs of checkpoints, each planted into a copy of the code to see that the test named for it fails.

python tests/checkpoint/planted.py [--jobs 2] [WORDS]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.planting import Planted, main

FOLDER, TRAINER, RESUME = (
    f"{name}::" for name in ("checkpoint/test_folder.py", "hf/test_checkpoints.py", "hf/test_resume_matrix.py")
)
COMPAT, MANIFEST, STAGING, DIGEST, TABLE, TORCH = (
    "compat_saving.py", "checkpoint/manifest.py", "checkpoint/staging.py", "checkpoint/digest.py",
    "checkpoint/table.py", "checkpoint/torch_file.py",
)  # fmt: skip

# fmt: off
PLANTED = (
    # ---- saving
    Planted("a checkpoint has its name before its manifest", TRAINER + "test_the_name_appears_only_when_all_is_written",
            COMPAT, "manifest.write(staged.path, known, rows)\nstaged.commit()",
            "staged.commit()\nmanifest.write(staged.target, known, rows)"),
    Planted("the best model is looked for in the temporary folder",
            TRAINER + "test_best_model_and_rotation_are_as_ever", COMPAT, "_name_the_best(self, run_dir, staged)"),
    Planted("old checkpoints pile up", TRAINER + "test_best_model_and_rotation_are_as_ever", COMPAT,
            "_rotate(self, run_dir)\nfor", "for"),
    Planted("the temporary folder is pushed to the hub",
            TRAINER + "test_what_is_pushed_to_the_hub_is_the_folder_that_is_there", COMPAT,
            "lambda folder: pushes.append(push)", "push"),
    Planted("what was saved before is deleted with what others put there",
            FOLDER + "test_a_folder_that_is_there_is_replaced_and_strangers_in_it_are_kept", STAGING,
            "_keep_strangers(self.root, self.target)"),
    Planted("parts of the checkpoint that was replaced stay in the new one",
            FOLDER + "test_a_folder_that_is_there_is_replaced_and_strangers_in_it_are_kept", STAGING,
            'ours = {name.split("/")[0] for name in known.files} | {manifest.NAME} if known else {manifest.NAME}',
            "ours = {manifest.NAME}"),
    Planted("what killed processes left piles up",
            FOLDER + "test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays", STAGING,
            "_remove_if_dead(left)"),
    Planted("what another process is writing is deleted",
            FOLDER + "test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays", STAGING,
            "except OSError:\nreturn\n_bring", "except OSError:\n    lock = open(os.devnull)\n_bring"),
    Planted("a failed save leaves its folder", FOLDER + "test_without_commit_nothing_is_left", STAGING,
            "shutil.rmtree(self.root, ignore_errors=True)\nself._lock.close()", "self._lock.close()"),
    Planted("a full disk goes unnoticed", FOLDER + "test_a_disk_that_is_full_is_told_when_the_file_is_closed", DIGEST,
            "raise self.error"),
    Planted("a full disk raises inside torch's writer",
            FOLDER + "test_a_disk_that_is_full_is_told_when_the_file_is_closed", DIGEST, "self.error = error",
            "raise"),
    Planted("a file is hashed in another order than it is written",
            FOLDER + "test_a_file_is_hashed_while_it_is_written",
            DIGEST, "hashed = self._hasher.submit(self._hash.update, part)",
            "hashed = self._hasher.submit(self._hash.update, bytes(part[::-1]))"),
    # ---- verifying
    Planted("a checkpoint is loaded unverified", TRAINER + "test_a_damaged_checkpoint_is_refused[optimizer.pt-flipped]",
            COMPAT, "found = manifest.verify(folder) if first else manifest.read(folder)\nfor",
            "found = manifest.read(folder)\nfor"),
    Planted("the best model is loaded unverified", TRAINER + "test_a_best_model_that_was_damaged_is_not_loaded", COMPAT,
            "manifest.verify(Path(self.state.best_model_checkpoint), table.model_files)"),
    Planted("accelerate's state is loaded unverified",
            TRAINER + "test_accelerates_state_is_saved_whole_and_resumes_bit_for_bit[float32]", COMPAT,
            "manifest.verify(folder) if self.is_local_main_process else", ""),
    Planted("only sizes are compared", FOLDER + "test_every_damage_is_told_by_file_and_what_to_do[flipped]", MANIFEST,
            "if changed:", "if False:"),
    Planted("a missing file is no damage", FOLDER + "test_every_damage_is_told_by_file_and_what_to_do[missing]",
            MANIFEST,
            "if not wanted(name):", "if not wanted(name) or not (folder / name).exists():"),
    Planted("the manifest's own checksum is not looked at",
            FOLDER + "test_every_flipped_bit_of_the_manifest_itself_is_seen", MANIFEST,
            'if whole["sha256"] != _hash(rest):', "if False:"),
    Planted("a manifest names files outside its folder",
            FOLDER + "test_a_manifest_cannot_name_files_outside_its_folder", MANIFEST,
            'if path.is_absolute() or ".." in path.parts or not path.parts:', "if False:"),
    Planted("torch's own checksums are not looked at",
            TRAINER + "test_without_a_manifest_torchs_own_checksums_are_looked_at[optimizer.pt-flipped]", COMPAT,
            "torch_file.check_zip(folder / name)"),
    # ---- loading
    Planted("a pickle is executed", FOLDER + "test_a_pickle_is_never_executed", TORCH, "weights_only=True, mmap",
            "weights_only=False, mmap"),
    Planted("loading reads a second copy of the state into memory", "checkpoint/test_memory.py::test_by_itself", TORCH,
            "mmap=mapped", "mmap=False"),
    Planted("the Trainer's load reads a second copy of the state into memory",
            "checkpoint/test_memory.py::test_through_a_trainer", COMPAT,
            "return torch_file.read(f, original)", "return original(f, *args, **kwargs)"),
    Planted("without optimizer.pt Adam begins anew",
            TRAINER + "test_a_checkpoint_without_optimizer_state_does_not_begin_anew_silently", COMPAT,
            "if not (folder / name).is_file():", "if False:"),
    Planted("another model's checkpoint is loaded", TRAINER + "test_another_model_is_refused[other0]", TABLE,
            "if strange or shapes:", "if False:"),
    Planted("masters are lost to 16-bit weights", TRAINER + "test_16_bit_weights_do_not_become_fp32_masters", TABLE,
            "if was in _SIXTEEN:", "if False:"),
    Planted("what is frozen now loses its state", TRAINER + "test_frozen_here_and_trained_there_is_refused", TABLE,
            "if frozen:", "if False:"),
    Planted("a conversion is not said", TRAINER + "test_fp32_weights_go_on_in_16_bit_and_it_is_said", COMPAT,
            'logger.warning("hf_offload: %s: %s.", folder, conversion)'),
    Planted("an error does not say which checkpoint",
            TRAINER + "test_another_number_of_groups_is_refused_by_checkpoint",
            COMPAT, "raise CheckpointError(f\"checkpoint={str(folder)!r}: {error}\") from error", "raise"),
    # ---- resuming
    Planted("a resumed run saves its settings in another order", RESUME + "test_a_resumed_run_ends_in_the_same_files",
            "state.py", "group.update(new)",
            "for name in new:\n    group.pop(name)\ngroup.update(sorted(new.items()))"),
    Planted("the manifest says that all state is float32",
            RESUME + "test_a_resumed_run_ends_in_the_same_files[speculative-in_order-bf16-2-int8]", COMPAT,
            "optimizer.config.state_dtype)", '"float32")'),
    Planted("accelerate's manifest says that all state is float32",
            TRAINER + "test_accelerates_state_is_saved_whole_and_resumes_bit_for_bit[int8]", COMPAT,
            "return _described(ours[0], models[0]) if",
            "return table.describe(ours[0].param_groups, models[0]) if"),
)
# fmt: on


if __name__ == "__main__":
    sys.exit(main(PLANTED, sys.argv[1:]))
