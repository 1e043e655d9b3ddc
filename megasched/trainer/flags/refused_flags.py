"""Lists Megatron's flags that can't be honoured under a schedule, with the reason for each."""

from __future__ import annotations

# Why a flag is refused -> Megatron's `args` attributes (shell patterns). The default value is never refused.
_REASONS = {
    "the loss of each token is computed in float32; only models of Megatron's own call these kernels": (
        "cross_entropy_loss_fusion cross_entropy_fusion_impl"
    ),
    "documents of a row see each other, as where the model was pretrained; --sft keeps sequences apart": (
        "reset_position_ids reset_attention_mask dataloader_inter_document_masking hybrid_context_parallel"
    ),
    "reinforcement learning drives Megatron's own inference engine": "perform_rl_step",
    "FSDP shards Megatron's own layers; --use-distributed-optimizer shards the optimizer": (
        "use_megatron_fsdp use_torch_fsdp2"
    ),
    "it reorders the steps of Megatron's own layers": "overlap_moe_expert_parallel_comm",
    "whole experts are shared out, their features are not": "expert_tensor_parallel_num_weight_shards",
    "4-bit training is not available under a schedule yet": "fp4*",
    "parameters are kept in 16 bits; 8-bit ones are not available under a schedule yet": (
        "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag"
    ),
    "the head is the HF definition's, which no 8-bit kernel computes": "fp8_output_proj",
    "which sizes a recipe of one's own takes is not known": "fp8_quantizer_factory",
    "it names modules of Megatron's own layers": "te_precision_config_file",
    "layers take Megatron's kernels of bias and activation, or the HF definition's": "use_te_activation_func",
    "it names layers of Megatron's own; the layers are the HF definition's": "spec",
    "it shards the weights of Megatron's own layers": "tensor_parallel_num_weight_shards",
    "megasched already builds on the meta device and fills each rank's shards": "init_model_with_meta_device",
    "recomputed blocks of a definition keep their whole input on each rank": "distribute_saved_activations",
    "it reads buffers of Megatron's own embedding": "defer_embedding_wgrad_compute",
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
        "num_experts moe_* hybrid_layer_pattern hybrid_override_pattern is_hybrid_model "
        "heterogeneous_layers_config_* multi_latent_attention experimental_attention_variant "
        "attention_output_gate softmax_type window_size window_attn_skip_freq qk_l2_norm "
        "apply_query_key_layer_scaling layernorm_zero_centered_gamma "
        "apply_residual_connection_post_layernorm fp32_residual_connection rotary_interleaved "
        "rotary_seq_len_interpolation_factor no_rope_freq mrope_section squared_relu quick_geglu "
        "openai_gelu glu_linear_offset activation_func_clamp_value encoder_num_layers "
        "decoder_num_layers use_mup mup_* init_method_xavier_uniform embedding_init_method_std "
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim cache_mla_latents "
        "mla_down_proj_fusion rope_type rotary_scaling_factor mscale mscale_all_dim yarn_* "
        "relative_attention_* dsa_* linear_conv_kernel_dim linear_key_* linear_value_* linear_num_* "
        "linear_attention_freq mamba_state_dim mamba_head_dim mamba_num_*"
    ),
    "it goes by names that Megatron's own q/k norms have; those of the definition are not decayed": (
        "apply_wd_to_qk_layernorm no_weight_decay_cond_type"
    ),
    "nothing would be trained; what saves a teacher's logits is Megatron-LM's own model": "freeze_all_layers",
}
REFUSED = {pattern: reason for reason, patterns in _REASONS.items() for pattern in patterns.split()}

# The same for single values of flags that have good ones too.
REFUSED_VALUES = {
    ("attention_backend", "local"): "Megatron allows it with --spec local only; leave it at auto",
    ("transformer_impl", "inference_optimized"): "it has no backward pass",
}
