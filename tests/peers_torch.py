"""What one would train the models of models/ with instead: PyTorch at its best, for tests/bench.sh.

bfloat16 by autocast over float32 weights, torch.compile, cuDNN's attention, products by groups for experts, fused
AdamW. One GPU. A step ends when its loss is known, as mlua's does; the next batch is drawn while the GPU works.
Prints one JSON line: tokens/s of the median step, peak memory, seconds to the first step, losses.
--compile blocks compiles the block once and the head, in about 12 s; model the whole model as one graph, in up to a
minute and a half: as fast on an H200 (gpt2-124m 538,000 and 536,000 tokens/s, moe-8x 44,000 and 43,000).
usage: python3 tests/peers_torch.py MODEL -B batch -T seq --data FILE-OF-U16-TOKENS [--steps 15] [--compile blocks]
"""
import argparse
import json
import math
import statistics
import time

START = time.time()
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

IMPORT_SECONDS = time.time() - START

# The presets of models/*.lua.
GPT = dict(kind="gpt", vocab=50304)
LLAMA = dict(kind="llama", vocab=128256, kv_heads=8, ffn=8192)
MOE = dict(kind="moe", vocab=50304, embed=2048, heads=16, kv_heads=8)
PRESETS = {
    "gpt2-124m": dict(GPT, layers=12, embed=768, heads=12),
    "gpt2-1.5b": dict(GPT, layers=48, embed=1600, heads=25),
    "gpt-1.3b": dict(GPT, layers=24, embed=2048, heads=16),
    "llama-1b": dict(LLAMA, layers=16, embed=2048, heads=16),
    "llama-3b": dict(LLAMA, layers=28, embed=3072, heads=24),
    "moe-8x": dict(MOE, layers=16, ffn=5632, experts=8, top_k=2),
    "moe-64x": dict(MOE, layers=12, ffn=1408, experts=64, top_k=6),
}


def weight(*dims, std=0.02):
    return nn.Parameter(torch.randn(*dims) * std)


class Linear(nn.Module):
    def __init__(self, inputs, outputs, bias):
        super().__init__()
        self.weight = weight(outputs, inputs)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gpt, self.width = c["kind"] == "gpt", c["embed"] // c["heads"]
        kv_heads = c.get("kv_heads", c["heads"])
        self.sizes = [c["heads"] * self.width, kv_heads * self.width, kv_heads * self.width]
        self.shared = kv_heads != c["heads"]
        self.qkv, self.out = Linear(c["embed"], sum(self.sizes), self.gpt), Linear(c["embed"], c["embed"], self.gpt)

    def forward(self, x, cos, sin):
        q, k, v = (y.unflatten(2, (-1, self.width)).transpose(1, 2) for y in self.qkv(x).split(self.sizes, -1))
        if not self.gpt:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gpt = c["kind"] == "gpt"
        ffn = 4 * c["embed"] if self.gpt else c["ffn"]
        self.up = Linear(c["embed"], ffn if self.gpt else 2 * ffn, self.gpt)
        self.down = Linear(ffn, c["embed"], self.gpt)

    def forward(self, x):
        h = self.up(x)
        if self.gpt:
            return self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """No token is dropped: choices sorted by expert, products by groups whose ends stay on the GPU."""

    def __init__(self, c):
        super().__init__()
        self.count, self.top_k = c["experts"], c["top_k"]
        self.router = Linear(c["embed"], self.count, False)
        self.up = weight(self.count, c["embed"], 2 * c["ffn"])
        self.down = weight(self.count, c["ffn"], c["embed"])

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, index = self.router(flat).float().softmax(-1).topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = index.flatten().argsort(stable=True)
        ends = torch.histc(index.flatten().float(), self.count, 0, self.count).cumsum(0).to(torch.int32)
        rows = flat[order // self.top_k].to(torch.bfloat16)
        gate, up = torch._grouped_mm(rows, self.up.to(torch.bfloat16), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down.to(torch.bfloat16), offs=ends)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(flat, dtype=y.dtype).index_add(0, order // self.top_k, y).view_as(x)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        norm = nn.LayerNorm if c["kind"] == "gpt" else RMSNorm
        self.norm1, self.norm2, self.attention = norm(c["embed"]), norm(c["embed"]), Attention(c)
        self.feed = Experts(c) if c["kind"] == "moe" else FeedForward(c)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed(self.norm2(x))


class Head(nn.Module):
    def __init__(self, c, embedding):
        super().__init__()
        self.norm = (nn.LayerNorm if c["kind"] == "gpt" else RMSNorm)(c["embed"])
        self.embedding = embedding  # tied

    def forward(self, x, targets):
        logits = F.linear(self.norm(x), self.embedding)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Model(nn.Module):
    def __init__(self, c, seq):
        super().__init__()
        self.tokens = weight(c["vocab"], c["embed"])
        self.positions = weight(seq, c["embed"]) if c["kind"] == "gpt" else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.head = Head(c, self.tokens)
        half = c["embed"] // c["heads"] // 2
        angle = torch.outer(torch.arange(seq).float(), 500000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, inputs, targets):
        x = F.embedding(inputs, self.tokens)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, targets)


def train(args):
    with torch.device("cuda"):
        model = Model(PRESETS[args.model], args.T)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    if args.compile == "model":
        model.compile()
    elif args.compile == "blocks":
        for part in [*model.blocks, model.head]:
            part.compile()
    corpus = torch.from_file(args.data, dtype=torch.int16, size=args.tokens).to(torch.int64) & 0xFFFF
    generator = torch.Generator().manual_seed(1)

    def draw():
        starts = torch.randint(len(corpus) - args.T - 1, (args.B,), generator=generator)
        return torch.stack([corpus[i : i + args.T + 1] for i in starts]).pin_memory()

    losses, seconds, batch, last = [], [], draw(), time.time()
    for step in range(args.steps):
        windows = batch.to("cuda", non_blocking=True)
        rate = 3e-4 * min(1, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        batch = draw()
        losses.append(loss.item())
        now = time.time()
        seconds.append(now - last)
        last = now
    return losses, seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=PRESETS)
    parser.add_argument("-B", type=int, required=True, help="batch")
    parser.add_argument("-T", type=int, required=True, help="seq")
    parser.add_argument("--data", required=True, help="a file of u16 tokens")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--compile", default="blocks", choices=["model", "blocks", "none"])
    args = parser.parse_args()
    with open(args.data, "rb") as file:
        args.tokens = file.seek(0, 2) // 2
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    begin = time.time()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        losses, seconds = train(args)
    first = time.time() - begin - sum(seconds[1:])
    tokens_per_s = args.B * args.T / statistics.median(seconds[min(3, len(seconds) - 1) :])
    if not all(math.isfinite(x) for x in losses):
        raise SystemExit(f"peers_torch.py: {args.model}: a loss is not finite: {losses}")
    print(json.dumps(dict(
        peer="torch " + torch.__version__, model=args.model, compile=args.compile, tok_s_gpu=round(tokens_per_s),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), import_s=round(IMPORT_SECONDS, 2),
        first_step_s=round(first, 2), loss_first=round(losses[0], 4), loss_last=round(losses[-1], 4))))


main()
