"""Published families of models in plain PyTorch, as transformers computes them: config.json and named tensors to logits.

Written from the semantics of transformers' modeling_*.py (gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, gemma2,
gemma3, deepseek_v3, mamba2, qwen3_next) and modeling_rope_utils.py; recurrences are loops over tokens; shares nothing with mlua. `w` maps names to tensors; all is float64.
"""
import math

import torch
import torch.nn.functional as F


def rms(x, weight, eps, plus=0.0):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + plus)


def rope_rates(dim, base, scaling, positions):
    """Inverse frequencies and the factor of cos and sin."""
    index = torch.arange(0, dim, 2, dtype=torch.float64)
    rate = 1.0 / base ** (index / dim)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "default":
        return rate, 1.0
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or positions
    if kind == "linear":
        return rate / factor, 1.0
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wave = 2 * math.pi / rate
        smooth = (original / wave - low) / (high - low)
        between = (1 - smooth) * rate / factor + smooth * rate
        out = torch.where(wave > original / low, rate / factor, rate)
        return torch.where((wave <= original / low) & (wave >= original / high), between, out), 1.0
    assert kind == "yarn"

    def mscale(scale, by=1.0):
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(factor, m) / mscale(factor, m_all) if m and m_all else mscale(factor)

    def find(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = find(scaling.get("beta_fast") or 32), find(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return rate / factor * ramp + rate * (1 - ramp), attention


def rotate(x, rates, factor, interleaved=False):
    """x: [batch, heads, seq, dim]."""
    b, h, t, d = x.shape
    if interleaved:
        x = x.view(b, h, t, d // 2, 2).transpose(4, 3).reshape(b, h, t, d)
    angle = torch.outer(torch.arange(t, dtype=torch.float64), rates)
    cos, sin = (torch.cat((f, f), -1) * factor for f in (angle.cos(), angle.sin()))
    half = torch.cat((-x[..., d // 2:], x[..., :d // 2]), -1)
    return x * cos + half * sin


def attend(q, k, v, scale, window=None, cap=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * scale
    if cap:
        s = torch.tanh(s / cap) * cap
    t = s.shape[-1]
    i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
    hidden = j > i
    if window:
        hidden = hidden | (j <= i - window)
    return s.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def heads(x, n):
    b, t, _ = x.shape
    return x.view(b, t, n, -1).transpose(1, 2)


def merge(x):
    b, h, t, d = x.shape
    return x.transpose(1, 2).reshape(b, t, h * d)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def gpt2(c, w, ids):
    eps, x = c["layer_norm_epsilon"], w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:ids.shape[1]]
    h = c["n_embd"]

    def norm(x, name):
        return F.layer_norm(x, (h,), w[name + ".weight"], w[name + ".bias"], eps)

    for i in range(c["n_layer"]):
        p = f"transformer.h.{i}."
        qkv = norm(x, p + "ln_1") @ w[p + "attn.c_attn.weight"] + w[p + "attn.c_attn.bias"]
        q, k, v = (heads(y, c["n_head"]) for y in qkv.split(h, -1))
        x = x + merge(attend(q, k, v, q.shape[-1] ** -0.5)) @ w[p + "attn.c_proj.weight"] + w[p + "attn.c_proj.bias"]
        y = gelu(norm(x, p + "ln_2") @ w[p + "mlp.c_fc.weight"] + w[p + "mlp.c_fc.bias"])
        x = x + y @ w[p + "mlp.c_proj.weight"] + w[p + "mlp.c_proj.bias"]
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def swiglu(x, w, p, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (w[f"{p}{n}.weight"] for n in names)
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def softmax_moe(c, w, x, p, names, normalise):
    top = c["num_experts_per_tok"]
    probs = (x @ w[p + "gate.weight"].T).softmax(-1)
    weights, chosen = probs.topk(top, -1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(probs.shape[-1]):
        out = out + ((chosen == e) * weights).sum(-1, keepdim=True) * swiglu(x, w, f"{p}experts.{e}.", names)
    return out


def deepseek_moe(c, w, x, p):
    n, groups = c["n_routed_experts"], c["n_group"]
    scores = (x @ w[p + "gate.weight"].T).sigmoid()
    choice = scores + w[p + "gate.e_score_correction_bias"]
    by_group = choice.view(*choice.shape[:-1], groups, n // groups).topk(2, -1)[0].sum(-1)
    kept = torch.zeros_like(by_group).scatter(-1, by_group.topk(c["topk_group"], -1)[1], 1)
    choice = choice.masked_fill(kept.repeat_interleave(n // groups, -1) == 0, 0.0)
    chosen = choice.topk(c["num_experts_per_tok"], -1)[1]
    weights = scores.gather(-1, chosen)
    if c["norm_topk_prob"]:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * c["routed_scaling_factor"]
    out = swiglu(x, w, p + "shared_experts.")
    for e in range(n):
        out = out + ((chosen == e) * weights).sum(-1, keepdim=True) * swiglu(x, w, f"{p}experts.{e}.")
    return out


def llama(c, w, ids):
    """Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE."""
    kind, eps = c["model_type"], c["rms_norm_eps"]
    n, k_n = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or c["hidden_size"] // n
    rates, factor = rope_rates(d, c["rope_theta"], c.get("rope_scaling"), c["max_position_embeddings"])
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        window = c.get("sliding_window")
        if kind in ("qwen2", "qwen3") and not (c.get("use_sliding_window") and i >= c["max_window_layers"]):
            window = None
        if kind in ("llama", "qwen3_moe"):
            window = window if kind == "qwen3_moe" and c.get("use_sliding_window") else None
        y = rms(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (y @ w[f"{p}self_attn.{m}_proj.weight"].T + w.get(f"{p}self_attn.{m}_proj.bias", 0) for m in "qkv")
        q, k, v = heads(q, n), heads(k, k_n), heads(v, k_n)
        if kind in ("qwen3", "qwen3_moe"):
            q = rms(q, w[p + "self_attn.q_norm.weight"], eps)
            k = rms(k, w[p + "self_attn.k_norm.weight"], eps)
        q, k = rotate(q, rates, factor), rotate(k, rates, factor)
        x = x + merge(attend(q, k, v, d ** -0.5, window)) @ w[p + "self_attn.o_proj.weight"].T
        y = rms(x, w[p + "post_attention_layernorm.weight"], eps)
        if kind == "mixtral":
            x = x + softmax_moe(c, w, y, p + "block_sparse_moe.", ("w1", "w3", "w2"), True)
        elif kind == "qwen3_moe":
            x = x + softmax_moe(c, w, y, p + "mlp.", ("gate_proj", "up_proj", "down_proj"), c["norm_topk_prob"])
        else:
            x = x + swiglu(y, w, p + "mlp.")
    x = rms(x, w["model.norm.weight"], eps)
    return x @ w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T


def gemma(c, w, ids):
    """Gemma-2 and Gemma-3 (text)."""
    three, eps = c["model_type"] == "gemma3_text", c["rms_norm_eps"]
    n, k_n, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    x = w["model.embed_tokens.weight"][ids] * math.sqrt(c["hidden_size"])
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        pattern = c.get("sliding_window_pattern", 6) if three else 2
        local = (i + 1) % pattern != 0
        base, scaling = c["rope_theta"], c.get("rope_scaling")
        if three and local:
            base, scaling = c["rope_local_base_freq"], None
        rates, factor = rope_rates(d, base, scaling, c["max_position_embeddings"])
        y = rms(x, w[p + "input_layernorm.weight"], eps, 1.0)
        q, k, v = (y @ w[f"{p}self_attn.{m}_proj.weight"].T for m in "qkv")
        q, k, v = heads(q, n), heads(k, k_n), heads(v, k_n)
        if three:
            q = rms(q, w[p + "self_attn.q_norm.weight"], eps, 1.0)
            k = rms(k, w[p + "self_attn.k_norm.weight"], eps, 1.0)
        q, k = rotate(q, rates, factor), rotate(k, rates, factor)
        a = attend(q, k, v, c["query_pre_attn_scalar"] ** -0.5, c["sliding_window"] if local else None, c.get("attn_logit_softcapping"))
        y = merge(a) @ w[p + "self_attn.o_proj.weight"].T
        x = x + rms(y, w[p + "post_attention_layernorm.weight"], eps, 1.0)
        y = rms(x, w[p + "pre_feedforward_layernorm.weight"], eps, 1.0)
        y = (gelu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        x = x + rms(y, w[p + "post_feedforward_layernorm.weight"], eps, 1.0)
    x = rms(x, w["model.norm.weight"], eps, 1.0) @ w["model.embed_tokens.weight"].T
    cap = c.get("final_logit_softcapping")
    return torch.tanh(x / cap) * cap if cap else x


def deepseek(c, w, ids):
    eps, n = c["rms_norm_eps"], c["num_attention_heads"]
    nope, rope, v_d, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    scaling = c.get("rope_scaling")
    rates, factor = rope_rates(rope, c["rope_theta"], scaling, c["max_position_embeddings"])
    scale = (nope + rope) ** -0.5
    if scaling and scaling.get("mscale_all_dim"):
        m = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0
        scale = scale * m * m
    x = w["model.embed_tokens.weight"][ids]
    b, t = ids.shape
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        y = rms(x, w[p + "input_layernorm.weight"], eps)
        a = p + "self_attn."
        if c.get("q_lora_rank"):
            q = rms(y @ w[a + "q_a_proj.weight"].T, w[a + "q_a_layernorm.weight"], 1e-6) @ w[a + "q_b_proj.weight"].T
        else:
            q = y @ w[a + "q_proj.weight"].T
        q_pass, q_rot = heads(q, n).split([nope, rope], -1)
        latent, k_rot = (y @ w[a + "kv_a_proj_with_mqa.weight"].T).split([rank, rope], -1)
        kv = heads(rms(latent, w[a + "kv_a_layernorm.weight"], 1e-6) @ w[a + "kv_b_proj.weight"].T, n)
        k_pass, v = kv.split([nope, v_d], -1)
        inter = c.get("rope_interleave", True)
        q_rot = rotate(q_rot, rates, factor, inter)
        k_rot = rotate(k_rot.view(b, 1, t, rope), rates, factor, inter).expand(b, n, t, rope)
        q, k = torch.cat((q_pass, q_rot), -1), torch.cat((k_pass, k_rot), -1)
        x = x + merge(attend(q, k, v, scale)) @ w[a + "o_proj.weight"].T
        y = rms(x, w[p + "post_attention_layernorm.weight"], eps)
        x = x + (swiglu(y, w, p + "mlp.") if i < c["first_k_dense_replace"] else deepseek_moe(c, w, y, p + "mlp."))
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def causal_conv(x, weight, bias=None):
    """x: [batch, seq, channels]; weight: [channels, 1, taps]."""
    taps = weight.shape[-1]
    return F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight, bias, groups=x.shape[-1]).transpose(1, 2)


def mamba2(c, w, ids):
    eps, n, d, g, s = c["layer_norm_epsilon"], c["num_heads"], c["head_dim"], c["n_groups"], c["state_size"]
    b, t = ids.shape
    inner = n * d
    x = w["backbone.embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"backbone.layers.{i}."
        h = rms(x, w[p + "norm.weight"], eps) @ w[p + "mixer.in_proj.weight"].T + w.get(p + "mixer.in_proj.bias", 0)
        gate, h, dt = h.split([inner, inner + 2 * g * s, n], -1)
        h = F.silu(causal_conv(h, w[p + "mixer.conv1d.weight"], w.get(p + "mixer.conv1d.bias")))
        u, key, query = h.split([inner, g * s, g * s], -1)
        u, dt = u.view(b, t, n, d), F.softplus(dt + w[p + "mixer.dt_bias"]).clamp(*c["time_step_limit"])
        key, query = (y.view(b, t, g, s).repeat_interleave(n // g, 2) for y in (key, query))
        rate = -w[p + "mixer.A_log"].exp()
        state, out = torch.zeros(b, n, d, s, dtype=x.dtype), []
        for k in range(t):
            state = state * (dt[:, k] * rate).exp()[:, :, None, None] + torch.einsum("bn,bnd,bns->bnds", dt[:, k], u[:, k], key[:, k])
            out.append(torch.einsum("bnds,bns->bnd", state, query[:, k]) + w[p + "mixer.D"][:, None] * u[:, k])
        y = rms(torch.stack(out, 1).reshape(b, t, inner) * F.silu(gate), w[p + "mixer.norm.weight"], eps)
        x = x + y @ w[p + "mixer.out_proj.weight"].T + w.get(p + "mixer.out_proj.bias", 0)
    return rms(x, w["backbone.norm_f.weight"], eps) @ w["backbone.embeddings.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T


def layer_types(c):
    """Of Qwen3-Next: every n-th layer attends."""
    return c.get("layer_types") or ["linear_attention" if (i + 1) % c.get("full_attention_interval", 4) else "full_attention" for i in range(c["num_hidden_layers"])]


def gated_delta_net(c, w, y, p):
    b, t, _ = y.shape
    g, n, dk, dv = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    r = n // g
    qkvz = (y @ w[p + "in_proj_qkvz.weight"].T).view(b, t, g, -1)
    q, k, v, z = qkvz.split([dk, dk, r * dv, r * dv], -1)
    beta, a = (y @ w[p + "in_proj_ba.weight"].T).view(b, t, g, 2 * r).split(r, -1)
    mixed = torch.cat([s.reshape(b, t, -1) for s in (q, k, v)], -1)
    mixed = F.silu(causal_conv(mixed, w[p + "conv1d.weight"]))
    q, k, v = mixed.split([g * dk, g * dk, n * dv], -1)
    q, k = (s.reshape(b, t, g, dk) for s in (q, k))
    q, k = (s * torch.rsqrt((s * s).sum(-1, keepdim=True) + 1e-6) for s in (q, k))
    q, k = (s.repeat_interleave(r, 2) for s in (q * dk ** -0.5, k))
    v, z, beta = v.reshape(b, t, n, dv), z.reshape(b, t, n, dv), beta.reshape(b, t, n).sigmoid()
    decay = (-w[p + "A_log"].exp() * F.softplus(a.reshape(b, t, n) + w[p + "dt_bias"])).exp()
    state, out = torch.zeros(b, n, dk, dv, dtype=y.dtype), []
    for i in range(t):
        state = state * decay[:, i, :, None, None]
        read = torch.einsum("bnkv,bnk->bnv", state, k[:, i])
        state = state + torch.einsum("bnk,bnv->bnkv", k[:, i], (v[:, i] - read) * beta[:, i, :, None])
        out.append(torch.einsum("bnkv,bnk->bnv", state, q[:, i]))
    y = rms(torch.stack(out, 1), w[p + "norm.weight"], c["rms_norm_eps"]) * F.silu(z)
    return y.reshape(b, t, n * dv) @ w[p + "out_proj.weight"].T


def qwen3_next(c, w, ids):
    eps, n, k_n, d = c["rms_norm_eps"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    turned = int(d * c["partial_rotary_factor"])
    rates, factor = rope_rates(turned, c["rope_theta"], c.get("rope_scaling"), c["max_position_embeddings"])
    x = w["model.embed_tokens.weight"][ids]

    def partly(y):
        return torch.cat((rotate(y[..., :turned], rates, factor), y[..., turned:]), -1)

    for i, kind in enumerate(layer_types(c)):
        p = f"model.layers.{i}."
        y = rms(x, w[p + "input_layernorm.weight"], eps, 1.0)
        if kind == "linear_attention":
            x = x + gated_delta_net(c, w, y, p + "linear_attn.")
        else:
            a = p + "self_attn."
            q, gate = heads(y @ w[a + "q_proj.weight"].T, n).split(d, -1)
            k, v = (heads(y @ w[f"{a}{m}_proj.weight"].T, k_n) for m in "kv")
            q, k = rms(q, w[a + "q_norm.weight"], eps, 1.0), rms(k, w[a + "k_norm.weight"], eps, 1.0)
            x = x + merge(attend(partly(q), partly(k), v, d ** -0.5) * gate.sigmoid()) @ w[a + "o_proj.weight"].T
        y = rms(x, w[p + "post_attention_layernorm.weight"], eps, 1.0)
        m = p + "mlp."
        if i in c["mlp_only_layers"]:
            x = x + swiglu(y, w, m)
        else:
            shared = swiglu(y, w, m + "shared_expert.") * (y @ w[m + "shared_expert_gate.weight"].T).sigmoid()
            x = x + softmax_moe(c, w, y, m, ("gate_proj", "up_proj", "down_proj"), c["norm_topk_prob"]) + shared
    return rms(x, w["model.norm.weight"], eps, 1.0) @ w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T


FORWARD = {
    "gpt2": gpt2, "llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama, "mixtral": llama, "qwen3_moe": llama,
    "gemma2": gemma, "gemma3_text": gemma, "deepseek_v3": deepseek, "mamba2": mamba2, "qwen3_next": qwen3_next,
}


def forward(config, weights, ids):
    return FORWARD[config["model_type"]](config, weights, ids)
