"""The mutants of `make mutants`: mistakes against promises of README, guarantees, architecture."""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake in the package, and the test that must fail because of it.

    Parameters
    ----------
    promise : str
        What no longer holds.
    path : str
        The file, relative to the project's folder.
    old, new : str
        A text that occurs once in the file, and what replaces it.
    test : str
        A test of the everyday tier, as ``FILE::NAME`` below ``tests/``; it takes a few seconds.
    """

    promise: str
    path: str
    old: str
    new: str
    test: str


MUTANTS: tuple[Mutant, ...] = (
    # Values
    Mutant(
        "run returns rank 0's value",
        "distributor/control/attempts.py",
        "else [0]",
        "else [1]",
        "outcomes/test_values.py::test_values_arrive_whole[local]",
    ),
    Mutant(
        "run_all returns values in rank order",
        "distributor/control/attempts.py",
        "wanted = range(attempt.num_ranks) if",
        "wanted = range(attempt.num_ranks)[::-1] if",
        "outcomes/test_values.py::test_run_all_returns_each_ranks_value_in_whatever_order_they_end[local]",
    ),
    # Root causes
    Mutant(
        "a rank's own failure precedes lost connections",
        "distributor/serialization/outcome.py",
        "key=lambda failure: failure.collateral",
        "key=lambda failure: not failure.collateral",
        "serialization/test_outcome.py::test_causes_come_before_collateral_failures",
    ),
    Mutant(
        "a lost connection is known as a consequence",
        "distributor/serialization/outcome.py",
        "return is_torchs and any(",
        "return False and any(",
        "outcomes/test_root_causes.py::test_root_cause_is_raised_and_not_the_error_of_a_blocked_peer[local-all_reduce-raise-1]",
    ),
    Mutant(
        "a consequence waits for its cause",
        "distributor/policies/failure_grace.py",
        "AFTER_COLLATERAL_SECONDS if failure.collateral",
        "AFTER_CAUSE_SECONDS if failure.collateral",
        "run/test_failure_grace.py::test_the_period_ends_at_the_expected_time_and_not_before",
    ),
    # Kills, and the end of processes
    Mutant(
        "the kernel kills ranks with their supervisor",
        "distributor/node/worker/control_channel.py",
        "prctl(set_parent_death_signal, signal.SIGKILL)",
        "prctl(set_parent_death_signal, 0)",
        "test_endings.py::test_the_kernel_ends_ranks_whose_supervisor_is_killed_if_the_driver_cannot",
    ),
    Mutant(
        "ranks end with the agent although another process holds its connection",
        "distributor/node/process/supervisor.py",
        "[os.pidfd_open(peer_credentials(agent).pid), *",
        "[*",
        "test_endings.py::test_ranks_end_with_a_killed_driver_although_its_child_has_its_descriptors",
    ),
    Mutant(
        "a rank's process group ends with it while others run",
        "distributor/node/process/supervisor.py",
        "and process_group_of(child) == pid",
        "and False",
        "outcomes/test_cleanup.py::test_what_a_rank_leaves_in_its_group_ends_while_others_run[local]",
    ),
    Mutant(
        "all that ranks started ends with the run",
        "distributor/node/process/supervisor.py",
        "kill_children(lambda child: True)",
        "kill_children(lambda child: False)",
        "test_endings.py::test_processes_that_ranks_started_end_with_the_run[local-False-return]",
    ),
    Mutant(
        "a resource tracker is never killed",
        "distributor/node/process/supervisor.py",
        "to_kill = [child for child in doomed if not is_resource_tracker(child)]",
        "to_kill = doomed",
        "test_endings.py::test_processes_that_ranks_started_end_with_the_run[local-False-return]",
    ),
    Mutant(
        "the agent kills what is left of a killed supervisor's ranks",
        "distributor/node/process/supervisor.py",
        "        kill_by_environment(self._run_variables)\n",
        "",
        "test_endings.py::test_processes_that_ranks_started_end_with_a_killed_ancestor[zygote and supervisor]",
    ),
    Mutant(
        "a zygote ends with its owner",
        "distributor/node/process/zygote.py",
        "self._selector.register(self._owner, ",
        "(lambda *_: None)(self._owner, ",
        "node/test_zygote_lifetime.py::test_each_driver_has_a_zygote_that_ends_with_it",
    ),
    Mutant(
        "a node stops its ranks if the driver is gone",
        "distributor/link/driver_lease.py",
        "return True",
        "return False",
        "link/test_driver_lease.py::test_a_driver_that_is_gone_is_noticed_at_once_if_the_link_is_lost",
    ),
    Mutant(
        "exit handlers cannot hide an exit code",
        "distributor/node/worker/main.py",
        "        control.send(EXIT + bytes(exit_code))\n",
        "        pass\n",
        "test_endings.py::test_an_exit_is_reported_if_its_exit_handlers_never_end[local]",
    ),
    Mutant(
        "what a program leaves open in globals is closed",
        "distributor/node/process/exit.py",
        "names = [name for name in candidates if _is_of_program(name)]",
        "names: list[str] = []",
        "outcomes/test_open_objects.py::test_of_a_script[local-return]",
    ),
    Mutant(
        "HDF5 files that are left open are closed",
        "distributor/node/process/exit.py",
        "    _close_hdf5()\n",
        "",
        "outcomes/test_open_objects.py::test_of_hdf5[local]",
    ),
    # Attempts
    Mutant(
        "preempted attempts do not count as failures",
        "distributor/policies/retry_policy.py",
        "        count -= num_preempted\n",
        "",
        "train/test_preemption.py::test_preempted_attempts_are_not_counted_in_max_failures",
    ),
    Mutant(
        "failures are counted exactly",
        "distributor/policies/retry_policy.py",
        "if 0 <= limit < count else None",
        "if 0 <= limit <= count else None",
        "test_attempts.py::test_failures_are_counted_exactly[local]",
    ),
    Mutant(
        "an error that would repeat is not retried",
        "distributor/policies/retry_policy.py",
        "if not is_retried or isinstance(last, NOT_RETRIED):",
        "if not is_retried:",
        "test_attempts.py::test_a_failure_that_would_repeat_ends_the_run",
    ),
    Mutant(
        "a driver that receives SIGTERM waits for a checkpoint",
        "distributor/control/graceful_shutdown.py",
        "if not self._is_subscribed:",
        "if True:",
        "train/test_preemption.py::test_after_sigterm_a_rank_and_the_driver_wait_for_a_checkpoint",
    ),
    # Checkpoints
    Mutant(
        "a checkpoint counts only with all of its files",
        "distributor/train/storage/checkpoint_store.py",
        "        check_sizes(self.checkpoint(checkpoint), manifest.files)\n",
        "",
        "train/test_storage.py::test_a_file_of_another_size_in_storage_stops_the_commit",
    ),
    Mutant(
        "an incomplete manifest does not count",
        "distributor/train/storage/manifest.py",
        'if zlib.crc32(envelope["of"].encode()) != envelope["checksum"]:',
        "if False:",
        "train/test_storage.py::test_a_checkpoint_with_a_modified_manifest_is_not_committed",
    ),
    Mutant(
        "a validation is of the checkpoint that it belongs to",
        "distributor/train/storage/manifest.py",
        "if result is None or result.index != self.index:",
        "if result is None:",
        "train/test_validation.py::test_a_validation_of_an_earlier_checkpoint_of_the_same_name_is_ignored",
    ),
    Mutant(
        "a damaged checkpoint is skipped",
        "distributor/train/storage/files.py",
        "and found[1:] != (file.size, file.checksum)",
        "and False",
        "train/test_resuming.py::test_a_damaged_checkpoint_is_skipped",
    ),
    Mutant(
        "a committed checkpoint is not overwritten",
        "distributor/train/storage/checkpoint_store.py",
        "if self.manifest_of(checkpoint) is not None:",
        "if False:",
        "train/test_storage.py::test_a_committed_checkpoint_is_not_overwritten",
    ),
    Mutant(
        "a report commits the files of all ranks",
        "distributor/train/runtime/report_round.py",
        "parts = self._channel.gather(request.key, UPLOAD_TIMEOUT_SECONDS)",
        "parts = self._channel.gather(request.key, UPLOAD_TIMEOUT_SECONDS)[:1]",
        "train/test_reporting.py::test_all_ranks_files_are_one_checkpoint[local]",
    ),
    Mutant(
        "ranks without common storage are named",
        "distributor/train/runtime/resume.py",
        'if proof.get("file") not in seen',
        'if "file" not in proof',
        "train/test_report_errors.py::test_ranks_that_do_not_share_the_storage_are_named",
    ),
    Mutant(
        "reports after the checkpoint are forgotten",
        "distributor/train/storage/checkpoint_manager.py",
        'self._storage.read(f"{checkpoint}/{CHECKPOINT_LOG}")',
        "self._storage.read(RUN_LOG)",
        "train/test_resuming.py::test_reports_after_the_checkpoint_are_forgotten",
    ),
    Mutant(
        "the latest checkpoint is kept",
        "distributor/train/storage/retention.py",
        "[*best, *committed[-1:], *pending]",
        "[*best, *pending]",
        "train/test_retention.py::test_the_best_and_the_latest_checkpoints_are_kept",
    ),
    Mutant(
        "a loader resumes at its position",
        "distributor/train/torch/loaders.py",
        'sampler.start = position["seen"] if position and resumes else 0',
        "sampler.start = 0",
        "train/test_positions.py::test_each_sample_is_trained_on_once_in_each_epoch",
    ),
    # Data
    Mutant(
        "rows that equal shares left over are read after a restart",
        "distributor/data/epochs.py",
        "for span in _without_first(part, rows)] + rest",
        "for span in _without_first(part, rows)]",
        "data/test_epochs.py::test_after_restarts_fewer_rows_than_ranks_are_dropped",
    ),
    Mutant(
        "rows that were read are not read again",
        "distributor/data/epochs.py",
        "for span in _without_first(part, rows)] + rest",
        "for span in part] + rest",
        "data/test_epochs.py::test_after_restarts_on_other_numbers_of_ranks_each_row_is_read_once",
    ),
    Mutant(
        "rows of a DataFrame that Spark has computed differently are an error",
        "distributor/data/chunk_file.py",
        "if zlib.crc32(message) != spec.checksums[chunk]:",
        "if False:",
        "data/test_lost_rows.py::test_rows_that_spark_has_computed_differently_are_an_error",
    ),
    # Wire
    Mutant(
        "a link proves the secret",
        "distributor/wire/protocol.py",
        'if not hmac.compare_digest(proof, _proof(secret, b"client", hub_nonce, nonce, key, index)):',
        "if False:",
        "wire/test_protocol.py::test_a_peer_is_admitted_once_and_by_the_secret_alone",
    ),
    Mutant(
        "the hub proves the secret",
        "distributor/wire/protocol.py",
        "if not hmac.compare_digest(welcome, ",
        "if False and not hmac.compare_digest(welcome, ",
        "wire/test_hub.py::test_each_side_refuses_a_wrong_secret",
    ),
    Mutant(
        "a frame's length is limited",
        "distributor/wire/protocol.py",
        "if not 0 < length <= MAX_FRAME:",
        "if not 0 < length:",
        "wire/test_protocol.py::test_a_frame_of_invalid_length_ends_only_its_connection",
    ),
    Mutant(
        "a silent node is lost",
        "distributor/wire/hub.py",
        "self._events.put((peer.node, SILENT))",
        "pass",
        "wire/test_hub.py::test_a_peer_that_answers_no_heartbeat_is_dropped",
    ),
    Mutant(
        "a failure inside Spark's error is authentic",
        "distributor/wire/sealing.py",
        "or not hmac.compare_digest(tag, _tag(body, secret))",
        "",
        "wire/test_spark_error_payload.py::test_a_changed_or_truncated_payload_is_refused",
    ),
    Mutant(
        "a failure inside Spark's error is encrypted",
        "distributor/wire/sealing.py",
        "sealed = nonce + _xor(payload, nonce, secret)",
        "sealed = nonce + payload",
        "wire/test_spark_error_payload.py::test_only_the_driver_of_the_run_can_read_messages",
    ),
    # GPUs and environment
    Mutant(
        "GPU addresses are positions in the mask",
        "distributor/node/agent/worker_env.py",
        "    if all(int(address) < len(entries) for address in addresses):\n",
        "    if not set(addresses) <= set(entries):\n",
        "node/test_worker_env.py::test_spark_addresses_are_positions_in_the_mask",
    ),
    Mutant(
        "ranks on CPUs see no GPU",
        "distributor/node/agent/worker_env.py",
        "{} if node.gpus is None else",
        "{} if not node.gpus else",
        "node/test_worker_env.py::test_ranks_see_the_gpus_of_their_node",
    ),
    Mutant(
        "a user's variables cannot identify a rank",
        "distributor/node/agent/worker_env.py",
        "        **node.env,\n        **identity,\n",
        "        **identity,\n        **node.env,\n",
        "node/test_worker_env.py::test_variables_that_identify_a_rank_cannot_be_overridden",
    ),
    # Redaction
    Mutant(
        "secrets are found by their names",
        "distributor/core/redaction.py",
        "|credential|",
        "|",
        "core/test_redaction.py::test_secrets_are_recognized_by_their_names",
    ),
    Mutant(
        "a secret in two chunks is masked",
        "distributor/core/redaction.py",
        "length = len(data) if last else self._settled(self._in_bytes, data)",
        "length = len(data)",
        "core/test_redaction.py::test_the_result_is_independent_of_chunk_boundaries",
    ),
    Mutant(
        "secrets leave no failure",
        "distributor/node/agent/agent.py",
        "        failure = redact(failure, self._redaction)\n",
        "",
        "test_secrets.py::test_a_secret_does_not_leave_local_ranks",
    ),
    # Deadlines and stalls
    Mutant(
        "start_timeout holds once nodes are up",
        "distributor/policies/deadlines.py",
        "if now > self.start and not all_started:",
        "if False and not all_started:",
        "control/test_controller.py::test_ranks_that_have_not_started_end_the_run_at_start_timeout",
    ),
    Mutant(
        "timeout holds for a run without any link",
        "distributor/policies/deadlines.py",
        "self._end = started + self._timeout + UNLINKED_SECONDS",
        "pass",
        "control/test_controller.py::test_a_run_without_a_link_ends_a_minute_after_its_timeout",
    ),
    Mutant(
        "a cancelled run cancels its Spark job",
        "distributor/spark/spark_job.py",
        "spark.sparkContext.cancelJobsWithTag(self._tag)",
        "pass",
        "launch/test_spark_job.py::test_a_job_is_cancelled_and_no_other_one_is",
    ),
    Mutant(
        "a stall needs idle ranks on all nodes",
        "distributor/policies/stalls.py",
        "not nodes <= self._idle_since.keys()",
        "not nodes & self._idle_since.keys()",
        "control/test_controller.py::test_a_stall_needs_idle_ranks_on_all_nodes",
    ),
    # Preemption
    Mutant(
        "all ranks of a cluster receive a preemption notice",
        "distributor/control/controller.py",
        "        self._links.broadcast(messages.Preempted(tuple(hosts)))\n",
        "",
        "control/test_controller.py::test_a_node_that_is_preempted_is_known_to_all_nodes",
    ),
    Mutant(
        "a notice is due at the same call in all ranks",
        "distributor/train/runtime/preemption.py",
        '1 + max(answer["calls"] for answer in answers)',
        '1 + min(answer["calls"] for answer in answers)',
        "train/test_preemption_notices.py::test_notices_to_all_ranks_are_due_at_one_call",
    ),
    # Output
    Mutant(
        "lines show their rank",
        "distributor/screen/labels.py",
        'else f"[{rank}]"',
        'else ""',
        "outcomes/test_output.py::test_odd_output_is_shown_and_logged[local]",
    ),
    Mutant(
        "output is received to its end if a run is cut short",
        "distributor/node/agent/agent.py",
        "self._log_relay.drain()  # the output",
        "pass  # the output",
        "outcomes/test_output.py::test_output_is_received_to_the_end_if_a_run_is_cut_short[local-node]",
    ),
    Mutant(
        "nodes of different versions are refused",
        "distributor/control/controller.py",
        '        check_alike(self._nodes.software | {"the driver": pickling_software()})\n',
        "",
        "control/test_controller.py::test_nodes_with_different_versions_fail_before_the_rendezvous",
    ),
    # Commands and settings
    Mutant(
        "the exit code is the script's",
        "distributor/cli.py",
        "return error.exit_code or 128 + (error.signal or 0)",
        "return FAILED",
        "test_cli.py::test_the_exit_code_is_that_of_the_script",
    ),
    Mutant(
        "variables of the launcher are refused",
        "distributor/settings/types.py",
        "if variable in RANK_VARIABLES:",
        "if False:",
        "test_bad_input.py::test_an_invalid_setting",
    ),
    Mutant(
        "a script waits for its runs",
        "distributor/control/future.py",
        "    before_thread_pools_end(_await_open_runs)\n",
        "    pass\n",
        "test_exit.py::test_a_script_waits_for_its_runs_and_shows_their_errors",
    ),
    # Zygotes, sources and modules
    Mutant(
        "a changed module makes a zygote stale",
        "distributor/node/process/zygote.py",
        " and not have_changed(self._files)",
        "",
        "node/test_zygote_preload.py::test_a_preloaded_module_is_imported_again_only_after_a_change",
    ),
    Mutant(
        "ranks of a zygote draw different random numbers",
        "distributor/node/process/fork_reset.py",
        "    _reseed()\n",
        "    pass\n",
        "node/test_zygote_equivalence.py::test_each_rank_of_each_run_draws_different_random_numbers",
    ),
    Mutant(
        "executors have the driver's source",
        "distributor/source.py",
        "if digest_of(files) != digest:",
        "if False:",
        "test_source.py::test_a_copy_with_another_source_is_not_imported",
    ),
    Mutant(
        "modules that imported modules import are sent",
        "distributor/spark/user_modules.py",
        "wanted += _imports_of(found",
        "_ = _imports_of(found",
        "test_modules.py::test_modules_that_imported_modules_import_are_sent",
    ),
    Mutant(
        "an executor's user may have no name",
        "distributor/node/process/scratch.py",
        'f"pymp-{secrets.token_hex(4)}"',
        "f\"pymp-{__import__('getpass').getuser()[:4]}-{secrets.token_hex(4)}\"",
        "test_unnamed_users.py::test_runs_work_if_the_python_of_executors_has_such_a_user",
    ),
    # The tasks of an ordinary job
    Mutant(
        "a copy of a task that Spark starts does nothing",
        "distributor/launchers/spark/gang/gang.py",
        "first.setdefault((member.job, member.partition), member)",
        "first[member.job, member.partition] = member",
        "launch/test_ordinary_jobs.py::test_a_second_task_for_a_partition_waits_until_the_first_has_gone",
    ),
    Mutant(
        "the end of an earlier attempt's node is not that of the next",
        "distributor/launchers/spark/gang/gang.py",
        "serial not in (work.serial, None)",
        "False",
        "launch/test_ordinary_jobs.py::test_the_end_of_an_earlier_attempt_is_not_that_of_the_next",
    ),
    # Cluster managers and storage
    Mutant(
        "the end of a decommissioned executor is a preemption",
        "distributor/_compat/spark_texts.py",
        r"|\bExecutor decommission\b",
        "",
        "launch/test_lost_executors.py::test_an_executor_that_was_taken_back",
    ),
    Mutant(
        "a manifest that storage does not deliver is an error",
        "distributor/filesystems.py",
        "    open_input_stream = open_input_file\n",
        "",
        "train/test_storage.py::test_a_manifest_that_cannot_be_read_is_an_error",
    ),
    # MLflow
    Mutant(
        "an unavailable MLflow server does not end the training",
        "distributor/node/worker/mlflow_hooks.py",
        "if not _is_server_error(error):\n                raise\n            self._losses",
        "if True:\n                raise\n            self._losses",
        "tracking/test_server_failures.py::test_training_continues_if_the_server_goes_away[local]",
    ),
    Mutant(
        "ranks that do not log have a read-only MLflow",
        "distributor/node/worker/mlflow_hooks.py",
        "return _ReadOnlyStore(store, self._run_id)",
        "return _FaultTolerantStore(store, self._run_id, self._losses)",
        "tracking/test_job_run.py::test_only_the_first_rank_logs_artifacts_and_models[local]",
    ),
)
