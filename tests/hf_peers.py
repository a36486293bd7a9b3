"""mlua's Hugging Face folders beside transformers and PEFT, where they are installed; no network.

usage: python3 tests/hf_peers.py --mlua build/mlua --out DIR [--jobs N] [FAMILY... tokenizer]

Each family (tests/hf) runs in a process of its own, which prints a line for each part; DIR/FAMILY.log has the details, DIR/hf.json
all results. transformers makes a tiny model with random weights that peak attention, in the folder "made", and there:
  fixture     transformers on tests/hf/FAMILY gives the logits and gradients of expected.safetensors
  logits      mlua's logits of "made" are those of transformers                     largest difference / standard deviation
  text        mlua generate --temperature 0 gives transformers' 64 ids, --from made and --from the export
  export      tensors of mlua export --hf equal those of "made" to the bit; nothing missing, unexpected, misshapen or warned of
  again       transformers' logits of the export against those of "made"
  checkpoint  the same of an export of a checkpoint of a run of one step at lr=0
  bf16        --dtype bf16 holds the rounded tensors and loads
  peft in     an adapter of PEFT in mlua; merged: mlua's export against merge_and_unload; peft out: mlua's in PEFT, untrained and trained
"""
import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
with open(os.path.join(HERE, "lua", "lib", "hf.lua")) as f:
    FAMILIES = dict(re.findall(r'(\w+) = "(\w+)"', re.search(r"FILES = {(.*?)}", f.read(), re.S)[1]))
ADAPTED = {  # modules of transformers, parameters of mlua; of these as one tensor alone where the second list is shorter
    "gpt2": (["c_attn", "c_fc"], ["c_fc"], "up"),
    "llama": (["q_proj", "k_proj", "o_proj", "down_proj", "lm_head"],) * 2 + ("wq wk wo down head",),
    "mistral": (["v_proj", "gate_proj", "up_proj"],) * 2 + ("wv gate up",),
    "qwen2": (["q_proj", "v_proj", "down_proj"],) * 2 + ("wq wv down",),
    "qwen3": (["q_proj", "v_proj", "down_proj"],) * 2 + ("wq wv down",),
    "gemma2": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"],) * 2 + ("wq wk wv wo gate",),
}
PROMPT, TOKENS, BOUND = [5, 3, 60, 11], 64, 1e-4


class Part:
    """Runs parts one by one; what one raises fails it alone."""

    def __init__(self, family, folder):
        self.family, self.folder, self.results = family, folder, {}

    def log(self, text):
        with open(os.path.join(self.folder, "..", self.family + ".log"), "a") as f:
            f.write(text.rstrip("\n") + "\n")

    def __call__(self, name, function, *arguments):
        try:
            ok, text = function(*arguments)
        except subprocess.TimeoutExpired as fault:
            ok, text = False, f"no end after {fault.timeout} s"
            self.log(f"---- {name}\n{fault}")
        except Exception as fault:  # any fault of any library
            ok, text = False, f"{type(fault).__name__}: {str(fault).strip()[:200]}".replace("\n", " | ")
            self.log(f"---- {name}\n{traceback.format_exc()}")
        self.results[name] = [bool(ok), text]
        print(f"{'PASS' if ok else 'FAIL'} {self.family} {name}: {text}", flush=True)
        return ok


def mlua(part, *words, **environment):
    part.log("$ mlua " + " ".join(words))
    r = subprocess.run([ARGS.mlua, *words], capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL,
                       cwd=part.folder, env={**os.environ, "ROOT": ROOT, **environment})
    part.log(r.stdout[-4000:] + r.stderr[-4000:])
    if r.returncode:
        raise RuntimeError(f"mlua {words[0]} exits with {r.returncode}: {(r.stderr or r.stdout).strip()[:400]}")
    return r.stdout


