"""Static graphs of single modules: traced, searched and cut into parts. Knows nothing of Megatron."""
