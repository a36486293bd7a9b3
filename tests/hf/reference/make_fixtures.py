"""Tiny models of the published families with random weights: tests/hf/NAME/{config.json, model.safetensors, expected.*}.

usage: python3 tests/hf/reference/make_fixtures.py [NAME...]   (torch >= 1.13)
Weights make attention peaked; texts are longer than windows and original_max_position_embeddings. expected.safetensors has ids,
logits [batch, seq, vocab], gradients of the mean cross-entropy of the next token for a few tensors, and for each variant (a
config.json with some fields altered, expected.json) the logits of the last positions.
"""
import copy
import json
import os
import struct
import sys

import torch

from families import forward, layer_types

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BATCH, SEQ, GREEDY = 2, 24, 64


def save(path, tensors, dtype=None):
    header, data, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, t in sorted(tensors.items()):
        t = t.detach().contiguous()
        if t.dtype == torch.float64:
            t = t.float()
        kind = {torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16"}[t.dtype]
        raw = (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(t.shape), "data_offsets": [offset, offset + len(raw)]}
        data.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data))


BASE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=68,
            max_position_embeddings=96, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2, torch_dtype="float32", transformers_version="4.57.1", use_cache=True)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

MODELS = {
    "gpt2": (dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=72, n_ctx=72, vocab_size=68,
                  n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1,
                  initializer_range=0.02, scale_attn_weights=True, reorder_and_upcast_attn=False, scale_attn_by_inverse_layer_idx=False,
                  summary_type="cls_index", bos_token_id=50256, eos_token_id=50256, use_cache=True, transformers_version="4.57.1"),
             [dict(layer_norm_epsilon=0.05), dict(n_head=8)]),
    "llama": (dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama", rope_scaling=LLAMA3, rope_theta=500000.0, attention_bias=False, mlp_bias=False,
                   attention_dropout=0.0, pretraining_tp=1, initializer_range=0.02, head_dim=8),
              [dict(rope_theta=10000.0), dict(rms_norm_eps=0.05), dict(rope_scaling=None), dict(rope_scaling=dict(LLAMA3, factor=2.0)),
               dict(rope_scaling=dict(LLAMA3, high_freq_factor=8.0)), dict(rope_scaling=dict(LLAMA3, low_freq_factor=2.0)),
               dict(rope_scaling=dict(LLAMA3, original_max_position_embeddings=8)), dict(rope_scaling=dict(type="linear", factor=4.0)),
               dict(rope_scaling=YARN), dict(rope_scaling=dict(YARN, attention_factor=1.5)), dict(rope_scaling=dict(YARN, beta_fast=4.0, beta_slow=0.5)),
               dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_scaling=dict(YARN, truncate=False))]),
    "mistral": (dict(BASE, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=7, attention_dropout=0.0, head_dim=8),
                [dict(sliding_window=None), dict(sliding_window=12), dict(rope_theta=1000000.0)]),
    "qwen2": (dict(BASE, architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True, sliding_window=5, use_sliding_window=True,
                   max_window_layers=1, attention_dropout=0.0, rope_scaling=YARN),
              [dict(use_sliding_window=False), dict(max_window_layers=0), dict(sliding_window=9), dict(rope_scaling=None)]),
    "qwen3": (dict(BASE, architectures=["Qwen3ForCausalLM"], model_type="qwen3", tie_word_embeddings=True, head_dim=16, rope_theta=1000000.0, sliding_window=None,
                   use_sliding_window=False, max_window_layers=2, attention_bias=False, attention_dropout=0.0, rope_scaling=None),
              [dict(rms_norm_eps=0.05), dict(rope_theta=100.0)]),
    "mixtral": (dict(BASE, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
                     output_router_logits=False, router_aux_loss_coef=0.02, router_jitter_noise=0.0, attention_dropout=0.0, intermediate_size=32),
                [dict(num_experts_per_tok=1), dict(rope_theta=1000000.0), dict(sliding_window=7)]),
    "qwen3_moe": (dict(BASE, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                       norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], head_dim=16, sliding_window=None, use_sliding_window=False,
                       max_window_layers=2, attention_bias=False, attention_dropout=0.0, output_router_logits=False, router_aux_loss_coef=0.001, rope_scaling=None),
                  [dict(norm_topk_prob=False), dict(num_experts_per_tok=3)]),
    "gemma2": (dict(BASE, architectures=["Gemma2ForCausalLM"], model_type="gemma2", tie_word_embeddings=True, head_dim=8, query_pre_attn_scalar=16, sliding_window=5,
                    attn_logit_softcapping=5.0, final_logit_softcapping=3.0, hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh",
                    attention_bias=False, attention_dropout=0.0, cache_implementation="hybrid"),
               [dict(query_pre_attn_scalar=8), dict(sliding_window=11), dict(attn_logit_softcapping=None), dict(final_logit_softcapping=None),
                dict(attn_logit_softcapping=20.0), dict(final_logit_softcapping=30.0)]),
    "gemma3": (dict(BASE, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", num_hidden_layers=3, tie_word_embeddings=True, head_dim=8, query_pre_attn_scalar=16,
                    sliding_window=5, sliding_window_pattern=3, attn_logit_softcapping=None, final_logit_softcapping=None, rope_theta=1000000.0,
                    rope_local_base_freq=10000.0, rope_scaling=dict(rope_type="linear", factor=8.0), hidden_activation="gelu_pytorch_tanh",
                    attention_bias=False, attention_dropout=0.0),
               [dict(sliding_window_pattern=2), dict(rope_local_base_freq=100.0), dict(rope_scaling=None), dict(query_pre_attn_scalar=8), dict(sliding_window=11)]),
    "deepseek_v3": (dict(BASE, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
                         qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=1,
                         moe_intermediate_size=16, first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid",
                         topk_method="noaux_tc", attention_bias=False, attention_dropout=0.0, num_nextn_predict_layers=0, rope_interleave=True,
                         rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=0.7, beta_fast=32, beta_slow=1)),
                    [dict(routed_scaling_factor=1.0), dict(norm_topk_prob=False), dict(topk_group=3), dict(n_group=2, topk_group=1), dict(num_experts_per_tok=2),
                     dict(rope_interleave=False), dict(rope_scaling=None), dict(rope_theta=100.0)]),
    "mamba2": (dict(architectures=["Mamba2ForCausalLM"], model_type="mamba2", hidden_size=32, num_hidden_layers=2, expand=2, num_heads=4, head_dim=16, n_groups=2, state_size=8,
                    conv_kernel=4, vocab_size=68, layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True, hidden_act="silu", tie_word_embeddings=False, chunk_size=8,
                    rms_norm=True, residual_in_fp32=True, rescale_prenorm_residual=False, time_step_limit=[0.0, float("inf")], time_step_rank=2, time_step_min=0.001,
                    time_step_max=0.1, time_step_floor=1e-4, initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True, torch_dtype="float32",
                    transformers_version="4.57.1"),
               [dict(layer_norm_epsilon=0.05), dict(time_step_limit=[0.3, 0.7])]),
    "qwen3_next": (dict(BASE, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", num_hidden_layers=3, full_attention_interval=2, head_dim=16, rope_theta=100000.0,
                        partial_rotary_factor=0.25, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
                        decoder_sparse_step=1, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
                        mlp_only_layers=[], attention_bias=False, attention_dropout=0.0, output_router_logits=False, router_aux_loss_coef=0.001, rope_scaling=None),
                   [dict(rms_norm_eps=0.05), dict(rope_theta=100.0), dict(partial_rotary_factor=0.5), dict(norm_topk_prob=False), dict(num_experts_per_tok=3)]),
}