class Said(logging.Handler):
    """What a library says at the level of a warning or above."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def listening():
    said = Said()
    loggers = [logging.getLogger(n) for n in ("transformers", "peft", "tokenizers", "safetensors")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addHandler(said)
        yield said
        for logger in loggers:
            logger.removeHandler(said)
    said.lines += [f"{w.category.__name__}: {w.message}" for w in caught if not issubclass(w.category, (ResourceWarning, DeprecationWarning))]


def load(part, folder, dtype=None):
    """The model, and what is wrong with the folder by transformers' own account."""
    import torch
    from transformers import AutoModelForCausalLM
    with listening() as said:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, attn_implementation="eager",
                                                           output_loading_info=True)
    info = info if isinstance(info, dict) else {k: getattr(info, k) for k in dir(info) if k.endswith(("_keys", "_msgs"))}
    wrong = [f"{key} {sorted(map(str, value))[:3]}" for key, value in info.items() if hasattr(value, "__len__") and len(value)]
    part.log(f"---- loading {folder}\n{info}\n" + "\n".join(said.lines))
    return model.eval(), wrong, [line.replace(folder, "DIR") for line in said.lines]


def load_beside(part, state, folder, dtype=None):
    """The same, less what transformers says of the folder that it wrote itself."""
    model, wrong, said = load(part, folder, dtype)
    return model, [w for w in wrong if w not in state["wrong"]], [line for line in said if line not in state["said"]]


def logits_of(model, ids):
    import torch
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def distance(a, b):
    return float((a - b).abs().max() / b.std()) if a.shape == b.shape else float("inf")


def write_ids(part, ids):
    from safetensors.torch import save_file
    import torch
    save_file({"ids": ids.to(torch.int32).contiguous()}, os.path.join(part.folder, "ids.safetensors"))


def mlua_logits(part, folder, ids):
    from safetensors.torch import load_file
    write_ids(part, ids)
    out = os.path.join(part.folder, "logits.safetensors")
    mlua(part, "run", os.path.join(HERE, "lua/lib/logits.lua"), "--from", folder, "--device", "cpu", MODEL=FAMILIES[part.family],
         IDS=os.path.join(part.folder, "ids.safetensors"), OUT=out)
    return load_file(out)["logits"]


def tensors(folder):
    from safetensors.torch import load_file
    all_of_them = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors") and not name.startswith("adapter"):
            all_of_them.update(load_file(os.path.join(folder, name)))
    return all_of_them


def differing(ours, theirs, change=lambda t: t):
    import torch
    names = sorted(set(ours) ^ set(theirs))
    for name in sorted(set(ours) & set(theirs)):
        wanted = change(theirs[name])
        if ours[name].shape != wanted.shape or not torch.equal(ours[name], wanted):
            names.append(name)
    return names


# ---- Parts -----------------------------------------------------------------------------------------------------------------


def peaked(model, family):
    """Random weights that make attention peaked and norms unequal; embeddings and projections keep the logits of order 1."""
    import torch
    g = torch.Generator().manual_seed(sum(map(ord, family)))
    gemma = family.startswith("gemma")
    sharp = ("q_proj", "k_proj", "c_attn", "q_b_proj", "kv_b_proj", "gate.weight")
    with torch.no_grad():
        for name, p in list(model.named_parameters()) + [b for b in model.named_buffers() if "correction_bias" in b[0]]:
            x = torch.randn(p.shape, generator=g)
            if p.ndim == 1:
                norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
                centred = gemma or family == "qwen3_next" and "linear_attn.norm" not in name
                x = 0.2 * x + (0 if not norm or centred else 1)
            elif any(k in name for k in ("embed", "wte", "wpe")):
                x = x * (32 ** -0.5 if gemma else 0.25 if model.config.tie_word_embeddings else 0.7)
            else:
                conv = family == "gpt2"
                x = x * (2.5 if any(k in name for k in sharp) else 1) / p.shape[0 if conv else -1] ** 0.5
            p.copy_(x)
    model.tie_weights()


def make(part):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(os.path.join(HERE, "hf", part.family))
    vars(config).pop("cache_implementation", None)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    peaked(model, part.family)
    made = os.path.join(part.folder, "made")
    model.save_pretrained(made)
    part.log(open(os.path.join(made, "config.json")).read() + "\n".join(f"{n} {list(t.shape)}" for n, t in tensors(made).items()))
    return True, f"{sum(p.numel() for p in model.parameters())} parameters, {len(tensors(made))} tensors"


