"""What one would train the models of models/ with instead: PyTorch at its best, for tests/bench.sh.

bfloat16 by autocast over float32 weights, torch.compile, cuDNN's attention, products by groups for experts, fused
AdamW. One GPU. A step ends when its loss is known, as mlua's does; the next batch is drawn while the GPU works.
Prints one JSON line: tokens/s of the median step, peak memory, seconds to the first step, losses.
--compile blocks compiles the block once and the head, in about 12 s; model the whole model as one graph, in up to a
minute and a half: as fast on an H200 (gpt2-124m 538,000 and 536,000 tokens/s, moe-8x 44,000 and 43,000).
--memory 0.5 lets each compiled part keep that share of its activations (activation_memory_budget): the rest is computed again.
--stream bf16 rounds the residual stream to bf16, as FSDP2's mixed precision does, and is 1 to 3 % faster; autocast alone leaves it in f32.
usage: python3 tests/peers_torch.py MODEL -B batch -T seq --data FILE-OF-U16-TOKENS [--steps 15] [--compile blocks] [--stream f32] [--memory 1]
       python3 tests/peers_torch.py linear-scan    a scan with one decay a position, beside gpu_linear_scan/times
       python3 tests/peers_torch.py lstm    an LSTM layer's milliseconds, beside gpu_loop/times
       python3 tests/peers_torch.py elementwise-scan    h' = a h + b, beside gpu_recurrence/times
       python3 tests/peers_torch.py gated-delta    a scan of gpu_delta_scan/times: milliseconds
"""
import argparse
import json
import math
import statistics
import sys
import time

START = time.time()
import torch
import torch._functorch.config
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
    def __init__(self, c, seq, stream):
        super().__init__()
        self.stream = stream
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
        x = x.to(self.stream)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, targets)


def train(args):
    with torch.device("cuda"):
        model = Model(PRESETS[args.model], args.T, torch.bfloat16 if args.stream == "bf16" else torch.float32)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    torch._functorch.config.activation_memory_budget = args.memory
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


def chunked_scan(q, k, v, log_decay, size):
    """y_t = q_t^T S_t, S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T: products in chunks, and over the chunks' states."""
    shape = q.shape
    q, k, v, g = (x.view(*x.shape[:2], -1, size, *x.shape[3:]) for x in (q, k, v, log_decay))
    g = g.cumsum(3)
    last = g[..., -1]
    below = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~below, float("-inf")).exp()
    scores = ((q @ k.mT) * decay).to(q.dtype)
    added = (k * (last.unsqueeze(-1) - g).exp().unsqueeze(-1)).to(k.dtype).mT @ v
    ends = last.cumsum(2)
    before = torch.ones(ends.shape[2], ends.shape[2], dtype=torch.bool, device=q.device).tril(-1)
    between = (ends - last).unsqueeze(-1) - ends.unsqueeze(-2)
    states = (between.masked_fill(~before, float("-inf")).exp().to(q.dtype) @ added.flatten(3)).view_as(added)
    return (scores @ v + (q * g.exp().unsqueeze(-1)).to(q.dtype) @ states).view(shape)