del MODELS["gemma3"][0]["hidden_act"]


def mamba2_shapes(c):
    h, n, inner = c["hidden_size"], c["num_heads"], c["num_heads"] * c["head_dim"]
    mixed = inner + 2 * c["n_groups"] * c["state_size"]
    s = {"backbone.embeddings.weight": (c["vocab_size"], h), "backbone.norm_f.weight": (h,), "lm_head.weight": (c["vocab_size"], h)}
    for i in range(c["num_hidden_layers"]):
        p = f"backbone.layers.{i}."
        s.update({p + "norm.weight": (h,), p + "mixer.A_log": (n,), p + "mixer.D": (n,), p + "mixer.dt_bias": (n,), p + "mixer.conv1d.weight": (mixed, 1, c["conv_kernel"]),
                  p + "mixer.conv1d.bias": (mixed,), p + "mixer.in_proj.weight": (inner + mixed + n, h), p + "mixer.norm.weight": (inner,),
                  p + "mixer.out_proj.weight": (h, inner)})
    return s


def linear_attention_shapes(c, p):
    h, n, g = c["hidden_size"], c["linear_num_value_heads"], c["linear_num_key_heads"]
    keys, values = g * c["linear_key_head_dim"], n * c["linear_value_head_dim"]
    return {p + "in_proj_qkvz.weight": (2 * keys + 2 * values, h), p + "in_proj_ba.weight": (2 * n, h), p + "conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]),
            p + "A_log": (n,), p + "dt_bias": (n,), p + "norm.weight": (c["linear_value_head_dim"],), p + "out_proj.weight": (h, values)}


