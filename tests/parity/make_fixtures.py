"""Parity fixtures by PyTorch, an implementation that shares nothing with mlua.

A tiny GPT, a tiny Llama and tiny recurrent models, whose recurrences are loops over tokens, with given weights: tokens, targets, logits, the mean loss, the gradient of every
parameter, and the losses of ten AdamW steps, in float64 and stored as float32 (losses as float64). Of a BERT, T5,
ViT, LLaVA and adapted Llama, in float64 and stored as float32: what the loss reads, the loss and the gradients.
Names and axis orders are those of models/*.lua.
usage: python3 tests/parity/make_fixtures.py [name ...]   (rewrites tests/parity/*.safetensors; any torch >= 1.13)
"""
import json
import math
import os
import struct
import sys

import torch
import torch.nn.functional as F
from torch.nn.utils.stateless import functional_call

HERE = os.path.dirname(os.path.abspath(__file__))
B, T, V, D, H, L = 2, 16, 61, 32, 4, 2
HD = D // H


def save(path, tensors):
    header, data, offset = {"__metadata__": {"made_by": "torch " + torch.__version__}}, b"", 0
    for name, t in tensors.items():
        kind = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32"}[t.dtype]
        raw = t.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(t.shape), "data_offsets": [offset, offset + len(raw)]}
        data, offset = data + raw, offset + len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def attend(q, k, v):  # [B, T, H, HD]; k, v may have fewer heads
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


