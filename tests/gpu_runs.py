"""Lasting runs on one GPU, measured: tests/gpu_runs.py [--mlua build/mlua] [--parts save,load,...] [--scale tiny]

  save     gpt-1.3b saves while it trains: stall, later steps, memory, write speed beside dd of as many random bytes
  load     --resume of what `save` wrote, cold and from the page cache, beside dd
  data     what the GPU waits for data at full speed: 1,000 blended .bin shards, .jsonl as bytes
  resume   a run that moves CPU -> GPU -> CPU, one that goes on in bf16, one that is equal to the bit with tuning on
  peer     torch.save, safetensors and distributed checkpoints (--peer torch_checkpoint.py)

A line of results each, as JSON. Files are written under --dir. `--scale tiny --device cpu` tests the script itself.
"""
import argparse, glob, json, os, random, re, shutil, statistics, struct, subprocess, sys, threading, time

a = argparse.ArgumentParser()
a.add_argument("--mlua", default="build/mlua"); a.add_argument("--parts", default="save,load,data,resume")
a.add_argument("--dir", default="/tmp/gpu_runs"); a.add_argument("--device", default="cuda")
a.add_argument("--scale", default="full"); a.add_argument("--peer", default="")
a = a.parse_args()
tiny = a.scale == "tiny"
os.makedirs(a.dir, exist_ok=True)
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def say(part, **results):
    print(json.dumps({"part": part, **{k: round(v, 4) if isinstance(v, float) else v for k, v in results.items()}}), flush=True)


def memory_of(pid):
    """GiB that a process has of its own. CUDA's pinned memory does not show: 2 buffers of 8 MiB of a save, 64 MiB of a load."""
    values = {}
    with open(f"/proc/{pid}/status") as f:
        for line in f:
            key, _, rest = line.partition(":")
            if key in ("RssAnon", "RssShmem"):
                values[key] = int(rest.split()[0]) / 2**20
    return values


def mlua(script, *arguments, out=None, timeout=300, device=None, options=()):
    """Run; returns seconds and the samples (time, memory) taken every 20 ms."""
    command = [a.mlua, "run", script, "--device", device or a.device, "--quiet", *options, *(["--out", out] if out else []), *arguments]
    start, samples = time.time(), []
    log = open(os.path.join(a.dir, "log.txt"), "ab")
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=here)
    while child.poll() is None:
        try: samples.append((time.time(), memory_of(child.pid)))
        except OSError: pass
        time.sleep(0.02)
        if time.time() - start > timeout: child.kill(); raise RuntimeError(f"stopped after {timeout} s: {' '.join(command)}")
    if child.returncode:
        raise RuntimeError(f"exit code {child.returncode}: {' '.join(command)}\n" + open(log.name, errors="replace").read()[-1500:])
    return time.time() - start, samples


def metrics(out):
    with open(os.path.join(out, "metrics.jsonl")) as f: lines = [json.loads(line) for line in f]
    return [l for l in lines if "loss" in l], [l for l in lines if "event" in l]


def timed(command):
    start = time.time(); subprocess.run(command, shell=True, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.time() - start


def tree_bytes(folder): return sum(os.path.getsize(p) for p in glob.glob(folder + "/*"))


def drop_cache(folder):
    os.sync()
    for path in glob.glob(folder + "/*"):
        f = os.open(path, os.O_RDONLY); os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED); os.close(f)


SIZE = ["layers=2", "embed=256", "heads=4", "vocab=256", "batch=4", "seq=64"] if tiny else ["preset=gpt-1.3b"]
STEPS, EVERY = (300, 100) if tiny else (210, 70)


def dd_write(bytes, name):
    """Seconds that dd takes for as many random bytes, which lie in memory before it starts."""
    source = f"/dev/shm/{name}"
    subprocess.run(f"head -c {bytes} /dev/zero | openssl enc -aes-256-ctr -pass pass:x -nosalt > {source}", shell=True, check=True, stderr=subprocess.DEVNULL)
    target = os.path.join(a.dir, name); seconds = []
    for _ in range(2):
        os.sync(); seconds.append(timed(f"dd if={source} of={target} bs=16M conv=fsync")); os.unlink(target)
    os.unlink(source)
    return seconds