def shapes(c):
    """Names of tensors with shapes; a name with a second entry has that standard deviation instead of 1/sqrt(inputs)."""
    if c["model_type"] == "gpt2":
        h, f = c["n_embd"], c["n_inner"] or 4 * c["n_embd"]
        s = {"wte.weight": (c["vocab_size"], h), "wpe.weight": (c["n_positions"], h), "ln_f.weight": (h,), "ln_f.bias": (h,)}
        for i in range(c["n_layer"]):
            s.update({f"h.{i}.{k}": v for k, v in {
                "ln_1.weight": (h,), "ln_1.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,), "attn.c_attn.weight": (h, 3 * h), "attn.c_attn.bias": (3 * h,),
                "attn.c_proj.weight": (h, h), "attn.c_proj.bias": (h,), "mlp.c_fc.weight": (h, f), "mlp.c_fc.bias": (f,), "mlp.c_proj.weight": (f, h), "mlp.c_proj.bias": (h,)}.items()})
        return {"transformer." + k: v for k, v in s.items()}
    if c["model_type"] == "mamba2":
        return mamba2_shapes(c)
    h, f, kind = c["hidden_size"], c["intermediate_size"], c["model_type"]
    n, k = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or h // n
    s = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    if not c["tie_word_embeddings"]:
        s["lm_head.weight"] = (c["vocab_size"], h)

    def mlp(p, f, names=("gate_proj", "up_proj", "down_proj")):
        return {p + names[0] + ".weight": (f, h), p + names[1] + ".weight": (f, h), p + names[2] + ".weight": (h, f)}

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for norm in ["input_layernorm", "post_attention_layernorm"] + (["pre_feedforward_layernorm", "post_feedforward_layernorm"] if kind.startswith("gemma") else []):
            s[p + norm + ".weight"] = (h,)
        a = p + "self_attn."
        if kind == "qwen3_next" and layer_types(c)[i] == "linear_attention":
            s.update(linear_attention_shapes(c, p + "linear_attn."))
        elif kind == "deepseek_v3":
            e, r = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["kv_lora_rank"]
            s.update({a + "q_a_proj.weight": (c["q_lora_rank"], h), a + "q_a_layernorm.weight": (c["q_lora_rank"],), a + "q_b_proj.weight": (n * e, c["q_lora_rank"]),
                      a + "kv_a_proj_with_mqa.weight": (r + c["qk_rope_head_dim"], h), a + "kv_a_layernorm.weight": (r,),
                      a + "kv_b_proj.weight": (n * (c["qk_nope_head_dim"] + c["v_head_dim"]), r), a + "o_proj.weight": (h, n * c["v_head_dim"])})
        else:
            s.update({a + "q_proj.weight": (n * d * (2 if kind == "qwen3_next" else 1), h), a + "k_proj.weight": (k * d, h), a + "v_proj.weight": (k * d, h), a + "o_proj.weight": (h, n * d)})
        if kind == "qwen2":
            s.update({a + "q_proj.bias": (n * d,), a + "k_proj.bias": (k * d,), a + "v_proj.bias": (k * d,)})
        if kind in ("qwen3", "qwen3_moe", "gemma3_text") or a + "q_proj.weight" in s and kind == "qwen3_next":
            s.update({a + "q_norm.weight": (d,), a + "k_norm.weight": (d,)})
        if kind == "mixtral":
            s[p + "block_sparse_moe.gate.weight"] = (c["num_local_experts"], h)
            for e in range(c["num_local_experts"]):
                s.update(mlp(f"{p}block_sparse_moe.experts.{e}.", f, ("w1", "w3", "w2")))
        elif kind == "qwen3_moe" or kind == "qwen3_next" and i not in c["mlp_only_layers"] or kind == "deepseek_v3" and i >= c["first_k_dense_replace"]:
            count = c["n_routed_experts"] if kind == "deepseek_v3" else c["num_experts"]
            s[p + "mlp.gate.weight"] = (count, h)
            for e in range(count):
                s.update(mlp(f"{p}mlp.experts.{e}.", c["moe_intermediate_size"]))
            if kind == "deepseek_v3":
                s[p + "mlp.gate.e_score_correction_bias"] = (count,)
                s.update(mlp(p + "mlp.shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"]))
            if kind == "qwen3_next":
                s[p + "mlp.shared_expert_gate.weight"] = (1, h)
                s.update(mlp(p + "mlp.shared_expert.", c["shared_expert_intermediate_size"]))
        else:
            s.update(mlp(p + "mlp.", f))
    return s