def fixture(part):
    import torch
    from safetensors.torch import load_file
    folder = os.path.join(HERE, "hf", part.family)
    expected = load_file(os.path.join(folder, "expected.safetensors"))
    model, wrong, said = load(part, folder)
    ids = expected["ids"].long()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    error = distance(logits.detach(), expected["logits"])
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    found = dict(model.named_parameters())
    gradients = {n: distance(found[n].grad, g) for n, g in ((k[9:], g) for k, g in expected.items() if k.startswith("gradient.")) if n in found}
    worst = max(gradients.values(), default=float("nan"))
    part.log(f"{gradients}")
    return error <= BOUND and not worst > 1e-3 and not wrong, f"logits {error:.1e}, gradients of {len(gradients)} tensors {worst:.1e} {wrong or ''}"


def logits(part, state):
    error = distance(mlua_logits(part, state["made"], state["ids"]), state["logits"])
    return error <= BOUND, f"{error:.1e} of their standard deviation ({float(state['logits'].std()):.2f})"


def greedy(model):
    import torch
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    with listening():
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)[0].tolist()


def text(part, state):
    import torch
    theirs = greedy(state["model"])
    for folder in (state["made"], state.get("export")):
        if not folder:
            return False, "no export"
        ours = json.loads(mlua(part, "generate", "--from", folder, "--ids", ",".join(map(str, PROMPT)), "--tokens", str(TOKENS), "--temperature",
                               "0", "--json", "--device", "cpu"))
        ours = ours["ids"] if isinstance(ours, dict) else ours
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            best = logits_of(state["model"], torch.tensor([theirs[:at]]))[0, -1]
            top = best.topk(2)[0]
            margin = float((top[0] - top[1]) / best.std())
            part.log(f"mlua {ours}\ntransformers {theirs}")
            return margin < 1e-4, f"differs at id {at} of {len(theirs)}, where the best two are {margin:.1e} of a deviation apart"
    return len(theirs) == len(PROMPT) + TOKENS, f"{TOKENS} ids equal, {len(set(theirs))} distinct"


def compare_export(part, state, out):
    ours = tensors(out)
    other = differing(ours, tensors(state["made"]))
    model, wrong, said = load_beside(part, state, out)
    state["again"] = distance(logits_of(model, state["ids"]), state["logits"])
    return not other and not wrong and not said, (f"{len(ours)} tensors equal to the bit, {len(said)} warnings" if not other and not wrong and not said
                                                  else f"tensors that differ {other[:4]}, wrong {wrong}, warnings {said}"[:600])


def export(part, state):
    state["again"] = float("inf")
    out = os.path.join(part.folder, "export")
    mlua(part, "export", state["made"], out, "--hf", "--device", "cpu")
    state["export"] = out
    part.log(open(os.path.join(out, "config.json")).read())
    return compare_export(part, state, out)


def again(part, state):
    return state["again"] <= BOUND, f"{state['again']:.1e}"


def write_text(part):
    path = os.path.join(part.folder, "text")
    with open(path, "w") as f:
        f.write("0123456789\n" * 20)
    return path


def checkpoint(part, state):
    run, out = os.path.join(part.folder, "run"), os.path.join(part.folder, "of-run")
    mlua(part, "run", os.path.join(ROOT, "models", FAMILIES[part.family] + ".lua"), "--from", state["made"], "--out", run, "--device", "cpu", "steps=1",
         "seq=16", "batch=2", "accum=1", "data=" + write_text(part), "sample=0", "warmup=0", "lr=0")
    mlua(part, "export", run, out, "--hf", "--device", "cpu")
    if part.family != "deepseek_v3":  # whose bias of the router learns without a rate
        return compare_export(part, state, out)
    ours, theirs = tensors(out), tensors(state["made"])
    other = [n for n in differing(ours, theirs) if "correction_bias" not in n]
    model, wrong, said = load_beside(part, state, out)
    return not other and not wrong, f"{len(ours)} tensors equal to the bit, the router's bias aside {other or ''} {wrong or ''}"


def bf16(part, state):
    import torch
    out = os.path.join(part.folder, "bf16")
    mlua(part, "export", state["made"], out, "--hf", "--dtype", "bf16", "--device", "cpu")
    other = differing(tensors(out), tensors(state["made"]), lambda t: t.to(torch.bfloat16))
    model, wrong, said = load_beside(part, state, out, "auto")
    kinds = {str(p.dtype) for p in model.parameters()}
    return not other and not wrong and not said and kinds == {"torch.bfloat16"}, f"{kinds} {other[:4] or ''} {wrong or ''} {said or ''}"


