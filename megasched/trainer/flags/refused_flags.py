"""Lists Megatron's flags that can't be honoured under a schedule, with the reason for each."""

from __future__ import annotations

# Why a flag is refused -> Megatron's `args` attributes. The default value is never refused. A shell pattern stands
# for a feature that is refused as a whole; elsewhere names are spelled out, so that a new flag is in no class
# (`flag_classes.py`).
_REASONS = {
    "the loss of each token is computed in float32; only models of Megatron's own call these kernels": (
        "cross_entropy_loss_fusion cross_entropy_fusion_impl"
    ),
    "the loss of each token is computed in float32": "fp16_lm_cross_entropy",
    "documents of a row see each other, as where the model was pretrained; --sft keeps sequences apart": (
        "reset_position_ids reset_attention_mask dataloader_inter_document_masking hybrid_context_parallel"
    ),
    "reinforcement learning drives Megatron's own inference engine": (
        "perform_rl_step rl_* grpo_* langrl_env_config refit_method"
    ),
    "FSDP shards Megatron's own layers; --use-distributed-optimizer shards the optimizer": (
        "use_megatron_fsdp use_torch_fsdp2 fsdp_manual_registration"
    ),
    "it reorders the steps of Megatron's own layers": (
        "overlap_moe_expert_parallel_comm delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad "
        "ep_overlap_early_attn_memory_release"
    ),
    "whole experts are shared out, their features are not": "expert_tensor_parallel_num_weight_shards",
    "4-bit training is not available under a schedule yet": "fp4*",
    "parameters are kept in 16 bits; 8-bit ones are not available under a schedule yet": (
        "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag"
    ),
    "the head is the HF definition's, which no 8-bit kernel computes": "fp8_output_proj",
    "the head is the HF definition's, and so is the dtype of its logits": "logit_dtype",
    "which sizes a recipe of one's own takes is not known": "fp8_quantizer_factory",
    "it names modules of Megatron's own layers": "te_precision_config_file",
    "it goes by the names of Megatron's own layers": "save_tokens_per_expert_interval",
    "layers take Megatron's kernels of bias and activation, or the HF definition's": "use_te_activation_func",
    "no layer calls these kernels under a schedule": (
        "use_kitchen_attention kitchen_config_file kitchen_recipe_number"
    ),
    "it names layers of Megatron's own; the layers are the HF definition's": "spec",
    "it shards the weights of Megatron's own layers": "tensor_parallel_num_weight_shards gtp_*",
    "megasched already builds on the meta device and fills each rank's shards": "init_model_with_meta_device",
    "recomputed blocks of a definition keep their whole input on each rank": "distribute_saved_activations",
    "it reads buffers of Megatron's own embedding": "defer_embedding_wgrad_compute",
    "Megatron has it with --ckpt-format torch alone, which is refused; --overlap-param-gather works": (
        "overlap_param_gather_with_optimizer_step"
    ),
    "it would overwrite what comes from the HF config; --load works without it": "use_checkpoint_args",
    "the YAML file replaces the command line, megasched's flags included": "yaml_cfg",
    "ModelOpt puts its own builder in the place of the schedule": "modelopt_enabled",
    "CUDA graphs are captured from Megatron's own layers": (
        "enable_cuda_graph external_cuda_graph cuda_graph_impl"
    ),
    "it moves activations of Megatron's own layers": (
        "cpu_offloading_num_layers fine_grained_activation_offloading"
    ),
    "it reads Megatron's own attention, which the definition does not use": "qk_clip log_max_attention_logit",
    "the vocabulary is always padded, and the padding masked out of the loss": "pad_vocab_size",
    "multi-token prediction is made of Megatron's own layers": "mtp_*",
    "this part of the model is what the HF definition makes it": (
        "num_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size moe_router_topk moe_router_num_groups "
        "moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function "
        "moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_force_biased "
        "moe_input_jitter_eps moe_shared_expert_intermediate_size moe_shared_expert_gate "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
        "moe_expert_rank_capacity_factor moe_apply_probs_on_input moe_use_upcycling moe_upcycling_granularity "
        "hybrid_layer_pattern hybrid_override_pattern is_hybrid_model "
        "heterogeneous_layers_config_* multi_latent_attention experimental_attention_variant "
        "attention_output_gate softmax_type window_size window_attn_skip_freq qk_l2_norm "
        "apply_query_key_layer_scaling layernorm_zero_centered_gamma "
        "apply_residual_connection_post_layernorm fp32_residual_connection rotary_interleaved "
        "rotary_seq_len_interpolation_factor no_rope_freq mrope_section squared_relu quick_geglu "
        "openai_gelu glu_linear_offset activation_func_clamp_value encoder_num_layers "
        "decoder_num_layers use_mup mup_* init_method_xavier_uniform embedding_init_method_std "
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim cache_mla_latents "
        "mla_down_proj_fusion rope_type rotary_scaling_factor mscale mscale_all_dim yarn_* "
        "relative_attention_* dsa_* linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
        "linear_num_key_heads linear_num_value_heads linear_attention_freq mamba_state_dim mamba_head_dim "
        "mamba_num_groups mamba_num_heads mamba_training_ssm_states_dtype enable_mhc_connections mhc_* gdp_*"
    ),
    "it is not among what Megatron's mixtures have been tried with under a schedule (docs/experts.md)": (
        "moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size moe_enable_routing_replay "
        "moe_router_padding_for_fp8 moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias "
        "moe_permute_fusion_into_hybridep moe_pad_experts_for_cuda_graph_inference moe_layer_recompute "
        "moe_ncclep_zero_copy moe_ncclep_static_shape moe_dispatch_fwd_dtype moe_combine_bwd_dtype "
        "moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda "
        "moe_paged_stash_buffer_size_factor_cpu moe_routing_trace_path moe_routing_trace_max_training_iters "
        "moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states "
        "moe_routing_trace_dump_weights use_grouped_gemm_for_shared_expert"
    ),
    "it goes by names that Megatron's own q/k norms have; those of the definition are not decayed": (
        "apply_wd_to_qk_layernorm no_weight_decay_cond_type"
    ),
    "nothing would be trained; what saves a teacher's logits is Megatron-LM's own model": "freeze_all_layers",
    "logits are taken from the output layer of Megatron's own models": "logits_*",
    "it is for vision models of Megatron's own; sizes and classes are those of the HF config": (
        "vision_pretraining vision_pretraining_type vision_backbone_type swin_backbone_type num_classes img_h "
        "img_w num_channels patch_dim classes_fraction data_per_class_fraction head_lr_mult mask_type "
        "mask_factor iter_per_epoch dino_*"
    ),
    "it is for retrieval by Megatron's own models": (
        "ict_head_size ict_load bert_load biencoder_projection_dim biencoder_shared_query_context_model "
        "titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path block_data_path "
        "embedding_path retriever_report_topk_accuracies retriever_score_scaling indexer_batch_size "
        "indexer_log_interval"
    ),
    "it goes with --transformer-impl inference_optimized, which has no backward pass": (
        "inference_fuse_tp_communication inference_disable_triton_nvls_kernels"
    ),
    "it is for inference: TP ranks would drop the same elements": "inference_rng_tracker",
    "nobody would set up the process groups then": "lazy_mpu_init",
    "nothing goes from rank to rank then, and ranks here ask each other what they hold": "fake_process_group",
    "Megatron reads it nowhere: every sample would be taken": "sample_rate",
    "Megatron reads it nowhere, and the batch would not grow; --step-batch-size-schedule does that": (
        "rampup_batch_size"
    ),
    "Megatron has no such flag any more; say --micro-batch-size": "batch_size",
    "Megatron has no such flag any more; say --lr-warmup-fraction": "warmup",
    "Megatron has no such flag any more; say --tensor-model-parallel-size": "model_parallel_size",
    "Megatron has no such flag any more; say --recompute-activations": "checkpoint_activations",
}
REFUSED = {pattern: reason for reason, patterns in _REASONS.items() for pattern in patterns.split()}