def linear_scan(size, batch=4, heads=32, seq=8192, width=128, runs=8):
    """Forward and backward of the scan alone, in bf16, in chunks of this size: tests/gpu/linear_scan.c."""
    q, k, v, weight = (torch.randn(batch, heads, seq, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    sources = [q, k, v, -0.05 * torch.rand(batch, heads, seq, device="cuda")]
    for x in sources:
        x.requires_grad_()
    compiled = torch.compile(chunked_scan)
    times = []
    for _ in range(runs):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        y = compiled(*sources, size)
        events[1].record()
        torch.autograd.grad(y, sources, weight)
        events[2].record()
        torch.cuda.synchronize()
        times.append((events[0].elapsed_time(events[2]), events[0].elapsed_time(events[1])))
    both, forward = sorted(times)[len(times) // 2]
    print(f"torch {torch.__version__} scan in chunks of {size}, batch {batch}, {heads} heads of {width}, {seq} positions, "
          f"forward and backward: {both:.3f} ms, of which forward {forward:.3f}", flush=True)


def lstm(batch=64, seq=1024, width=1024, dtype=torch.bfloat16, runs=12):
    """One layer forward and backward by cuDNN, the input's product included: tests/gpu/loops.c."""
    layer = nn.LSTM(width, width, device="cuda", dtype=dtype)
    layer.flatten_parameters()
    x = torch.randn(seq, batch, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(seq, batch, width, device="cuda", dtype=dtype)
    times = []
    for _ in range(runs):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        y = layer(x)[0]
        events[1].record()
        y.backward(weight)
        events[2].record()
        torch.cuda.synchronize()
        layer.zero_grad(set_to_none=True)
        x.grad = None
        times.append((events[0].elapsed_time(events[2]), events[0].elapsed_time(events[1])))
    both, forward = min(times)
    print(f"torch {torch.__version__} nn.LSTM {dtype} {width} wide, batch {batch}, {seq} positions, forward and backward: "
          f"{both:.3f} ms, of which forward {forward:.3f}")


# ---- Scans alone: prints milliseconds, forward and forward with gradient


class UnitInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower A: (I - A)(I + A^2)(I + A^4)..."""

    @staticmethod
    def forward(ctx, a):
        inverse, power, n = torch.eye(a.shape[-1], device=a.device) - a, a @ a, 2
        while n < a.shape[-1]:
            inverse, power, n = inverse + inverse @ power, power @ power, 2 * n
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, slope):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ slope @ inverse.mT)


def delta_before(q, k, v, g, beta, size):
    """What all chunks of a Gated DeltaNet need (its WY form), g the logarithms of the decays."""
    b, h, t, _ = q.shape
    q, k, v, beta, g = (x.reshape(b * h, t // size, size, *x.shape[3:]) for x in (q, k, v, beta, g))
    g = g.cumsum(2)
    last = g[..., -1:]
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~seen, float("-inf")).exp()
    inverse = UnitInverse.apply(((k @ k.mT).float() * decay * beta.unsqueeze(-1)).tril(-1)).to(q.dtype)
    w = inverse @ (k * (beta * g.exp()).unsqueeze(-1)).to(q.dtype)
    u = inverse @ (v * beta.unsqueeze(-1)).to(q.dtype)
    to_end = (k * (last - g).exp().unsqueeze(-1)).to(q.dtype)
    return w, u, (q * g.exp().unsqueeze(-1)).to(q.dtype), to_end, ((q @ k.mT) * decay).to(q.dtype), last.exp().unsqueeze(-1)


def delta_step(state, w, u, k, decay):
    before = state.to(w.dtype)
    new = u - w @ before
    return state * decay + (k.mT @ new).float(), before, new


def delta_after(q, scores, states, new):
    return q @ states + scores @ new


def gated_delta(q, k, v, g, beta, size, before, step, after):
    w, u, q_decayed, k_decayed, scores, decay = before(q, k, v, g, beta, size)
    state = torch.zeros(w.shape[0], w.shape[-1], u.shape[-1], device=q.device)
    states, news = [], []
    for chunk in zip(w.unbind(1), u.unbind(1), k_decayed.unbind(1), decay.unbind(1)):
        state, low, new = step(state, *chunk)
        states.append(low)
        news.append(new)
    return after(q_decayed, scores, torch.stack(states, 1), torch.stack(news, 1)).view_as(v)


def milliseconds(body, runs=6):
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        body()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 2)


def time_gated_delta(batch=4, heads=32, length=8192, width=128):
    torch.set_float32_matmul_precision("high")

    def normal(*more):
        return torch.randn(batch, heads, length, *more, device="cuda")

    q, k = (F.normalize(normal(width), dim=-1).bfloat16() for _ in range(2))
    inputs = [q, k, normal(width).bfloat16(), -0.1 * torch.rand_like(normal()), torch.rand_like(normal())]
    inputs = [x.requires_grad_() for x in inputs]
    slope = normal(width).bfloat16()
    for size in (64, 128):
        parts = [torch.compile(f) for f in (delta_before, delta_step, delta_after)]

        def both():
            torch.autograd.grad(gated_delta(*inputs, size, *parts), inputs, slope)

        begin = time.time()
        both()
        torch.cuda.synchronize()
        first = time.time() - begin
        with torch.no_grad():
            gated_delta(*inputs, size, *parts)
            forward = milliseconds(lambda: gated_delta(*inputs, size, *parts))
        print(json.dumps(dict(peer="torch " + torch.__version__, scan="gated-delta", chunk=size, forward_ms=forward, both_ms=milliseconds(both), first_s=round(first, 1))))



def compose(earlier, later):
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def affine_scan(a, b, reverse=False):
    return associative_scan(compose, (a, b), dim=1, reverse=reverse, combine_mode="pointwise")[1]


def affine_scan_gradient(a, h, dy):
    later = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
    db = affine_scan(later, dy, reverse=True)
    return db * torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1), db


def elementwise_scan(batch, dtype, length=16384, channels=2048):
    """h' = a h + b, as gpu_recurrence/times has it: PyTorch's associative_scan, and its gradient by another one."""
    global associative_scan  # a prototype, which PyTorch may move
    from torch._higher_order_ops.associative_scan import associative_scan

    a, b, dy = (torch.rand(batch, length, channels, device="cuda").to(dtype) for _ in range(3))
    forward, backward = torch.compile(affine_scan), torch.compile(affine_scan_gradient)
    h = forward(a, b)
    times = [milliseconds(lambda: forward(a, b)), milliseconds(lambda: backward(a, h, dy))]
    print(json.dumps(dict(peer="torch " + torch.__version__, scan="elementwise", batch=batch, dtype=str(dtype), forward_ms=times[0], backward_ms=times[1])))


def main():
    if sys.argv[1:] == ["elementwise-scan"]:
        for batch, dtype in (8, torch.float32), (8, torch.bfloat16), (2, torch.float32):
            elementwise_scan(batch, dtype)
        return
    if sys.argv[1:] == ["linear-scan"]:
        for size in 32, 64, 128:
            linear_scan(size)
        return
    if sys.argv[1:] == ["lstm"]:
        lstm()
        lstm(dtype=torch.float16)
        lstm(batch=128)
        lstm(batch=16, width=512)
        return
    if sys.argv[1:] == ["gated-delta"]:
        return time_gated_delta()
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=PRESETS)
    parser.add_argument("-B", type=int, required=True, help="batch")
    parser.add_argument("-T", type=int, required=True, help="seq")
    parser.add_argument("--data", required=True, help="a file of u16 tokens")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--memory", type=float, default=1, help="share of the activations that a compiled part may keep (activation_memory_budget)")
    parser.add_argument("--compile", default="blocks", choices=["model", "blocks", "none"])
    parser.add_argument("--stream", default="f32", choices=["f32", "bf16"], help="dtype of the residual stream")
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
        peer="torch " + torch.__version__, model=args.model, compile=args.compile, memory=args.memory, tok_s_gpu=round(tokens_per_s),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), import_s=round(IMPORT_SECONDS, 2),
        first_step_s=round(first, 2), loss_first=round(losses[0], 4), loss_last=round(losses[-1], 4))))


main()
