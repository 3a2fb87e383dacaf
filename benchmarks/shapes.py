"""Shapes of published models, as their `config.json` has them, for benchmarks with random weights."""

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "rope_theta": 1e6, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "rope_theta": 5e5, "dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    "qwen3-0.6b": QWEN3
    | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    | {"tie_word_embeddings": True},
    "qwen3-4b": QWEN3
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    | {"tie_word_embeddings": True},
    "qwen3-8b": QWEN3
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
    | {"tie_word_embeddings": False},
    "llama3-8b": LLAMA3
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "qwen3-30b-a3b": QWEN3_MOE
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144}
    | {"moe_intermediate_size": 768},
    # The 30B's layer, few and narrow enough for a CPU.
    "qwen3-moe-cpu": QWEN3_MOE
    | {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 3072}
    | {"moe_intermediate_size": 384, "num_experts": 32, "vocab_size": 65536},
}