_BY_MATRIX = (
    "it treats a weight as the matrix that Megatron's own layers have: here q, k and v may be packed in one, and "
    "the experts of a layer be one tensor, which would go to Adam; there are adam and sgd"
)
_OF_FSDP = "it is for FSDP, which is not available under a schedule; say torch_dist"
_OF_RANKS = (
    "Megatron's older format has a rank's weights by the names that one schedule gives them, and states of the "
    "optimizer under no names; say torch_dist"
)
# The same for single values of flags that have good ones too.
REFUSED_VALUES = {
    ("attention_backend", "local"): "Megatron allows it with --spec local only; leave it at auto",
    ("transformer_impl", "inference_optimized"): "it has no backward pass",
    ("fp8_recipe", "custom"): REFUSED["fp8_quantizer_factory"],
    ("ckpt_format", "torch"): _OF_RANKS,
    ("ckpt_convert_format", "torch"): _OF_RANKS,
    ("ckpt_format", "torch_dcp"): _OF_FSDP,
    ("ckpt_format", "fsdp_dtensor"): _OF_FSDP,
    **{("optimizer", name): _BY_MATRIX for name in ("muon", "dist_muon", "adaptive_muon", "soap")},
    ("optimizer", "lion"): (
        "Megatron takes it from the package emerging_optimizers, past the distributed optimizer, and no run under "
        "a schedule has been compared with it; there are adam and sgd"
    ),
}
