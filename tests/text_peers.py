"""mlua's tokenizers beside Hugging Face's tokenizers, tiktoken and sentencepiece, where they are installed; no network.

usage: python3 tests/text_peers.py --mlua build/mlua --out DIR [--vocab DIR] [--megabytes 1024] [--seconds 420] [--cores N] [--only NAME,...]
                                   [PART... of train speed compare hostile points bytes sentencepiece others]

DIR/corpus gets the text: files of code and documentation found on the machine, prose drawn from their words, many scripts, long runs.
Vocabularies are trained there by each library and by mlua; --vocab names a folder with published ones (gpt2.json, llama3.json,
*.tiktoken), which the chief comparisons then use. Lines: PASS, FAIL or INFO, what, figures; DIR/text.json has all of them.
  train          mlua tokenize --train 32768 on the corpus; what tokenizers makes of the file
  speed          one thread on prose and on files, threads against processes, a megabyte of one character
  compare        ids of the corpus for gpt2 and llama3 beside both libraries
  hostile        strings of combining marks, surrogates' neighbours, runs...; what mlua decodes
  points         every code point between other characters; the peers' Unicode tables differ beyond its version here
  bytes          invalid UTF-8 beside tiktoken's _encode_bytes
  sentencepiece  .model files
  others         an eighth of the corpus for the other tokenizers
"""
import argparse
import base64
import concurrent.futures
import glob
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
import unicodedata

HERE = os.path.dirname(os.path.abspath(__file__))
SHARDS = 32
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""]
PATTERNS = {"gpt2": [GPT2], "llama3": [LLAMA3], "qwen2": [LLAMA3.replace("{1,3}", "")], "cl100k": [CL100K], "o200k": [O200K], "deepseek": DEEPSEEK}
# tiktoken's own patterns of its own files.
TIKTOKEN = {"r50k": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
            "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
            "o200k": O200K}
SPECIAL = {"r50k": {"<|endoftext|>": 50256},
           "cl100k": {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276},
           "o200k": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}}


# ---- Text ---------------------------------------------------------------------------------------------------------------------

KINDS = (".py", ".pyi", ".h", ".hpp", ".cuh", ".c", ".cpp", ".rst", ".txt", ".md", ".json", ".html", ".js", ".lua", ".pm", ".po", ".xml", ".yaml", ".toml",
         ".ipynb", ".csv", ".tex", ".css", ".cmake", ".pod", ".ini")
RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x2AF), (0x2B0, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58F), (0x591, 0x5F4), (0x600, 0x6FF), (0x710, 0x74A),
          (0x900, 0x97F), (0x980, 0x9FE), (0xA00, 0xA76), (0xB80, 0xBFA), (0xC00, 0xC7F), (0xE01, 0xE5B), (0xE81, 0xEDF), (0xF00, 0xFDA), (0x1000, 0x109F), (0x10A0, 0x10FF),
          (0x1100, 0x11FF), (0x1200, 0x137C), (0x13A0, 0x13FD), (0x1780, 0x17F9), (0x1800, 0x18AA), (0x1D00, 0x1DFF), (0x1E00, 0x1FFE), (0x2000, 0x206F), (0x2070, 0x20C0),
          (0x2100, 0x218B), (0x2190, 0x2426), (0x2460, 0x27BF), (0x2C00, 0x2DFF), (0x3000, 0x30FF), (0x3105, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x4E00, 0x9FFF),
          (0xA000, 0xA4C6), (0xA640, 0xA7CA), (0xAC00, 0xD7A3), (0xAC00, 0xD7A3), (0xD7B0, 0xD7FB), (0xE000, 0xF8FF), (0xF900, 0xFAD9), (0xFB00, 0xFDFF), (0xFE00, 0xFE4F), (0xFE70, 0xFFFD),
          (0x10000, 0x100FA), (0x10400, 0x104FF), (0x11000, 0x1107F), (0x12000, 0x12399), (0x13000, 0x1342E), (0x1B000, 0x1B122), (0x1D400, 0x1D7FF), (0x1E900, 0x1E95F),
          (0x1F000, 0x1F2FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0x30000, 0x3134A), (0xE0100, 0xE01EF), (0x10FF00, 0x10FFFD)]
NEWEST = [(0x897, 0x897), (0x1C89, 0x1C8A), (0x2FFC, 0x2FFF), (0x31E4, 0x31EF), (0xA7CB, 0xA7DC), (0x105C0, 0x105F3), (0x10D40, 0x10D8F), (0x10940, 0x1095F), (0x11380, 0x113E2),
          (0x116D0, 0x116E3), (0x11BC0, 0x11BF9), (0x11DB0, 0x11DEF), (0x11F00, 0x11F59), (0x13460, 0x143FA), (0x16100, 0x16139), (0x16D40, 0x16D79), (0x16EA0, 0x16ED4),
          (0x1CC00, 0x1CEB3), (0x1E4D0, 0x1E4F9), (0x1E5D0, 0x1E5FF), (0x1E6C0, 0x1E6FF), (0x2EBF0, 0x2EE5D), (0x31350, 0x323AF), (0x323B0, 0x33479)]
