"""The losses of a model of models/ beside PyTorch's: same tokens, initial values and optimizer.

tests/lua/lib/losses.lua trains as models/*.lua does and tells the tokens of each step, and of each parameter the
constant or the key and standard deviation that it begins with. Here the same model, written in PyTorch's own
terms and sharing no code with mlua, repeats the steps: initial values come from the counter generator as this
file defines it, bfloat16 is autocast over float32 weights. Where data= names no file the tokens are a drawn text.
Prints the losses and gradient norms of both and the largest relative differences; exits 1 where one is above its
bound. Autocast leaves PyTorch's residual stream in float32; mlua's is in bfloat16. --residual bf16 has PyTorch round
as mlua does, to compare like with like. --again repeats PyTorch's steps, with the other of the two (stream) or with
the rows of each batch in reverse and in drawn orders (rows, ORDERS times: the same but for the order of sums), which
says how far rounding alone takes PyTorch from itself: the largest difference of any two runs so far. That is much where
a norm leaps, and from there on, and differs from run to run; --early-norm-bound holds the first ten norms.
usage: python3 tests/losses_torch.py gpt|llama|moe [key=value ...] [--device cuda] [--dtype f32]
           [--residual bf16] [--again stream|rows] [--bound 0.01] [--norm-bound 0.05]
           [--early-norm-bound 0.005] [--median-norm-bound 0.005] [--norm-of-own 2] [--orders 5]
       MLUA names the binary. Such as: tests/losses_torch.py moe preset=moe-8x --device cuda
"""
import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
torch = F = checkpoint = None  # imported when mlua is done


# ---- What mlua says ----
def run_mlua(args):
    """settings, {parameter: told}, {step: windows}, [(loss, gradient norm)]"""
    command = [os.environ.get("MLUA", os.path.join(HERE, "../build/mlua")), "run"]
    command += [os.path.join(HERE, "lua/lib/losses.lua"), "--device", args.device, "--dtype", args.dtype, "--json"]
    command += args.settings
    script = "models/" + {"moe": "gpt_moe"}.get(args.model, args.model) + ".lua"
    with tempfile.TemporaryDirectory() as folder:
        told = {"MODEL": script, "TOKENS": os.path.join(folder, "tokens.bin")}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **told})
    if done.returncode:
        sys.exit(f"losses_torch.py: {' '.join(command)} failed ({done.returncode})")
    settings, parameters, windows, steps = {}, {}, {}, []
    for line in done.stdout.splitlines():
        told = json.loads(line)
        if "settings" in told:
            settings = told["settings"]
        elif "parameter" in told:
            parameters[told["parameter"]] = told
        elif "window" in told:
            windows.setdefault(told["window"], []).append(told["tokens"])
        elif "step" in told:
            steps.append((told["loss"], told["grad_norm"]))
    return settings, parameters, windows, steps


# ---- Initial values: SplitMix64 over (key, index), and Box and Muller ----
def wrapped(x):
    """A 64-bit integer as the signed one of the same bits."""
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


GOLDEN = 0x9E3779B97F4A7C15


def shifted(x, bits):  # to the right, zeros coming in
    return (x >> bits) & (2 ** (64 - bits) - 1)


def mix(x):
    x = (x ^ shifted(x, 30)) * wrapped(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * wrapped(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


def uniform(key, index):
    start = mix(torch.tensor(wrapped(key + GOLDEN))).item()
    bits = mix((index + 1) * wrapped(GOLDEN) + start)
    return shifted(bits, 40).to(torch.float32) * 2.0**-24


def initial(told, device):
    dims = told["dims"]
    if "constant" in told:
        return torch.full(dims, float(told["constant"]), device=device)
    key, count, chunk = int(told["key"]), math.prod(dims), 1 << 25
    values = torch.empty(count, device=device)
    for begin in range(0, count, chunk):
        index = torch.arange(begin, min(count, begin + chunk), device=device)
        radius = (-2 * (1 - uniform(key, index)).log()).sqrt()
        values[begin : begin + chunk] = radius * (2 * math.pi * uniform(key + 1, index)).cos() * told["std"]
    return values.view(dims)


# ---- The models ----
def attend(q, k, v):  # [batch, seq, heads, head_dim]; k and v may have fewer heads
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def rope(x, base=500000.0):
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(x.shape[1], device=x.device, dtype=torch.float32), rate)[:, None, :]
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)