def rope(x, base=500000.0):
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), base ** (-torch.arange(half, dtype=x.dtype) / half))[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def gpt_parameters():
    p = {"wte": (V, D), "wpe": (T, D)}
    for i in range(1, L + 1):
        b = f"blocks.{i}."
        p |= {b + "norm1.gain": (D,), b + "norm1.bias": (D,)}
        for x in "qkv":
            p |= {b + "attention.w" + x: (D, H, HD), b + "attention.b" + x: (H, HD)}
        p |= {b + "attention.wo": (H, HD, D), b + "attention.bo": (D,), b + "norm2.gain": (D,), b + "norm2.bias": (D,)}
        p |= {b + "mlp.up": (D, 4 * D), b + "mlp.up_bias": (4 * D,), b + "mlp.down": (4 * D, D), b + "mlp.down_bias": (D,)}
    return p | {"norm.gain": (D,), "norm.bias": (D,)}


def gpt(p, tokens):
    x = p["wte"][tokens] + p["wpe"]
    for i in range(1, L + 1):
        w = lambda n: p[f"blocks.{i}.{n}"]
        h = F.layer_norm(x, (D,), w("norm1.gain"), w("norm1.bias"), 1e-5)
        q, k, v = (torch.einsum("btd,dhe->bthe", h, w("attention.w" + n)) + w("attention.b" + n) for n in "qkv")
        x = x + torch.einsum("bthe,hed->btd", attend(q, k, v), w("attention.wo")) + w("attention.bo")
        h = F.layer_norm(x, (D,), w("norm2.gain"), w("norm2.bias"), 1e-5)
        h = h @ w("mlp.up") + w("mlp.up_bias")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
        x = x + h @ w("mlp.down") + w("mlp.down_bias")
    return F.layer_norm(x, (D,), p["norm.gain"], p["norm.bias"], 1e-5) @ p["wte"].T


KV, FF = 2, 48


def llama_parameters():
    p = {"embedding": (V, D)}
    for i in range(1, L + 1):
        b = f"blocks.{i}."
        p |= {b + "norm1.gain": (D,), b + "norm2.gain": (D,), b + "wq": (D, H, HD), b + "wk": (D, KV, HD)}
        p |= {b + "wv": (D, KV, HD), b + "wo": (H, HD, D), b + "gate": (D, FF), b + "up": (D, FF), b + "down": (FF, D)}
    return p | {"norm.gain": (D,)}


def rms_norm(x, gain):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain


def llama(p, tokens):
    x = p["embedding"][tokens]
    for i in range(1, L + 1):
        w = lambda n: p[f"blocks.{i}.{n}"]
        h = rms_norm(x, w("norm1.gain"))
        q, k, v = (torch.einsum("btd,dhe->bthe", h, w("w" + n)) for n in "qkv")
        x = x + torch.einsum("bthe,hed->btd", attend(rope(q), rope(k), v), w("wo"))
        h = rms_norm(x, w("norm2.gain"))
        x = x + (F.silu(h @ w("gate")) * (h @ w("up"))) @ w("down")
    return rms_norm(x, p["norm.gain"]) @ p["embedding"].T


def make(name, shapes, model, length=T, centres={}, exempt=()):
    """centres: mean and deviation by the end of a parameter's name; exempt: those of two or more axes without weight decay, likewise."""
    torch.manual_seed(7)
    p = {}
    for key, shape in shapes.items():
        # small enough that bf16 is fit for it: PyTorch's own autocast stays within 1.3e-2 of these gradients
        mean, std = 1 if key.endswith("gain") else 0, 0.05 if len(shape) > 1 else 0.2
        mean, std = next((c for end, c in centres.items() if key.endswith(end)), (mean, std))
        p[key] = (torch.randn(shape) * std + mean).float().double().requires_grad_()
    tokens, targets = torch.randint(V, (B, length)), torch.randint(V, (B, length))
    out = {"tokens": tokens.int(), "targets": targets.int()}
    out |= {"weight." + k: v.detach().float() for k, v in p.items()}
    logits = model(p, tokens)
    loss = F.cross_entropy(logits.view(-1, V), targets.view(-1))
    loss.backward()
    out |= {"logits": logits.float(), "loss": loss.detach().view(1)}
    out |= {"grad." + k: v.grad.float() for k, v in p.items()}
    # decay as m.param's rule: parameters of two or more axes, biases and gains exempt
    decay = [v for k, v in p.items() if v.dim() > 1 and "attention.b" not in k and not k.endswith(tuple(exempt))]
    rest = [v for v in p.values() if not any(v is d for d in decay)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(p, tokens).view(-1, V), targets.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        optimizer.step()
        losses.append(loss.item())
    out["losses"] = torch.tensor(losses, dtype=torch.float64)
    save(os.path.join(HERE, name + ".safetensors"), out)
    print(name, sum(v.numel() for v in p.values()), "parameters, losses", [round(x, 4) for x in losses])


# ---- Recurrent models: a loop over tokens, each as its paper writes it ---------------------------------------------

LONG = 37  # positions: more than a chunk, and no multiple of one


def short_conv(x, filter, bias=None):
    """silu of the sum of the last taps; x: [B, T, channels...], filter: [taps, channels...]."""
    taps = filter.shape[0]
    out = []
    for t in range(x.shape[1]):
        y = sum(filter[taps - 1 - back] * x[:, t - back] for back in range(min(taps, t + 1)))
        out.append(y if bias is None else y + bias)
    return F.silu(torch.stack(out, 1))


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def over(x, gain, axes, eps=1e-5):
    """RMS norm over the last `axes` axes."""
    dims = tuple(range(-axes, 0))
    return x / torch.sqrt((x * x).mean(dims, keepdim=True) + eps) * gain


MG, MH, MP, MN = 2, 2, 8, 6  # groups, heads of each, channels of a head, of the state


def mamba_mixer_parameters(b, gain):
    p = {b + "wz": (D, MG, MH, MP), b + "wx": (D, MG, MH, MP), b + "wB": (D, MG, MN), b + "wC": (D, MG, MN), b + "wdt": (D, MG, MH)}
    p |= {b + n: (MG, MH) for n in ("dt_bias", "A_log", "D")}
    for n, shape in (("x", (MG, MH, MP)), ("B", (MG, MN)), ("C", (MG, MN))):
        p |= {f"{b}conv_{n}.filter": (4,) + shape, f"{b}conv_{n}.bias": shape}
    return p | {b + gain: (MG, MH, MP), b + "wo": (MG, MH, MP, D)}


def mamba_mixer(w, h, gain, eps=1e-5):
    x, B_, C = (short_conv(torch.tensordot(h, w("w" + n), 1), w(f"conv_{n}.filter"), w(f"conv_{n}.bias")) for n in "xBC")
    dt = torch.log1p(torch.exp(torch.tensordot(h, w("wdt"), 1) + w("dt_bias")))
    S, out = torch.zeros(B, MG, MH, MN, MP, dtype=h.dtype), []
    for t in range(h.shape[1]):
        decay = torch.exp(-dt[:, t] * torch.exp(w("A_log")))
        S = decay[..., None, None] * S + torch.einsum("bgn,bgh,bghp->bghnp", B_[:, t], dt[:, t], x[:, t])
        out.append(torch.einsum("bgn,bghnp->bghp", C[:, t], S) + w("D")[..., None] * x[:, t])
    y = over(torch.stack(out, 1) * F.silu(torch.tensordot(h, w("wz"), 1)), w(gain), 3, eps)
    return torch.tensordot(y, w("wo"), 3)


def mamba(p, tokens):
    x = p["embedding"][tokens]
    for i in "12":
        w = lambda n: p[f"blocks.{i}.{n}"]
        x = x + mamba_mixer(w, rms_norm(x, w("norm.gain")), "gated.gain")
    return rms_norm(x, p["norm.gain"]) @ p["embedding"].T


def delta_rule(q, k, v, decay, beta):
    """q, k: [B, T, heads..., K], v: [B, T, heads..., V], decay: [B, T, heads..., 1 or K], beta: [B, T, heads...]."""
    S, out = torch.zeros(v.shape[:1] + v.shape[2:-1] + (q.shape[-1], v.shape[-1]), dtype=v.dtype), []
    for t in range(v.shape[1]):
        S = decay[:, t, ..., None] * S
        read = torch.einsum("...k,...kv->...v", k[:, t], S)
        S = S + torch.einsum("...k,...v->...kv", k[:, t], beta[:, t, ..., None] * (v[:, t] - read))
        out.append(torch.einsum("...k,...kv->...v", q[:, t], S))
    return torch.stack(out, 1)


DH, DK, DV, DR = 2, 12, 10, 5  # heads, key_dim, value_dim, rank


def deltanet_parameters(per_key):
    p = {"embedding": (V, D), "norm.gain": (D,)}
    for i in "12":
        b = f"blocks.{i}."
        p |= {b + "norm1.gain": (D,), b + "norm2.gain": (D,), b + "gate": (D, FF), b + "up": (D, FF), b + "down": (FF, D)}
        b += "delta."
        p |= {b + "wq": (D, DH, DK), b + "wk": (D, DH, DK), b + "wv": (D, DH, DV), b + "wbeta": (D, DH), b + "A_log": (DH,), b + "norm.gain": (DV,)}
        p |= {b + "conv_q.filter": (4, DH, DK), b + "conv_k.filter": (4, DH, DK), b + "conv_v.filter": (4, DH, DV), b + "wo": (DH, DV, D)}
        if per_key:
            p |= {b + "wa_in": (D, DR), b + "wa": (DR, DH, DK), b + "wg_in": (D, DR), b + "wg": (DR, DH, DV), b + "dt_bias": (DH, DK)}
        else:
            p |= {b + "wa": (D, DH), b + "wg": (D, DH, DV), b + "dt_bias": (DH,)}
    return p


def deltanet(p, tokens):
    x = p["embedding"][tokens]
    for i in "12":
        w = lambda n: p[f"blocks.{i}.{n}"]
        d = lambda n: p[f"blocks.{i}.delta.{n}"]
        per_key = f"blocks.{i}.delta.wa_in" in p
        h = rms_norm(x, w("norm1.gain"))
        q, k, v = (short_conv(torch.tensordot(h, d("w" + n), 1), d(f"conv_{n}.filter")) for n in "qkv")
        a = torch.tensordot(h @ d("wa_in") if per_key else h, d("wa"), 1)
        gate = torch.tensordot(h @ d("wg_in") if per_key else h, d("wg"), 1)
        rate = torch.exp(d("A_log"))
        a = -(rate[:, None] if per_key else rate) * F.softplus(a + d("dt_bias"))
        y = delta_rule(unit(q) / math.sqrt(DK), unit(k), v, torch.exp(a if per_key else a[..., None]), torch.sigmoid(torch.tensordot(h, d("wbeta"), 1)))
        y = over(y, d("norm.gain"), 1) * (torch.sigmoid(gate) if per_key else F.silu(gate))
        x = x + torch.tensordot(y, d("wo"), 2)
        h = rms_norm(x, w("norm2.gain"))
        x = x + (F.silu(h @ w("gate")) * (h @ w("up"))) @ w("down")
    return rms_norm(x, p["norm.gain"]) @ p["embedding"].T


HG, HV, HE, HF, HS = 2, 2, 4, 12, 20  # keys' heads, values' heads of each, experts, their width, the shared one's
PATTERN = ("DE", "M-", "*E")


def hybrid_parameters():
    p = {"embedding": (V, D), "norm.gain": (D,)}
    for i, word in enumerate(PATTERN, 1):
        for k, letter in enumerate(word, 1):
            p[f"blocks.{i}.norms.{k}.gain"] = (D,)
            b = f"blocks.{i}.parts.{k}."
            if letter == "*":
                p |= {b + "wq": (D, H, HD), b + "wk": (D, KV, HD), b + "wv": (D, KV, HD), b + "wo": (H, HD, D), b + "wg": (D, H, HD)}
                p |= {b + "q_norm.gain": (HD,), b + "k_norm.gain": (HD,)}
            elif letter == "D":
                p |= {b + n: (D, HG, DK) for n in ("wq", "wk")} | {b + n: (D, HG, HV, DV) for n in ("wv", "wz")} | {b + n: (D, HG, HV) for n in ("wbeta", "wa")}
                p |= {b + "A_log": (HG, HV), b + "dt_bias": (HG, HV), b + "norm.gain": (DV,), b + "wo": (HG, HV, DV, D), b + "conv_v.filter": (4, HG, HV, DV)}
                p |= {f"{b}conv_{n}.filter": (4, HG, DK) for n in "qk"}
            elif letter == "M":
                p |= mamba_mixer_parameters(b, "norm.gain")
            elif letter == "-":
                p |= {b + "gate": (D, FF), b + "up": (D, FF), b + "down": (FF, D)}
            else:
                p |= {b + "moe.router": (D, HE), b + "moe.gate": (HE, D, HF), b + "moe.up": (HE, D, HF), b + "moe.down": (HE, HF, D), b + "open": (D,)}
                p |= {b + "shared.gate": (D, HS), b + "shared.up": (D, HS), b + "shared.down": (HS, D)}
    return p


def hybrid(p, tokens):
    """Zero-centred norms: the gain is 1 + g; in the mixers it is g."""
    eps = 1e-6
    norm = lambda x, g: over(x, 1 + g, 1, eps)
    swiglu = lambda x, gate, up, down: (F.silu(x @ gate) * (x @ up)) @ down

    def attention(w, h):
        def turned(x):  # the first half of each head
            return torch.cat((rope(x[..., :HD // 2], 1e7), x[..., HD // 2:]), -1)

        q, k, v, gate = (torch.tensordot(h, w("w" + n), 1) for n in "qkvg")
        y = attend(turned(norm(q, w("q_norm.gain"))), turned(norm(k, w("k_norm.gain"))), v)
        return torch.tensordot(y * torch.sigmoid(gate), w("wo"), 2)

    def delta(w, h):
        q, k, v = (short_conv(torch.tensordot(h, w("w" + n), 1), w(f"conv_{n}.filter")) for n in "qkv")
        q, k = (y[:, :, :, None].expand(-1, -1, -1, HV, -1) for y in (unit(q) / math.sqrt(DK), unit(k)))
        a = torch.exp(-torch.exp(w("A_log")) * F.softplus(torch.tensordot(h, w("wa"), 1) + w("dt_bias")))
        y = delta_rule(q, k, v, a[..., None], torch.sigmoid(torch.tensordot(h, w("wbeta"), 1)))
        return torch.tensordot(over(y, w("norm.gain"), 1, eps) * F.silu(torch.tensordot(h, w("wz"), 1)), w("wo"), 3)

    def experts(w, h):
        weights, chosen = torch.softmax(h @ w("moe.router"), -1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = sum(((chosen == e) * weights).sum(-1, keepdim=True) * swiglu(h, *(w("moe." + n)[e] for n in ("gate", "up", "down"))) for e in range(HE))
        return y + swiglu(h, *(w("shared." + n) for n in ("gate", "up", "down"))) * torch.sigmoid(h @ w("open"))[..., None]

    x = p["embedding"][tokens]
    for i, word in enumerate(PATTERN, 1):
        for k, letter in enumerate(word, 1):
            w = lambda n: p[f"blocks.{i}.parts.{k}.{n}"]
            h = norm(x, p[f"blocks.{i}.norms.{k}.gain"])
            if letter == "M":
                x = x + mamba_mixer(w, h, "norm.gain", eps)
            elif letter == "-":
                x = x + swiglu(h, w("gate"), w("up"), w("down"))
            else:
                x = x + {"*": attention, "D": delta, "E": experts}[letter](w, h)
    return norm(x, p["norm.gain"]) @ p["embedding"].T


RH = 4  # heads; ranks
RANKS = {"w": 5, "a": 4, "v": 3, "g": 6}


def rwkv_parameters():
    p, k = {"embedding": (V, D), "head": (V, D)}, D // RH
    for n in ("norm_in", "norm"):
        p |= {n + ".gain": (D,), n + ".bias": (D,)}
    for i in "12":
        b = f"blocks.{i}."
        p |= {b + "norm1.gain": (D,), b + "norm1.bias": (D,), b + "norm2.gain": (D,), b + "norm2.bias": (D,), b + "mix": (D,), b + "up": (D, FF), b + "down": (FF, D)}
        b += "time."
        p |= {f"{b}mix_{n}": (D,) for n in "rwkvag"} | {f"{b}w{n}": (D, RH, k) for n in "rkv"}
        for n, rank in RANKS.items():
            if n != "v" or i != "1":
                p |= {f"{b}{n}.a": (D, rank), f"{b}{n}.b": (rank, RH, k)} | ({} if n == "g" else {f"{b}{n}.bias": (RH, k)})
        p |= {b + n: (RH, k) for n in ("removal", "replace", "bonus", "norm_gain", "norm_bias")} | {b + "wo": (RH, k, D)}
    return p


def rwkv(p, tokens):
    def before(x):
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)

    norm = lambda x, n: F.layer_norm(x, (D,), p[n + ".gain"], p[n + ".bias"], 1e-5)
    x, v_first = norm(p["embedding"][tokens], "norm_in"), None
    for i in "12":
        w = lambda n: p[f"blocks.{i}.time.{n}"]
        h = norm(x, f"blocks.{i}.norm1")
        mixed = {n: h + (before(h) - h) * w("mix_" + n) for n in "rwkvag"}
        low = lambda n, act=lambda y: y: torch.tensordot(act(mixed[n] @ w(n + ".a")), w(n + ".b"), 1)
        r, k, v = (torch.tensordot(mixed[n], w("w" + n), 1) for n in "rkv")
        decay = torch.exp(-torch.exp(-F.softplus(-(w("w.bias") + low("w", torch.tanh))) - 0.5))
        a, g = torch.sigmoid(w("a.bias") + low("a")), low("g", torch.sigmoid)
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(w("v.bias") + low("v"))
        removal = F.normalize(k * w("removal"), dim=-1)
        k = k * (1 + (a - 1) * w("replace"))
        S, out = torch.zeros(B, RH, D // RH, D // RH, dtype=x.dtype), []  # values x keys
        for t in range(x.shape[1]):
            gone = removal[:, t, :, :, None] * (a * removal)[:, t, :, None, :]
            S = S @ (torch.diag_embed(decay[:, t]) - gone) + v[:, t, :, :, None] * k[:, t, :, None, :]
            out.append((S @ r[:, t, :, :, None])[..., 0])
        y = torch.stack(out, 1)
        y = (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(-1, unbiased=False, keepdim=True) + 64e-5) * w("norm_gain") + w("norm_bias")
        y = y + (r * k * w("bonus")).sum(-1, keepdim=True) * v
        x = x + torch.tensordot(y * g, w("wo"), 2)
        h = norm(x, f"blocks.{i}.norm2")
        h = h + (before(h) - h) * p[f"blocks.{i}.mix"]
        x = x + F.relu(h @ p[f"blocks.{i}.up"]) ** 2 @ p[f"blocks.{i}.down"]
    return norm(x, "norm") @ p["head"].T


def mamba_parameters():
    p = {"embedding": (V, D), "norm.gain": (D,)}
    for i in "12":
        p |= {f"blocks.{i}.norm.gain": (D,)} | mamba_mixer_parameters(f"blocks.{i}.", "gated.gain")
    return p


# Memories of tens of tokens; short convolutions of some size.
RATES = {"A_log": (-1.0, 0.7), "dt_bias": (-1.0, 0.7), ".filter": (0.0, 0.5), ".D": (1.0, 0.2), "gain": (1.0, 0.2), "": (0.0, 0.08)}
EXEMPT = ("A_log", "dt_bias", ".D", ".bias", "gain")
RWKV = {"w.bias": (-2.0, 1.5), "mix": (0.5, 0.2), ".removal": (0.85, 0.2), ".replace": (1.0, 0.2), ".bonus": (0.0, 0.2), "_gain": (1.0, 0.2)}
for name in "rwkvag":
    RWKV["mix_" + name] = (0.5, 0.2)
RWKV |= {"gain": (1.0, 0.2), "": (0.0, 0.08)}
HYBRID = {"parts.1.norm.gain": (1.0, 0.2), **RATES, "gain": (0.0, 0.2)}

# ---- Models with inputs of their own ------------------------------------------------------------------------------

E, EH, EF = 16, 2, 32  # embed, heads, ffn
EHD = E // EH


def encoder_parameters(prefix, attention, bias=True):
    p = {}
    for x in "qkv":
        p |= {f"{prefix}{attention}w{x}": (E, EH, EHD)} | ({f"{prefix}{attention}b{x}": (EH, EHD)} if bias else {})
    p |= {f"{prefix}{attention}wo": (EH, EHD, E), prefix + "up": (E, EF), prefix + "down": (EF, E)}
    if bias:
        p |= {f"{prefix}{attention}bo": (E,), prefix + "up_bias": (EF,), prefix + "down_bias": (E,)}
    for n in "12":
        p |= {f"{prefix}norm{n}.gain": (E,), f"{prefix}norm{n}.bias": (E,)}
    return p


def encoder_layer(p, prefix, attention, x, eps, first, activation="gelu"):
    """PyTorch's own layer with these weights."""
    layer = torch.nn.TransformerEncoderLayer(E, EH, EF, 0.0, activation, eps, batch_first=True, norm_first=first).double()
    w = lambda n: p[prefix + n]
    a = lambda n, size: p.get(f"{prefix}{attention}{n}", torch.zeros(size, dtype=x.dtype)).reshape(size)
    state = {
        "self_attn.in_proj_weight": torch.cat([a("w" + n, (E, E)).T for n in "qkv"]),
        "self_attn.in_proj_bias": torch.cat([a("b" + n, (E,)) for n in "qkv"]),
        "self_attn.out_proj.weight": a("wo", (E, E)).T, "self_attn.out_proj.bias": a("bo", (E,)),
        "linear1.weight": w("up").T, "linear2.weight": w("down").T,
        "linear1.bias": p.get(prefix + "up_bias", torch.zeros(EF, dtype=x.dtype)),
        "linear2.bias": p.get(prefix + "down_bias", torch.zeros(E, dtype=x.dtype)),
    }
    for n in "12":
        state |= {f"norm{n}.weight": w(f"norm{n}.gain"), f"norm{n}.bias": w(f"norm{n}.bias")}
    return functional_call(layer, state, (x,))


def bert():
    vocab, seq, hidden = 40, 16, 4
    p = {"words": (vocab, E), "positions": (seq, E), "segments": (2, E), "pool": (E, E), "pool_bias": (E,), "order": (E, 2), "order_bias": (2,)}
    p |= {"restore": (E, E), "restore_bias": (E,), "words_bias": (vocab,)}
    for n in ("norm", "restore_norm"):
        p |= {n + ".gain": (E,), n + ".bias": (E,)}
    for i in "12":
        p |= encoder_parameters(f"blocks.{i}.", "attention.")
    places = torch.stack([torch.randperm(seq)[:hidden].sort().values for _ in range(3)])
    inputs = {"tokens": torch.randint(vocab, (3, seq)), "segments": (torch.arange(seq) > 6).long().expand(3, seq), "order": torch.tensor([0, 1, 1]),
              "places": places, "targets": torch.randint(vocab, (3, hidden))}

    def loss(p, i):
        norm = lambda x, n: F.layer_norm(x, (E,), p[n + ".gain"], p[n + ".bias"], 1e-12)
        x = norm(F.embedding(i["tokens"], p["words"]) + F.embedding(i["segments"], p["segments"]) + p["positions"], "norm")
        for n in "12":
            x = encoder_layer(p, f"blocks.{n}.", "attention.", x, 1e-12, False)
        order = torch.tanh(x[:, 0] @ p["pool"] + p["pool_bias"]) @ p["order"] + p["order_bias"]
        h = torch.take_along_dim(x, i["places"][:, :, None], 1)
        h = norm(F.gelu(h @ p["restore"] + p["restore_bias"]), "restore_norm")
        words = h @ p["words"].T + p["words_bias"]
        return F.cross_entropy(words.transpose(1, 2), i["targets"]), F.cross_entropy(order, i["order"])

    return p, inputs, loss, lambda name: True


def vit():
    side, patch, channels, classes = 12, 4, 3, 10
    p = {"patches": (patch * patch * channels, E), "patches_bias": (E,), "class": (1, E), "positions": ((side // patch) ** 2 + 1, E)}
    p |= {"norm.gain": (E,), "norm.bias": (E,), "head": (E, classes), "head_bias": (classes,)}
    for i in "12":
        p |= encoder_parameters(f"blocks.{i}.", "attention.")
    inputs = {"image": torch.randn(3, side, side, channels), "label": torch.tensor([0, 9, 4])}

    def loss(p, i):
        kernel = p["patches"].reshape(patch, patch, channels, E).permute(3, 2, 0, 1)
        x = F.conv2d(i["image"].permute(0, 3, 1, 2), kernel, p["patches_bias"], stride=patch).flatten(2).transpose(1, 2)
        x = torch.cat((p["class"].expand(3, 1, E), x), 1) + p["positions"]
        for n in "12":
            x = encoder_layer(p, f"blocks.{n}.", "attention.", x, 1e-6, True)
        x = F.layer_norm(x[:, 0], (E,), p["norm.gain"], p["norm.bias"], 1e-6)
        return F.cross_entropy(x @ p["head"] + p["head_bias"], i["label"]), None

    return p, inputs, loss, lambda name: True


def t5_bucket(relative, causal, buckets, reach):
    base = torch.zeros_like(relative)
    if causal:
        distance = (-relative).clamp(min=0)
    else:
        buckets //= 2
        base, distance = (relative > 0).long() * buckets, relative.abs()
    exact = buckets // 2
    far = exact + (torch.log(distance.double().clamp(min=1) / exact) / math.log(reach / exact) * (buckets - exact) + 1e-9).long()
    return base + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


def t5():
    vocab, seq, out, dim, buckets, reach = 40, 24, 6, 6, 8, 12  # of 26 tokens a span of 4 is cut out
    p = {"embedding": (vocab, E)}
    for stack in ("encoder", "decoder"):
        p |= {stack + ".bias": (buckets, EH), stack + ".norm.gain": (E,)}
        for n in "12":
            b = f"{stack}.blocks.{n}."
            p |= {b + "up": (E, EF), b + "down": (EF, E), b + "norm1.gain": (E,), b + "norm2.gain": (E,)}
            for a in ("attention", "read")[: 1 + (stack == "decoder")]:
                p |= {f"{b}{a}.w{x}": (E, EH, dim) for x in "qkv"} | {f"{b}{a}.wo": (EH, dim, E)}
            if stack == "decoder":
                p |= {b + "norm_read.gain": (E,)}
    targets = torch.randint(vocab, (3, out))
    inputs = {"tokens": torch.randint(vocab, (3, seq)), "before": F.pad(targets, (1, -1)), "targets": targets}
    norm = lambda x, gain: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def attention(p, name, x, memory, bias):
        q, k, v = ((y @ p[f"{name}.w{n}"].reshape(E, -1)).unflatten(-1, (EH, dim)).transpose(1, 2) for n, y in zip("qkv", (x, memory, memory)))
        return ((q @ k.transpose(2, 3) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2) @ p[name + ".wo"].reshape(-1, E)

    def stack(p, name, x, memory):
        at = torch.arange(x.shape[1])
        relative = at[None, :] - at[:, None]
        bias = p[name + ".bias"][t5_bucket(relative, memory is not None, buckets, reach)].permute(2, 0, 1)
        if memory is not None:
            bias = bias.masked_fill(relative > 0, float("-inf"))
        for n in "12":
            b = f"{name}.blocks.{n}."
            h = norm(x, p[b + "norm1.gain"])
            x = x + attention(p, b + "attention", h, h, bias)
            if memory is not None:
                x = x + attention(p, b + "read", norm(x, p[b + "norm_read.gain"]), memory, 0)
            x = x + F.relu(norm(x, p[b + "norm2.gain"]) @ p[b + "up"]) @ p[b + "down"]
        return norm(x, p[name + ".norm.gain"])

    def loss(p, i):
        memory = stack(p, "encoder", p["embedding"][i["tokens"]], None)
        x = stack(p, "decoder", p["embedding"][i["before"]], memory)
        return F.cross_entropy((x @ p["embedding"].T * E ** -0.5).transpose(1, 2), i["targets"]), None

    return p, inputs, loss, lambda name: True


def decoder_parameters(prefix, dim=EHD, kv=1):
    p = {prefix + "norm1.gain": (E,), prefix + "norm2.gain": (E,), prefix + "wq": (E, EH, dim), prefix + "wk": (E, kv, dim)}
    return p | {prefix + "wv": (E, kv, dim), prefix + "wo": (EH, dim, E), prefix + "gate": (E, EF), prefix + "up": (E, EF), prefix + "down": (EF, E)}


def decoder_layer(p, prefix, x, base):
    """Rotations as products of complex numbers, keys and values repeated."""
    w = lambda n: p[prefix + n]

    def rotated(x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1]).double()[:, None] * base ** (-torch.arange(half).double() / half)
        y = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((y.real, y.imag), -1)

    h = rms_norm(x, w("norm1.gain"))
    q, k, v = (torch.tensordot(h, w("w" + n), 1) for n in "qkv")
    q, k, v = (y.expand(-1, -1, EH, -1).transpose(1, 2) for y in (rotated(q), rotated(k), v))
    s = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    s = s + torch.full(s.shape[2:], float("-inf"), dtype=s.dtype).triu(1)
    x = x + torch.einsum("bhqe,hed->bqd", s.softmax(-1) @ v, w("wo"))
    h = rms_norm(x, w("norm2.gain"))
    return x + (F.silu(h @ w("gate")) * (h @ w("up"))) @ w("down")


def llava():
    vocab, seq, side, patch, channels = 40, 16, 8, 4, 3
    seen = (side // patch) ** 2
    p = {"eye.patches": (patch * patch * channels, E), "eye.positions": (seen, E), "embedding": (vocab, E), "norm.gain": (E,)}
    p |= {"projector.first": (E, E), "projector.first_bias": (E,), "projector.second": (E, E), "projector.second_bias": (E,)}
    for n in "12":
        p |= encoder_parameters(f"eye.blocks.{n}.", "", False) | decoder_parameters(f"blocks.{n}.")
    tokens, targets = torch.randint(vocab - 1, (3, seq)), torch.randint(vocab, (3, seq))
    for row, first in enumerate((2, 7, 12)):
        tokens[row, first:first + seen] = vocab - 1
        targets[row, :first + 1] = -1
    inputs = {"image": torch.randn(3, side, side, channels), "tokens": tokens, "targets": targets}

    def loss(p, i):
        kernel = p["eye.patches"].reshape(patch, patch, channels, E).permute(3, 2, 0, 1)
        x = F.conv2d(i["image"].permute(0, 3, 1, 2), kernel, stride=patch).flatten(2).transpose(1, 2) + p["eye.positions"]
        for n in "12":
            x = encoder_layer(p, f"eye.blocks.{n}.", "", x, 1e-5, True, lambda y: F.gelu(y, approximate="tanh"))
        x = F.gelu(x @ p["projector.first"] + p["projector.first_bias"], approximate="tanh") @ p["projector.second"] + p["projector.second_bias"]
        x = F.embedding(i["tokens"], p["embedding"]).masked_scatter((i["tokens"] == vocab - 1)[:, :, None], x)
        for n in "12":
            x = decoder_layer(p, f"blocks.{n}.", x, 10000.0)
        logits = rms_norm(x, p["norm.gain"]) @ p["embedding"].T
        return F.cross_entropy(logits.transpose(1, 2), i["targets"], ignore_index=-1), None

    return p, inputs, loss, lambda name: not name.startswith("eye.")


def lora():
    vocab, seq, rank, alpha = 40, 16, 3, 6.0
    p, first = {"embedding": (vocab, E), "norm.gain": (E,)}, {}
    for n in "12":
        block = decoder_parameters(f"blocks.{n}.")
        for name, shape in [x for x in block.items() if len(x[1]) > 1]:
            split = 2 if name.endswith("wo") else 1
            first[name] = split
            block |= {name + "_lora.a": shape[:split] + (rank,), name + "_lora.b": (rank,) + shape[split:]}
        p |= block
    targets = torch.randint(vocab, (3, seq))
    targets[:, :5] = -1
    inputs = {"tokens": torch.randint(vocab, (3, seq)), "targets": targets}

    def loss(p, i):
        merged = dict(p)
        for name in first:
            merged[name] = p[name] + alpha / rank * torch.tensordot(p[name + "_lora.a"], p[name + "_lora.b"], 1)
        x = F.embedding(i["tokens"], p["embedding"])
        for n in "12":
            x = decoder_layer(merged, f"blocks.{n}.", x, 500000.0)
        logits = rms_norm(x, p["norm.gain"]) @ p["embedding"].T
        return F.cross_entropy(logits.transpose(1, 2), i["targets"], ignore_index=-1), None

    return p, inputs, loss, lambda name: "_lora." in name


def make_with_inputs(name, model):
    torch.manual_seed(7)
    shapes, inputs, loss, trained = model()
    p = {}
    for key, shape in shapes.items():
        value = torch.randn(shape) * (0.2 if len(shape) > 1 else 0.3) + (1 if key.endswith("gain") else 0)
        p[key] = value.float().double().requires_grad_(trained(key))
    main, added = loss(p, {k: v.float().double() if v.is_floating_point() else v for k, v in inputs.items()})
    (main if added is None else main + added).backward()
    out = {"input." + k: v.float() if v.is_floating_point() else v.int() for k, v in inputs.items()}
    out |= {"weight." + k: v.detach().float() for k, v in p.items()}
    out |= {"loss": main.detach().view(1)} | ({} if added is None else {"added": added.detach().view(1)})
    out |= {"grad." + k: v.grad.float() for k, v in p.items() if v.requires_grad}
    save(os.path.join(HERE, name + ".safetensors"), out)
    print(name, sum(v.numel() for v in p.values()), "parameters, loss", main.item(), added)


MADE = {"gpt": lambda: make("gpt", gpt_parameters(), gpt), "llama": lambda: make("llama", llama_parameters(), llama)}
MADE |= {
    "mamba": lambda: make("mamba", mamba_parameters(), mamba, LONG, RATES, EXEMPT),
    "deltanet": lambda: make("deltanet", deltanet_parameters(False), deltanet, LONG, RATES, EXEMPT),
    "kda": lambda: make("kda", deltanet_parameters(True), deltanet, LONG, RATES, EXEMPT),
    "hybrid": lambda: make("hybrid", hybrid_parameters(), hybrid, LONG, HYBRID, EXEMPT),
    "rwkv": lambda: make("rwkv", rwkv_parameters(), rwkv, LONG, RWKV, (".bias", "removal", "replace", "bonus", "norm_gain", "norm_bias")),
}
for model in (bert, t5, vit, llava, lora):
    MADE[model.__name__] = lambda model=model: make_with_inputs(model.__name__, model)
for name in sys.argv[1:] or MADE:
    MADE[name]()
