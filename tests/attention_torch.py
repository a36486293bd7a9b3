"""PyTorch's FlexAttention with the score functions and masks of gpu_attention/times, beside its SDPA on cuDNN.

    python3 tests/attention_torch.py [tiny]

One line each, as that test prints them; medians of 20 runs, TFLOP/s count causal attention at one half. What
FlexAttention can skip it may: documents and the causal mask are block masks. Needs a GPU, PyTorch >= 2.5.
"""

import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SHAPES = [(1, 2, 256, 64)] if sys.argv[1:] == ["tiny"] else [(64, 12, 1024, 64), (8, 16, 4096, 128)]
DOCUMENT = 700  # tokens


def median_seconds(run):
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(20)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1e-3


def report(shape, score, kernels, attention):
    batch, heads, length, dim = shape
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn_like(q)
    out = attention(q, k, v)
    forward = median_seconds(lambda: attention(q, k, v))
    backward = median_seconds(
        lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
    )
    flops = 2 * batch * heads * length * length * dim
    print(
        f"B{batch} H{heads} T{length} D{dim}  {score:<9}  {kernels:<8}  {'':<9}  "
        f"forward {forward * 1e6:6.0f} us {flops / forward * 1e-12:4.0f} TFLOP/s   "
        f"backward {backward * 1e6:6.0f} us {2.5 * flops / backward * 1e-12:4.0f} TFLOP/s",
        flush=True,
    )


def flex(shape, score):
    batch, heads, length, _ = shape
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
    document = torch.arange(length, device="cuda") // DOCUMENT

    def causal(b, h, i, j):
        return i >= j

    def same_document(b, h, i, j):
        return (i >= j) & (document[i] == document[j])

    def soft_cap(s, b, h, i, j):
        return 30 * torch.tanh(s / 30)

    def alibi(s, b, h, i, j):
        return s + slopes[h] * (j - i)

    change = {"soft cap": soft_cap, "alibi": alibi}.get(score)
    mask = same_document if score == "documents" else causal
    blocks = create_block_mask(mask, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, score_mod=change, block_mask=blocks)


def main():
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # the backward runs more than once
    for shape in SHAPES:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            report(
                shape,
                "plain",
                "sdpa",
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            )
        for score in ("plain", "soft cap", "alibi", "documents"):
            torch._dynamo.reset()
            report(shape, score, "flex", flex(shape, score))


main()
