"""Takes one wait after the other out of a copy of the engine, and sees that the test named for it fails.

    python tests/engine/planted.py            # all of them: a quarter of an hour on two cores
    python tests/engine/planted.py slot ring  # those whose names contain one of these words

Exit status 1 if a bug is not caught. README.md shows the same list as a table. Whoever adds a wait adds a line here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LAYOUT = {"hf_offload": "hf_offload", "kernels": "hf_offload/kernels", "callbacks": "hf_offload/callbacks",
          "recipes": "hf_offload/recipes", "tests": "tests", "pyproject.toml": "pyproject.toml"}  # fmt: skip
"""Where each folder lies in the copy: as it would be installed, so that one entry of PYTHONPATH finds all of it. An
editable install looks behind PYTHONPATH."""
HUNG_S = 90.0
"""Seconds after which a test that goes on has failed: the bug made it hang."""


@dataclass(frozen=True)
class Planted:
    """One bug.

    Attributes:
        name: the wait that is taken out, in words.
        test: below `tests/`; it must fail then.
        file: below `hf_offload/`.
        old: the source text that is replaced, its lines without their indentation; it must occur exactly once.
        new: what replaces it; its lines are indented as the line where `old` begins.
    """

    name: str
    test: str
    file: str
    old: str
    new: str = "pass"

    def plant(self, source: str) -> str:
        """`source` with the bug in it."""
        found = list(re.finditer(r"\n *".join(map(re.escape, self.old.split("\n"))), source))
        assert len(found) == 1, f"{self.name}: its text occurs {len(found)} times in {self.file}"
        start, end = found[0].span()
        line = source[source.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip(" "))]
        return source[:start] + self.new.replace("\n", f"\n{indent}") + source[end:]


# fmt: off
WAITS, STREAMED, GUESSES, DELAYED, INTERRUPTS = (
    f"engine/test_{name}.py::" for name in ("waits", "streaming", "speculation", "delayed", "interrupts")
)
OUTSIDE, SKIPPED = (f"optimizer/test_{name}.py::" for name in ("outside_matrix", "skipped_steps"))
ENGINE, PIPELINE, SCHEDULES, STREAMING, INLETS, SPECULATION, GATES, HOST, OPTIMIZER = (
    "engine/engine.py", "engine/pipeline.py", "engine/schedules.py", "engine/streaming.py", "engine/inlets.py",
    "engine/speculation.py", "engine/gates.py", "transport/host.py", "optimizer.py",
)
UP = "stage.transport.up[k % stage.slots][: work.bucket.nbytes].view(NUMPY_WIRE[work.bucket.wire])"
"""An up slot, not waited for."""
PLANTED = (
    # ---- the model's hooks
    Planted("a unit's weights, in its pre-hook", WAITS + "test_a_unit_waits_for_its_weights", ENGINE,
            "*self.gates.needs_of(guard)))", "*self.gates.needs_of(guard)[:0]))"),
    Planted("unguarded weights, in the root's pre-hook", WAITS + "test_weights_behind_no_hook_are_awaited_at_the_root",
            ENGINE, "_before_forward()\nself._wait_units(self._unguarded())", "_before_forward()"),
    Planted("unguarded weights, in any other pre-hook",
            WAITS + "test_where_the_root_is_never_called_the_first_hook_stands_for_it", ENGINE,
            "(*self._unguarded(), *self.gates.needs_of(guard))", "self.gates.needs_of(guard)"),
    Planted("the tail, after the last block", WAITS + "test_the_tail_is_awaited_after_the_last_block", ENGINE,
            "self._wait_units({self.gates.units.tail})"),
    Planted("unguarded weights, before a micro-batch", WAITS + "test_train_waits_for_what_no_hook_guards", ENGINE,
            'guards."""\nself._wait_units(self._unguarded())', 'guards."""'),
    Planted("everything at the root, where no forward was seen",
            WAITS + "test_where_no_forward_was_seen_everything_is_awaited_at_the_root", GATES,
            "set(range(len(self.units.units)))", "set(self._unguarded)"),
    Planted("that no weight was read before it arrived, at step()",
            "engine/test_unhooked.py::test_a_weight_that_was_read_too_early_is_told_and_awaited_from_then_on", ENGINE,
            "if early:", "if False:"),
    Planted("kept gradients, in the first hook", WAITS + "test_kept_gradients_wait_for_their_copies", ENGINE,
            "if self._may_be_kept:\nself._wait_for_kept_gradients()"),
    # ---- inside the pipeline
    Planted("that a bucket is on its way", WAITS + "test_a_unit_waits_for_its_weights", PIPELINE,
            "self._wait(lambda: len(step.events) > k, _name(step, k))"),
    Planted("that a bucket has arrived", WAITS + "test_a_unit_waits_for_its_weights", PIPELINE,
            "k, _name(step, k))\nself._join(step, k)", "k, _name(step, k))"),
    Planted("a new step's copies are joined anew", WAITS + "test_a_unit_waits_for_its_weights", PIPELINE,
            "self._joined = {}\nself._checked", "self._checked"),
    Planted("a new step's units are awaited anew", WAITS + "test_a_unit_waits_for_its_weights", ENGINE,
            "self._waited_to = {}\nself._last", "self._last"),
    Planted("that buckets which are there have arrived for the caller",
            "engine/test_in_flight.py::test_a_weight_that_was_awaited_may_be_written_while_others_are_under_way",
            PIPELINE, "self._join(step, k)\nreturn True", "return True"),
    Planted("the end of the step", WAITS + "test_readers_wait_for_all", PIPELINE,
            "self._wait(lambda: step.ended, _name(step, len(step.events)))"),
    Planted("that all weights have arrived for the caller",
            "engine/test_in_flight.py::test_a_weight_written_during_its_copy_up_raises", PIPELINE,
            "self._join(step, len(step.events) - 1)"),
    Planted("all copies up, at the end of a step", WAITS + "test_a_step_ends_only_when_all_weights_have_arrived",
            PIPELINE, "stages.drain()"),
    Planted("gradients, before the host step", WAITS + "test_the_host_step_waits_for_the_gradients", SCHEDULES,
            'its range."""\nevent.wait(self.timeout_s)', 'its range."""'),
    Planted("a copy of gradients, before it is put into the store",
            "engine/test_bits.py::test_every_setting_gives_the_same_bits", SCHEDULES,
            'its range."""\nevent.wait(self.timeout_s)', 'its range."""'),
    Planted("a copy up, before its slot is free", WAITS + "test_an_up_slot_is_the_copys_until_it_has_arrived",
            SCHEDULES, "is not None:\nevent.wait(self.timeout_s)", "is not None:"),
    Planted("a free up slot, overlapped", WAITS + "test_an_up_slot_is_the_copys_until_it_has_arrived", SCHEDULES,
            "grads, stage.room(work, k % stage.slots))", "grads, " + UP + ")"),
    Planted("a free up slot, from the store, guessed right or not",
            WAITS + "test_an_up_slot_is_the_copys_until_it_has_arrived", SCHEDULES,
            "stage, work, stage.room(work, k % stage.slots))", "stage, work, " + UP + ")"),
    Planted("a free up slot, for a pending update",
            WAITS + "test_an_up_slot_is_the_copys_where_a_pending_update_goes_up", SCHEDULES,
            "room = stage.room(work, k % stage.slots)", "room = " + UP),
    Planted("a free down slot: the bound of the look-ahead",
            WAITS + "test_a_down_slot_is_the_host_steps_until_it_has_returned", SCHEDULES, "k + ring):",
            "k + ring + 1):"),
    Planted("weights on the host, before masters are made of them",
            "engine/test_bits.py::test_every_setting_gives_the_same_bits", "engine/seeding.py", ".wait(timeout_s)", ""),
    Planted("a step is told to its thread at once",
            "engine/test_in_flight.py::test_gradients_are_let_go_when_they_are_copied_not_when_the_weights_are_back",
            PIPELINE, "hits this thread\nself._wake()", "hits this thread"),
    Planted("each job is done once", INTERRUPTS + "test_a_step_is_taken_whole_or_not_at_all", PIPELINE,
            "if not job.taken:\njob", "if True:\n    job"),
    Planted("an untold step, before a wait", INTERRUPTS + "test_a_step_is_taken_whole_or_not_at_all", PIPELINE,
            "self._wake()\nstages = ", "stages = "),
    Planted("an untold step, before gradients are put away",
            WAITS + "test_gradients_that_leave_after_an_untold_step_come_after_it", PIPELINE,
            'being told of."""\nself._wake()', 'being told of."""'),
    Planted("an untold step, before the thread ends",
            WAITS + "test_an_untold_step_is_taken_though_close_is_interrupted_as_well", PIPELINE,
            'called again."""\nself._wake()', 'called again."""'),
    # ---- the step
    Planted("the step before, at step()", WAITS + "test_the_next_step_waits_for_this_one", ENGINE,
            "self._wait_step()\nrecord =", "record ="),
    Planted("the step itself, in order", WAITS + "test_in_order_a_step_has_ended_when_it_returns", ENGINE,
            "else:\npipeline.wait_all()", "else:\n    pass"),
    Planted("weights outside the model, at step()", WAITS + "test_parameters_outside_the_model_are_awaited_in_step",
            ENGINE, "self._wait_units({OUTSIDE})"),
    # ---- who reads or writes weights, state, gradients
    Planted("gradients, before they are zeroed in place", WAITS + "test_zeroing_in_place_waits_for_the_copies",
            OPTIMIZER, "self._engine.wait_gradients()"),
    Planted("all, for synchronize and eval", WAITS + "test_readers_wait_for_all", ENGINE,
            'whether they did."""\nself.wait_all()', 'whether they did."""'),
    Planted("all, for state_dict", DELAYED + "test_what_applies_the_pending_update[optimizer.state_dict]", OPTIMIZER,
            'next step."""\nself.engine.wait_outsider()', 'next step."""'),
    Planted("all, for reseed", DELAYED + "test_what_applies_the_pending_update[reseed]", ENGINE,
            "self.wait_all()\nself.watch.suspect_all", "self.watch.suspect_all"),
    Planted("all, for attach", WAITS + "test_readers_wait_for_all[attach again]", ENGINE,
            "self.wait_all()\nif self.gates", "if self.gates"),
    Planted("all, for binding", WAITS + "test_readers_wait_for_all[add_param_group, then bind]", ENGINE,
            "self.wait_all()\nself.placement", "self.placement"),
    Planted("all, for close", DELAYED + "test_what_applies_the_pending_update[close]", ENGINE,
            "self.wait_all()  # delayed", "pass  # delayed"),
    Planted("all, before the model or a part of it is read", WAITS + "test_copies_of_the_model_wait_for_all", GATES,
            'handles.append(module.register_state_dict_pre_hook(_Hook(keeper, "before_state_read")))'),
    Planted("all, before the model is copied or pickled", WAITS + "test_copies_of_the_model_wait_for_all", GATES,
            "keeper.before_state_read()"),
    Planted("all, before weights are loaded", WAITS + "test_loading_weights_waits_for_all_and_wins", ENGINE,
            "load(self) -> None:\nself.wait_all()", "load(self) -> None:\n    pass"),
    Planted("the step, before optimizer state is loaded", WAITS + "test_loading_optimizer_state_waits_for_all",
            OPTIMIZER, "self.engine.wait_all()\nself.engine.settle_state()\nload", "load"),
    Planted("a pending update, before optimizer state is loaded",
            DELAYED + "test_loading_optimizer_state_applies_it_first", OPTIMIZER,
            "self.engine.wait_all()\nself.engine.settle_state()\nload", "self.engine.settle_state()\nload"),
    Planted("the step, before the optimizer goes",
            "engine/test_lifetime.py::test_del_in_the_middle_of_a_step_ends_the_step_first", PIPELINE, "thread.join()"),
    Planted("the copies, before the transport goes",
            "transport/test_contract.py::test_a_forgotten_transport_first_ends_the_copy_under_way", HOST,
            "lane.join()"),
    Planted("the step, before optimizer.state is read", WAITS + "test_readers_wait_for_all[optimizer.state]", ENGINE,
            'writes them."""\nself._wait_step()', 'writes them."""'),
    Planted("the step, before its timeline is written",
            "engine/test_recording.py::test_a_window_of_steps_ends_with_the_step_under_way", ENGINE,
            "if not self._closed:\nself._wait_step()\nrecorded", "recorded"),
    # ---- gradients that leave during backward
    Planted("gradients that left, before anything is made of them",
            WAITS + "test_the_norm_waits_for_gradients_that_left", STREAMING,
            'self._pipeline.call(then, "gradients on their way to the host")', "then()"),
    Planted("a free down slot, before gradients leave",
            WAITS + "test_a_down_slot_is_the_stores_until_its_gradients_are_there", STREAMING,
            "if not free or self._pipeline.failed:\nwith",
            "if not free:\n    return 0\nif self._pipeline.failed:\n    with"),
    Planted("a down slot is free only when the store has its gradients",
            WAITS + "test_a_down_slot_is_the_stores_until_its_gradients_are_there", INLETS,
            "begun = stages.work(name)\nstore", "self._free.append(self._slot)\nbegun = stages.work(name)\nstore"),
    Planted("gradients that left, before seeding takes the ring", WAITS + "test_binding_waits_for_gradients_that_left",
            ENGINE, "self.stream.settle()  # seeding", "pass  #"),
    Planted("gradients that left, before changed weights take the ring",
            WAITS + "test_a_look_at_changed_weights_waits_for_gradients_that_left", ENGINE,
            "self.stream.settle()  # the ring", "pass  #"),
    Planted("gradients that left, before they are zeroed in place",
            WAITS + "test_zeroing_in_place_waits_for_gradients_that_left", STREAMING, "self.settle(write)", "write()"),
    Planted("gradients by hand, before step() returns", WAITS + "test_gradients_by_hand_are_copied_when_step_returns",
            STREAMING, "self.settle()  # whoever", "pass  #"),
    Planted("all slots, after an interrupt fell into a hook",
            INTERRUPTS + "test_an_interrupted_backward_can_be_dropped_and_tried_again", STREAMING,
            "self.settle()  # an interrupt", "pass  #"),
    Planted("slots of interrupted copies are free again",
            INTERRUPTS + "test_an_interrupted_backward_can_be_dropped_and_tried_again", STREAMING,
            "self._free_all_slots()  # after", "self._torn = False  # after"),
    Planted("gradients of incomplete buckets leave before they are zeroed",
            STREAMED + "test_a_backward_that_fails_midway", STREAMING, 'under way."""\nself.flush()', 'under way."""'),
    Planted("gradients that wait to leave are dropped with the rest",
            "engine/test_in_flight.py::test_gradients_that_wait_to_leave_are_let_go_when_they_are_dropped", STREAMING,
            "if not inlet.is_empty:\ninlet.empty()", "if not inlet.is_empty:\n    pass"),
    Planted("gradients that left, before the transport closes", WAITS + "test_close_waits_for_gradients_that_left",
            ENGINE,
            "if self._pipeline is not None:\nself._pipeline.close()\nif self.stream is not None:\nself.stream.close()\n"
            "self.placement.close()",
            "self.placement.close()\nif self._pipeline is not None:\n    self._pipeline.close()\n"
            "if self.stream is not None:\n    self.stream.close()"),
    # ---- speculation
    Planted("a guess, before its bucket's gradients change", GUESSES + "test_what_was_guessed_is_dropped", INLETS,
            "shared.speculation.forget(store.arena, k)"),
    Planted("guesses, when gradients are zeroed in place", GUESSES + "test_what_was_guessed_is_dropped", STREAMING,
            "self.shared.speculation.clear()"),
    Planted("guesses, when the state is brought home", GUESSES + "test_what_was_guessed_is_dropped", SPECULATION,
            'shows."""\nself.clear()', 'shows."""'),
    Planted("a guess counts only where the step uses its coefficients",
            GUESSES + "test_a_change_between_backward_and_step_is_a_miss", SPECULATION,
            "if not np.array_equal(guess.rows.view(np.uint32), work.coefficients().view(np.uint32)):", "if False:"),
    Planted("a guess that is half made, before its bucket's gradients change",
            GUESSES + "test_a_guess_that_is_half_made_is_forgotten", SPECULATION,
            "if self._making is not None and self._making.of == (arena.number, bucket):\nself._making = None", "pass"),
    Planted("a guess that is half made, when all are cleared", GUESSES + "test_a_guess_that_is_half_made_is_forgotten",
            SPECULATION, "self._waiting.clear()\nself._making = None", "self._waiting.clear()"),
    Planted("a guess is finished before it is taken", GUESSES + "test_step_finishes_a_guess_that_is_half_made",
            SPECULATION, "while guess is half and not guess.go_on(self._threads):", "while False:"),
    Planted("a guess is made where the state is not", GUESSES + "test_before_step_nothing_but_shadow_is_written",
            SPECULATION, "state = slot.state if arena.state_of(k) is arena.home_of(k) else arena.home_of(k)",
            "state = slot.state"),
    Planted("a guess under way, before the state is brought home",
            GUESSES + "test_the_state_is_brought_home_when_no_guess_is_under_way", ENGINE,
            'self._pipeline.call(lambda: speculation.bring_home(self.arenas), "the state")',
            "speculation.bring_home(self.arenas)"),
    Planted("the state at home, before optimizer.state is read", GUESSES + "test_state_can_be_read_at_any_moment",
            "state.py", "engine.settle_state()"),
    Planted("the state at home, before it is saved", GUESSES + "test_state_can_be_read_at_any_moment", OPTIMIZER,
            "settle_state()\nself._fill", "wait_all()\nself._fill"),
    Planted("the state at home, before state is loaded", GUESSES + "test_state_is_loaded_over_what_lies_in_the_shadow",
            OPTIMIZER, "settle_state()\nload", "wait_all()\nload"),
    Planted("the state at home, before changed weights are looked at", GUESSES + "test_what_was_guessed_is_dropped",
            ENGINE, "if suspects:\nself.settle_state()", "if suspects:\n    pass"),
    Planted("the state at home, before the optimizer closes", GUESSES + "test_close_and_del_leave_the_state_whole",
            ENGINE, "too\nself.settle_state()", "too"),
    Planted("the basis, when parameters are bound", STREAMED + "test_parameters_unfrozen_or_added_later", STREAMING,
            "self.basis = None  # it knows", "pass  # it knows"),
    Planted("the basis, when gradients are dropped",
            GUESSES + "test_settings_that_change_between_steps_are_guessed_right", STREAMING,
            'begins anew."""\nself.basis, self._guessed = None, None', 'begins anew."""'),
    Planted("the basis, at a step", GUESSES + "test_settings_that_change_between_steps_are_guessed_right", STREAMING,
            "self.inverse = inverse\nself.basis, self._guessed = None, None",
            "self.inverse, self._guessed = inverse, None"),
    # ---- delayed
    Planted("a pending update, for who reads weights", DELAYED + "test_what_applies_the_pending_update", ENGINE,
            "self._delay.pending and not self._closed:", "False:"),
    Planted("its copies, once it is on its way", DELAYED + "test_what_applies_the_pending_update", ENGINE,
            "self._send_pending(self._delay).wait_all()", "self._send_pending(self._delay)"),
    Planted("it stays pending until it is taken", DELAYED + "test_ctrl_c_while_it_is_applied_does_not_lose_it", ENGINE,
            "self._pipeline.submit(StepWork((), (), delivered), self.meter.current)\ndelay.end()",
            "delay.end()\nself._pipeline.submit(StepWork((), (), delivered), self.meter.current)"),
    Planted("it may be delivered once more", DELAYED + "test_ctrl_c_while_it_is_applied_does_not_lose_it", ENGINE,
            "delay.delivering = True  #", "pass  #"),
    Planted("it stays pending until the next step is taken",
            DELAYED + "test_a_step_that_is_not_taken_keeps_the_update_that_is_pending", "engine/delay.py",
            "self._planned = delivered, buckets", "self._pending = buckets"),
    Planted("writes are looked for again after an interrupted wait",
            DELAYED + "test_a_write_over_a_pending_update_is_told_after_an_interrupted_wait_too", "engine/delay.py",
            "self.delivering = False\nif steps", "if steps"),
    Planted("it is not lost where close() is interrupted",
            DELAYED + "test_ctrl_c_in_close_does_not_lose_the_pending_update", ENGINE, "self._send_what_is_left()"),
    Planted("the step under way, before close() sends what is left",
            DELAYED + "test_ctrl_c_in_close_does_not_lose_the_pending_update", ENGINE,
            "pipeline.wait_all()\nself._send_pending(delay)", "self._send_pending(delay)"),
    Planted("nobody wrote to its weights, at step()", DELAYED + "test_a_write_to_weights_with_a_pending_update_raises",
            ENGINE, "self._check_undelivered()\nself._reseed", "self._reseed"),
    Planted("nobody wrote to its weights, when it is applied",
            DELAYED + "test_a_write_to_weights_with_a_pending_update_raises", ENGINE, "self._check_undelivered()\nwith",
            "with"),
    # ---- the transport and the bell
    Planted("a copy waits for what the device was asked before",
            "bench/test_pipeline_bench.py::test_a_gradient_is_not_copied_before_the_device_has_made_it", HOST,
            "max(time.perf_counter(), self._after)", "time.perf_counter()"),
    Planted("gradients let weights pass", "transport/test_host.py::test_weights_do_not_queue_behind_gradients", HOST,
            "while self._weights_wait:\ntime.sleep(LET_PASS_S)"),
    Planted("a copy holds its memory",
            "transport/test_contract.py::test_owners_live_until_the_copy_is_done_and_no_longer", HOST,
            "(segments, ring)\nself._slot", "([s._replace(owner=None) for s in segments], ring)\nself._slot"),
    Planted("a copy that slips in behind the end fails",
            "transport/test_host.py::test_a_copy_that_slips_in_behind_the_end_fails", HOST,
            "for the last time\nself._fail_rest()", "for the last time\n    pass"),
    Planted("who waits looks once more before it listens",
            "transport/test_bell.py::test_what_becomes_true_just_before_it_listens_is_heard", "transport/bell.py",
            "while not reached():\nleft", "while True:\n    left"),
    Planted("the bell, when a bucket is on its way",
            "engine/test_unhooked.py::test_the_first_block_runs_while_the_last_weights_are_on_their_way[plain-overlapped]",
            PIPELINE, "append(event)\nself._bell.ring()", "append(event)"),
    Planted("the bell, when a step has ended", WAITS + "test_readers_wait_for_all", PIPELINE, "job.end()\nbell.ring()",
            "job.end()"),
    Planted("the bell, when a copy has ended", WAITS + "test_a_unit_waits_for_its_weights", HOST,
            "self._ended = True\nself._bell.ring()", "self._ended = True"),
    # ---- what is no wait but guards the same memory
    Planted("nobody wrote to gradients while they were copied",
            WAITS + "test_a_write_to_a_gradient_behind_our_back_raises", SCHEDULES, "work.check_gradients_unchanged()"),
    Planted("the same, once more at the end", WAITS + "test_a_write_whose_version_moves_late_raises_too", PIPELINE,
            "self.work.check_gradients_unchanged()"),
    Planted("nobody wrote to weights before their copy", WAITS + "test_a_write_to_weights_before_their_copy_raises",
            SCHEDULES, "work.check_weights_unwritten()"),
    Planted("nobody wrote to weights during their copy",
            "engine/test_in_flight.py::test_a_weight_written_during_its_copy_up_raises", PIPELINE,
            "step.delivered[n].check_arrived_unwritten()"),
    Planted("the same, in each step", "engine/test_in_flight.py::test_a_weight_written_during_its_copy_up_raises",
            PIPELINE, "self._checked = 0\nself._step", "self._step"),
    Planted("gradients' memory, until it was copied",
            "engine/test_in_flight.py::test_gradients_live_until_they_are_copied_whatever_takes_their_place",
            "engine/taking.py", "grads[i], storages[i] = value, value.untyped_storage()", "grads[i] = value"),
    Planted("a backward over new weights raises",
            "engine/test_gates.py::test_a_backward_through_a_retained_graph_raises_instead_of_using_new_weights",
            ENGINE, "torch.autograd.graph.increment_version(params)"),
    Planted("no parameter was resized, at a step",
            "optimizer/test_parameters.py::test_a_parameter_that_changes_after_its_state_was_made_is_refused",
            "engine/taking.py", "arena_.glance(indices)"),
    Planted("no two parameters share memory",
            "optimizer/test_parameters.py::test_two_parameters_that_share_memory_are_refused", ENGINE, "check_apart([",
            "list(["),
    # ---- weights changed from outside
    Planted("guesses on old masters are dropped", OUTSIDE + "test_a_write_between_backward_and_step", ENGINE,
            "if suspects:\nself.settle_state()", "if suspects:\n    self._wait_step()"),
    Planted("a write that moved the version counter", OUTSIDE + "test_a_write_that_shows_needs_no_wait_between_"
            "backward_and_step", "engine/watch.py", "p._version != v or p.data_ptr() != at", "p.data_ptr() != at"),
    Planted("a write that moved the address", OUTSIDE + "test_a_write_that_shows_needs_no_wait_between_backward_and_"
            "step", "engine/watch.py", "p._version != v or p.data_ptr() != at", "p._version != v"),
    Planted("a write that only the checksum shows", OUTSIDE + "test_a_write_after_a_step", "engine/watch.py",
            "return sorted(moved + [i for i in others if self._changed(left.params[i])])", "return moved"),
    Planted("checksums from the first forward on",
            OUTSIDE + "test_a_write_after_the_first_forward_and_before_the_first_step", ENGINE,
            "self.watch.arm()  # before the first step nobody has a reason to wait before writing to weights"),
    Planted("checksums again after reseed", OUTSIDE + "test_a_write_after_reseed", ENGINE,
            "self.watch.arm()  # whoever asked may write again"),
    Planted("a skipped step keeps the checksums", OUTSIDE + "test_a_write_before_a_step_that_is_skipped", ENGINE,
            "self.skips.add()", "self.skips.add()\nself.watch.settled()"),
    Planted("a load waits for what is under way", OUTSIDE + "test_a_state_dict_is_loaded_without_any_wait", ENGINE,
            "def before_state_load(self) -> None:\nself.wait_all()", "def before_state_load(self) -> None:\n    pass"),
    Planted("memory that parameters came to share", OUTSIDE + "test_what_is_refused_harms_nothing", ENGINE,
            "check_apart(p for a in self.arenas for p in a.params)  # `a.data = b.data` shows as another address"),
    Planted("whole modules that were replaced",
            "optimizer/test_census.py::test_a_replaced_parameter_is_refused_before_anything_is_stepped",
            "engine/census.py", "(*seats, *ways)]\nself._keys", "seats]\nself._keys"),
    Planted("the model is looked at where nothing has a gradient",
            "optimizer/test_census.py::test_also_where_all_that_the_optimizer_has_is_gone", OPTIMIZER,
            "self.engine.check_model()\nfound = self.engine.gather(self.param_groups)",
            "found = self.engine.gather(self.param_groups)\nif found.items:\n    self.engine.check_model()"),
    # ---- steps that are not taken
    Planted("a scaler's skips are counted", SKIPPED + "test_the_course_of_a_run", "compat.py", "ours.skip_step()"),
    Planted("a skip drops what was pending", SKIPPED + "test_a_scaler_that_skips_drops_what_was_pending",
            "engine/scaling.py", "inverse = self._inverse\nself.clear()", "inverse = self._inverse"),
    Planted("guessing goes on after a skip", SKIPPED + "test_guessing_goes_on_after_a_skipped_step", ENGINE,
            "self.stream.step_taken(factor.inverse, clipped=True)"),
    Planted("a skip leaves a pending update pending",
            SKIPPED + "test_a_skipped_step_leaves_every_byte_and_a_pending_update", ENGINE, "self.skips.add()",
            "self.skips.add()\nself.wait_all()"),
    Planted("a step that is taken ends the row", SKIPPED + "test_a_step_that_is_taken_ends_the_row", ENGINE,
            "self.skips.taken()"),
    Planted("a guess is compared with the step", SKIPPED + "test_the_course_of_a_run", SPECULATION,
            "if not np.array_equal(guess.rows.view(np.uint32), work.coefficients().view(np.uint32)):", "if False:"),
)
# fmt: on


def main(words: list[str]) -> int:
    chosen = [bug for bug in PLANTED if not words or any(word in bug.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder)
        copy_to(root)
        tests = sorted({bug.test for bug in chosen})
        if (status := run(root, tests, HUNG_S * len(tests), show=True)) != 0:
            print(f"the code as it is does not pass these tests (status {status}): nothing can be told")
            return 1
        missed = [bug.name for bug in chosen if not is_caught(root, bug)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return 1 if missed else 0


def copy_to(root: Path) -> None:
    """The repository, with the kernels' own compiled code, which is found by the hash of their source."""
    for source, to in LAYOUT.items():
        copy = shutil.copytree if (REPOSITORY / source).is_dir() else shutil.copy2
        copy(REPOSITORY / source, root / to)


def is_caught(root: Path, bug: Planted) -> bool:
    file = root / "hf_offload" / bug.file
    source = file.read_text()
    file.write_text(bug.plant(source))
    try:
        status = run(root, [bug.test], HUNG_S)
    finally:
        file.write_text(source)
    caught = status == 1 or status < 0  # 2 and above: pytest never came to run the test
    print(f"{'caught' if caught else f'NOT CAUGHT ({status})':<12} {bug.name}: {bug.test}", flush=True)
    return caught


def run(root: Path, tests: list[str], timeout_s: float, show: bool = False) -> int:
    """pytest's exit status; negative where it crashed or hung."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = (
        f"import hf_offload.kernels.cpu as cpu; assert cpu.__file__.startswith({str(root)!r}), cpu.__file__; "
        "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-q", "-x", "-n0", "-p", "no:cacheprovider"]
    ids = [f"tests/{test}" for test in tests]
    to = None if show else subprocess.DEVNULL
    call = [sys.executable, "-c", command, *options, *ids]
    try:
        return subprocess.run(call, cwd=root, env=env, timeout=timeout_s, stdout=to, stderr=to).returncode
    except subprocess.TimeoutExpired:
        return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