def adapter(part, state, modules, folder):
    import torch
    from peft import LoraConfig, get_peft_model
    base, _, _ = load(part, state["made"])
    with listening() as said:
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM",
                                                fan_in_fan_out=part.family == "gpt2"))
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=g))
    model.save_pretrained(folder)  # of an adapted head its weight too
    part.log(open(os.path.join(folder, "adapter_config.json")).read() + "\n".join(said.lines))
    return model.eval()


def peft_in(part, state):
    state["adapter"] = os.path.join(part.folder, "adapter")
    state["adapted"] = adapter(part, state, ADAPTED[part.family][0], state["adapter"])
    theirs = logits_of(state["adapted"], state["ids"])
    error = distance(mlua_logits(part, f"{state['made']},{state['adapter']}", state["ids"]), theirs)
    moved = distance(theirs, state["logits"])
    return error <= BOUND < moved, f"logits {error:.1e}, the adapter moves them {moved:.1e}"


def peft_merged(part, state):
    out, merged = os.path.join(part.folder, "merged"), os.path.join(part.folder, "merge_and_unload")
    mlua(part, "export", f"{state['made']},{state['adapter']}", out, "--hf", "--device", "cpu")
    state["adapted"].merge_and_unload().save_pretrained(merged)
    ours, theirs = tensors(out), tensors(merged)
    names = sorted(set(ours) ^ set(theirs))
    worst = max(float((ours[n] - theirs[n]).abs().max()) for n in set(ours) & set(theirs))
    _, wrong, said = load_beside(part, state, out)
    return not names and worst <= 2e-6 and not wrong and not said, f"largest difference {worst:.1e} {names[:4] or ''} {wrong or ''} {said or ''}"


def in_peft(part, state, folder):
    from peft import PeftModel
    base, _, _ = load(part, state["made"])
    with listening() as said:
        model = PeftModel.from_pretrained(base, folder).eval()
    lines = [line for line in said.lines if "adapter" in line or "lora" in line.lower()]
    return logits_of(model, state["ids"]), lines


def peft_out(part, state):
    """An adapter of PEFT through mlua and back; then what mlua trained, in PEFT and merged by mlua."""
    modules, own = ADAPTED[part.family][1:]
    begun = os.path.join(part.folder, "begun")
    theirs = logits_of(adapter(part, state, modules, begun), state["ids"])
    script = os.path.join(part.folder, "adapted.lua")
    with open(script, "w") as f:
        f.write("local m = require 'mlua'\nlocal train = m.train\nfunction m.train(o)\n  m.lora(o.model, { rank = 4, alpha = 6, match = { "
                + ", ".join(repr(n) for n in own.split()) + " } })\n  return train(o)\nend\n"
                + f"dofile('{ROOT}/models/{FAMILIES[part.family]}.lua')\n")
    written, run, learned, whole = (os.path.join(part.folder, n) for n in ("written", "peft-run", "learned", "learned-whole"))
    mlua(part, "export", f"{state['made']},{begun}", written, "--hf", "--adapter", "--script", script, "--device", "cpu")
    ours, said = in_peft(part, state, written)
    same = distance(ours, theirs)
    mlua(part, "run", script, "--from", state["made"], "--out", run, "--device", "cpu", "steps=3", "seq=16", "batch=2", "accum=1",
         "data=" + write_text(part), "sample=0", "warmup=0", "lr=0.1")
    mlua(part, "export", run, learned, "--hf", "--adapter", "--device", "cpu")
    mlua(part, "export", run, whole, "--hf", "--device", "cpu")
    in_theirs, more = in_peft(part, state, learned)
    merged = logits_of(load(part, whole)[0], state["ids"])
    trained, moved = distance(in_theirs, merged), distance(merged, state["logits"])
    return same <= BOUND and trained <= BOUND < moved and not said + more, f"as it was {same:.1e}, trained {trained:.1e} (moved {moved:.1e}) {said + more or ''}"


