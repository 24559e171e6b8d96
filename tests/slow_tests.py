"""What `make test` leaves to `make test-all`, besides tests with the mark `slow`.

FILES are left out whole and not imported: MLflow alone takes seconds, in each worker. CASES are functions that are left
out; the cases whose names begin with one of the words beside a function stay in `make test`.
"""

from __future__ import annotations

FILES = {
    "attacks/test_attack_browser.py",
    "chaos/test_masked_kills.py",
    "chaos/test_network_faults.py",
    "chaos/test_power_loss.py",
    "chaos/test_random_kills.py",
    "cluster/test_ray_conformance.py",
    "cluster/test_ray_gather.py",
    "cluster/test_ray_losses.py",
    "cluster/test_ray_objects.py",
    "docs/test_docs_site.py",
    "dst/test_dst.py",
    "hostile/test_approved_jobs.py",
    "hostile/test_lying_counts.py",
    "hostile/test_lying_evaluations.py",
    "hostile/test_lying_masks.py",
    "hostile/test_lying_parties.py",
    "hostile/test_lying_questions.py",
    "hostile/test_lying_sizes.py",
    "net/test_linear_jobs.py",
    "net/test_split_bad_input.py",
    "net/test_split_scores.py",
    "net/test_tree_jobs.py",
    "notebooks/test_notebooks.py",
    "notebooks/test_study_display.py",
    "run/test_demo.py",
    "study/test_report_browser.py",
    "track/test_track_mlflow.py",
    "ui/test_ui_browser.py",
}