def weights(c, seed):
    g = torch.Generator().manual_seed(seed)
    w = {}
    for name, shape in shapes(c).items():
        x = torch.randn(shape, generator=g, dtype=torch.float32)
        gemma = c["model_type"].startswith("gemma")
        centred = gemma or c["model_type"] == "qwen3_next" and "linear_attn.norm" not in name
        if "conv1d" in name:
            x = x * 0.5
        elif name.endswith(("A_log", "dt_bias")):
            x = 0.5 * x - (0.5 if name.endswith("dt_bias") else 0)
        elif len(shape) == 1:
            norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            x = 0.2 * x + (0 if not norm or centred else 1)
        elif "embed" in name or "wte" in name or "wpe" in name:
            x = x * (1 / 32 ** 0.5 if gemma else 0.25 if c.get("tie_word_embeddings") else 0.7)
        else:
            inputs = shape[0] if c["model_type"] == "gpt2" else shape[1]
            sharp = any(k in name for k in ("q_proj", "k_proj", "c_attn", "q_b_proj", "kv_b_proj", "gate.weight"))
            x = x * (2.5 if sharp else 1.0) / inputs ** 0.5
        w[name] = x
    return w


def greedy(c, w, ids, count):
    out = list(ids)
    margin = 1e9
    for _ in range(count):
        logits = forward(c, w, torch.tensor([out]))[0, -1]
        best = logits.topk(2)[0]
        margin = min(margin, float((best[0] - best[1]) / logits.std()))
        out.append(int(logits.argmax()))
    return out, margin


def make(name):
    config, variants = MODELS[name]
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    kept = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight", "transformer.h.1.attn.c_attn.weight", "transformer.h.0.ln_1.bias",
            "model.layers.1.self_attn.kv_b_proj.weight", "model.layers.1.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight",
            "model.layers.1.block_sparse_moe.experts.2.w2.weight", "model.layers.1.mlp.experts.1.down_proj.weight",
            "backbone.embeddings.weight", "model.layers.1.self_attn.q_proj.weight" if name == "qwen3_next" else "", "model.layers.0.mlp.shared_expert_gate.weight"]
    kept += [p + n for p in ("model.layers.0.linear_attn.", "backbone.layers.1.mixer.")
             for n in ("A_log", "D", "dt_bias", "norm.weight", "conv1d.weight", "conv1d.bias", "in_proj.weight", "in_proj_qkvz.weight", "in_proj_ba.weight")]
    for seed in range(100):  # one whose greedy text has no close calls
        w32 = weights(config, 1000 + seed)
        w = {k: v.double() for k, v in w32.items()}
        long = copy.deepcopy(config)
        text, margin = greedy(long, w, [5, 3, 60, 11], GREEDY)
        if margin > 2e-3 and len(set(text)) > 8:
            break
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(0, config["vocab_size"], (BATCH, SEQ), generator=g)
    for t in w.values():
        t.requires_grad_(True)
    logits = forward(config, w, ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    expected = {"ids": ids.int(), "logits": logits}
    expected.update({"gradient." + k: w[k].grad for k in kept if k in w})
    facts = {"loss": float(loss), "greedy": text, "margin": margin, "prompt": 4, "variants": []}
    std = float(logits.std())
    with torch.no_grad():
        for i, change in enumerate(variants):
            other = forward({**config, **change}, w, ids)
            moved = float((other - logits).abs().max()) / std
            assert moved > 1e-2, (name, change, moved)
            expected[f"variant.{i + 1}"] = other[:, -3:]
            facts["variants"].append(change)
    save(os.path.join(folder, "model.safetensors"), w32)
    save(os.path.join(folder, "expected.safetensors"), expected)
    for file, value in (("config.json", config), ("expected.json", facts)):
        with open(os.path.join(folder, file), "w") as f:
            json.dump(value, f, indent=1, sort_keys=True)
            f.write("\n")
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    print(f"{name}: loss {float(loss):.4f}, logits' deviation {std:.3f}, greedy margin {margin:.4f} (seed {seed}), {size / 1000:.0f} KB")


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        make(name)
