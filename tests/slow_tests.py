"""What `make test` leaves to `make test-all`, besides tests with the mark `slow`.

FILES are left out whole and not imported: MLflow alone takes seconds, in each worker. CASES are functions that are left
out; the cases whose names begin with one of the words beside a function stay in `make test`.
"""

from __future__ import annotations

FILES = {
    "chaos/test_masked_kills.py",
    "chaos/test_network_faults.py",
    "chaos/test_power_loss.py",
    "chaos/test_random_kills.py",
    "docs/test_docs_site.py",
    "dst/test_dst.py",
    "notebooks/test_notebooks.py",
    "study/test_report_browser.py",
    "track/test_track_mlflow.py",
    "ui/test_ui_browser.py",
}

CASES: dict[str, dict[str, set[str]]] = {
    "adversary/test_attacked_runs.py": {
        "test_updates_that_wait_on_disk_are_attacked_as_those_in_memory": {"alie-None", "ipm-None"},
    },
    "algorithms/test_adaptive_top_k.py": {
        "test_it_learns_with_a_tenth_of_the_numbers": set(),
    },
    "algorithms/test_admm.py": {
        "test_its_fixed_point_is_the_optimum_of_the_mean_loss": {"5-settings0"},
        "test_the_solver_passes_the_suite_of_solvers": {"solver0"},
        "test_with_enough_local_steps_it_is_the_papers_iteration": {"Scalar-reference"},
        "test_with_per_samples_its_fixed_point_is_the_ridge_regression_on_all_samples": {"stacked"},
    },
    "algorithms/test_clustering.py": {
        "test_the_state_of_restarts_and_of_a_growing_start_is_resumed": set(),
    },
    "algorithms/test_ditto.py": {
        "test_a_large_lam_ties_the_own_models_to_the_shared_one": set(),
        "test_the_solver_passes_the_suite_of_solvers": set(),
    },
    "algorithms/test_dpsgd.py": {
        "test_a_missing_party_keeps_its_model_and_the_mean_is_preserved": {"reference-ring", "stacked-random"},
        "test_parties_come_to_agree_on_the_optimum_of_the_mean_loss": set(),
    },
    "algorithms/test_fedavg.py": {
        "test_the_fixed_point_of_two_quadratics_is_that_of_the_specification": {"1-"},
    },
    "algorithms/test_fednova.py": {
        "test_unequal_rates_do_not_move_the_optimum_when_steps_are_small": set(),
        "test_unequal_steps_do_not_move_the_optimum_when_steps_are_small": set(),
        "test_without_the_division_unequal_steps_would_move_the_optimum": set(),
    },
    "algorithms/test_fedplus.py": {
        "test_a_strong_pull_brings_the_models_together": set(),
        "test_the_solver_passes_the_suite_of_solvers": {"solver2"},
    },
    "algorithms/test_mapper.py": {
        "test_a_party_chooses_the_weight_with_the_lowest_loss_on_its_held_out_samples": {
            "dapper-reference", "mapper-reference",
        },
    },
    "algorithms/test_prunefl.py": {
        "test_the_algorithm_keeps_its_promises_while_the_mask_changes": set(),
    },
    "algorithms/test_qfedavg.py": {
        "test_a_larger_q_makes_the_losses_more_even": set(),
    },
    "algorithms/test_scaffold.py": {
        "test_it_reaches_the_optimum_of_two_quadratics_where_fedavg_stops_short": set(),
    },
    "cli/test_cli.py": {
        "test_a_module_function_and_party_files_are_tasks_too": set(),
        "test_a_third_party_algorithm_registers_by_entry_point": set(),
    },
    "cli/test_progress.py": {
        "test_hansa_run_shows_it_on_a_terminal": set(),
        "test_hansa_run_shows_none_in_a_pipe": set(),
        "test_the_engine_can_be_chosen_and_a_wrong_one_is_one_sentence": set(),
    },
    "core/test_rng.py": {
        "test_coordinates_are_different_places_and_each_is_as_likely": {"1-1", "4097", "7-3"},
    },
    "deploy/test_healthcheck.py": {
        "test_the_hospitals_files_hold_the_hospitals_patients": set(),
    },
    "docs/test_howto_parts.py": {
        "test_a_part_that_is_neither_imported_nor_installed_is_unknown": set(),
        "test_installed_parts_are_found_by_name": {"with register"},
    },
    "estimators/test_tree_estimators.py": {
        "test_scikit_learns_own_checks_hold": {"ForestClassifier"},
    },
    "fusion/test_legato.py": {
        "test_a_run_keeps_the_promises_of_all_algorithms": set(),
    },
    "fusion/test_runs.py": {
        "test_a_bad_reply_changes_nothing_to_the_last_bit_and_is_reported": {"inf", "nan"},
        "test_a_huge_update_is_survived": {"reference-krum", "stacked-median", "stacked-zeno"},
        "test_engines_agree_under_every_fusion": {"mean", "median", "zeno"},
        "test_runs_with_robust_fusions_keep_the_promises_of_all_algorithms": set(),
    },
    "fuzz/test_fuzz.py": {
        "test_a_mutated_request_is_answered_or_the_connection_closed": set(),
        "test_whole_requests_in_any_order_are_answered": set(),
    },
    "hostile/test_lying_about_noise.py": {
        "test_no_record_is_read_by_choosing_clip_rate_noise_or_model": set(),
    },
    "hostile/test_lying_buffers.py": {
        "test_nobody_moves_frozen_parameters_and_lies_about_buffers_are_rejected": set(),
    },
    "hostile/test_lying_counts.py": {
        "test_a_party_that_stands_for_a_crowd_is_left_out_by_name": {"exact"},
    },
    "hostile/test_lying_openers.py": {
        "test_who_lies_about_a_shared_key_is_named_and_the_sums_are_right": set(),
    },
    "hostile/test_lying_parties.py": {
        "test_a_party_that_sends_hostile_parts_is_left_out_by_name": set(),
    },
    "hostile/test_too_much_work.py": {
        "test_parties_refuse_what_is_too_much_stop_what_nobody_awaits_and_end_when_told": set(),
    },
    "local/test_clipping_extremes.py": {
        "test_a_layers_gradient_of_any_length_is_no_longer_than_the_bound": {"dtype0"},
        "test_a_models_gradient_of_any_length_is_no_longer_than_the_bound": {"dtype0"},
    },
    "local/test_dp_sgd.py": {
        "test_every_engine_gives_what_a_deployed_party_would": {"flat-dense", "flat-dropping", "layers-linear"},
    },
    "mutants/test_mutants.py": {
        "test_survivors_are_the_changes_that_no_test_notices": set(),
        "test_the_same_seed_gives_the_same_sample": set(),
    },
    "net/test_admin.py": {
        "test_serve_listens_where_it_is_told": set(),
    },
    "net/test_bad_lines.py": {
        "test_a_slow_line_gets_a_chunk_through_that_takes_longer_than_anybody_waits": set(),
    },
    "net/test_bombs.py": {
        "test_a_compressed_body_is_refused_and_never_unpacked": {"gzip"},
        "test_an_order_as_long_as_it_may_be_takes_little_memory": {"\xc0"},
        "test_an_order_of_anything_is_refused_or_taken_as_one": set(),
    },
    "net/test_clocks.py": {
        "test_an_aggregator_that_comes_back_with_another_clock_goes_on": {"86400"},
    },
    "net/test_compressed_jobs.py": {
        "test_a_job_that_packs_models_gives_the_reference_s_bits": set(),
        "test_a_job_that_packs_updates_gives_the_reference_s_bits": set(),
        "test_a_party_whose_policy_does_not_list_the_transform_declines_and_says_so": set(),
        "test_a_private_party_accepts_a_transform_after_private_training_only": set(),
    },
    "net/test_descriptions.py": {
        "test_a_bad_description_is_its_partys_own_rejection": {"at0", "at5", "at8"},
        "test_metrics_that_nobody_can_measure_are_left_out": {"accuracy"},
        "test_metrics_that_were_not_asked_for_do_not_enter_the_record": {"model"},
    },
    "net/test_every_algorithm.py": {
        "test_four_hospitals_in_five_processes_train_the_reference_engine_s_model": set(),
    },
    "net/test_exact_jobs.py": {
        "test_a_job_with_exact_sums_gives_the_reference_s_bits": set(),
    },
    "net/test_frozen_bases.py": {
        "test_parties_train_adapters_under_a_privacy_budget": set(),
    },
    "net/test_limits.py": {
        "test_many_handshakes_that_do_not_go_on_make_room_for_one_that_does": set(),
    },
    "net/test_malformed.py": {
        "test_malformed_requests_to_a_simulations_page_print_nothing": set(),
        "test_malformed_requests_to_the_parties_port_print_no_traceback": set(),
    },
    "net/test_many.py": {
        "test_a_round_reaches_every_one_of_many_parties_once_and_fuses_every_reply": set(),
    },
    "net/test_masked_jobs.py": {
        "test_a_masked_job_gives_the_plain_model_and_each_answer_once": {"True"},
    },
    "net/test_own_models.py": {
        "test_an_aggregator_that_crashes_during_the_fine_tuning_ends_with_the_same_bits": {"ask.closed"},
        "test_parties_export_the_models_that_the_simulation_has_for_them": {"fedper-tuning2"},
    },
    "net/test_private_jobs.py": {
        "test_parties_with_a_floor_evaluate_within_the_secure_sum": {"privacy0-secure = true"},
        "test_privacy_secrecy_and_few_bits_in_one_job_over_mutual_tls": set(),
    },
    "net/test_processes.py": {
        "test_killed_parties_are_missing_and_the_others_go_on_between_the_exchanges_of_a_masked_sum_too": set(),
        "test_processes_and_the_reference_engine_give_the_same_float32_bits": {"2nn"},
    },
    "net/test_record_at_rest.py": {
        "test_a_start_that_fails_is_not_taken_for_damage_by_the_next": {"create-1", "rename-2"},
    },
    "net/test_replays.py": {
        "test_a_request_with_any_byte_changed_is_refused_or_means_the_same": set(),
    },
    "net/test_routed_jobs.py": {
        "test_a_party_that_leaves_before_its_message_keeps_its_model": set(),
        "test_an_aggregator_that_restarts_in_the_middle_of_a_route_gives_the_same_bits": {"route-send"},
    },
    "net/test_several_models.py": {
        "test_a_job_gives_the_bits_of_the_simulation_and_sends_public_samples_once": set(),
        "test_a_party_that_leaves_and_comes_back_keeps_its_model": set(),
    },
    "net/test_shutdown.py": {
        "test_a_job_comes_to_rest_and_goes_on": set(),
        "test_a_process_that_is_told_to_end_does_so_with_0_and_told_twice_does_so_at_once": set(),
    },
    "net/test_store_faults.py": {
        "test_a_job_goes_through_random_faults_to_the_same_bits": set(),
        "test_a_party_whose_disk_is_full_keeps_its_receipt_when_there_is_room_and_goes_on": {"write"},
        "test_an_aggregator_without_open_files_says_so_and_goes_on_when_it_has_some": set(),
    },
    "net/test_tracked_jobs.py": {
        "test_every_job_is_tracked_and_a_tracker_that_fails_is_none_of_its_business": set(),
    },
    "net/test_upgrade.py": {
        "test_a_job_that_was_interrupted_under_format_2_goes_on_with_the_same_parties_and_secret": set(),
    },
    "net/test_waiting.py": {
        "test_waiting_goes_on_when_the_aggregator_restarts": set(),
    },
    "net/test_workload.py": {
        "test_memory_is_bounded_by_the_operating_system_and_the_party_lives_on": set(),
    },
    "notebooks/test_study_display.py": {
        "test_results_are_one_line_and_a_table": set(),
        "test_results_plot_any_picture_of_their_report_by_its_name": set(),
        "test_results_tell_what_they_found_and_write_their_report": set(),
    },
    "plugins/test_fedma.py": {
        "test_it_keeps_the_promises_in_every_runtime": set(),
        "test_three_stages_give_a_model_that_no_party_had": {"stacked"},
    },
    "plugins/test_ifca.py": {
        "test_it_keeps_the_promises_in_every_runtime": set(),
    },
    "plugins/test_own_scores.py": {
        "test_it_keeps_the_promises_in_every_runtime": set(),
    },
    "plugins/test_prototypes.py": {
        "test_it_keeps_the_promises_in_every_runtime": set(),
    },
    "plugins/test_routed_plugins.py": {
        "test_a_routed_plugin_keeps_the_promises_in_every_runtime": set(),
    },
    "plugins/test_subprocess_engine.py": {
        "test_an_engine_gives_what_the_reference_gives": set(),
        "test_an_engine_is_asked_for_single_replies_where_each_one_is_looked_at": set(),
        "test_an_installed_package_adds_an_engine_by_its_entry_point": set(),
    },
    "privacy/test_bound.py": {
        "test_scaffold_with_a_bound_reaches_the_optimum": set(),
    },
    "run/test_adapters.py": {
        "test_engines_agree_on_adapters": {"stacked-settings0"},
    },
    "run/test_demo.py": {
        "test_the_demonstration_scores_every_hospital_under_every_regime": set(),
    },
    "run/test_diagnosis.py": {
        "test_a_run_that_never_changed_the_model_fails_with_one_sentence": set(),
    },
    "run/test_exact_runs.py": {
        "test_engines_and_separate_processes_agree_with_exact_sums": set(),
    },
    "run/test_killed_runs.py": {
        "test_a_run_that_was_killed_and_resumed_equals_one_that_was_not": set(),
        "test_the_kills_left_runs_at_different_moments": set(),
    },
    "run/test_models_and_public.py": {
        "test_an_experiment_file_names_models_and_public_samples": {"function"},
    },
    "run/test_report.py": {
        "test_the_demonstrations_report_stands_alone_and_names_its_source": set(),
    },
    "run/test_side_by_side.py": {
        "test_figures_drawn_at_once_have_the_bytes_of_figures_drawn_alone": set(),
    },
    "run/test_work.py": {
        "test_parties_in_processes_of_their_own_are_told_the_same": set(),
    },
    "schedule/test_pace.py": {
        "test_each_party_draws_its_epochs_anew_in_each_round": {"stacked"},
    },
    "secure/test_child_process.py": {
        "test_a_child_gives_what_the_function_itself_gives": set(),
        "test_a_child_that_is_killed_is_replaced_and_one_that_keeps_ending_is_reported": set(),
        "test_other_threads_go_on_while_a_large_power_is_computed": set(),
    },
    "secure/test_encrypted_sums.py": {
        "test_a_dealt_key_is_kept_until_too_few_of_those_asked_hold_it": set(),
        "test_a_party_that_is_missing_or_declines_is_left_out_of_the_sum": {"ckks", "functional", "paillier"},
        "test_a_sum_without_a_short_name_is_neither_opened_nor_written_down": {"long", "none"},
        "test_a_tree_is_what_it_is_without": {"ckks", "paillier"},
        "test_fedavg_is_what_it_is_without_to_the_precision_of_the_numbers": {"ckks", "paillier"},
        "test_naive_bayes_is_what_it_is_without": {"ckks", "paillier"},
        "test_the_sum_is_exact_for_updates_and_for_counts": {"ckks", "functional", "paillier"},
        "test_threshold_sums_stand_dropouts_at_every_exchange": {"gone0", "gone5", "gone8"},
    },
    "secure/test_evaluations.py": {
        "test_a_secure_sum_measures_what_the_plain_run_does_and_no_single_party": {
            "False-ckks", "False-masking", "True-active",
        },
    },
    "secure/test_masking.py": {
        "test_every_subset_of_dropouts_at_every_exchange_gives_the_sum_of_those_who_came_or_none": set(),
    },
    "secure/test_masking_runs.py": {
        "test_fedavg_is_itself_to_fixed_point_precision": {"reference-False", "stacked-True"},
    },
    "secure/test_ranges.py": {
        "test_encryption_changes_no_algorithm_whatever_the_size_of_what_it_sends": {
            "ckks-fednova momentum", "functional-qfedavg", "paillier-fedavg", "paillier-scaffold II",
        },
        "test_masks_change_no_algorithm_whatever_the_size_of_what_it_sends": {
            "fedadam", "fedavg", "fednova", "fsvrg", "qfedavg", "scaffold II",
        },
        "test_masks_change_no_quantity_beside_an_update_on_any_engine": {"reference"},
    },
    "secure/test_refused_asks.py": {
        "test_a_party_takes_no_share_that_it_did_not_prepare_for_or_that_strangers_own": set(),
    },
    "secure/test_threshold.py": {
        "test_a_dealing_with_a_single_wrong_verification_key_is_refused": set(),
        "test_a_wrong_partial_decryption_has_no_proof": set(),
    },
    "select/test_selectors.py": {
        "test_a_resumed_run_selects_the_same_and_gives_the_same_bits": {
            "poisson-reference", "power-of-choice-cpow-d-stacked", "tiers-adaptive-stacked", "uniform-reference",
        },
        "test_the_engines_select_the_same_parties": {"power-of-choice-pow", "tiers-adaptive", "uniform"},
    },
    "select/test_weighted.py": {
        "test_a_run_draws_large_parties_more_often": set(),
        "test_parties_are_drawn_as_often_as_successive_draws_by_size_say": set(),
    },
    "sim/test_clock.py": {
        "test_a_steps_time_is_that_of_the_model_and_does_not_rise_with_the_period": set(),
        "test_by_day_and_night_a_party_is_there_for_its_share_of_each_period": set(),
        "test_only_available_parties_are_selected": set(),
        "test_the_slowest_of_m_exponential_parties_takes_the_harmonic_number_times_the_mean": {"1-0.5"},
    },
    "sim/test_engines.py": {
        "test_every_solver_is_the_same_in_a_stack_whatever_each_party_is_told": {"alike-line"},
        "test_whole_runs_agree_and_repeat_bit_for_bit": {"batch_norm-fsvrg", "dropout-fedavg"},
    },
    "sim/test_gpu.py": {
        "test_a_failing_compiler_leaves_the_recording_as_it_is": {"cpu-alike"},
        "test_a_recorded_stack_trains_as_each_party_does_alone": {
            "convolving-gradient-cpu", "dense-gradient-cpu", "dense-sgd-cpu",
        },
        "test_batch_norm_is_recorded_where_all_batches_are_alike": set(),
        "test_batches_that_are_drawn_anew_and_may_be_empty_are_recorded_once": {"dense-cpu"},
        "test_large_dense_layers_take_their_step_inside_the_product": set(),
        "test_recurrent_layers_are_unrolled": set(),
    },
    "sim/test_hooks.py": {
        "test_a_solver_that_overrides_one_hook_answers_the_same_in_a_stack": set(),
    },
    "sim/test_memories.py": {
        "test_a_million_memories_need_little_ram_and_only_the_disk_they_use": set(),
        "test_memories_are_a_dictionary_and_a_crash_leaves_those_of_the_checkpoint": set(),
    },
    "sim/test_odd_models.py": {
        "test_models_that_a_chain_would_not_replay_are_not_replayed": {"1.0"},
        "test_rows_that_look_at_each_other_stay_with_their_party": {"dense-relative-3"},
    },
    "sim/test_workers.py": {
        "test_a_run_whose_parent_was_killed_at_work_can_be_resumed_at_once": set(),
    },
    "study/test_report_contents.py": {
        "test_a_report_is_written_as_html_and_markdown_with_each_picture_as_png_and_svg": set(),
        "test_labels_are_taken_literally_in_every_form": set(),
        "test_odd_studies_have_a_good_report": {"all failed", "one of each", "regression"},
        "test_the_page_is_well_formed_and_has_its_sections_in_order": set(),
    },
    "study/test_study_execute.py": {
        "test_a_worker_that_dies_takes_only_its_run_with_it_and_another_gives_the_bits_of_this_process": set(),
        "test_killed_in_the_middle_and_started_again_a_study_repeats_nothing": set(),
    },
    "study/test_study_measures.py": {
        "test_a_meaningless_interval_is_said_to_be_one_wherever_it_is_shown": set(),
        "test_every_view_of_a_study_by_auc_shows_the_worst_tenth_of_auc": set(),
    },
    "test_conformance.py": {
        "test_every_registered_algorithm_keeps_the_promises": {
            "d-psgd", "fedavg", "fedbuff", "naive-bayes", "scaffold",
        },
    },
    "testing/test_check_solver.py": {
        "test_every_registered_solver_keeps_the_promises": {"gradient", "scaffold", "sgd"},
        "test_solvers_with_other_fields_keep_the_promises": set(),
    },
    "track/test_track_files.py": {
        "test_console_says_a_round_a_line_and_the_last_line_is_still_the_json_object": set(),
        "test_tensorboard_reads_back_every_round_once_after_a_resume": set(),
    },
    "transforms/test_compressed_runs.py": {
        "test_a_lossless_transform_changes_no_bit_of_any_verb": set(),
        "test_every_algorithm_that_trains_works_with_int8_in_every_engine_and_after_a_resume": {
            "fedavg", "fedbuff", "scaffold",
        },
        "test_fusions_that_see_each_update_see_the_opened_update": {"reference-median", "stacked-krum"},
        "test_hostile_parts_reject_one_reply_by_name": {"reference-reduce", "stacked-gather"},
        "test_what_a_party_carries_over_is_kept_with_its_memory": {"False-reference", "True-stacked"},
    },
    "transforms/test_conformance_of_transforms.py": {
        "test_every_registered_transform_keeps_the_promises": {"by-layer", "int8", "top-k"},
        "test_other_settings_and_transforms_with_parts_that_add_or_with_a_memory_keep_them": {"Halves"},
    },
    "transforms/test_downlink.py": {
        "test_every_engine_gives_the_same_model_with_fewer_bytes_down": {"fedavg0", "fedbuff"},
        "test_separate_processes_have_the_same_bits": set(),
    },
    "transforms/test_every_transform.py": {
        "test_every_engine_gives_the_same_model": {"fedavg", "median"},
        "test_worker_processes_give_the_same_model": set(),
    },
    "transforms/test_sparsifiers.py": {
        "test_the_mean_of_scaled_rand_k_is_the_vector_and_its_error_that_of_the_card": set(),
    },
}  # fmt: skip
