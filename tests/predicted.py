"""Predicted steps beside measured ones: python3 tests/predicted.py [--mlua build/mlua] [one|several|published]

One H200 and several: tokens a second and GPU of tests/README.md (22 November 2026; those of two, dp=2,tp=2 and
dp=2,cp=2 27 November). Nothing runs on a device: the times are those of `mlua check --device h200`. Prints the tables of tests/README.md.
"""
import argparse, json, math, subprocess

ONE = [  # name, script, settings, tokens/s
    ("gpt-1.3b", "gpt", "preset=gpt-1.3b", 69114), ("gpt2-1.5b", "gpt", "preset=gpt2-1.5b", 56200),
    ("llama-1b", "llama", "preset=llama-1b", 68575), ("llama-3b", "llama", "preset=llama-3b", 25652),
    ("gpt2-124m", "gpt", "preset=gpt2-124m", 641167), ("moe-8x", "gpt_moe", "preset=moe-8x", 53880),
    ("moe-64x", "gpt_moe", "preset=moe-64x", 69324),
]
GPT, MOE = ("gpt", "preset=gpt-1.3b"), ("gpt_moe", "preset=moe-8x aux=0.01")
SEVERAL = [  # layout, GPUs, mesh, model, further settings, tokens/s of a GPU, exposed communication or bubble in percent
    ("ZeRO-1", 4, "dp=4", GPT, "batch=32", 64119, 4.5), ("parameters in parts", 4, "dp=4", GPT, "batch=32 layout=fsdp reshard=false", 63020, 3.5),
    ("FSDP", 4, "dp=4", GPT, "batch=32 layout=fsdp", 62356, None),
    ("ZeRO-1", 2, "dp=2", GPT, "batch=32", 66400, None), ("parameters in parts", 2, "dp=2", GPT, "batch=32 layout=fsdp reshard=false", 64750, None),
    ("FSDP", 2, "dp=2", GPT, "batch=32 layout=fsdp", 65062, None),
    ("parameters in parts", 8, "dp=8", GPT, "batch=64 layout=fsdp reshard=false", 65204, 3.1),
    ("tensor and sequence", 4, "dp=2,tp=2", GPT, "batch=32", 57772, None), ("gathered context", 4, "dp=2,cp=2", GPT, "batch=32", 54233, None),
    ("tensor and sequence", 2, "tp=2", GPT, "batch=16", 61312, None), ("gathered context", 2, "cp=2", GPT, "batch=16", 59384, None),
    ("tokens exchanged", 4, "ep=4", MOE, "batch=16 exchange=2", 47139, 12.3), ("tokens exchanged", 2, "ep=2", MOE, "batch=8 exchange=2", 47156, None),
    ("1f1b", 4, "pp=4", GPT, "batch=32 accum=16", 53419, 20.7),
    ("interleaved", 4, "pp=4", GPT, "batch=32 accum=16 schedule=interleaved", 59161, 9.9),
    ("zero-bubble", 4, "pp=4", GPT, "batch=32 accum=16 schedule=zero-bubble", 57746, 14.1),
    ("1f1b, moe-8x", 4, "pp=4", MOE, "batch=16 accum=16", 35276, 23.7),
    ("zero-bubble, moe-8x", 4, "pp=4", MOE, "batch=16 accum=16 schedule=zero-bubble", 38420, 15.0),
    ("1f1b", 2, "pp=2", GPT, "batch=32 accum=16", 58851, 8.8),
    ("interleaved", 2, "pp=2", GPT, "batch=32 accum=16 schedule=interleaved", 59863, None),
    ("zero-bubble", 2, "pp=2", GPT, "batch=32 accum=16 schedule=zero-bubble", 60107, None),
]


