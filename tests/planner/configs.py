"""Small models whose activations weigh as much as their parameters, so that a wrong count of either shows."""

from transformers import (
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    PretrainedConfig,
    Starcoder2Config,
)

VOCABULARY = 2000
_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "head_dim": 32,
}


def config_of(name: str) -> PretrainedConfig:
    match name:
        case "llama":
            return LlamaConfig(**_LLAMA)
        case "gemma":
            return GemmaConfig(**_LLAMA)
        case "starcoder2":
            return Starcoder2Config(**_LLAMA)
        case "nemotron":
            return NemotronConfig(**_LLAMA)
        case "mistral":
            return MistralConfig(**_LLAMA, sliding_window=128)
        case "gemma2":
            return Gemma2Config(**_LLAMA, sliding_window=128)
        case "gpt2":
            return GPT2Config(n_embd=256, n_layer=8, n_head=8, vocab_size=VOCABULARY, n_positions=1024)
        case "mixtral":
            return MixtralConfig(**{**_LLAMA, "num_hidden_layers": 4}, num_local_experts=4)
    raise ValueError(name)
