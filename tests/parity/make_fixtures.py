"""Parity fixtures by PyTorch, an implementation that shares nothing with mlua.

A tiny GPT and a tiny Llama with given weights: tokens, targets, logits, the mean loss, the gradient of every
parameter, and the losses of ten AdamW steps, in float64 and stored as float32 (losses as float64).
Names and axis orders are those of models/gpt.lua and models/llama.lua.
usage: python3 tests/parity/make_fixtures.py   (rewrites tests/parity/*.safetensors; any torch >= 1.13)
"""
import json
import math
import os
import struct

import torch
import torch.nn.functional as F

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
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HD)
    s = s.masked_fill(torch.triu(torch.ones(T, T, dtype=torch.bool), 1), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


def rope(x, base=500000.0):
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(T, dtype=x.dtype), base ** (-torch.arange(half, dtype=x.dtype) / half))[:, None, :]
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


def make(name, shapes, model):
    torch.manual_seed(7)
    p = {}
    for key, shape in shapes.items():
        # small enough that bf16 is fit for it: PyTorch's own autocast stays within 1.3e-2 of these gradients
        value = torch.randn(shape) * (0.05 if len(shape) > 1 else 0.2) + (1 if key.endswith("gain") else 0)
        p[key] = value.float().double().requires_grad_()
    tokens, targets = torch.randint(V, (B, T)), torch.randint(V, (B, T))
    out = {"tokens": tokens.int(), "targets": targets.int()}
    out |= {"weight." + k: v.detach().float() for k, v in p.items()}
    logits = model(p, tokens)
    loss = F.cross_entropy(logits.view(-1, V), targets.view(-1))
    loss.backward()
    out |= {"logits": logits.float(), "loss": loss.detach().view(1)}
    out |= {"grad." + k: v.grad.float() for k, v in p.items()}
    # decay as m.param's rule: parameters of two or more axes, biases and gains exempt
    decay = [v for k, v in p.items() if v.dim() > 1 and ".b" not in k.rsplit("attention", 1)[-1]]
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


make("gpt", gpt_parameters(), gpt)
make("llama", llama_parameters(), llama)