SEEDS = ["'s", "'S", "'ſ", "'LL", "'re", "'Ve", "'d", "’s", " ", "  ", "   ", "\n", "\r\n", "\r", "\t", "\n\n", "\x85", "\xa0", "\u1680", "\u180e", "\u2003", "\u2028", "\u2029", "\u202f",
         "\u3000", "\u200b", "\u200d", "\ufeff", "\ufffd", "\0", "\x01", "\x7f", "\x1c", "\x1f", "\u0300", "\u0301", "\u0327", "é", "e\u0301", "Å", "\u212b", "\u1e9b\u0323", "ﬁ", "ﬀ",
         "½", "²", "Ⅷ", "٣", "๓", "\u0e33", "ᄀ", "ᅡ", "ᆨ", "각", "가", "ʰ", "ª", "º", "ǅ", "ß", "ẞ", "İ", "ı", "ſ", "K", "Σ", "ς", "中文", "日本語", "ー", "々", "〆", "龥", "龦",
         "한국어", "العربية", "हिन्दी", "ไทย", "Việt", "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "\U0001F1E9\U0001F1EA", "𝔘", "𝟘", "\U0010FFFF", "\U000E0100", "\ud7ff", "\ue000", "\ufffe", "\U00010000",
         "<|endoftext|>", "<|endoftext", "|>", "<s>", "<unk>", "▁", "▁▁", "<0x41>", "_", "__", "//", "/", "!!!", "...", "$€£", "a", "A", "Ab", "aB", "AB", "abC", "0", "12", "123",
         "1234", "12345678", "x1", "1x", "\\", '"', "#", "@", "`", "~", "^", "\u0660", "\u06f0", "\u2160", "\u00bc", "\u3400", "\U00020000", "\U0001E900", "\U0001E943",
         "\u0903", "\u093e", "\u20e3", "\u2044", "\u00ad", "\u061c", "\u2066", " the", "ing", "Hello", "world", "function", "'", "''", " '", "-", "--", "=", "==="]


def find_files():
    """Paths of text files of this machine in a drawn order."""
    places = [os.path.dirname(os.path.dirname(os.__file__)), *[p for p in sys.path if p.endswith("-packages")], "/usr/share", "/usr/include", "/usr/lib/python3", "/usr/local",
              "/opt", "/usr/src"]
    found, seen, began = [], set(), time.time()
    for place in places:
        for folder, folders, names in os.walk(place):
            real = os.path.realpath(folder)
            if real in seen or time.time() - began > 25:
                folders[:] = []
                continue
            seen.add(real)
            for name in names:
                if name.endswith(KINDS) or name[:7] in ("LICENSE", "COPYING", "README"):
                    found.append(os.path.join(folder, name))
    found.sort()
    random.Random(18).shuffle(found)
    return found