CASES: dict[str, dict[str, set[str]]] = {
    "adversary/test_adversary_tables.py": {
        "test_a_run_of_a_file_records_its_adversary_and_resumes_with_it": set(),
    },
    "adversary/test_attacked_runs.py": {
        "test_engines_agree_on_attacked_runs": {"backdoor", "free-rider"},
        "test_updates_that_wait_on_disk_are_attacked_as_those_in_memory": {"alie-None", "ipm-None"},
    },
    "adversary/test_attacks.py": {
        "test_a_flipped_sign_is_a_negative_multiple_of_ones_own_update": set(),
    },
    "algorithms/test_adaptive_top_k.py": {
        "test_it_learns_with_a_tenth_of_the_numbers": set(),
    },
    "algorithms/test_admm.py": {
        "test_its_fixed_point_is_the_optimum_of_the_mean_loss": {"5-settings0"},
        "test_parties_that_did_not_take_part_keep_x_and_y_and_count_in_z": {"Scalar-reference", "line-stacked"},
        "test_the_solver_passes_the_suite_of_solvers": {"solver0"},
        "test_with_enough_local_steps_it_is_the_papers_iteration": {"Scalar-reference"},
        "test_with_per_samples_its_fixed_point_is_the_ridge_regression_on_all_samples": {"stacked"},
    },
    "algorithms/test_clustering.py": {
        "test_a_claim_of_a_cluster_that_does_not_exist_is_rejected": {"-1-0", "2-0"},
        "test_a_robust_fusion_protects_each_cluster_from_its_own_liar": set(),
        "test_it_works_with_transforms_selectors_and_small_cohorts": set(),
        "test_parties_of_two_kinds_find_two_models": {"fields5-HypCluster", "fields5-IFCA"},
        "test_the_state_of_restarts_and_of_a_growing_start_is_resumed": set(),
        "test_with_one_cluster_hypcluster_is_fedavg_bit_for_bit": {"server0-False-reference", "server0-False-stacked"},
    },
    "algorithms/test_ditto.py": {
        "test_a_large_lam_ties_the_own_models_to_the_shared_one": set(),
        "test_the_shared_model_is_that_of_fedavg_to_the_last_bit": {"reference-local1", "stacked-local0"},
        "test_the_solver_passes_the_suite_of_solvers": set(),
        "test_with_lam_0_each_party_trains_its_own_model_alone": {"reference-local0", "stacked-local0"},
    },
    "algorithms/test_dpsgd.py": {
        "test_a_missing_party_keeps_its_model_and_the_mean_is_preserved": {"reference-ring", "stacked-random"},
        "test_mixing_keeps_the_mean_and_contracts_by_the_spectral_factor": {"ring", "complete"},
        "test_parties_come_to_agree_on_the_optimum_of_the_mean_loss": set(),
    },
    "algorithms/test_push_sum.py": {
        "test_training_on_a_one_way_ring_finds_the_optimum_of_the_mean_loss": set(),
        "test_parties_that_miss_rounds_of_a_run_lose_no_mass": {"stacked"},
        "test_the_models_converge_to_the_true_mean_although_half_of_the_messages_is_lost": set(),
    },
    "algorithms/test_bayesian_gossip.py": {
        "test_a_likelihood_that_is_spread_over_rounds_counts_once": set(),
        "test_beliefs_converge_to_the_pooled_posterior_with_its_precision_over_n": {"complete", "ring"},
        "test_several_newton_steps_of_a_logistic_model_find_the_most_probable_one": set(),
        "test_a_party_that_misses_a_round_adds_its_likelihood_later": set(),
    },
    "algorithms/test_self_aggregation.py": {
        "test_on_the_complete_graph_every_party_has_the_model_of_a_central_aggregator": {"mean", "median"},
    },
    "algorithms/test_easgd.py": {
        "test_overlapped_sgd_is_the_authors_order_of_pull_and_mean": {
            "0.2-0.7-line-stacked",
            "0.95-0.3-Scalar-reference",
        },
        "test_the_centre_converges_to_the_optimum_of_the_mean_when_all_curvatures_are_the_same": set(),
        "test_without_gradients_the_sum_of_workers_and_centre_is_kept": {"settings1-reference", "settings2-stacked"},
    },
    "algorithms/test_fedasync.py": {
        "test_with_alpha_one_and_one_party_it_is_sequential_sgd": {"net"},
    },
    "algorithms/test_fedavg.py": {
        "test_the_fixed_point_of_two_quadratics_is_that_of_the_specification": {"1-"},
    },
    "algorithms/test_fedbuff.py": {
        "test_every_step_of_the_server_applies_as_many_updates_as_the_buffer_holds": {
            "1-1-latency0-arrival",
            "1-1-latency0-flush",
            "1-1-latency1-arrival",
            "1-4-latency0-arrival",
        },
    },
    "algorithms/test_fedmd.py": {
        "test_a_party_learns_a_class_that_it_does_not_have": set(),
    },
    "algorithms/test_fednova.py": {
        "test_unequal_rates_do_not_move_the_optimum_when_steps_are_small": set(),
        "test_unequal_steps_do_not_move_the_optimum_when_steps_are_small": set(),
        "test_without_the_division_unequal_steps_would_move_the_optimum": set(),
    },
    "algorithms/test_fedplus.py": {
        "test_a_run_is_the_papers_equations": {
            "0.0-FedAvgPlus-Scalar-reference",
            "0.0-FedAvgPlus-line-reference",
            "0.3-FedAvgPlus-line-reference",
            "0.3-FedAvgPlus-line-stacked",
        },
        "test_a_strong_pull_brings_the_models_together": set(),
        "test_the_solver_passes_the_suite_of_solvers": {"solver2"},
    },
    "algorithms/test_fedprox.py": {
        "test_a_party_stops_as_soon_as_its_point_is_gamma_inexact": {"0.0-40-reference--3.0", "1.0-0-stacked--3.0"},
    },
    "algorithms/test_mapper.py": {
        "test_a_party_chooses_the_weight_with_the_lowest_loss_on_its_held_out_samples": {
            "dapper-reference",
            "mapper-reference",
        },
    },
    "algorithms/test_prunefl.py": {
        "test_robust_fusions_and_transforms_see_the_remaining_parameters": {"None-norm-clip", "int8-median"},
        "test_the_algorithm_keeps_its_promises_while_the_mask_changes": set(),
    },
    "algorithms/test_qfedavg.py": {
        "test_a_larger_q_makes_the_losses_more_even": set(),
    },
    "algorithms/test_scaffold.py": {
        "test_it_reaches_the_optimum_of_two_quadratics_where_fedavg_stops_short": set(),
        "test_the_servers_control_variate_is_the_mean_of_the_parties": {"settings1-I-reference", "settings1-I-stacked"},
    },
    "classical/test_id3.py": {
        "test_the_tree_is_that_of_the_union_whoever_holds_which_row": set(),
    },
    "classical/test_linear.py": {
        "test_the_hinge_machine_approaches_its_minimum_and_does_not_depend_on_the_division": set(),
    },
    "classical/test_tree_leakage.py": {
        "test_masked_messages_do_not_tell_which_party_holds_a_row": set(),
        "test_masked_messages_show_no_row_and_their_sums_show_rows_of_all_parties_together": set(),
        "test_with_min_rows_an_aggregator_that_knows_some_holders_learns_others_from_sums": set(),
    },
    "cli/test_cli.py": {
        "test_a_module_function_and_party_files_are_tasks_too": set(),
        "test_a_third_party_algorithm_registers_by_entry_point": set(),
        "test_the_examples_run": {"matching", "split-sequential"},
    },
    "cli/test_newcomers.py": {
        "test_a_file_in_the_place_of_a_run_is_one_sentence": set(),
        "test_a_folder_of_a_finished_run_is_not_said_to_be_resumable": set(),
        "test_show_prints_the_configuration": set(),
        "test_the_report_says_who_was_asked": set(),
    },
    "cli/test_progress.py": {
        "test_hansa_run_shows_it_on_a_terminal": set(),
        "test_hansa_run_shows_none_in_a_pipe": set(),
        "test_the_engine_can_be_chosen_and_a_wrong_one_is_one_sentence": set(),
    },
    "core/test_gateway.py": {
        "test_every_op_that_reads_samples_fails_when_the_gateway_refuses": set(),
    },
    "core/test_imports.py": {
        "test_a_party_can_train_without_loading_a_runtime": set(),
        "test_a_run_of_a_dense_model_loads_neither_the_compiler_nor_symbolic_algebra": set(),
    },
    "core/test_norms.py": {
        "test_a_length_is_that_of_exact_arithmetic": {"dtype1"},
    },
    "core/test_rng.py": {
        "test_coordinates_are_different_places_and_each_is_as_likely": {"1-1", "4097", "7-3"},
    },
    "core/test_samples.py": {
        "test_a_model_without_a_last_dimension_takes_targets_in_a_column": set(),
    },
    "core/test_stored.py": {
        "test_a_sum_over_files_has_the_bits_of_the_sum_in_memory": {
            "1024-1-shape0-dtype0",
            "1024-1-shape0-dtype1",
            "1024-1-shape0-dtype2",
            "1024-1-shape0-dtype3",
        },
        "test_an_encoding_is_safetensors_own": set(),
    },
    "data/test_picture.py": {
        "test_a_picture_is_written": {"4-30", "5-None"},
    },
    "deploy/test_healthcheck.py": {
        "test_the_hospitals_files_hold_the_hospitals_patients": set(),
    },
    "docs/test_docs_snippets.py": {
        "test_an_algorithm_of_ones_own_is_found_once_it_is_installed": set(),
    },
    "docs/test_howto_parts.py": {
        "test_a_part_that_is_neither_imported_nor_installed_is_unknown": set(),
        "test_installed_parts_are_found_by_name": set(),
    },
    "estimators/test_estimators.py": {
        "test_any_torch_task_and_any_algorithm_is_an_estimator": set(),
    },
    "estimators/test_tree_estimators.py": {
        "test_missing_values_masks_importances_and_clones": set(),
        "test_scikit_learns_own_checks_hold": {"ForestClassifier"},
    },
    "fusion/test_each_rule.py": {
        "test_huge_updates_do_not_matter_within_the_bound": {"dtype0-Median()", "dtype1-TrimmedMean(beta=0.3)"},
    },
    "fusion/test_geometric.py": {
        "test_no_scale_is_too_small_or_too_large": set(),
    },
    "fusion/test_large.py": {
        "test_rules_give_the_same_bits_from_a_file_as_from_memory": {
            "False-MatchPermute(inner=WeightedMean(uniform=None), sweeps=5)",
            "True-MatchPermute(inner=Median(), sweeps=5)",
            "True-Median()",
            "True-TrimmedMean(beta=0.45)",
        },
    },
    "fusion/test_legato.py": {
        "test_a_run_keeps_the_promises_of_all_algorithms": set(),
        "test_methods_that_fuse_pass_the_memory_on": {"fedavg", "fedper"},
        "test_random_noise_of_one_party_in_one_layer_moves_the_model_less_in_a_round_than_under_the_mean": set(),
    },
    "fusion/test_rules.py": {
        "test_equal_updates_give_that_update": {
            "MatchPermute(inner=Median(), sweeps=5)",
            "MatchPermute(inner=WeightedMean(uniform=None), sweeps=5)",
            "Median()",
            "Zeno(b=None, rho=0.0005, gamma=1.0, samples=32)",
        },
        "test_moving_all_updates_moves_the_result": {
            "MatchPermute(inner=Median(), sweeps=5)",
            "MatchPermute(inner=WeightedMean(uniform=None), sweeps=5)",
        },
        "test_scaling_all_updates_scales_the_result": {"Median()", "WeightedMean(uniform=None)"},
        "test_the_order_of_updates_does_not_matter": {
            "MatchPermute(inner=Median(), sweeps=5)",
            "MatchPermute(inner=WeightedMean(uniform=None), sweeps=5)",
            "Median()",
            "TrimmedMean(beta=0.45)",
        },
        "test_updates_that_are_not_finite_are_left_out_bit_for_bit": {
            "MatchPermute(inner=Median(), sweeps=5)",
            "Median()",
            "NormClip(bound=0.5, weighted=False)",
            "TrimmedMean(beta=0.2)",
        },
    },
    "fusion/test_runs.py": {
        "test_a_bad_reply_changes_nothing_to_the_last_bit_and_is_reported": {
            "inf-meamed",
            "inf-multi-krum",
            "inf-norm-clip",
            "inf-trimmed-mean",
        },
        "test_a_huge_update_is_survived": {"reference-krum", "stacked-median", "stacked-zeno"},
        "test_engines_agree_under_every_fusion": {"mean", "median", "zeno"},
        "test_replies_on_disk_give_the_bits_of_replies_in_memory": {"trimmed-mean", "zeno"},
        "test_runs_with_robust_fusions_keep_the_promises_of_all_algorithms": set(),
        "test_what_comes_beside_the_update_is_no_way_in": {"meamed", "median"},
    },
    "fuzz/test_fuzz.py": {
        "test_a_mutated_request_is_answered_or_the_connection_closed": set(),
        "test_a_reader_takes_mutated_input_or_refuses_it": {
            "ask",
            "client.https_url",
            "keys.identity_of",
            "wire.Enrolment",
        },
        "test_whole_requests_in_any_order_are_answered": set(),
    },
    "fuzz/test_hostile_asks.py": {
        "test_every_policy_is_answered_by_replies_too": set(),
    },
    "hostile/test_lying_about_noise.py": {
        "test_no_record_is_read_by_choosing_clip_rate_noise_or_model": set(),
    },
    "hostile/test_lying_buffers.py": {
        "test_nobody_moves_frozen_parameters_and_lies_about_buffers_are_rejected": set(),
    },
    "hostile/test_lying_cohorts.py": {
        "test_a_promise_of_a_large_cohort_gets_an_aggregator_no_smaller_sum": set(),
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
    "kernel/test_apart.py": {
        "test_a_sum_is_exactly_the_sum_of_what_each_sample_adds_alone": {"dense-dtype1", "images-dtype1"},
    },
    "kernel/test_discrete_gaussian.py": {
        "test_the_tail_beyond_the_table_follows_the_distribution": {"0-40.0"},
    },
    "local/test_clipping_extremes.py": {
        "test_a_layers_gradient_of_any_length_is_no_longer_than_the_bound": {"dtype0"},
        "test_a_models_gradient_of_any_length_is_no_longer_than_the_bound": {"dtype0-layer]", "dtype0-layers"},
    },
    "local/test_dp_sgd.py": {
        "test_every_engine_gives_what_a_deployed_party_would": {"flat-dense", "flat-dropping", "layers-linear"},
    },
    "local/test_optimisers.py": {
        "test_a_party_trains_as_pytorchs_optimiser_does": {"decay-reference", "decay-stacked"},
    },
    "matching/test_matched_layers.py": {
        "test_a_missing_party_comes_back_in_the_next_stage": set(),
        "test_convolutions_and_sequences_learn": set(),
        "test_cycles_start_from_each_partys_part_of_the_matched_network": set(),
    },
    "matching/test_permute.py": {
        "test_it_is_the_fusion_of_an_averaging_algorithm_or_refused": {
            "easgd",
            "fedper",
            "optimal-averaging",
            "prunefl",
        },
    },
    "matching/test_pfnm.py": {
        "test_further_rounds_start_from_each_partys_own_part": set(),
    },
    "metrics/test_measured_runs.py": {
        "test_the_summary_says_how_each_metric_combines": set(),
    },
    "models/test_models.py": {
        "test_gradients_stacked_over_parties_equal_those_of_each_party": {
            "Logistic(inputs=(13,), outputs=1)",
            "TwoNN(inputs=(1, 8, 8), outputs=3, hidden=16)",
        },
    },
    "mutants/test_mutants.py": {
        "test_survivors_are_the_changes_that_no_test_notices": set(),
        "test_the_same_seed_gives_the_same_sample": set(),
    },
    "net/test_admin.py": {
        "test_serve_listens_where_it_is_told": set(),
    },
    "net/test_approvals.py": {
        "test_a_job_goes_on_without_a_waiting_party_which_joins_once_it_is_approved": set(),
        "test_a_job_that_is_resumed_has_the_manifest_that_was_approved": set(),
        "test_an_aggregator_that_asks_for_something_else_is_refused": {"cohort", "numbers"},
    },
    "net/test_audit.py": {
        "test_every_field_of_every_kind_of_entry_is_covered": set(),
    },
    "net/test_audit_counts.py": {
        "test_an_empty_round_leaves_the_hash_of_the_state": set(),
    },
    "net/test_bad_lines.py": {
        "test_a_slow_line_gets_a_chunk_through_that_takes_longer_than_anybody_waits": set(),
    },
    "net/test_bombs.py": {
        "test_a_compressed_body_is_refused_and_never_unpacked": {"gzip"},
        "test_a_header_that_is_no_text_is_answered_with_one": set(),
        "test_an_order_as_long_as_it_may_be_takes_little_memory": {"À"},
        "test_an_order_of_anything_is_refused_or_taken_as_one": set(),
    },
    "net/test_clocks.py": {
        "test_an_aggregator_that_comes_back_with_another_clock_goes_on": set(),
    },
    "net/test_column_jobs.py": {
        "test_ids_are_read_as_often_as_the_policy_allows_over_all_jobs": set(),
    },
    "net/test_comings_and_goings.py": {
        "test_a_deadline_that_passed_while_the_aggregator_was_away_begins_again": set(),
        "test_what_a_killed_party_had_half_written_is_gone_when_it_comes_back": set(),
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
        "test_the_loss_decides_what_targets_of_different_types_are": {"cross_entropy", "mae"},
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
    "net/test_identity.py": {
        "test_one_process_at_a_time_serves_a_federation_or_runs_a_party": set(),
    },
    "net/test_limits.py": {
        "test_a_request_costs_a_token_whatever_is_answered": set(),
        "test_many_handshakes_that_do_not_go_on_make_room_for_one_that_does": set(),
    },
    "net/test_lost_probes.py": {
        "test_one_lost_probe_ends_no_connection_and_a_peer_that_has_gone_does": set(),
    },
    "net/test_malformed.py": {
        "test_malformed_requests_to_a_simulations_page_print_nothing": set(),
        "test_malformed_requests_to_the_admin_port_print_no_traceback": set(),
        "test_malformed_requests_to_the_parties_port_print_no_traceback": set(),
    },
    "net/test_manifests.py": {
        "test_the_manifest_allows_every_ask_of_a_registered_algorithm": {"fedavg", "psi", "scaffold"},
    },
    "net/test_many.py": {
        "test_a_round_reaches_every_one_of_many_parties_once_and_fuses_every_reply": set(),
        "test_each_of_many_parties_is_known_by_its_own_certificate": set(),
    },
    "net/test_masked_jobs.py": {
        "test_a_masked_job_gives_the_plain_model_and_each_answer_once": {"True"},
    },
    "net/test_matching_jobs.py": {
        "test_a_deployed_matching_has_the_rows_of_its_simulation_and_the_aggregator_sees_sizes": set(),
        "test_a_linkage_needs_the_word_of_every_owner": set(),
        "test_a_matching_goes_on_after_a_restart_of_the_aggregator": set(),
        "test_a_party_refuses_a_matching_with_more_people_than_its_owner_allows": set(),
    },
    "net/test_measured_jobs.py": {
        "test_a_deployed_job_measures_the_bits_of_the_simulation": set(),
    },
    "net/test_own_models.py": {
        "test_a_delivered_model_is_forgotten_with_its_job": set(),
        "test_a_party_s_policy_may_refuse_fine_tuning_and_the_others_go_on": set(),
        "test_a_party_with_a_privacy_floor_fine_tunes_and_keeps_the_metrics": set(),
        "test_an_aggregator_that_crashes_during_the_fine_tuning_ends_with_the_same_bits": {"ask.closed"},
        "test_no_answer_to_a_fine_tuning_has_content": set(),
        "test_parties_export_the_models_that_the_simulation_has_for_them": {"fedper-tuning2"},
        "test_the_command_exports_at_the_party": set(),
        "test_what_cannot_be_exported_is_refused_in_one_sentence": set(),
    },
    "net/test_policy.py": {
        "test_a_partys_own_work_is_what_it_trains_with": {"adam-lr = 0.02", "sgd-epochs = 3"},
    },
    "net/test_predicting_jobs.py": {
        "test_a_pulled_model_and_a_partys_own_model_predict_files": set(),
    },
    "net/test_private_jobs.py": {
        "test_a_party_that_declines_costs_the_evaluation_and_not_the_round": set(),
        "test_parties_with_a_floor_evaluate_within_the_secure_sum": set(),
        "test_privacy_secrecy_and_few_bits_in_one_job_over_mutual_tls": set(),
    },
    "net/test_processes.py": {
        "test_a_replay_under_another_configuration_fails_loudly": set(),
        "test_bytes_are_counted_as_in_simulation": set(),
        "test_killed_parties_are_missing_and_the_others_go_on_between_the_exchanges_of_a_masked_sum_too": set(),
        "test_processes_and_the_reference_engine_give_the_same_float32_bits": set(),
        "test_simulated_devices_do_to_processes_what_they_do_to_a_simulation": set(),
    },
    "net/test_reasons.py": {
        "test_who_refuses_a_preparation_is_left_out_of_it_and_the_others_go_on": set(),
    },
    "net/test_record_at_rest.py": {
        "test_a_start_that_fails_is_not_taken_for_damage_by_the_next": {"create-1", "rename-2"},
    },
    "net/test_rejections.py": {
        "test_a_bad_reply_is_refused_with_the_reason_and_changes_nothing": {"huge weight", "one more dimension"},
    },
    "net/test_reloading.py": {
        "test_a_party_takes_a_new_policy_and_refuses_a_bad_one": set(),
        "test_an_ask_under_way_finishes_under_the_policy_with_which_it_began": set(),
    },
    "net/test_replays.py": {
        "test_a_job_whose_every_request_comes_twice_or_more_ends_with_the_same_bits": set(),
        "test_a_request_with_any_byte_changed_is_refused_or_means_the_same": set(),
    },
    "net/test_rounds.py": {
        "test_two_jobs_at_once_do_not_touch_each_other": set(),
    },
    "net/test_routed_jobs.py": {
        "test_a_party_accepts_messages_of_its_pinned_peers_alone": set(),
        "test_a_party_that_forgets_its_keys_declines_and_the_others_go_on": set(),
        "test_a_party_that_leaves_after_its_message_keeps_its_model_and_the_others_use_it": set(),
        "test_a_party_that_leaves_before_its_message_keeps_its_model": set(),
        "test_an_aggregator_that_restarts_in_the_middle_of_a_route_gives_the_same_bits": {"route-send"},
        "test_the_aggregator_never_gets_the_models_that_parties_send": set(),
    },
    "net/test_session_jobs.py": {
        "test_a_message_that_the_aggregator_changed_is_refused": {"renumbered", "shortened"},
        "test_a_party_that_fails_in_the_middle_comes_back_and_the_session_is_repeated": set(),
        "test_an_aggregator_that_restarts_in_the_middle_repeats_the_session": set(),
    },
    "net/test_sessions.py": {
        "test_a_thief_in_the_middle_of_a_sum_can_unmask_it_and_a_thief_after_it_cannot": set(),
    },
    "net/test_several_models.py": {
        "test_a_job_gives_the_bits_of_the_simulation_and_sends_public_samples_once": set(),
        "test_a_party_that_leaves_and_comes_back_keeps_its_model": set(),
        "test_no_parameter_of_a_party_s_model_is_in_any_message": set(),
        "test_parties_refuse_what_their_owners_did_not_allow_and_the_others_go_on": set(),
    },
    "net/test_shutdown.py": {
        "test_a_job_comes_to_rest_and_goes_on": set(),
        "test_a_process_that_is_told_to_end_does_so_with_0_and_told_twice_does_so_at_once": set(),
    },
    "net/test_split_jobs.py": {
        "test_a_deployed_job_has_the_bits_of_its_simulation": {"vertical"},
        "test_a_party_that_loses_its_work_in_the_middle_repeats_the_round": set(),
        "test_rules_approve_a_split_job_and_every_ask_of_it_is_in_its_manifest": set(),
    },
    "net/test_store_faults.py": {
        "test_a_job_goes_through_random_faults_to_the_same_bits": set(),
        "test_a_party_whose_disk_is_full_keeps_its_receipt_when_there_is_room_and_goes_on": {"write"},
        "test_an_aggregator_without_open_files_says_so_and_goes_on_when_it_has_some": set(),
    },
    "net/test_table_jobs.py": {
        "test_a_column_of_weights_counts_in_training_and_is_no_feature": set(),
        "test_a_declared_kind_is_checked_at_the_party_without_a_value": set(),
        "test_a_party_whose_table_does_not_fit_says_so_in_one_sentence": set(),
        "test_a_table_job_gives_the_reference_s_bits": set(),
        "test_an_augmented_table_job_gives_the_reference_s_bits": set(),
        "test_held_out_rows_and_the_aggregator_s_test_file_give_the_reference_s_metrics": set(),
    },
    "net/test_tracked_jobs.py": {
        "test_every_job_is_tracked_and_a_tracker_that_fails_is_none_of_its_business": set(),
    },
    "net/test_upgrade.py": {
        "test_a_job_that_was_interrupted_under_format_2_goes_on_with_the_same_parties_and_secret": set(),
    },
    "net/test_vault.py": {
        "test_the_aggregators_own_secret_decides_who_is_drawn_is_kept_and_is_told_nobody": set(),
    },
    "net/test_relays.py": {
        "test_a_party_that_a_relay_does_not_know_does_not_hold_up_the_relay_below": set(),
        "test_a_job_waits_for_the_parties_behind_a_relay_and_goes_on_without_one": set(),
        "test_a_tree_gives_the_bits_of_the_flat_federation": {"sums"},
        "test_an_asynchronous_job_takes_tickets_through_relays": set(),
        "test_privacy_works_through_relays": set(),
        "test_the_root_learns_why_a_party_behind_a_relay_refuses": set(),
    },
    "net/test_waiting.py": {
        "test_a_job_is_waited_for_and_its_own_metric_is_printed": set(),
        "test_waiting_goes_on_when_the_aggregator_restarts": set(),
        "test_who_does_not_take_part_or_counts_for_less_is_said_once_with_the_reason": set(),
    },
    "net/test_weighted_jobs.py": {
        "test_a_job_with_weights_has_the_bits_of_the_simulation": {"False"},
        "test_a_party_refuses_weights_of_classes_beyond_its_limit_and_the_job_says_so": set(),
    },
    "net/test_wider_rounds.py": {
        "test_a_deployed_round_that_needs_all_is_empty_without_one_of_them": set(),
        "test_the_log_hashes_the_algorithm_s_model": set(),
    },
    "net/test_worker_process.py": {
        "test_a_worker_that_trains_on_a_gpu_is_watched_from_outside": set(),
        "test_an_agent_sends_heartbeats_while_its_worker_hangs_and_then_does_the_next_job": set(),
        "test_an_op_that_misbehaves_gives_one_sentence_and_the_next_ask_is_answered": {
            "environment-the ask failed at the party (KeyError)",
            "socket-the ask failed at the party (PermissionError)",
        },
        "test_cpu_time_is_limited_in_the_worker_even_if_nobody_kills_it": set(),
    },
    "net/test_workload.py": {
        "test_a_party_stops_when_the_deadline_has_passed": set(),
        "test_a_reply_that_would_fill_the_memory_is_refused": set(),
        "test_memory_is_bounded_by_the_operating_system_and_the_party_lives_on": set(),
    },
    "notebooks/test_study_display.py": {
        "test_results_are_one_line_and_a_table": set(),
        "test_results_plot_any_picture_of_their_report_by_its_name": set(),
        "test_results_tell_what_they_found_and_write_their_report": set(),
    },
    "plugins/test_fedma.py": {
        "test_it_keeps_the_promises_in_every_runtime": set(),
        "test_three_stages_give_a_model_that_no_party_had": set(),
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
        "test_split_learning_learns_and_only_the_label_holder_reports": set(),
    },
    "plugins/test_subprocess_engine.py": {
        "test_an_engine_gives_what_the_reference_gives": set(),
        "test_an_engine_is_asked_for_single_replies_where_each_one_is_looked_at": set(),
        "test_an_installed_package_adds_an_engine_by_its_entry_point": set(),
    },
    "privacy/test_accounting.py": {
        "test_loss_distributions_need_less_noise_and_of_one_gaussian_just_what_it_takes": set(),
        "test_next_to_no_noise_promises_nothing_and_very_much_costs_little": set(),
    },
    "privacy/test_bound.py": {
        "test_a_bound_that_no_update_reaches_changes_nothing": {"qfedavg q=0-plain", "qfedavg-plain"},
        "test_scaffold_with_a_bound_reaches_the_optimum": set(),
    },
    "privacy/test_central.py": {
        "test_given_an_epsilon_the_noise_is_what_all_rounds_need": {"rdp"},
        "test_the_clip_goes_to_the_quantile_of_the_lengths": set(),
        "test_with_a_quantile_the_update_carries_more_noise_and_the_count_its_own": set(),
    },
    "run/test_adapters.py": {
        "test_dp_sgd_trains_adapters_in_every_engine": set(),
        "test_engines_agree_on_adapters": {"stacked-settings0"},
    },
    "run/test_baselines.py": {
        "test_the_report_has_the_run_beside_its_baselines": set(),
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
    "run/test_finetuning.py": {
        "test_it_follows_every_algorithm_that_trains_a_network": {"fedavg]", "fedavgm", "scaffold", "zeno++"},
    },
    "run/test_frozen.py": {
        "test_engines_agree_with_a_model_whose_base_is_frozen": {"reference-still", "stacked-still"},
        "test_every_algorithm_leaves_frozen_parameters_to_the_bit_and_trains_the_rest": {
            "fedavg]",
            "fedgeomed+",
            "fedprox",
            "lg-fedavg",
        },
    },
    "run/test_killed_runs.py": {
        "test_a_run_that_was_killed_and_resumed_equals_one_that_was_not": set(),
        "test_the_kills_left_runs_at_different_moments": set(),
    },
    "run/test_large_data.py": {
        "test_files_and_data_sets_train_to_the_bits_of_samples_in_memory": {"auto-conv", "reference-net"},
    },
    "run/test_models_and_public.py": {
        "test_an_experiment_file_names_models_and_public_samples": set(),
    },
    "run/test_party_metrics.py": {
        "test_the_command_and_the_report_show_each_party": set(),
    },
    "run/test_predictions.py": {
        "test_a_long_file_is_read_and_written_in_blocks": set(),
    },
    "run/test_report.py": {
        "test_a_run_with_hostile_parties_reports_who_was_left_out": set(),
        "test_a_runs_report_says_who_was_missing": set(),
        "test_learning_is_drawn_over_simulated_time_only_where_rounds_take_different_times": set(),
        "test_the_demonstrations_report_stands_alone_and_names_its_source": set(),
    },
    "run/test_side_by_side.py": {
        "test_figures_drawn_at_once_have_the_bytes_of_figures_drawn_alone": set(),
    },
    "run/test_torch_export.py": {
        "test_a_model_that_cannot_be_exported_is_named_in_a_sentence": set(),
        "test_the_file_gives_the_outputs_of_the_model_for_any_batch": {"{'dataset': 'breast"},
        "test_the_file_needs_no_hansa": set(),
    },
    "run/test_weights.py": {
        "test_every_engine_agrees_with_the_reference": {"stacked-deep", "stacked-linear"},
        "test_methods_with_solvers_of_their_own_train_with_weights": {"fednova", "scaffold"},
    },
    "run/test_work.py": {
        "test_parties_in_processes_of_their_own_are_told_the_same": set(),
    },
    "schedule/test_pace.py": {
        "test_a_resumed_run_keeps_its_pace_to_the_bit": {"fedbuff-adacomm", "fedbuff-random"},
        "test_each_party_draws_its_epochs_anew_in_each_round": {"stacked"},
        "test_local_steps_follow_the_root_of_the_loss": {"pace0-schedule0-stacked", "pace0-schedule1-reference"},
        "test_what_a_party_draws_depends_on_nobody_else": set(),
    },
    "secure/test_child_process.py": {
        "test_a_child_ends_with_an_aggregator_that_is_killed": set(),
        "test_a_child_gives_what_the_function_itself_gives": set(),
        "test_a_child_that_is_killed_is_replaced_and_one_that_keeps_ending_is_reported": set(),
        "test_other_threads_go_on_while_a_large_power_is_computed": set(),
        "test_the_thread_of_a_job_keeps_its_child_and_the_child_ends_with_it": set(),
    },
    "secure/test_encoding.py": {
        "test_wide_numbers_add_up_in_their_places": set(),
    },
    "secure/test_encrypted_sums.py": {
        "test_a_dealt_key_is_kept_until_too_few_of_those_asked_hold_it": set(),
        "test_a_party_that_is_missing_or_declines_is_left_out_of_the_sum": {"ckks", "functional", "paillier"},
        "test_a_party_that_sends_no_ciphertexts_is_left_out_of_the_sum": {"ckks", "functional"},
        "test_a_sum_without_a_short_name_is_neither_opened_nor_written_down": {"long", "none"},
        "test_a_tree_is_what_it_is_without": {"ckks", "paillier"},
        "test_fedavg_is_what_it_is_without_to_the_precision_of_the_numbers": {"ckks-reference", "paillier-stacked"},
        "test_fewer_shares_than_needed_and_the_transcript_do_not_open_a_sum": set(),
        "test_naive_bayes_is_what_it_is_without": {"ckks", "paillier"},
        "test_the_aggregator_sees_no_partys_numbers_and_no_secret": {"ckks", "functional"},
        "test_the_sum_is_exact_for_updates_and_for_counts": {"ckks", "functional", "paillier"},
        "test_threshold_sums_stand_dropouts_at_every_exchange": {"gone0", "gone5", "gone8"},
    },
    "secure/test_evaluations.py": {
        "test_a_secure_sum_measures_what_the_plain_run_does_and_no_single_party": {
            "False-ckks",
            "False-masking",
            "True-active",
        },
    },
    "secure/test_masking.py": {
        "test_a_sum_over_neighbourhoods_is_right_or_not_given": set(),
        "test_every_subset_of_dropouts_at_every_exchange_gives_the_sum_of_those_who_came_or_none": set(),
    },
    "secure/test_masking_runs.py": {
        "test_an_algorithm_does_not_notice_that_its_sums_are_masked": {"fednova-stacked", "fedyogi-reference"},
        "test_fedavg_is_itself_to_fixed_point_precision": {"reference-False", "stacked-True"},
    },
    "secure/test_ranges.py": {
        "test_encryption_changes_no_algorithm_whatever_the_size_of_what_it_sends": {
            "paillier-fedavg+",
            "paillier-fedavgm",
        },
        "test_masks_change_no_algorithm_whatever_the_size_of_what_it_sends": {"fedadam", "fsvrg"},
        "test_masks_change_no_quantity_beside_an_update_on_any_engine": {"reference"},
    },
    "secure/test_refused_asks.py": {
        "test_a_party_takes_no_share_that_it_did_not_prepare_for_or_that_strangers_own": set(),
    },
    "secure/test_threshold.py": {
        "test_a_dealing_with_a_single_wrong_verification_key_is_refused": set(),
        "test_a_wrong_partial_decryption_has_no_proof": set(),
        "test_the_proof_of_right_partial_decryptions_holds": set(),
    },
    "secure/test_threshold_lies.py": {
        "test_a_dealer_whose_key_is_wrong_is_named_and_another_deals": {"<lambda>1", "<lambda>4"},
        "test_one_partys_word_on_the_key_counts_for_nothing": {"-1", "0"},
    },
    "select/test_power_of_choice.py": {
        "test_more_candidates_never_lower_the_mean_loss_of_the_selected": set(),
    },
    "select/test_selectors.py": {
        "test_a_resumed_run_selects_the_same_and_gives_the_same_bits": {
            "poisson-reference",
            "power-of-choice-cpow-d-stacked",
            "tiers-adaptive-stacked",
            "uniform-reference",
        },
        "test_parties_in_processes_of_their_own_give_the_bits_of_the_reference": set(),
        "test_the_engines_select_the_same_parties": {"power-of-choice-pow", "tiers-adaptive", "uniform"},
    },
    "select/test_tiers.py": {
        "test_inside_a_tier_every_pair_is_drawn_alike": set(),
        "test_tiers_are_drawn_as_often_as_their_probabilities_say": set(),
    },
    "select/test_weighted.py": {
        "test_a_run_draws_large_parties_more_often": set(),
        "test_parties_are_drawn_as_often_as_successive_draws_by_size_say": set(),
    },
    "sim/test_chain.py": {
        "test_every_solver_is_served_by_a_chain": {
            "dense-solver2-1",
            "dense-solver2-3",
            "plain-solver2-None",
            "shaped-solver2-None",
        },
    },
    "sim/test_clock.py": {
        "test_a_steps_time_is_that_of_the_model_and_does_not_rise_with_the_period": set(),
        "test_by_day_and_night_a_party_is_there_for_its_share_of_each_period": set(),
        "test_only_available_parties_are_selected": set(),
        "test_the_slowest_of_m_exponential_parties_takes_the_harmonic_number_times_the_mean": set(),
    },
    "sim/test_engines.py": {
        "test_every_solver_is_the_same_in_a_stack_whatever_each_party_is_told": {"alike-line"},
        "test_stacked_parties_train_as_they_do_alone": {"dropout-gradient", "words-gradient"},
        "test_whole_runs_agree_and_repeat_bit_for_bit": {"batch_norm-fsvrg", "dropout-fedavg"},
    },
    "sim/test_gpu.py": {
        "test_a_failing_compiler_leaves_the_recording_as_it_is": {"cpu-alike"},
        "test_a_recorded_stack_trains_as_each_party_does_alone": {
            "convolving-gradient-cpu",
            "dense-gradient-cpu",
            "dense-sgd-cpu",
        },
        "test_batch_norm_is_recorded_where_all_batches_are_alike": set(),
        "test_batches_that_are_drawn_anew_and_may_be_empty_are_recorded_once": {"dense-cpu"},
        "test_large_dense_layers_take_their_step_inside_the_product": set(),
        "test_parties_of_one_size_whose_last_batch_is_short_train_as_each_does_alone": {"gradient-cpu", "sgd-cpu"},
        "test_recurrent_layers_are_unrolled": set(),
    },
    "sim/test_hooks.py": {
        "test_a_solver_that_overrides_one_hook_answers_the_same_in_a_stack": set(),
    },
    "sim/test_late_parties.py": {
        "test_the_share_of_stragglers_does_part_of_the_epochs": {"0.1-stacked", "0.9-reference"},
    },
    "sim/test_layers.py": {
        "test_engines_agree_on_layers_that_mix_rows_or_draw": {"centred", "noisy"},
        "test_what_a_layer_draws_does_not_depend_on_the_global_generator": {"reference-noisy", "stacked-noisy"},
    },
    "sim/test_memories.py": {
        "test_a_million_memories_need_little_ram_and_only_the_disk_they_use": set(),
        "test_memories_are_a_dictionary_and_a_crash_leaves_those_of_the_checkpoint": set(),
    },
    "sim/test_odd_models.py": {
        "test_models_that_a_chain_would_not_replay_are_not_replayed": {"1.0"},
        "test_rows_that_look_at_each_other_stay_with_their_party": {"dense-relative-3"},
    },
    "sim/test_schedule.py": {
        "test_a_schedule_holds_the_batches_of_each_party": set(),
    },
    "sim/test_stacked_tickets.py": {
        "test_a_resumed_run_in_stacks_has_the_same_bits": {"memory"},
        "test_stacked_tickets_of_different_rounds_agree_with_the_reference": {"co-op-chain", "fedasync-chain"},
        "test_worker_processes_give_the_bits_of_the_reference": {"fedasync"},
    },
    "sim/test_workers.py": {
        "test_a_run_whose_parent_was_killed_at_work_can_be_resumed_at_once": set(),
        "test_workers_end_with_their_parent": set(),
        "test_workers_give_the_reference_bits": {"fedbuff", "fedsgd"},
    },
    "study/test_report_contents.py": {
        "test_a_report_is_written_as_html_and_markdown_with_each_picture_as_png_and_svg": set(),
        "test_labels_are_taken_literally_in_every_form": set(),
        "test_odd_studies_have_a_good_report": {"all failed", "regression]"},
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
    "study/test_study_results.py": {
        "test_results_come_back_from_their_folder_as_they_were": set(),
    },
    "study/test_study_spec.py": {
        "test_a_report_is_made_anew_and_the_table_printed": set(),
        "test_the_command_compares_tells_it_as_one_object_and_a_failed_run_is_the_exit_code_1": set(),
    },
    "study/test_study_tune.py": {
        "test_what_won_is_in_the_cells_and_tuning_is_not_done_again": set(),
    },
    "test_conformance.py": {
        "test_every_registered_algorithm_keeps_the_promises": {"naive-bayes", "scaffold"},
    },
    "testing/test_check_solver.py": {
        "test_every_registered_solver_keeps_the_promises": {"gradient", "scaffold", "sgd"},
        "test_solvers_with_other_fields_keep_the_promises": set(),
    },
    "track/test_track_delivery.py": {
        "test_a_process_says_that_it_is_at_work": set(),
        "test_a_tracker_at_work_is_waited_for_longer_than_an_idle_one_but_not_for_ever": set(),
    },
    "track/test_track_files.py": {
        "test_console_says_a_round_a_line_and_the_last_line_is_still_the_json_object": set(),
        "test_tensorboard_reads_back_every_round_once_after_a_resume": set(),
    },
    "transforms/test_by_layer.py": {
        "test_the_errors_of_groups_are_remembered_apart": set(),
    },
    "transforms/test_compressed_runs.py": {
        "test_a_lossless_transform_changes_no_bit_of_any_verb": set(),
        "test_a_transform_that_commutes_with_sums_works_with_a_secure_sum": set(),
        "test_every_algorithm_that_trains_works_with_int8_in_every_engine_and_after_a_resume": {"scaffold"},
        "test_forged_updates_are_packed_too": {"reference-sign-flip", "stacked-alie"},
        "test_fusions_that_see_each_update_see_the_opened_update": {"reference-median", "stacked-krum"},
        "test_hostile_parts_reject_one_reply_by_name": {"reference-reduce-nan", "stacked-gather-inf"},
        "test_the_limit_on_norms_is_that_of_the_opened_update": {"gather-reference", "reduce-stacked"},
        "test_what_a_party_carries_over_is_kept_with_its_memory": {"False-reference", "True-stacked"},
        "test_what_is_left_out_of_one_round_is_sent_in_a_later_one": set(),
    },
    "transforms/test_conformance_of_transforms.py": {
        "test_a_broken_promise_is_found": {"AnnouncesLess-", "OpensZerosToOnes-"},
        "test_every_registered_transform_keeps_the_promises": {"top-k"},
        "test_other_settings_and_transforms_with_parts_that_add_or_with_a_memory_keep_them": set(),
    },
    "transforms/test_downlink.py": {
        "test_a_lossless_transform_of_models_changes_no_bit": {"fedavg"},
        "test_every_engine_gives_the_same_model_with_fewer_bytes_down": {"fedavg0", "fedbuff"},
        "test_separate_processes_have_the_same_bits": set(),
    },
    "transforms/test_error_feedback.py": {
        "test_error_feedback_reaches_the_model_that_top_k_alone_does_not": set(),
    },
    "transforms/test_every_transform.py": {
        "test_a_liar_is_rejected_by_name_and_the_round_goes_on": {
            "fedavg-stacked-length",
            "median-reference-twice",
            "median-stacked-place",
            "median-stacked-twice",
        },
        "test_every_engine_gives_the_same_model": {"fedavg-by-layer", "fedavg-clip", "median-clip", "median-identity"},
        "test_worker_processes_give_the_same_model": set(),
    },
    "transforms/test_quantisers.py": {
        "test_the_mean_of_many_opened_vectors_is_the_vector": set(),
    },
    "transforms/test_sparsifiers.py": {
        "test_the_mean_of_scaled_rand_k_is_the_vector_and_its_error_that_of_the_card": set(),
    },
    "ui/test_ui_http.py": {
        "test_events_tell_of_a_job_from_its_submission_to_its_end": set(),
    },
    "vertical/test_fedv.py": {
        "test_ciphertexts_outside_the_group_are_named_and_nothing_is_lost": {"invalid"},
        "test_the_gradient_is_the_centralised_one": {"logistic"},
    },
    "vertical/test_secureboost.py": {
        "test_a_forest_equals_that_of_the_joined_columns": {"fields0"},
        "test_splits_leaves_and_gains_equal_those_of_the_joined_columns": {"fields0"},
    },
    "vertical/test_secureboost_liars.py": {
        "test_lies_of_a_passive_party_are_named_and_nothing_is_lost": {"data-flip_sets", "data-overflow"},
        "test_lies_of_the_active_party_are_named": {"key", "records"},
    },
    "vertical/test_split.py": {
        "test_many_steps_equal_those_of_the_unsplit_network": {"settings1-vanilla", "settings2-vanilla"},
    },
    "vertical/test_vertical_linear_liars.py": {
        "test_a_lie_is_refused_and_the_next_round_is_as_if_it_had_not_been": {"0-gradient", "0-scores-<lambda>-some"},
    },
}  # fmt: skip
