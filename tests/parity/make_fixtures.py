"""Parity fixtures by PyTorch, an implementation that shares nothing with mlua.

A tiny GPT and a tiny Llama with given weights: tokens, targets, logits, the mean loss, the gradient of every
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
for model in (bert, t5, vit, llava, lora):
    MADE[model.__name__] = lambda model=model: make_with_inputs(model.__name__, model)
for name in sys.argv[1:] or MADE:
    MADE[name]()