def prose(rng, words, weights, size):
    text = rng.choices(words, weights, k=size // 6)
    out, at = [], 0
    while at < len(text):
        n = rng.randint(4, 24)
        part = text[at:at + n]
        at += n
        if rng.random() < 0.3:
            part[rng.randrange(len(part))] = rng.choice([str(rng.randint(0, 2100)), "it's", "don't", "(e.g.", "“" + part[0] + "”", "U.S.", "3.14", "50%", "we'll", "—"])
        part[0] = part[0].capitalize()
        out.append(" ".join(part) + rng.choice([". ", ". ", ". ", ", ", "? ", "; ", ".\n", ".\n\n"]))
    return "".join(out)


def scripts(rng, size):
    out = []
    while size > 0:
        low, high = rng.choice(RANGES)
        kind = rng.random()
        run = [chr(rng.randint(low, high)) for _ in range(rng.randint(20, 200))]
        if kind < 0.5:
            run = [c if rng.random() > 0.15 else rng.choice([" ", " ", ", ", "\n", ". ", "12", "\u0301", "'s "]) for c in run]
        elif kind < 0.6:
            run = [c + rng.choice(["\u0301", "\u0327\u0323", "\ufe0f", "\u200d", "\U0001f3fd", ""]) for c in run]
        text = "".join(c for c in "".join(run) if unicodedata.category(c) not in ("Cn", "Cs"))
        out.append(text + " ")
        size -= len(out[-1].encode())
    return "".join(out)


def runs(rng, size):
    out = []
    while size > 0:
        n = rng.choice([50, 500, 5000, 50000])
        out.append(rng.choice(SEEDS[8:20] + ["a", "aB", "1", "-", "=", "中", "😀", "é", "_", " x", "\n ", "ab"]) * rng.randint(1, n))
        size -= len(out[-1].encode())
    return "".join(out)


def write_line(file, text):
    if text:
        file.write((json.dumps({"text": text}, ensure_ascii=False) + "\n").encode())


def corpus(job):
    """One shard as .jsonl: files up to two thirds, then prose, scripts and runs."""
    rng, size, files, words, said = random.Random(job["seed"]), job["bytes"], 0, {}, {"files": 0}
    with open(job["to"], "wb") as out:
        for path in job["paths"]:
            if files > size * 0.68:
                break
            try:
                if not 64 < os.path.getsize(path) < 400_000:
                    continue
                text = open(path, "rb").read().decode("utf-8", "replace").replace("\x00", "\ufffd")
            except OSError:
                continue
            if files < 3e6 and path.endswith((".py", ".rst", ".md", ".txt", ".html")):
                for word in re.findall(r"[A-Za-z]+(?:'[a-z]+)?", text):
                    if len(word) < 16 and not word.isupper():
                        words[word] = words.get(word, 0) + 1
            write_line(out, text)
            files += len(text.encode())
            said["files"] += 1
        words = words or {"the": 5, "of": 3, "word": 1}
        names, weights = list(words), list(words.values())
        while files < size * 0.86:
            text = prose(rng, names, weights, rng.choice([600, 6000, 60000]))
            write_line(out, text)
            files += len(text.encode())
        while files < size * 0.98:
            text = scripts(rng, rng.choice([300, 3000, 30000]))
            write_line(out, text)
            files += len(text.encode())
        while files < size:
            text = runs(rng, 20000)
            write_line(out, text)
            files += len(text.encode())
    return {"bytes": files, "of_files": said["files"]}


def hostile(job):
    rng = random.Random(job["seed"])

    def point():
        low, high = rng.choice(RANGES if rng.random() < 0.95 else NEWEST)
        return chr(rng.randint(low, high))

    with open(job["to"], "wb") as out:
        for _ in range(job["count"]):
            parts = []
            for _ in range(rng.randint(1, 24)):
                kind = rng.random()
                parts.append(rng.choice(SEEDS) if kind < 0.6 else point() if kind < 0.85 else rng.choice(SEEDS) * rng.randint(1, 20) if kind < 0.9
                             else "".join(chr(rng.randint(97, 122)) for _ in range(rng.randint(1, 12))))
            write_line(out, "".join(parts))
    return {"bytes": os.path.getsize(job["to"])}


def points(job):
    """Each code point between letters, digits, spaces and signs, a line each."""
    with open(job["to"], "wb") as out:
        for c in range(job["first"], job["last"]):
            if not 0xD800 <= c < 0xE000:
                out.write(json.dumps({"text": f"a{chr(c)}b {chr(c)} 1{chr(c)}2!{chr(c)}?{chr(c)}{chr(c)}A\n{chr(c)}"}).encode() + b"\n")
    return {}


def documents(path):
    with open(path, "rb") as f:
        for line in f:
            yield json.loads(line)["text"]


def sample(job, most):
    """Texts of a few shards, cut to pieces of at most 4,000 characters."""
    used = 0
    for path in job["shards"]:
        for text in documents(path):
            for i in range(0, len(text), 4000):
                yield text[i:i + 4000]
            used += len(text)
            if used > most:
                return


# ---- Vocabularies -----------------------------------------------------------------------------------------------------------------

def byte_characters():
    """GPT-2's character of each byte."""
    plain = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table, n = {}, 0
    for b in range(256):
        table[b] = chr(b) if b in plain else chr(256 + n)
        n += b not in plain
    return table


def train_bytes(job):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    t = Tokenizer(models.BPE(ignore_merges=job["name"] == "llama3"))
    if job["name"] == "qwen2":
        t.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PATTERNS[job["name"]]]
    t.pre_tokenizer = pre_tokenizers.Sequence(splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(sample(job, job["most"]), trainers.BpeTrainer(vocab_size=job["size"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    t.save(job["to"])
    return {"vocab": t.get_vocab_size()}


def train_characters(job):
    """Metaspace BPE with byte fallback as Llama-2, Mistral and Gemma arrange it, a Unigram model."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    space = "\u2581"
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.train_from_iterator(sample(job, job["most"]), trainers.BpeTrainer(vocab_size=12000, limit_alphabet=3000, special_tokens=["<unk>"], show_progress=False))
    t.save(job["to"])
    learned = json.load(open(job["to"]))["model"]
    os.unlink(job["to"])
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    names += [n for n, _ in sorted(learned["vocab"].items(), key=lambda p: p[1]) if n not in set(names)]
    added = [{"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i, c in enumerate(names[:3])]
    model = dict(learned, vocab={n: i for i, n in enumerate(names)}, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None, "post_processor": None, "model": model}
    pieces = [{"type": "Replace", "pattern": {"String": space}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip, spaces = {"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Replace", "pattern": {"String": " "}, "content": space}
    made = {
        "llama2": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": space}, spaces]}, "decoder": {"type": "Sequence", "decoders": pieces + [strip]}},
        "mistral": {"pre_tokenizer": {"type": "Metaspace", "replacement": space, "prepend_scheme": "first", "split": False}, "decoder": {"type": "Sequence", "decoders": pieces + [strip]}},
        "gemma": {"normalizer": spaces, "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
                  "decoder": {"type": "Sequence", "decoders": pieces}}}
    for name, steps in made.items():
        with open(os.path.join(os.path.dirname(job["to"]), name + ".json"), "w") as f:
            json.dump({**whole, **steps}, f)
    return {"vocab": len(names)}


def train_unigram(job):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    t = Tokenizer(models.Unigram())
    t.normalizer, t.pre_tokenizer, t.decoder = normalizers.NFKC(), pre_tokenizers.Metaspace(), decoders.Metaspace()
    t.train_from_iterator(sample(job, job["most"]), trainers.UnigramTrainer(vocab_size=8000, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False))
    t.save(job["to"])
    return {"vocab": t.get_vocab_size()}


def train_sentencepiece(job):
    import sentencepiece
    lines = (line for text in sample(job, job["most"]) for line in text.split("\n") if 0 < len(line) < 1000 and "\0" not in line
             and len(line.encode()) < 1.3 * len(line))  # else its characters alone are more than the vocabulary
    more = dict(byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False) if job["kind"] == "bpe" else {}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_prefix=job["to"], vocab_size=8000, model_type=job["kind"], num_threads=2,
                                             hard_vocab_limit=False, character_coverage=0.999, minloglevel=2, **more)
    return {"vocab": 8000}


def ranks_of(path):
    """tiktoken's ranks and special tokens of a byte-level tokenizer.json, and how many merges make a token another made before."""
    whole = json.load(open(path))
    back = {c: b for b, c in byte_characters().items()}
    ranks = {bytes(back[c] for c in token): i for token, i in whole["model"]["vocab"].items() if all(c in back for c in token)}
    special, more = {}, len(whole["model"]["vocab"])  # tokenizers gives what the vocabulary lacks the next ids, whatever the file has
    for t in whole["added_tokens"]:
        special[t["content"]] = whole["model"]["vocab"].get(t["content"], more)
        more += t["content"] not in whole["model"]["vocab"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]]
    return ranks, special, len(merges) - len({m.replace(" ", "", 1) for m in merges})


def read_tiktoken(path):
    return {base64.b64decode(t): int(r) for t, r in (line.split() for line in open(path, "rb") if line.strip())}


# ---- Peers ----------------------------------------------------------------------------------------------------------------------------

class Peer:
    """encode: texts to lists of ids; decode: ids to bytes or text."""

    def __init__(self, job):
        kind, path = job["peer"], job["tokenizer"]
        if kind == "tokenizers":
            from tokenizers import Tokenizer
            t = Tokenizer.from_file(path)
            batch = getattr(t, "encode_batch_fast", t.encode_batch)
            self.encode = lambda texts: [e.ids for e in batch(texts, add_special_tokens=False)]
            self.only = lambda texts: batch(texts, add_special_tokens=False)
            self.decode = lambda ids: t.decode(ids, skip_special_tokens=False).encode()
        elif kind == "tiktoken":
            import tiktoken
            if path.endswith(".tiktoken"):
                name = os.path.basename(path).split("_")[0].split(".")[0]
                ranks, special, pattern = read_tiktoken(path), SPECIAL[name], TIKTOKEN[name]
            else:
                ranks, special, _ = ranks_of(path)
                pattern = PATTERNS[job["name"]][0]
            t = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
            self.encode = lambda texts: [t.encode(x, allowed_special="all") for x in texts]
            self.only = lambda texts: [t.encode_ordinary(x) for x in texts]
            self.decode, self.bytes = t.decode_bytes, getattr(t, "_encode_bytes", None)
        else:
            import sentencepiece
            t = sentencepiece.SentencePieceProcessor(model_file=path)
            self.encode = self.only = lambda texts: t.encode(texts, out_type=int, num_threads=1)
            self.decode = lambda ids: t.decode(ids).encode()


class Ids:
    """The documents of mlua's OUT.idx and OUT.bin."""

    def __init__(self, stem):
        import numpy
        head = open(stem + ".idx", "rb").read(34)
        self.count = struct.unpack("<Q", head[18:26])[0]
        self.lengths = numpy.fromfile(stem + ".idx", numpy.int32, self.count, offset=34)
        self.ends = numpy.cumsum(self.lengths, dtype=numpy.int64)
        self.all = numpy.memmap(stem + ".bin", numpy.uint16 if head[17] == 8 else numpy.int32, "r")

    def of(self, i, eos):
        return self.all[self.ends[i] - self.lengths[i]:self.ends[i] - eos]


def batches(texts, most=1 << 19):
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > most or len(batch) == 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def compare(job):
    """Documents of a shard whose ids differ; those with characters newer than Python's table apart."""
    import numpy
    peer, ours, at, eos = Peer(job), Ids(job["ids"]), job["first"], job["eos"]
    r = {"documents": 0, "bytes": 0, "tokens": 0, "different": 0, "newest": 0, "seconds": 0.0, "examples": [], "points": []}
    for batch in batches(documents(job["shard"])):
        began = time.process_time()
        lists = peer.encode(batch)
        r["seconds"] += time.process_time() - began
        for text, theirs in zip(batch, lists):
            r["documents"] += 1
            r["bytes"] += len(text.encode())
            r["tokens"] += len(theirs)
            if not theirs and not eos:
                continue  # Megatron's files have no empty documents
            mine = ours.of(at, eos) if at < ours.count else []
            at += 1
            if len(mine) == len(theirs) and numpy.array_equal(mine, theirs):
                continue
            new = any(unicodedata.category(c) == "Cn" for c in text)
            r["newest" if new else "different"] += 1
            if job.get("points"):
                r["points"].append(ord(text[1]))
            elif len(r["examples"]) < 3 and not new:
                k = next((k for k, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
                r["examples"].append({"text": text[:200], "at": k, "mlua": [int(x) for x in mine[max(0, k - 3):k + 6]], "peer": theirs[max(0, k - 3):k + 6],
                                      "around": repr(peer.decode(theirs[max(0, k - 5):k + 8]))})
    return r


def decoding(job):
    """What mlua decodes of its ids (tests/lua/lib/encode.lua) against the peer's text of them."""
    peer, r = Peer(job), {"documents": 0, "different": 0, "examples": []}
    data, at = open(job["decoded"], "rb").read(), 0
    while at < len(data):
        n = struct.unpack_from("<I", data, at)[0]
        ids = list(struct.unpack_from(f"<{n // 4}I", data, at + 4))
        at += 4 + n
        n = struct.unpack_from("<I", data, at)[0]
        mine = data[at + 4:at + 4 + n]
        at += 4 + n
        theirs = peer.decode(ids)
        r["documents"] += 1
        if theirs != mine:
            r["different"] += 1
            if len(r["examples"]) < 3:
                r["examples"].append({"ids": ids[:40], "mlua": repr(mine[:200]), "peer": repr(theirs[:200])})
    return r


def damaged(count, seed):
    """Strings that are no UTF-8: cut, with bytes altered, drawn."""
    rng = random.Random(seed)
    for _ in range(count):
        text = "".join(rng.choice(SEEDS) for _ in range(rng.randint(1, 12))).encode()
        kind = rng.random()
        if kind < 0.4:
            text = text[:rng.randint(1, len(text))]
        elif kind < 0.8:
            text = bytearray(text)
            for _ in range(rng.randint(1, 3)):
                text[rng.randrange(len(text))] = rng.choice([0x80, 0xBF, 0xC0, 0xC1, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF, rng.randrange(256)])
            text = bytes(text)
        else:
            text = bytes(rng.randrange(256) for _ in range(rng.randint(1, 30)))
        yield text


def invalid(job):
    """tiktoken on invalid UTF-8: all behind the first invalid byte is one piece to it, which mlua splits on."""
    peer, r = Peer(job), {"documents": 0, "invalid": 0, "valid differ": 0, "cut differ": 0, "cut": 0, "split otherwise": 0, "not kept": 0}
    data, at = open(job["decoded"], "rb").read(), 0
    for text in damaged(job["count"], job["seed"]):
        n = struct.unpack_from("<I", data, at)[0]
        ids = list(struct.unpack_from(f"<{n // 4}I", data, at + 4))
        at += 4 + n
        at += 4 + struct.unpack_from("<I", data, at)[0]
        r["documents"] += 1
        r["not kept"] += peer.decode(ids) != text
        try:
            r["valid differ"] += peer.encode([text.decode()])[0] != ids
            continue
        except UnicodeDecodeError as fault:
            r["invalid"] += 1
            cut = fault.start + 4 > len(text) and fault.reason == "unexpected end of data"
        same = peer.bytes(text) == ids
        r["cut"] += cut
        r["cut differ" if cut else "split otherwise"] += not same
    return r


def speed(job):
    """One thread of a peer: megabytes a second of three passes."""
    peer, texts = Peer(job), [t.decode() for t in read_blocks(job["docs"])]
    size, seconds = sum(len(t.encode()) for t in texts), []
    for _ in range(job["passes"]):
        began = time.perf_counter()
        for batch in batches(texts, 1 << 16):
            peer.only(batch)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "rate": size / 1e6 / sorted(seconds)[len(seconds) // 2]}


def loads(job):
    """A tokenizer.json of mlua --train in tokenizers."""
    from tokenizers import Tokenizer
    return {"vocab": Tokenizer.from_file(job["tokenizer"]).get_vocab_size()}


def write_blocks(path, texts):
    with open(path, "wb") as out:
        for text in texts:
            out.write(struct.pack("<I", len(text)) + text)


def read_blocks(path):
    data, at, out = open(path, "rb").read(), 0, []
    while at < len(data):
        n = struct.unpack_from("<I", data, at)[0]
        out.append(data[at + 4:at + 4 + n])
        at += 4 + n
    return out


# ---- The run ------------------------------------------------------------------------------------------------------------------------------

class Run:
    def __init__(self):
        self.out, self.results, self.began, self.lock = ARGS.out, [], time.time(), threading.Lock()
        self.pool = concurrent.futures.ThreadPoolExecutor(ARGS.cores)
        self.vocab = {}
        memory = "/dev/shm"  # where waiting for a disk costs nothing
        large = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 40 * ARGS.megabytes * 1_000_000
        self.ids = os.path.join(memory, f"text-peers-{os.getpid()}") if large else os.path.join(self.out, "ids")
        for folder in ("corpus", "vocab", "log", "work", self.ids):
            os.makedirs(self.path(folder), exist_ok=True)

    def path(self, *names):
        return os.path.join(self.out, *names)

    def say(self, verdict, what, text, **more):
        with self.lock:
            self.results.append({"verdict": verdict, "what": what, "text": text, **more})
            print(f"{verdict} {what}: {text}", flush=True)
            with open(self.path("text.json"), "w") as f:
                json.dump(self.results, f, indent=1, ensure_ascii=False)

    def left(self):
        return ARGS.seconds - (time.time() - self.began)

    def work(self, function, label, limit=150, **job):
        """A job in a process of its own: its result, or None where it failed, which is said."""
        limit = min(limit, self.left() + 30)
        if limit < 20:
            return None  # no time left: whoever waits says so
        log = self.path("log", re.sub(r"\W+", "-", label))
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": str(job.get("threads", 1)), "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
        if job.get("threads", 1) > 1:
            environment["TOKENIZERS_PARALLELISM"] = "true"
        with open(log + ".json", "w") as f:
            json.dump(job, f)
        try:
            r = subprocess.run([sys.executable, os.path.abspath(__file__), "--mlua", ARGS.mlua, "--out", self.out, "--job", function.__name__, "--input", log + ".json"],
                               capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL, env=environment)
            with open(log + ".log", "w") as f:
                f.write(r.stdout[-20000:] + r.stderr[-20000:])
            if r.returncode == 0:
                return json.loads(r.stdout.splitlines()[-1])
            self.say("FAIL", label, f"ended with {r.returncode}: {(r.stderr.strip().splitlines() or [''])[-1][:300]}")
        except subprocess.TimeoutExpired:
            self.say("FAIL", label, f"no end within {limit:.0f} s")
        except Exception as fault:
            self.say("FAIL", label, f"{type(fault).__name__}: {fault}"[:300])
        return None

    def mlua(self, *words, cores=None, limit=200, **environment):
        """Seconds of a command and what it wrote to standard output."""
        began = time.perf_counter()
        r = subprocess.run([ARGS.mlua, *words], capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL, env={**os.environ, **environment},
                           preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None)
        seconds = time.perf_counter() - began
        if r.returncode:
            raise RuntimeError(f"mlua {' '.join(words)[:80]} exits with {r.returncode}: {r.stderr.strip()[:300]}")
        return seconds, r.stdout

    def part(self, name, function):
        if ARGS.parts and name not in ARGS.parts:
            return
        began = time.time()
        try:
            function()
        except Exception as fault:
            self.say("FAIL", name, f"{type(fault).__name__}: {fault}"[:400])
        print(f"---- {name}: {time.time() - began:.1f} s, {time.time() - self.began:.0f} s since the start", flush=True)

    # Text and vocabularies.

    def make_text(self):
        paths = find_files()
        self.shards = [self.path("corpus", f"{i:02}.jsonl") for i in range(SHARDS)]
        futures = [self.pool.submit(self.work, corpus, f"corpus {i}", to=self.shards[i], seed=i, bytes=ARGS.megabytes * 1_000_000 // SHARDS, paths=paths[i::SHARDS][:40000])
                   for i in range(SHARDS)]
        each = int(ARGS.megabytes * 1e6 / 1.024e9 * 1_000_000) // 16 or 100
        self.hostile = [self.path("corpus", f"hostile{i:02}.jsonl") for i in range(16)]
        futures += [self.pool.submit(self.work, hostile, f"hostile {i}", to=self.hostile[i], seed=1000 + i, count=each) for i in range(16)]
        step = (0x110000 if ARGS.megabytes > 100 else 0x4000) // 16
        self.points = [self.path("corpus", f"points{i:02}.jsonl") for i in range(16)]
        futures += [self.pool.submit(self.work, points, f"points {i}", to=self.points[i], first=i * step, last=(i + 1) * step) for i in range(16)]
        made = [f.result() for f in futures]
        self.hostile = [s for s, m in zip(self.hostile, made[SHARDS:]) if m]
        self.shards = [s for s, m in zip(self.shards, made) if m]
        made = [m for m in made[:SHARDS] if m]
        self.bytes = sum(m["bytes"] for m in made)
        self.say("INFO", "corpus", f"{self.bytes / 1e6:.0f} MB of text, {sum(m['of_files'] for m in made)} files of {len(paths)} found, {16 * each} hostile strings")

    def start_training(self):
        jobs, small = [], ARGS.megabytes <= 100
        for name in PATTERNS:
            jobs.append((train_bytes, name + "-trained.json", dict(name=name, size=2000 if small else 50256 if name == "gpt2" else 32000, most=2e6 if small else 40e6 if name == "gpt2" else 25e6)))
        jobs.append((train_characters, "characters.json", dict(most=1e6 if small else 12e6)))
        jobs.append((train_unigram, "unigram.json", dict(most=1e6 if small else 3e6)))
        jobs += [(train_sentencepiece, "sp-" + kind, dict(kind=kind, most=1e6 if small else 6e6)) for kind in ("bpe", "unigram")]
        if ARGS.parts and not set(ARGS.parts) & {"hostile", "points", "others"}:  # what is not compared is not made
            wanted = ["gpt2-", "llama3-"] if set(ARGS.parts) & {"speed", "compare", "bytes"} else []
            jobs = [j for j in jobs if j[1].startswith(tuple(wanted + ["sp-"] * ("sentencepiece" in ARGS.parts)))]
        if ARGS.only:
            jobs = [j for j in jobs if any(name in j[1] for name in ARGS.only.split(",") + ["gpt2", "llama3"])]
        if ARGS.vocab:
            jobs = [j for j in jobs if not os.path.exists(os.path.join(ARGS.vocab, j[1].replace("-trained", "")))]
        self.training = {to: self.pool.submit(self.work, function, "make " + to, 170, to=self.path("vocab", to), shards=self.shards[1::5], threads=2, **more)
                         for function, to, more in jobs}

    def find_vocabularies(self):
        """What each comparison uses; published ones first."""
        for to, future in self.training.items():
            self.vocab[to] = future.result() and self.path("vocab", to)
        for path in sorted(glob.glob(os.path.join(ARGS.vocab, "*"))) if ARGS.vocab else []:
            self.vocab[os.path.basename(path)] = os.path.abspath(path)
        for name in ("gpt2", "llama3"):
            self.vocab.setdefault(name + ".json", self.vocab.get(name + "-trained.json"))
        for name in ("llama2", "mistral", "gemma"):
            path = self.path("vocab", name + ".json")
            if os.path.exists(path):
                self.vocab[name + ".json"] = path

    # Parts.

    def train(self):
        to = self.path("vocab", "mlua.json")
        seconds, _ = self.mlua("tokenize", "--train", "32768", *self.shards, "-o", to, "--quiet", limit=300)
        self.say("PASS" if seconds <= 60 else "FAIL", "train", f"mlua tokenize --train 32768 on {self.bytes / 1e6:.0f} MB: {seconds:.1f} s on {ARGS.cores} cores (60 allowed)")
        found = self.work(loads, "tokenizers loads mlua's tokenizer.json", tokenizer=to)
        if found:
            self.say("PASS", "train", f"tokenizers loads the file, {found['vocab']} tokens")
            self.vocab["mlua.json"] = to

    def speed(self):
        docs = {}
        texts = {"prose": [], "files": []}
        rng = random.Random(3)
        words = re.findall(r"[A-Za-z]+(?:'[a-z]+)?", " ".join(t for _, t in zip(range(60), documents(self.shards[0]))))
        size, used = 2e6 if ARGS.megabytes <= 100 else 12e6, 0
        while used < size:
            texts["prose"].append(prose(rng, words, None, 6000).encode())
            used += len(texts["prose"][-1])
        used = 0
        for shard in self.shards:
            for n, text in enumerate(documents(shard)):
                if n == 100 or used > size:
                    break
                texts["files"].append(text.encode())
                used += len(texts["files"][-1])
        for kind in texts:
            docs[kind] = self.path("work", kind + ".bin")
            write_blocks(docs[kind], texts[kind])
        # The peers beside each other, a core each, but not beside mlua.
        jobs = {(name, kind, p): self.pool.submit(self.work, speed, f"speed {name} {kind} {p}", 100, peer=p, name=name, tokenizer=self.vocab[name + ".json"], docs=docs[kind],
                                                  passes=3 if p == "tiktoken" else 1)
                for name in ("gpt2", "llama3") for kind in docs for p in ("tokenizers", "tiktoken")}
        peers = {job: (future.result() or {}).get("rate", 0.0) for job, future in jobs.items()}
        for name in ("gpt2", "llama3"):
            for kind in docs:
                path, size = self.vocab[name + ".json"], sum(map(len, texts[kind]))
                out = json.loads(self.mlua("run", os.path.join(HERE, "lua/lib/encode.lua"), "--device", "cpu", cores={1}, TOKENIZER=path, DOCS=docs[kind], PASSES="5")[1])
                rate = size / 1e6 / sorted(out["seconds"])[2]
                rates = {p: peers[name, kind, p] for p in ("tokenizers", "tiktoken")}
                fastest = max(rates.values()) or float("nan")
                self.say("PASS" if rate >= 100 and rate >= 5 * fastest else "FAIL", f"speed {name} {kind}",
                         f"mlua {rate:.1f} MB/s (first pass {size / 1e6 / out['seconds'][0]:.1f}, with a Lua table of the ids {size / 1e6 / sorted(out['table_seconds'])[2]:.1f}), "
                         f"tokenizers {rates['tokenizers']:.1f}, tiktoken {rates['tiktoken']:.1f}: {rate / fastest:.1f} times")
        for name in ("gpt2", "llama3"):
            self.threads(name)
        self.letters()

    def threads(self, name):
        cores = sorted(os.sched_getaffinity(0))[:ARGS.cores]
        path, parts = self.vocab[name + ".json"], [self.shards[i::len(cores)] for i in range(len(cores))]
        stem = os.path.join(self.ids, "threads")
        one, _ = self.mlua("tokenize", path, *parts[0], "-o", stem + "-one.idx", "--quiet", cores={cores[0]})
        together, _ = self.mlua("tokenize", path, *self.shards, "-o", stem + ".idx", "--quiet")
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
            list(pool.map(lambda i: self.mlua("tokenize", path, *parts[i], "-o", f"{stem}-{i}.idx", "--quiet", cores={cores[i]}), range(len(cores))))
        apart = time.perf_counter() - began
        for file in glob.glob(stem + "*"):
            os.unlink(file)
        size = self.bytes / 1e6
        self.say("PASS" if apart >= 0.8 * together else "FAIL", f"threads {name}", f"{len(cores)} threads {size / together:.0f} MB/s, {len(cores)} processes {size / apart:.0f} MB/s: "
                 f"{apart / together:.2f}; one thread, files and all, {size / len(cores) / one:.0f} MB/s")

    def letters(self):
        for name in ("gpt2", "llama3"):
            path, lines, worst = self.vocab[name + ".json"], [], 0
            for letter in ("a", " ", "\n", "1", "中", "ab"):
                seconds = []
                for million in (1, 4):
                    docs = self.path("work", "letter.bin")
                    write_blocks(docs, [(letter * (million * 1_000_000 // len(letter.encode()))).encode()])
                    out = json.loads(self.mlua("run", os.path.join(HERE, "lua/lib/encode.lua"), "--device", "cpu", TOKENIZER=path, DOCS=docs, PASSES="3", limit=60)[1])
                    seconds.append(min(out["seconds"]))
                worst = max(worst, seconds[1] / seconds[0])
                lines.append(f"{letter!r} {seconds[0] * 1e3:.0f} ms")
            self.say("PASS" if worst < 8 else "FAIL", f"one letter {name}", f"a megabyte of {', '.join(lines)}; four take at most {worst:.1f} times as long")
        write_blocks(docs, [b"a" * 1_000_000])
        for peer in ("tokenizers", "tiktoken"):
            r = self.work(speed, f"one letter {peer}", 30, peer=peer, name="llama3", tokenizer=self.vocab["llama3.json"], docs=docs, passes=1)
            if r:
                self.say("INFO", f"one letter llama3 {peer}", f"a megabyte of 'a' {r['seconds'][0] * 1e3:.0f} ms")

    def encode(self, label, path, shards):
        """mlua's ids of shards, and what else jobs must know of them."""
        stem = os.path.join(self.ids, re.sub(r"\W+", "-", label))
        for file in glob.glob(stem + ".*"):
            shutil.rmtree(file) if os.path.isdir(file) else os.unlink(file)
        seconds, _ = self.mlua("tokenize", path, *shards, "-o", stem + ".idx", "--quiet", limit=120)
        docs = self.path("work", "one.bin")
        write_blocks(docs, [b"a"])
        with self.lock:
            _, text = self.mlua("run", os.path.join(HERE, "lua/lib/encode.lua"), "--device", "cpu", TOKENIZER=path, DOCS=docs, IDS=self.path("work", "one.out"))
        first, firsts = 0, []
        for shard in shards:
            firsts.append(first)
            first += self.lines(shard)
        return dict(ids=stem, eos=int(json.loads(text)["eos"] >= 0), firsts=firsts, seconds=seconds)

    def lines(self, shard):
        if not hasattr(self, "counts"):
            self.counts = {}
        if shard not in self.counts:
            with open(shard, "rb") as f:
                self.counts[shard] = sum(block.count(b"\n") for block in iter(lambda: f.read(1 << 20), b""))
        return self.counts[shard]

    def against(self, label, name, path, shards, peers, **more):
        """Comparisons of one tokenizer, started; what to wait for."""
        if ARGS.only and not any(name in label for name in ARGS.only.split(",")):
            return []
        if not path:
            self.say("SKIP", label, "there is no vocabulary")
            return []
        try:
            e = self.encode(label, path, shards)
        except Exception as fault:
            self.say("FAIL", label, f"{fault}"[:400])
            return []
        waiting = []
        for peer in peers:
            jobs = [self.pool.submit(self.work, compare, f"{label} {peer} {i}", peer=peer, name=name, tokenizer=path, shard=shard, ids=e["ids"], first=first, eos=e["eos"], **more)
                    for i, (shard, first) in enumerate(zip(shards, e["firsts"]))]
            waiting.append((label, peer, path, jobs, e))
        return waiting

    def settle(self, waiting):
        for label, peer, path, jobs, e in waiting:
            found = [r for r in (j.result() for j in jobs) if r]
            if not found:
                self.say("SKIP", f"{label} beside {peer}", "no time left, or its processes failed")
                continue
            total = {k: sum(r[k] for r in found) for k in ("documents", "bytes", "tokens", "different", "newest", "seconds")}
            points = sorted({p for r in found for p in r["points"]})
            ok, note = total["different"] == 0, "" if len(found) == len(jobs) else f", {len(found)} of {len(jobs)} shards"
            note += f", {total['newest']} with characters beyond Unicode {unicodedata.unidata_version}" if total["newest"] else ""
            if peer == "tiktoken" and path.endswith(".json") and not ok:
                twice = ranks_of(path)[2]
                note += f"; {twice} merges make tokens that others make" if twice else ""
            if points:
                ranges, first = [], points[0]
                for a, b in zip(points, points[1:] + [-1]):
                    if b != a + 1:
                        ranges.append(f"{first:X}-{a:X}" if a > first else f"{a:X}")
                        first = b
                note += ": " + " ".join(ranges[:60])
            verdict = "FAIL" if not ok else "PASS" if len(found) == len(jobs) else "SKIP"
            self.say(verdict, f"{label} beside {peer}", f"{total['documents']} texts, {total['bytes'] / 1e6:.1f} MB, {total['tokens']} tokens, {total['different']} different{note}"
                     f" ({total['bytes'] / 1e6 / max(total['seconds'], 1e-9):.1f} MB/s a core)", examples=[x for r in found for x in r["examples"]][:6])

    def compare(self):
        both = ("tokenizers", "tiktoken")
        waiting = self.against("gpt2", "gpt2", self.vocab["gpt2.json"], self.shards, both)
        self.settle(waiting + self.against("llama3", "llama3", self.vocab["llama3.json"], self.shards, both))

    def others(self):
        eighth, waiting = self.shards[::8], []
        both, hf = ("tokenizers", "tiktoken"), ("tokenizers",)
        if "mlua.json" in self.vocab:
            waiting += self.against("trained by mlua", "gpt2", self.vocab["mlua.json"], eighth, hf)
        for name in PATTERNS:
            waiting += self.against(name + " trained", name, self.vocab.get(name + "-trained.json"), eighth, hf if name in ("deepseek", "qwen2") else both)
        for name in ("llama2", "mistral", "gemma", "unigram"):
            waiting += self.against(name, name, self.vocab.get(name + ".json"), eighth, hf)
        for file in sorted(self.vocab):
            if file.endswith(".tiktoken"):
                waiting += self.against(file, file.split("_")[0], self.vocab[file], eighth, ("tiktoken",))
        for name in ("qwen2", "deepseek", "o200k"):
            if name + ".json" in self.vocab:
                waiting += self.against(name + " published", name, self.vocab[name + ".json"], eighth, hf)
        self.settle(waiting)

    def strings(self):
        waiting = []
        for name in ("gpt2", "llama3"):
            waiting += self.against("hostile " + name, name, self.vocab[name + ".json"], self.hostile, ("tokenizers", "tiktoken"))
        others = [("llama2", "llama2.json"), ("mistral", "mistral.json"), ("gemma", "gemma.json"), ("unigram", "unigram.json")]
        others += [(n, n + "-trained.json") for n in ("qwen2", "cl100k", "o200k", "deepseek")] + [("mlua", "mlua.json")]
        for name, file in others:
            waiting += self.against("hostile " + name, name, self.vocab.get(file), self.hostile[::4], ("tokenizers",))
        decoded = []
        for name, file in [("gpt2", "gpt2.json"), ("llama3", "llama3.json"), *others]:
            if not self.vocab.get(file):
                continue
            docs, to = self.path("work", "hostile.bin"), self.path("work", f"decoded-{name}.bin")
            if not os.path.exists(docs):
                write_blocks(docs, (t.encode() for t in documents(self.hostile[1])))
            try:
                facts = json.loads(self.mlua("run", os.path.join(HERE, "lua/lib/encode.lua"), "--device", "cpu", TOKENIZER=self.vocab[file], DOCS=docs, IDS=to)[1])
            except Exception as fault:
                self.say("FAIL", "decode " + name, str(fault)[:300])
                continue
            if name in ("gpt2", "llama3", "cl100k", "o200k", "deepseek", "mlua"):
                self.say("PASS" if facts["kept"] == facts["texts"] else "FAIL", "decode " + name, f"decode(encode(x)) = x for {facts['kept']} of {facts['texts']}")
            decoded.append((name, self.pool.submit(self.work, decoding, "decode " + name, peer="tokenizers", name=name, tokenizer=self.vocab[file], decoded=to)))
        self.settle(waiting)
        for name, job in decoded:
            r = job.result()
            if r:
                self.say("PASS" if r["different"] == 0 else "FAIL", f"decode {name} beside tokenizers", f"{r['documents']} texts, {r['different']} different", examples=r["examples"])

    def code_points(self):
        waiting = []
        for name in ("gpt2", "llama3"):
            waiting += self.against("points " + name, name, self.vocab[name + ".json"], self.points, ("tokenizers", "tiktoken"), points=True)
        for name in ("o200k", "deepseek"):
            waiting += self.against("points " + name, name, self.vocab.get(name + "-trained.json"), self.points, ("tokenizers",), points=True)
        self.settle(waiting)

    def invalid_bytes(self):
        count = 10_000 if ARGS.megabytes <= 100 else 200_000
        for name in ("gpt2", "llama3"):
            docs, to = self.path("work", "damaged.bin"), self.path("work", "damaged-" + name)
            write_blocks(docs, damaged(count, 9))
            facts = json.loads(self.mlua("run", os.path.join(HERE, "lua/lib/encode.lua"), "--device", "cpu", TOKENIZER=self.vocab[name + ".json"], DOCS=docs, IDS=to)[1])
            self.say("PASS" if facts["kept"] == facts["texts"] else "FAIL", "bytes " + name, f"decode(encode(x)) = x for {facts['kept']} of {facts['texts']}, most of them no UTF-8")
            r = self.work(invalid, "bytes " + name, peer="tiktoken", name=name, tokenizer=self.vocab[name + ".json"], decoded=to, count=count, seed=9)
            if r:
                self.say("PASS" if not r["not kept"] and not r["valid differ"] else "FAIL", f"bytes {name} beside tiktoken", ", ".join(f"{k} {v}" for k, v in r.items()))

    def sentencepieces(self):
        waiting = []
        for kind in ("bpe", "unigram"):
            path = self.vocab.get("sp-" + kind) and self.vocab["sp-" + kind] + ".model"
            waiting += self.against("sentencepiece " + kind, kind, path, self.shards[::8], ("sentencepiece",))
            waiting += self.against("hostile sentencepiece " + kind, kind, path, self.hostile[::4], ("sentencepiece",))
        self.settle(waiting)

    def all(self):
        self.make_text()
        print(f"---- text: {time.time() - self.began:.0f} s", flush=True)
        self.part("train", self.train)
        self.start_training()
        self.find_vocabularies()
        print(f"---- vocabularies: {time.time() - self.began:.0f} s", flush=True)
        self.part("speed", self.speed)
        self.part("compare", self.compare)
        self.part("hostile", self.strings)
        self.part("points", self.code_points)
        self.part("bytes", self.invalid_bytes)
        self.part("sentencepiece", self.sentencepieces)
        self.part("others", self.others)
        verdicts = [r["verdict"] for r in self.results]
        print(f"text_peers: {verdicts.count('PASS')} passed, {verdicts.count('FAIL')} failed, {verdicts.count('SKIP')} skipped in {time.time() - self.began:.0f} s")
        if not ARGS.keep:
            for folder in ("corpus", self.ids, "work"):
                shutil.rmtree(self.path(folder), ignore_errors=True)
        return 1 if "FAIL" in verdicts else 0


parser = argparse.ArgumentParser()
parser.add_argument("--mlua", required=True, type=os.path.abspath)
parser.add_argument("--out", required=True, type=os.path.abspath)
parser.add_argument("--vocab")
parser.add_argument("--megabytes", type=int, default=1024)
parser.add_argument("--seconds", type=int, default=420)
parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
parser.add_argument("--only", help="comparisons whose names hold one of these, as unigram,qwen2")
parser.add_argument("--keep", action="store_true", help="keep texts and ids")
parser.add_argument("--job", help=argparse.SUPPRESS)
parser.add_argument("--input", help=argparse.SUPPRESS)
parser.add_argument("parts", nargs="*")
ARGS = parser.parse_args()
if __name__ == "__main__":
    if ARGS.job:
        print(json.dumps(globals()[ARGS.job](json.load(open(ARGS.input)))))
    else:
        sys.exit(Run().all())
