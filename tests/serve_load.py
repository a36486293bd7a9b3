"""The load of mlua serve: many clients at once against the same texts generated as one batch (mlua generate --prompts), one after the other on
the same device. Both read prompts of random tokens, all of one length, and draw as many tokens at temperature 1 from a model of random weights,
which is written as a Hugging Face folder with a tokenizer of made-up words (speed does not depend on values).

    python3 tests/serve_load.py --mlua build/mlua --out DIR [--preset llama-3b] [--clients 256] [--requests 1024] [--stream] [--device cpu]

Prints one JSON line each: output tokens/s of the batch ("offline"; prompts read included, loading and compiling not), of the server between
the first request and the last answer, and their ratio; with --stream also the time to the first token and between tokens. The server's
processor time a token is what the host takes where the device is a GPU, or null. It needs the standard library alone.
"""
import argparse, asyncio, json, os, random, re, struct, subprocess, sys, time

PRESETS = {  # layers, embed, heads, heads of keys, ffn, vocabulary
    "llama-3b": (28, 3072, 24, 8, 8192, 128256), "llama-1b": (16, 2048, 16, 8, 8192, 128256), "small": (4, 256, 4, 2, 704, 8192), "tiny": (1, 32, 2, 1, 64, 1024),
}


def shapes(preset):
    layers, embed, heads, kv, ffn, vocab = PRESETS[preset]
    dim = embed // heads
    yield "model.embed_tokens.weight", (vocab, embed)
    for i in range(layers):
        name = f"model.layers.{i}."
        yield name + "input_layernorm.weight", (embed,)
        yield name + "post_attention_layernorm.weight", (embed,)
        for part, rows in ("q", heads), ("k", kv), ("v", kv): yield f"{name}self_attn.{part}_proj.weight", (rows * dim, embed)
        yield name + "self_attn.o_proj.weight", (embed, heads * dim)
        for part in "gate", "up": yield f"{name}mlp.{part}_proj.weight", (ffn, embed)
        yield name + "mlp.down_proj.weight", (embed, ffn)
    yield "model.norm.weight", (embed,)