def family_parts(part):
    import torch
    if not part("made", make, part):
        return
    part("fixture", fixture, part)
    state = {"made": os.path.join(part.folder, "made")}
    state["model"], state["wrong"], state["said"] = load(part, state["made"])
    g = torch.Generator().manual_seed(7)
    state["ids"] = torch.randint(0, 68, (2, 40), generator=g)  # longer than windows and original_max_position_embeddings
    state["logits"] = logits_of(state["model"], state["ids"])
    part("logits", logits, part, state)
    part("export", export, part, state)
    part("again", again, part, state)
    part("text", text, part, state)
    part("checkpoint", checkpoint, part, state)
    part("bf16", bf16, part, state)
    if part.family in ADAPTED:
        if part("peft in", peft_in, part, state):
            part("merged", peft_merged, part, state)
        part("peft out", peft_out, part, state)


# ---- Tokenizers and chat templates --------------------------------------------------------------------------------------------

TEMPLATES = {
    "chatml": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}"
              "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "headers": "{{- bos_token }}{%- set offset = 0 %}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
               "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}\n{{- '<|start|>system<|end|>\\n\\n' ~ system ~ '<|eot|>' }}\n"
               "{%- for message in messages %}\n    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}\n{%- endfor %}\n"
               "{%- if add_generation_prompt %}\n    {{- '<|start|>assistant<|end|>\\n\\n' }}\n{%- endif %}",
    "turns": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
             "{% endif %}{{ '<turn>' + role + '\n' + message['content'] | trim + '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<turn>model\n'}}{% endif %}",
    "inst": "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
            "{% elif message.role == 'system' %}{{ '[SYS]' ~ message.content ~ '[/SYS]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}",
    "thinking": "{%- set ns = namespace(last=0, open=true) %}{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
                "{%- if ns.open and message.role == 'user' %}{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
                "{%- for message in messages %}{%- if message.role == 'assistant' and '</think>' in message.content %}"
                "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}{%- else %}{%- set content = message.content %}{%- endif %}"
                "{{- '<|im_start|>' ~ message.role ~ ('*' if loop.index0 > ns.last else '') ~ '\\n' ~ content ~ '<|im_end|>\\n' }}{%- endfor %}"
                "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
                "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}",
}
MESSAGES = [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": " Hi \u00e9\u4e2d\U0001f600"},
            {"role": "assistant", "content": "<think>\nwell\n</think>\n\nYes?"}, {"role": "user", "content": "1+1?\n"}]
STRINGS = ["Hello world, it's a test of 12345 words\n\n  and  spaces", "caf\u00e9 \u4e2d\u6587 \U0001f600\u200d\U0001f9d1", "<|im_start|>user\n<s> x</s>", "\t \n", "a"]


def tokenizer_folder(part, folder, name, template):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train([os.path.join(ROOT, "README.md"), os.path.join(ROOT, "tests/README.md")], trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", t.token_to_id("<s>"))])
    theirs = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", chat_template=template)
    shutil.copytree(os.path.join(HERE, "hf", "llama"), folder)
    theirs.save_pretrained(folder)
    part.log("\n".join(f"---- {n}\n{open(os.path.join(folder, n)).read()[:1500]}" for n in ("tokenizer_config.json",)) + f"\n{os.listdir(folder)}")


CHAT = """
local m, core = require "mlua", require "mlua.core"
local t = m.tokenizer(os.getenv "TOKENIZER")
local input = core.json(io.open(os.getenv "INPUT"):read "a", "input")
local out = { texts = {}, framed = {}, plain = {} }
for i, options in ipairs(input.options) do out.texts[i] = (t:chat(input.messages, options)) end
for i, text in ipairs(input.strings) do
  out.framed[i], out.plain[i] = t:encode(text, { special = true }), t:encode(text)
  assert(t:decode(out.plain[i]) == text, text)
end
core.write(core.to_json(out))
"""


def chat(part, name):
    from transformers import AutoTokenizer
    folder, out = os.path.join(part.folder, name), os.path.join(part.folder, name + "-export")
    tokenizer_folder(part, folder, name, TEMPLATES[name])
    mlua(part, "export", folder, out, "--hf", "--device", "cpu")
    with listening() as said:
        theirs = AutoTokenizer.from_pretrained(out)
    with listening() as before:
        first = AutoTokenizer.from_pretrained(folder)
    options = [{"prompt": True}, {"prompt": False}, {"prompt": True, "enable_thinking": False}]
    script, data = os.path.join(part.folder, "chat.lua"), os.path.join(part.folder, "chat.json")
    with open(script, "w") as f:
        f.write(CHAT)
    with open(data, "w") as f:
        json.dump({"options": options, "messages": MESSAGES, "strings": STRINGS}, f)
    ours = json.loads(mlua(part, "run", script, "--device", "cpu", TOKENIZER=out, INPUT=data))
    wrong = [f"warning {line}" for line in said.lines if line not in before.lines]
    for o, text in zip(options, ours["texts"]):
        wanted = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=o["prompt"],
                                            **{k: v for k, v in o.items() if k != "prompt"})
        if wanted != text:
            wrong.append(f"chat {text!r}, and {wanted!r} of transformers")
    for text, framed, plain in zip(STRINGS, ours["framed"], ours["plain"]):
        if theirs(text)["input_ids"] != framed or theirs(text, add_special_tokens=False)["input_ids"] != plain or first(text)["input_ids"] != framed:
            wrong.append(f"ids of {text!r}: {framed}, {theirs(text)['input_ids']} of transformers")
    part.log("\n".join(wrong))
    return not wrong, f"{len(options)} conversations and {len(STRINGS)} texts equal, {type(theirs).__name__}" if not wrong else wrong[0][:400]