def save():
    out = os.path.join(a.dir, "save"); shutil.rmtree(out, ignore_errors=True)
    mlua("models/gpt.lua", *SIZE, "steps=8", "sample=0")  # compiles and tunes
    _, samples = mlua("models/gpt.lua", *SIZE, f"steps={STEPS}", f"save_every={EVERY}", "keep=2", "sample=0", "log_every=1", out=out)
    steps, events = metrics(out); saves = [e for e in events if e["event"] == "save"]
    ms = {l["step"]: l["step_ms"] for l in steps}
    calm = statistics.median(ms[s] for s in range(EVERY // 2, EVERY + 1)); rows = []
    for s in saves[:-1]:
        first, spent, during = s["step"] + 1, 0, []
        # the first step after a save holds the stall: it is judged apart
        for step in range(first + 1, STEPS + 1):
            if spent > 1000 * s["seconds"]: break
            spent += ms[step]; during.append(ms[step])
        after = [ms[x] for x in range(first + 1 + len(during), min(first + EVERY - 1, STEPS))]
        rows.append(dict(step=s["step"], stall_ms=round(s["stall_ms"], 2), seconds=round(s["seconds"], 2), first_step_extra_ms=round(ms[first] - calm, 2),
                         during_percent=round(100 * (statistics.median(during) / calm - 1), 2) if during else None,
                         during_mean_percent=round(100 * (statistics.mean(during) / calm - 1), 2) if during else None,
                         worst_percent=round(100 * (max(during) / calm - 1), 2) if during else None, steps_during=len(during),
                         after_percent=round(100 * (statistics.median(after) / calm - 1), 2) if after else None))
    bytes = saves[-1]["bytes"]; dd = dd_write(bytes, "random.bin")
    # host memory of its own: most while no save ran against most in all
    began = samples[0][0]; own = [(t - began, sum(m.values())) for t, m in samples]
    quiet = [o for t, o in own if t < own[-1][0] * 0.25]
    say("save", bytes=bytes, step_ms=calm, dd_s=[round(x, 2) for x in dd], dd_gb_s=round(bytes / min(dd) / 1e9, 3),
        share_of_dd=[round(min(dd) / s["seconds"], 3) for s in saves], last_s=saves[-1]["seconds"], last_stall_ms=saves[-1]["stall_ms"],
        own_gib_before=max(quiet), own_gib_most=max(o for _, o in own), device_gib=steps[-1]["memory_gib"], saves=rows)


def load():
    out = os.path.join(a.dir, "save"); newest = sorted(glob.glob(out + "/checkpoints/step-*"))[-1]; last = int(newest.split("-")[-1]); bytes = tree_bytes(newest)
    os.environ["MLUA_DEBUG"] = "1"  # says how long the load itself took
    for state in ("cold", "warm", "warm"):
        if state == "cold": drop_cache(newest)
        read = timed(f"for f in {newest}/*.safetensors; do dd if=$f of=/dev/null bs=16M; done")
        if state == "cold": drop_cache(newest)
        copy = out + "-copy"; shutil.rmtree(copy, ignore_errors=True); os.makedirs(copy + "/checkpoints")
        for name in os.listdir(out):
            if os.path.isfile(os.path.join(out, name)): shutil.copy(os.path.join(out, name), copy)
        os.rename(newest, os.path.join(copy, "checkpoints", os.path.basename(newest)))
        try:
            seconds, samples = mlua("models/gpt.lua", *SIZE, f"steps={last + 1}", "sample=0", "save_every=0", out=copy, options=["--resume"])
            with open(os.path.join(a.dir, "log.txt"), errors="replace") as log: loaded = float(re.findall(r"loaded .* in ([0-9.]+) s by", log.read())[-1])
        finally:
            os.rename(os.path.join(copy, "checkpoints", os.path.basename(newest)), newest)
        own = max(sum(m.values()) for _, m in samples)
        say("load " + state, gb=bytes / 1e9, read_s=read, load_s=loaded, share_of_dd=read / loaded, command_s=seconds, own_gib_most=own)
    del os.environ["MLUA_DEBUG"]


def data():
    folder = os.path.join(a.dir, "data"); shutil.rmtree(folder, ignore_errors=True); os.makedirs(folder)
    random.seed(1); words = [random.randbytes(2 * 4096) for _ in range(16)]
    shards, per = (20, 20000) if tiny else (1000, 1000000)
    block = bytearray()
    for _ in range(per // 4096 + 1): block += random.choice(words)
    tokens = struct.unpack(f"<{per}H", bytes(block[: 2 * per])); block = struct.pack(f"<{per}H", *(t % 50000 for t in tokens))
    for i in range(shards):
        with open(f"{folder}/shard-{i:04d}.bin", "wb") as f: f.write(block[2 * i :] + block[: 2 * i])
    blend = f"{folder}/shard-000*.bin:0.7,{folder}/shard-001*.bin:0.3" if tiny else ",".join(f"{folder}/shard-{i}*.bin:{0.05 + 0.01 * i}" for i in range(10)).replace("shard-", "shard-0")
    text = f"{folder}/text.jsonl"
    with open(text, "w") as f:
        for i in range(2000 if tiny else 40000): f.write(json.dumps({"text": "".join(random.choice("abcdefgh ijklmnop\né世") for _ in range(random.randint(100, 3000)))}) + "\n")
    size = SIZE[:3] + ["vocab=50304", "batch=4", "seq=64"] if tiny else ["preset=gpt2-124m", "batch=64", "seq=1024"]
    for name, source, more in (("1,000 .bin, blended", blend, []), (".jsonl as bytes", text, ["vocab=256"])):
        out = os.path.join(a.dir, "data-run"); shutil.rmtree(out, ignore_errors=True)
        seconds, _ = mlua("models/gpt.lua", *[s for s in size if not (more and s.startswith("vocab"))], *more, f"data={source}", "steps=80", "sample=0", "log_every=1", "save_every=0", out=out)
        steps, _ = metrics(out); steady = steps[10:]
        waits = [100 * l["data_ms"] / l["step_ms"] for l in steady]
        say("data " + name, tokens_per_s=statistics.median(l["tokens_per_s"] for l in steady), wait_percent=100 * sum(l["data_ms"] for l in steady) / sum(l["step_ms"] for l in steady),
            median_wait_percent=statistics.median(waits), worst_wait_percent=max(waits), first_data_ms=steps[0]["data_ms"], files=shards if source == blend else 1)


def resume():
    """Losses of steps 8 to 14 after moves, beside one run that did not move."""
    small = ["layers=2", "embed=128", "heads=4", "vocab=256", "batch=8", "seq=128", "sample=0"]
    def run(name, steps, device, dtype="f32", fresh=True):
        """Losses of 14 steps (rates follow from their number), of which only `steps` are kept for those that resume."""
        out = os.path.join(a.dir, name)
        if fresh: shutil.rmtree(out, ignore_errors=True)
        mlua("models/gpt.lua", *small, "steps=14", "warmup=4", "lr=1e-3", *([f"save_every={steps}"] if steps < 14 else []), out=out, device=device,
             options=["--dtype", dtype] + ([] if fresh else ["--resume"]))
        for path in glob.glob(out + "/checkpoints/step-*"):
            if int(path.split("-")[-1]) > steps: shutil.rmtree(path)
        return {l["step"]: l["loss"] for l in metrics(out)[0]}
    def moves(label, limit, *legs):
        for i, (steps, device, dtype) in enumerate(legs): losses = run("moved", steps, device, dtype, i == 0)
        off = max(abs(losses[s] - whole[s]) / abs(whole[s]) for s in range(8, 15)); say("resume " + label, worst_relative=f"{off:.2e}", ok=off <= limit)
    gpu, cpu = a.device, "cpu"
    whole = run("whole", 14, cpu)
    moves("GPU all along", 1e-5, (14, gpu, "f32"))
    moves("CPU -> GPU", 1e-5, (7, cpu, "f32"), (14, gpu, "f32"))
    moves("GPU -> CPU", 1e-5, (7, gpu, "f32"), (14, cpu, "f32"))
    moves("CPU -> GPU -> CPU", 1e-5, (7, cpu, "f32"), (10, gpu, "f32"), (14, cpu, "f32"))
    moves("f32 CPU -> bf16 GPU", 2e-2, (7, cpu, "f32"), (14, gpu, "bf16"))
    # to the bit, tuning on, each run with kernels and choices of its own: a cache that is new
    for dtype in ("f32", "bf16"):
        whole = run("whole-gpu", 14, gpu, dtype)
        os.environ["MLUA_CACHE"] = os.path.join(a.dir, "cache-a"); shutil.rmtree(os.environ["MLUA_CACHE"], ignore_errors=True)
        run("split", 7, gpu, dtype)
        os.environ["MLUA_CACHE"] = os.path.join(a.dir, "cache-b"); shutil.rmtree(os.environ["MLUA_CACHE"], ignore_errors=True)
        split = run("split", 14, gpu, dtype, False)
        straight = run("straight", 14, gpu, dtype)
        del os.environ["MLUA_CACHE"]
        say(f"resume to the bit {dtype}", equal_to_first_half={s: split[s] == whole[s] for s in (1, 7, 8, 14)}, straight_equals=straight == whole,
            worst=max(abs(split[s] - whole[s]) for s in range(8, 15)))


for part in a.parts.split(","):
    try:
        if part == "peer":
            if a.peer: subprocess.run([sys.executable, a.peer, "--gib", "0.1" if tiny else "14.7", "--dir", a.dir + "/peer"], timeout=200)
        else: {"save": save, "load": load, "data": data, "resume": resume}[part]()
    except Exception as error: say(part + " FAILED", error=str(error)[-1500:])