def write_tokenizer(path, vocab):
    """256 bytes, and words of letters: what an id decodes to, nothing more, for prompts are ids."""
    marks = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    letters = {b: chr(b) for b in marks}
    for b in range(256):
        if b not in letters: letters[b] = chr(256 + sum(1 for x in range(b) if x not in marks))
    words = {letters[b]: b for b in range(256)}
    for i in range(256, vocab):
        word, n = "", i
        while n: word, n = chr(97 + n % 26) + word, n // 26
        words["\u0120" + word] = i
    model = {"type": "BPE", "vocab": words, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    with open(path, "w") as file:
        json.dump({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}, file)


def write_model(folder, preset, context):
    layers, embed, heads, kv, ffn, vocab = PRESETS[preset]
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/config.json", "w") as file:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": embed, "num_hidden_layers": layers, "num_attention_heads": heads,
                   "num_key_value_heads": kv, "head_dim": embed // heads, "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": context,
                   "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16"}, file)
    write_tokenizer(folder + "/tokenizer.json", vocab)
    header, at = {}, 0
    for name, shape in shapes(preset):
        size = 2
        for n in shape: size *= n
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = random.Random(1)  # a block of bf16 values of deviation 0.02, repeated
    block = b"".join(struct.pack("<f", generator.gauss(0, 0.02))[2:] for _ in range((1 << 20) + 7))
    one = struct.pack("<f", 1.0)[2:]
    with open(folder + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in header.items():
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            source = one * (size // 2) if name.endswith("norm.weight") else block
            for start in range(0, size, len(source)): file.write(source[:min(len(source), size - start)])


async def read_answer(reader):
    """An HTTP answer: its status, its body, and the times at which pieces of it came."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, times, parts = int(head.split(b" ", 2)[1]), [], []
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    if length:
        parts.append(await reader.readexactly(int(length[1])))
        return status, b"".join(parts), [time.monotonic()]
    while True:
        size = int(await reader.readline(), 16)
        parts.append((await reader.readexactly(size + 2))[:size])
        if size == 0: return status, b"".join(parts), times
        times.append(time.monotonic())


async def client(port, bodies, results):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    while bodies:
        body = bodies.pop()
        begin = time.monotonic()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        status, answer, times = await read_answer(reader)
        if status != 200: raise SystemExit(f"status {status}: {answer[:500]!r}")
        if answer.startswith(b"data: "):
            lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
            tokens = json.loads(lines[-1])["usage"]["completion_tokens"]
        else: tokens = json.loads(answer)["usage"]["completion_tokens"]
        results.append((begin, times, tokens))
    writer.close()


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


async def load(port, a, prompts):
    bodies = []
    for i, ids in enumerate(prompts):
        asked = {"prompt": ids, "max_tokens": a.tokens, "temperature": 1, "seed": i}
        if a.stream: asked.update(stream=True, stream_options={"include_usage": True})
        bodies.append(json.dumps(asked).encode())
    results, begin = [], time.monotonic()
    await asyncio.gather(*(client(port, bodies, results) for _ in range(a.clients)))
    seconds = time.monotonic() - begin
    tokens = sum(r[2] for r in results)
    line = {"case": "stream" if a.stream else "serve", "clients": a.clients, "requests": len(results), "tokens": tokens, "seconds": round(seconds, 3), "tokens_s": round(tokens / seconds, 1),
            "request_s": [round(percentile([r[1][-1] - r[0] for r in results], p), 3) for p in (0.5, 0.95)]}
    if a.stream:
        gaps = [b - x for _, times, _ in results for x, b in zip(times, times[1:])]
        line["first_token_s"] = [round(percentile([r[1][0] - r[0] for r in results], p), 3) for p in (0.5, 0.95)]
        line["between_tokens_ms"] = [round(1e3 * percentile(gaps, p), 2) for p in (0.5, 0.95, 0.99)]
    return line


def offline(a, command, prompts):
    path = a.out + "/prompts.jsonl"
    with open(path, "w") as file:
        for ids in prompts: file.write(json.dumps({"ids": ids}) + "\n")
    run = subprocess.run([a.mlua, "generate", *command, "--prompts", path, "--tokens", str(a.tokens), "--temperature", "1", "--rows", str(a.clients)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = re.search(r"(\d+) tokens in ([0-9.]+) s", run.stderr)
    if run.returncode or not found: raise SystemExit(f"mlua generate: {run.stderr[-2000:]}")
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    if len(answers) != len(prompts) or any(len(r["ids"]) != a.tokens for r in answers): raise SystemExit("mlua generate gave fewer answers or tokens than asked")
    tokens, seconds = int(found[1]), float(found[2])
    return {"case": "offline", "rows": a.clients, "requests": len(prompts), "tokens": tokens, "seconds": seconds, "tokens_s": round(tokens / seconds, 1)}


def processor_seconds(pid):
    with open(f"/proc/{pid}/stat") as file: fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def served(a, command, prompts):
    begin = time.monotonic()
    server = subprocess.Popen([a.mlua, "serve", *command, "--port", "0", "--slots", str(a.clients)], stdout=subprocess.PIPE, text=True)
    try:
        port = None
        for line in server.stdout:
            port = re.search(r"http://[^:]+:(\d+)", line)
            if port: break
        if not port: raise SystemExit("mlua serve did not start")
        ready, warm = time.monotonic() - begin, a.requests // 16
        asyncio.run(load(int(port[1]), a, prompts[:warm]))  # kernels of chunks and rows that only many texts need
        before = processor_seconds(server.pid)
        line = asyncio.run(load(int(port[1]), a, prompts))
        line["ready_s"], line["processor_us_token"] = round(ready, 2), round(1e6 * (processor_seconds(server.pid) - before) / line["tokens"], 1)
        return line
    finally:
        server.terminate()
        server.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mlua", default="build/mlua")
    p.add_argument("--out", required=True)
    p.add_argument("--preset", default="llama-3b", choices=PRESETS)
    for name, default in ("clients", 256), ("requests", 1024), ("prompt", 512), ("tokens", 256): p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--stream", action="store_true")
    p.add_argument("--device")
    p.add_argument("--parts", default="offline,serve")
    a, rest = p.parse_known_args()
    context = a.prompt + a.tokens + 16
    folder = f"{a.out}/{a.preset}"
    if not os.path.exists(folder + "/model.safetensors"): write_model(folder, a.preset, context)
    command = ["--from", folder, f"seq={context}", *(["--device", a.device] if a.device else []), *rest]
    generator = random.Random(2)
    prompts = [[generator.randrange(PRESETS[a.preset][5]) for _ in range(a.prompt)] for _ in range(a.requests)]
    lines = {}
    for part in a.parts.split(","):
        lines[part] = offline(a, command, prompts) if part == "offline" else served(a, command, prompts)
        print(json.dumps(lines[part]), flush=True)
    if len(lines) == 2: print(json.dumps({"case": "ratio", "of_offline": round(lines["serve"]["tokens_s"] / lines["offline"]["tokens_s"], 3)}))


main()