# Model, GPU, script's settings, microbatches, mesh, further options; TFLOP/s of a GPU and FLOPs a token as published. Narayanan et al. 2021
# (table 1; stages and tensor parallel as there) recompute everything and count that; Megatron-LM's README of 2024 does not.
A100 = "vocab=51200 seq=2048"
H100 = "layers=96 embed=12288 heads=96 vocab=131072 seq=4096 batch=1152"
PUBLISHED = [
    ("146 B", 1536, "a100", f"{A100} layers=80 embed=12288 heads=96 batch=2304 accum=96", "pp=8,dp=24,tp=8", "", 148, 96, 80, 12288, 2048, 51200),
    ("310 B", 1920, "a100", f"{A100} layers=96 embed=16384 heads=128 batch=2160 accum=144", "pp=16,dp=15,tp=8", "", 155, 96, 96, 16384, 2048, 51200),
    ("530 B", 2520, "a100", f"{A100} layers=105 embed=20480 heads=128 batch=2520 accum=280", "pp=35,dp=9,tp=8", "", 163, 96, 105, 20480, 2048, 51200),
    ("1,008 B", 3072, "a100", f"{A100} layers=128 embed=25600 heads=160 batch=3072 accum=512", "pp=64,dp=6,tp=8", "", 163, 96, 128, 25600, 2048, 51200),
    ("177 B", 96, "h100", f"{H100} accum=1152", "pp=12,tp=8", "--layout schedule=interleaved,chunks=2", 465, 72, 96, 12288, 4096, 131072),
    ("177 B", 2304, "h100", f"{H100} accum=32", "pp=16,dp=36,tp=4", "--layout schedule=interleaved,chunks=6", 433, 72, 96, 12288, 4096, 131072),
    ("177 B", 4608, "h100", f"{H100} accum=32", "pp=16,dp=36,tp=8", "--layout schedule=interleaved,chunks=6", 415, 72, 96, 12288, 4096, 131072),
]


def check(a, script, settings, mesh=None, device="h200"):
    words = [a.mlua, "check", f"models/{script}.lua", "--json", "--device", device] + settings.split()
    words += ["--mesh", mesh] if mesh else []
    done = subprocess.run(words, capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(" ".join(words) + "\n" + done.stderr)
    return json.loads(done.stdout)


def summary(ratios):
    errors = sorted(abs(r - 1) for r in ratios)
    print(f"\nfurthest {100 * errors[-1]:.1f} %, median {100 * errors[len(errors) // 2]:.1f} %")


def one(a):
    print("| model | measured tokens/s | predicted | predicted / measured |\n| --- | --- | --- | --- |")
    ratios = []
    for name, script, settings, measured in ONE:
        p = check(a, script, settings)["predicted"]
        ratios.append(p["tokens_per_s"] / measured)
        print(f"| {name} | {measured:,} | {p['tokens_per_s']:,.0f} | {ratios[-1]:.3f} |" + ("  " + json.dumps(p) if a.parts else ""))
    summary(ratios)


def several(a):
    print("| layout | GPUs | measured tokens/s of a GPU | predicted | predicted / measured | exposed or bubble, measured / predicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    ratios = []
    for name, gpus, mesh, (script, settings), more, measured, waits in SEVERAL:
        p = check(a, script, f"{settings} {more}", mesh)["predicted"]
        ratios.append(p["tokens_per_s"] / gpus / measured)
        waited = 100 * (p["bubble"] if mesh.startswith("pp") else p["exposed"])
        print(f"| {mesh}, {name} | {gpus} | {measured:,} | {p['tokens_per_s'] / gpus:,.0f} | {ratios[-1]:.3f} | "
              f"{waits if waits is not None else '–'} / {waited:.1f} % |" + ("  " + json.dumps(p) if a.parts else ""))
    summary(ratios)


def published(a):
    print("| model | GPUs | mesh | published TFLOP/s of a GPU | tokens/s | predicted | predicted / published | MFU, bubble, exposed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, gpus, device, settings, mesh, more, tflops, factor, layers, embed, seq, vocab in PUBLISHED:
        p = check(a, "gpt", f"{settings} sample=0 {more}", mesh, device)["predicted"]
        flops = factor * layers * embed**2 * (1 + seq / (6 * embed) + vocab / (factor // 6 * layers * embed))  # of a token, as they count
        tokens = tflops * 1e12 * gpus / flops
        print(f"| {name} | {gpus:,} {device.upper()} | {mesh} | {tflops} | {tokens:,.0f} | {p['tokens_per_s']:,.0f} | {p['tokens_per_s'] / tokens:.2f} | "
              f"{100 * p['mfu']:.1f}, {100 * p['bubble']:.1f}, {100 * p['exposed']:.1f} % |")


def main():
    a = argparse.ArgumentParser()
    a.add_argument("tables", nargs="*", default=["one", "several"])
    a.add_argument("--mlua", default="build/mlua")
    a.add_argument("--parts", action="store_true", help="what each time is made of")
    a = a.parse_args()
    for i, table in enumerate(a.tables):
        print("" if i else "", end="\n" if i else "")
        {"one": one, "several": several, "published": published}[table](a)


if __name__ == "__main__":
    main()