def one(family):
    import torch
    torch.set_num_threads(2)
    part = Part(family, os.path.join(ARGS.out, family))
    shutil.rmtree(part.folder, ignore_errors=True)
    os.makedirs(part.folder)
    if family == "tokenizer":
        for name in TEMPLATES:
            part(name, chat, part, name)
    else:
        family_parts(part)
    print(json.dumps({family: part.results}))


def main():
    names = ARGS.families or [*FAMILIES, "tokenizer"]
    os.makedirs(ARGS.out, exist_ok=True)
    waiting, running, results, limit = list(names), {}, {}, 280
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2",
                   "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "MLUA_CACHE": os.path.abspath(os.path.join(ARGS.out, "kernels"))}
    while waiting or running:
        while waiting and len(running) < ARGS.jobs:
            name = waiting.pop(0)
            output = open(os.path.join(ARGS.out, name + ".out"), "w+")
            running[name] = (time.time(), output, subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--mlua", ARGS.mlua, "--out", ARGS.out, "--one", name], stdout=output,
                stderr=open(os.path.join(ARGS.out, name + ".err"), "w"), stdin=subprocess.DEVNULL, env=environment))
        for name, (began, output, process) in list(running.items()):
            if process.poll() is None and time.time() - began > limit:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del running[name]
                output.seek(0)
                lines = output.read().splitlines()
                print("\n".join(line for line in lines if line[:5] in ("PASS ", "FAIL ")), flush=True)
                if process.returncode == 0 and lines:
                    results.update(json.loads(lines[-1]))
                else:
                    errors = open(os.path.join(ARGS.out, name + ".err")).read().strip().splitlines()
                    print(f"FAIL {name}: its process ended with {process.returncode} after {time.time() - began:.0f} s: {(errors or [''])[-1][:300]}", flush=True)
                    results[name] = {"process": [False, str(process.returncode)]}
        time.sleep(0.05)
    with open(os.path.join(ARGS.out, "hf.json"), "w") as f:
        json.dump(results, f, indent=1)
    columns = ["made", "fixture", "logits", "text", "export", "again", "checkpoint", "bf16", "peft in", "merged", "peft out"]
    print("\n" + "family".ljust(12) + "".join(c.rjust(12) for c in columns))
    for name in names:
        row = results.get(name, {})
        if name != "tokenizer":
            print(name.ljust(12) + "".join(("-" if c not in row else ("ok" if row[c][0] else "FAIL")).rjust(12) for c in columns))
    checks = [ok for row in results.values() for ok, _ in row.values()]
    print(f"hf_peers: {sum(checks)} passed, {len(checks) - sum(checks)} failed")
    return 0 if all(checks) else 1


parser = argparse.ArgumentParser()
parser.add_argument("--mlua", required=True, type=os.path.abspath)
parser.add_argument("--out", required=True, type=os.path.abspath)
parser.add_argument("--jobs", type=int, default=6)
parser.add_argument("--one")
parser.add_argument("families", nargs="*")
ARGS = parser.parse_args()
if __name__ == "__main__":
    sys.exit(one(ARGS.one) if ARGS.one else main())
