"""Lists Megatron's flags that hold under a schedule, and those whose values come from the HF model.

Most of them are the trainer's: it runs as it is, around another model. Those of kernels and of 8 bits are passed
to Megatron's own layers, where a schedule takes them (level ``block``), and to Transformer Engine; they change no
number of an HF layer. The flags of Megatron's mixtures are in ``moe.py``.
"""

from __future__ import annotations

# What they are for -> Megatron's `args` attributes. All are spelled out, so that a new flag is in no class.
_SUBJECTS = {
    "layout of the ranks, and what goes between them": (
        "tensor_model_parallel_size pipeline_model_parallel_comm_backend pipeline_model_parallel_size "
        "sequence_parallel context_parallel_size hierarchical_context_parallel_sizes cp_comm_type "
        "expert_model_parallel_size tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag "
        "tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_comm_bootstrap_backend "
        "tp_comm_overlap_cfg use_ring_exchange_p2p overlap_p2p_comm overlap_p2p_comm_warmup_flush "
        "microbatch_group_size_per_vp_stage account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "pipeline_model_parallel_layout num_layers_per_virtual_pipeline_stage "
        "num_virtual_stages_per_pipeline_rank use_tp_pp_dp_mapping"
    ),
    "precision": (
        "fp16 bf16 disable_bf16_reduced_precision_matmul fp8 fp8_recipe fp8_margin fp8_interval "
        "fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad first_last_layers_bf16 num_layers_at_start_in_bf16 "
        "num_layers_at_end_in_bf16 grad_reduce_in_bf16 loss_scale initial_loss_scale min_loss_scale "
        "loss_scale_window hysteresis accumulate_allreduce_grads_in_fp32 deterministic_mode batch_invariant_mode "
        "batch_invariant_backend"
    ),
    "kernels: of Megatron's own layers, and of attention wherever Transformer Engine computes it": (
        "attention_backend flash_attention_version transformer_impl bias_gelu_fusion bias_swiglu_fusion "
        "bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion use_fused_weighted_squared_relu "
        "fused_residual_rmsnorm use_transformer_engine_op_fuser symmetric_ar_type mlp_chunks_for_training "
        "test_mode disable_jit_fuser"
    ),
    "recompute": (
        "recompute_granularity recompute_method recompute_num_layers recompute_modules recompute_activations"
    ),
    "sizes and random numbers": ("make_vocab_size_divisible_by seed te_rng_tracker data_parallel_random_init"),
    "optimizer": (
        "optimizer weight_decay clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum optimizer_cpu_offload "
        "optimizer_cuda_graph cuda_graph_warmup_steps optimizer_offload_fraction "
        "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d dump_param_to_param_group_map "
        "pin_cpu_grads pin_cpu_params use_precision_aware_optimizer main_grads_dtype main_params_dtype "
        "exp_avg_dtype exp_avg_sq_dtype use_distributed_optimizer num_distributed_optimizer_instances"
    ),
    "reduction of gradients, and gathering of parameters": (
        "calculate_per_token_loss overlap_grad_reduce align_grad_reduce ddp_num_buckets ddp_bucket_size "
        "ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation "
        "ddp_param_name_patterns_for_fp32_local_accumulation ddp_average_in_collective overlap_param_gather "
        "align_param_gather nccl_ub disable_symmetric_registration"
    ),
    "learning rate and weight decay": (
        "lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters "
        "lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay "
        "weight_decay_incr_style lr min_lr decoupled_lr decoupled_min_lr"
    ),
    "batches and length of the run": (
        "micro_batch_size global_batch_size step_batch_size_schedule decrease_batch_size_if_needed train_iters "
        "train_samples exit_interval exit_duration_in_mins exit_signal_handler exit_signal "
        "exit_signal_handler_for_training iterations_to_skip phase_transition_iterations"
    ),
    "evaluation": (
        "eval_iters eval_interval start_eval_at_iter eval_global_batch_size eval_micro_batch_size skip_train "
        "full_validation multiple_validation_sets validation_set_names"
    ),
    "data, of which some are for scripts of Megatron-LM's or for those of other objectives": (
        "data_path split train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path "
        "per_dataset_sequences_path dataloader_type data_sharding dataloader_fast_cache_load "
        "dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files mock_data seq_length encoder_seq_length "
        "decoder_seq_length mask_prob short_seq_prob num_workers eod_mask_loss "
        "create_attention_mask_in_dataloader num_dataset_builder_threads object_storage_cache_path "
        "mid_level_dataset_surplus allow_ambiguous_pad_tokens sft sft_tokenizer_prompt_format fim_data fim_rate "
        "fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
        "fim_suffix_token fim_pad_token fim_eod_token"
    ),
    "tokenizer": (
        "vocab_size vocab_file merge_file tokenizer_type tokenizer_model metadata_path special_tokens "
        "tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy "
        "tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast "
        "tokenizer_hf_no_include_special_tokens trust_remote_code null_tokenizer_eod_id null_tokenizer_pad_id "
        "chat_template use_gigatoken"
    ),
    "checkpoints": (
        "save save_interval save_params_interval save_activations_interval save_wgrads_interval "
        "save_dgrads_interval save_retain_interval load load_main_params_from_ckpt non_persistent_save_interval "
        "non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir "
        "non_persistent_local_ckpt_algo finetune pretrained_checkpoint ckpt_step exit_on_missing_checkpoint "
        "ckpt_format auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save "
        "ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save async_save async_strategy "
        "use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm "
        "ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo "
        "ckpt_fully_parallel_load_per_rank_objects ckpt_fully_parallel_save_process_group "
        "ckpt_fully_parallel_load_process_group ckpt_assume_constant_structure ckpt_pg_tensors_cache_path "
        "ckpt_pg_tensors_cache_create ckpt_load_validate_sharding_integrity dist_ckpt_strictness "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient save_tokenizer_assets "
        "replication replication_jump replication_factor verify_integrity no_save_optim no_save_rng "
        "no_load_optim no_load_rng override_ckpt_iteration dist_ckpt_workers ckpt_drop_redundant_extra_state "
        "stream_ckpt_dequant enable_msc disable_msc_deprecated"
    ),
    "processes, their groups, and memory": (
        "distributed_backend distributed_timeout_minutes local_rank nccl_communicator_config_path "
        "use_gloo_process_groups use_sharp sharp_enabled_group high_priority_stream_groups "
        "distributed_timeout_seconds_after_init flight_recorder_dump_path flight_recorder_trace_buffer_size "
        "flight_recorder_dump_on_timeout flight_recorder_include_stack_trace flight_recorder_include_only_active "
        "flight_recorder_extra_dump_on_exec empty_unused_memory_level manual_gc manual_gc_interval "
        "manual_gc_eval enable_experimental"
    ),
    "log": (
        "log_interval log_params_norm log_throughput log_progress timing_log_level timing_log_option "
        "tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard "
        "log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard "
        "log_memory_interval log_device_memory_used log_num_zeros_in_grad barrier_with_L1_time "
        "log_world_size_to_tensorboard wandb_project wandb_exp_name wandb_save_dir wandb_entity logging_level "
        "log_energy otel_enabled otel_service_name otel_span_groups config_logger_dir enable_one_logger "
        "one_logger_project one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version"
    ),
    "profiles": (
        "profile profile_step_start profile_step_end use_pytorch_profiler pytorch_profiler_collect_shapes "
        "pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks record_memory_history "
        "memory_snapshot_path record_shapes nvtx_ranges"
    ),
    "faults, their detection, and restarts": (
        "check_for_nan_in_loss_and_grad check_for_large_grads check_for_spiky_loss "
        "result_rejected_tracker_filename check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval "
        "train_sync_interval error_injection_rate error_injection_type rerun_mode adlr_autoresume "
        "adlr_autoresume_interval log_straggler straggler_ctrlr_port straggler_minmax_count "
        "disable_straggler_on_startup run_workload_inspector_server inprocess_restart "
        "inprocess_monitor_thread_interval inprocess_monitor_process_interval inprocess_heartbeat_interval "
        "inprocess_soft_timeout inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout "
        "inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time "
        "inprocess_granularity inprocess_active_world_size inprocess_empty_cuda_cache enable_ft_package "
        "calc_ft_timeouts ft_num_warmup_iters fault_injector_ranks fault_injector_num_ranks "
        "fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay "
        "fault_injector_delay_start_iteration fault_injector_mtti_seconds fault_injector_offset_seconds "
        "fault_injector_seed"
    ),
}
HONOURED = {name: subject for subject, names in _SUBJECTS.items() for name in names.split()}

# What the HF config and the definition say (`model_shape.derive`, `arguments.apply_derived`); a given value must
# agree.
_DERIVED = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention "
    "num_query_groups max_position_embeddings padded_vocab_size untie_embeddings_and_output_weights "
    "attention_dropout hidden_dropout init_method_std swiglu normalization layernorm_epsilon qk_layernorm "
    "add_bias_linear add_qkv_bias position_embedding_type use_rotary_position_embeddings rotary_base "
    "rotary_percent use_rope_scaling rope_scaling_factor expert_tensor_parallel_size"
)
DERIVED = frozenset(_DERIVED.split())

# Value of --recompute-modules that is kept from the trainer's config: layers alone know whether they have it.
MLA_UP_PROJ = "mla_up_proj"
