"""Lists Megatron's flags that change nothing under a schedule, with the reason for each.

They are accepted, as the same numbers are computed with and without them, and a run that is given one says so.
"""

from __future__ import annotations

# Why a flag changes nothing -> Megatron's `args` attributes.
_REASONS = {
    "it says more of --use-megatron-fsdp and --use-torch-fsdp2, which are refused": (
        "data_parallel_sharding_strategy outer_dp_sharding_strategy enable_full_sharding_in_hsdp "
        "fsdp_double_buffer suggested_communication_unit_size keep_fp8_transpose_cache create_all_gather_group "
        "gradient_reduce_div_fusion torch_fsdp2_reshard_after_forward strict_fsdp_dtensor_load "
        "fsdp_db_use_persist_buf_on_alloc_fail megatron_fsdp_version megatron_fsdp_main_params_dtype "
        "megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype megatron_fsdp_max_pool_double_buffer "
        "megatron_fsdp_enable_fine_grained_param_gather"
    ),
    "it says more of --optimizer muon and its like, which are refused": (
        "muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type "
        "muon_num_ns_steps muon_tp_mode muon_use_syrk muon_extra_scale_factor muon_scalar_optimizer lion_beta1 "
        "lion_beta2 use_layer_wise_param_layout"
    ),
    "it says more of --hybrid-context-parallel, which is refused": "max_seqlen_per_dp_cp_rank",
    "it says more of --defer-embedding-wgrad-compute, which is refused": "wgrad_deferral_limit",
    "it says more of offloading activations, which is refused": (
        "cpu_offloading_retain_pinned_cpu_buffers offload_modules min_offloaded_tensor_size "
        "delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks activation_offload_fraction "
        "fine_grained_offloading_max_inflight_offloads"
    ),
    "it says more of --qk-clip, which is refused": "qk_clip_alpha qk_clip_threshold",
    "it says more of --use-kitchen-attention, which is refused": "kitchen_attention_backend",
    "it says more of --overlap-moe-expert-parallel-comm, which is refused": "high_priority_a2a_comm_stream",
    "it says more of --cuda-graph-impl, which is refused": "cuda_graph_modules cuda_graph_scope_deprecated",
    "it says more of --use-checkpoint-args, which is refused": (
        "use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args"
    ),
    "it is for inference": (
        "inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings bert_embedder_type "
        "use_legacy_static_engine inference_max_requests inference_max_seq_length inference_dynamic_batching "
        "inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb "
        "inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size "
        "inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens "
        "inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_track_paused_request_events "
        "inference_dynamic_batching_track_generated_token_events inference_dynamic_batching_sampling_backend "
        "inference_dynamic_batching_unified_memory_level inference_dynamic_batching_enable_prefix_caching "
        "inference_dynamic_batching_prefix_caching_eviction_policy "
        "inference_dynamic_batching_prefix_caching_coordinator_policy "
        "inference_dynamic_batching_prefix_caching_routing_alpha "
        "inference_dynamic_batching_prefix_caching_mamba_gb inference_dynamic_batching_async_sched_mode "
        "inference_dynamic_batching_cuda_graph_mixed_prefill_count inference_dynamic_batching_logprobs_mode "
        "inference_dynamic_batching_cuda_graph_sizing_distribution inference_cuda_graph_scope "
        "inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens decode_only_cuda_graphs "
        "enable_chunked_prefill num_speculative_tokens offset_sampling_seed_by_dp_rank "
        "inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging "
        "inference_coordinator_port mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype "
        "inference_use_synchronous_zmq_collectives inference_disable_ep_consensus inference_shards "
        "inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels "
        "inference_moe_token_dispatcher_type flash_decode nccl_all_reduce_for_prefill mlp_chunks_for_prefill"
    ),
    "weights come from --hf-model, or as the HF definition initialises them": "perform_initialization",
    "each rank fills its shards where they are, with the same values at any layout": "use_cpu_initialization",
    "tokens and positions are embedded as the HF definition does": (
        "clone_scatter_output_in_embedding add_position_embedding"
    ),
    "the softmax is that of the attention kernel, in 32 bits, or the HF definition's": (
        "masked_softmax_fusion attention_softmax_in_fp32"
    ),
    "norms are Transformer Engine's, torch's or the HF definition's": "no_persist_layer_norm",
    "no layer that it is for is made under a schedule": "use_grouped_gemm_for_dense_mlp use_mamba_mem_eff_path",
    "no model has such a head under a schedule": "bert_binary_head",
    "Megatron reads it nowhere": (
        "onnx_safe vocab_extra_ids dist_ckpt_save_pre_mcore_014 exit_signal_handler_for_dataloader "
        "inprocess_max_iterations inprocess_progress_watchdog_interval deprecated_use_mcore_models"
    ),
    "Megatron reads it nowhere; say --attention-backend flash": "use_flash_attn",
    "Megatron reads it nowhere; say --ckpt-format": "use_dist_ckpt_deprecated dist_ckpt_format_deprecated",
    "it is so without it": "ckpt_fully_parallel_save_deprecated",
}
IDLE = {name: reason for reason, names in _REASONS.items() for name in names.split()}