def linear(x, w, b=None):  # [.., in] by [in, out], the bias added before the sum is rounded, as nn.Linear does
    return F.linear(x, w.T, b)


def project(x, w, b=None):  # [.., embed] by [embed, heads, head_dim]
    return linear(x, w.flatten(1), None if b is None else b.flatten()).unflatten(-1, w.shape[1:])


def layer_norm(x, gain, bias):
    return F.layer_norm(x.float(), x.shape[-1:], gain, bias, 1e-5)


def rms_norm(x, gain):
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


def add(x, y):  # to the residual stream
    return (x.float() + y).to(x.dtype)


def gpt_block(x, p, c):
    h = layer_norm(x, p["norm1.gain"], p["norm1.bias"])
    q, k, v = (project(h, p["attention.w" + n], p["attention.b" + n]) for n in "qkv")
    x = add(x, linear(attend(q, k, v).flatten(2), p["attention.wo"].flatten(0, 1), p["attention.bo"]))
    h = layer_norm(x, p["norm2.gain"], p["norm2.bias"])
    h = F.gelu(linear(h, p["mlp.up"], p["mlp.up_bias"]), approximate="tanh")
    return add(x, linear(h, p["mlp.down"], p["mlp.down_bias"])), 0


def experts(x, p, c):
    """softmax over all experts, the top_k of a token made to sum to 1, no token dropped; the router in float32.
    Also the router's losses, for the mean over tokens: E * sum(f_e P_e) of each sequence, logsumexp squared."""
    flat = x.flatten(0, 1)
    with torch.autocast(x.device.type, enabled=False):
        logits = flat.float() @ p["moe.router"]
        probabilities = logits.softmax(-1)
    weights, index = probabilities.topk(int(c["top_k"]), -1)
    chosen = F.one_hot(index, int(c["experts"])).sum(1).view(*x.shape[:2], -1)
    share, mean = chosen.float().mean(1) / c["top_k"], probabilities.view_as(chosen).mean(1)
    added = c["aux"] * c["experts"] * (share * mean).sum(-1).mean() + c["z"] * logits.logsumexp(-1).square().mean()
    weights = weights / weights.sum(-1, keepdim=True)
    order = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=int(c["experts"])).tolist()
    out = []
    for e, rows in enumerate((flat[order // index.shape[1]]).split(counts)):
        out.append((F.silu(rows @ p["moe.gate"][e]) * (rows @ p["moe.up"][e])) @ p["moe.down"][e])
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    y = torch.cat(out)[back].view(*index.shape, -1)
    return (y * weights[..., None]).sum(1).view_as(x), added


def llama_block(x, p, c):
    h = rms_norm(x, p["norm1.gain"])
    q, k, v = (project(h, p["w" + n]) for n in "qkv")
    x = add(x, attend(rope(q), rope(k), v).flatten(2) @ p["wo"].flatten(0, 1))
    h = rms_norm(x, p["norm2.gain"])
    if "moe.router" in p:
        y, added = experts(h, p, c)
        return add(x, y), added
    return add(x, (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]), 0


def mean_loss(p, windows, c, residual):
    """The loss, and what is minimized: with the routers' losses."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    gpt = "wpe" in p
    x = F.embedding(inputs, p["wte" if gpt else "embedding"])
    if gpt:
        x = x + p["wpe"]
    x, total = x.to(residual), 0
    for i in range(1, int(c["layers"]) + 1):
        prefix = f"blocks.{i}."
        block = {name[len(prefix) :]: w for name, w in p.items() if name.startswith(prefix)}
        x, added = checkpoint(gpt_block if gpt else llama_block, x, block, c, use_reentrant=False)
        total = total + added
    if gpt:
        logits = layer_norm(x, p["norm.gain"], p["norm.bias"]) @ p["wte"].T
    else:
        logits = rms_norm(x, p["norm.gain"]) @ p["embedding"].T
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss, loss + total


# ---- Training ----
def decays(name):  # gains and biases do not
    last = name.split(".")[-1]
    return last not in ("gain", "bias", "bq", "bk", "bv", "bo") and not last.endswith("_bias")


def clip(parameters, most):
    """The norm of all gradients, which are scaled to `most` where it is larger. Summed in float64, for float32
    would be the less accurate side of a comparison."""
    norm = math.sqrt(sum(w.grad.double().square().sum() for w in parameters))
    for w in parameters:
        w.grad.mul_(min(1, most / (norm + 1e-6)))
    return norm


def in_order(rows, order):
    """The rows of a batch: 0 as they are, 1 in reverse, others drawn."""
    return random.Random(order).sample(rows, len(rows)) if order > 1 else rows[:: -1 if order else 1]


def run_torch(c, told, windows, device, dtype, residual, order=0):
    """[(loss, gradient norm)], and the most memory in GiB"""
    p = {name: initial(t, device).requires_grad_() for name, t in told.items()}
    groups = [([w for n, w in p.items() if decays(n) == wanted], c["decay"] * wanted) for wanted in (True, False)]
    optimizer = torch.optim.AdamW([{"params": g, "weight_decay": d} for g, d in groups], lr=c["lr"], betas=(0.9, 0.95),
                                  eps=1e-8, **({"fused": True} if device == "cuda" else {}))
    out = []
    for step in sorted(windows):
        for group in optimizer.param_groups:  # the first steps alone: the schedule after them is left out
            group["lr"] = c["lr"] * min(1, step / c["warmup"])
        batch = torch.tensor(in_order(windows[step], order), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            loss, minimized = mean_loss(p, batch, c, residual)
        minimized.backward()
        norm = clip(p.values(), c["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        out.append((loss.item(), norm))
    return out, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0


def off(value, expected):
    """The relative difference; infinite where either is no number."""
    difference = abs(value / expected - 1)
    return difference if difference == difference else math.inf


def worst_of(steps, expected):
    """The largest difference of a loss, and of a norm, of [(loss, norm)]"""
    return [max(off(a[i], b[i]) for a, b in zip(steps, expected)) for i in range(2)]


def median_of_norms(steps, expected):
    differences = sorted(off(a[1], b[1]) for a, b in zip(steps, expected))
    return differences[len(differences) // 2]


def beyond_own(steps, runs, factor):
    """The largest difference of a norm from the first of PyTorch's runs, less `factor` times the largest of any two of
    these so far."""
    largest, own = 0, 0
    for i in range(len(steps)):
        own = max([own] + [off(a[i][1], b[i][1]) for a in runs for b in runs if a is not b])
        largest = max(largest, off(steps[i][1], runs[0][i][1]) - factor * own)
    return largest


def report(steps, expected, again):
    """The table, of [(loss, norm)] of each"""
    def columns(what, *names):
        return f"   {what} {names[0]:>10} {names[1]:>10} {'off by':>8}" + (f" {'other one':>10} {'off by':>8}" if again else "")

    def row(i, at):
        value, of_torch = steps[i][at], expected[i][at]
        other = f" {again[i][at]:>10.6f} {off(again[i][at], of_torch):>8.1e}" if again else ""
        return f"{value:>10.6f} {of_torch:>10.6f} {off(value, of_torch):>8.1e}{other}"

    print("step" + columns("loss:", "mlua", "PyTorch") + columns("norm:", "mlua", "PyTorch"))
    for i in range(len(steps)):
        print(f"{i + 1:>4}         {row(i, 0)}         {row(i, 1)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["gpt", "llama", "moe"])
    parser.add_argument("settings", nargs="*", help="key=value of models/*.lua; steps=20 unless they say so")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["bf16", "f32"], help="bf16 on a GPU and f32 on a CPU unless told")
    parser.add_argument("--bound", type=float, help="of a loss; 0.01, and 1e-5 in f32, unless told")
    parser.add_argument("--norm-bound", type=float, help="of a gradient norm; none, and 1e-3 in f32, unless told")
    parser.add_argument("--median-norm-bound", type=float, default=math.inf, help="of the norms' median difference; none unless told")
    parser.add_argument("--residual", choices=["f32", "bf16"], default="f32", help="PyTorch's residual stream; f32 unless told")
    parser.add_argument("--early-norm-bound", type=float, default=math.inf, help="of the first ten gradient norms; none unless told")
    parser.add_argument("--again", choices=["stream", "rows"], help="PyTorch also with the other residual stream, or the rows in other orders")
    parser.add_argument("--orders", type=int, default=1, help="of --again rows: so many, the first in reverse")
    parser.add_argument("--norm-of-own", type=float, metavar="K", help="with --again: norms may be K times as far off beside --norm-bound as PyTorch was from itself")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "f32")
    bounds = {"bf16": (0.01, math.inf), "f32": (1e-5, 1e-3)}[args.dtype]
    bounds = [usual if told is None else told for told, usual in zip((args.bound, args.norm_bound), bounds)]
    if not any(s.startswith("steps=") for s in args.settings):
        args.settings.append("steps=20")
    begin = time.time()
    settings, parameters, windows, steps = run_mlua(args)
    if settings["steps"] > settings["warmup"]:
        sys.exit("losses_torch.py: more steps than warmup: this file knows the schedule's first part only")
    middle = time.time()
    global torch, F, checkpoint
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint
    residual, other = [torch.float32, torch.bfloat16][:: 1 if args.residual == "f32" else -1]
    expected, gib = run_torch(settings, parameters, windows, args.device, args.dtype, residual)
    end = time.time()
    again = []
    for order in range(1, 1 + (args.orders if args.again == "rows" else args.again is not None)):
        also = (other, 0) if args.again == "stream" else (residual, order)
        again.append(run_torch(settings, parameters, windows, args.device, args.dtype, *also)[0])
    if not len(steps) == len(expected) == settings["steps"]:
        sys.exit(f"losses_torch.py: {len(steps)} steps of mlua, {len(expected)} of PyTorch")
    report(steps, expected, again[0] if again else None)
    for i, run in enumerate(again):
        print("PyTorch from itself, run {}: {:.2g} of a loss, {:.2g} of a norm".format(i + 2, *worst_of(run, expected)))
    worst, median = worst_of(steps, expected), median_of_norms(steps, expected)
    early = worst_of(steps[:10], expected[:10])[1]
    own = ""
    if args.norm_of_own:
        worst[1] = beyond_own(steps, [expected] + again, args.norm_of_own)
        own = f" beyond {args.norm_of_own:g} times PyTorch's from itself"
    print(f"largest difference {worst[0]:.2g} of a loss (allowed {bounds[0]:g}), {worst[1]:.2g} of a gradient norm{own} (allowed {bounds[1]:g}), "
          f"{early:.2g} of the first ten (allowed {args.early_norm_bound:g}), its median {median:.2g} (allowed {args.median_norm_bound:g}); "
          f"torch {torch.__version__}; mlua {middle - begin:.1f} s, PyTorch {end - middle:.1f} s, {gib:.1f} GiB")
    sys.exit(worst[0] > bounds[0] or worst[1] > bounds[1] or early > args.early_norm_bound or median > args.median_norm_bound)


main()
