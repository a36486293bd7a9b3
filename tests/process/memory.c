/* The memory of training: what `mlua check` plans for an H200, and that the ways to need less of it
 * change nothing of what is learned. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/machine.h"
#include "tests/process/support.h"

enum { STEPS = 3 };

/* Logits of 4 MiB, in 4 chunks and whole; one microbatch after the other in 2. */
static process_step *check_chunks(process_room *room, const char *model, char **script) {
    char *wide = *script =
        ml_arena_format(room->arena,
                        "\"$ROOT\"/models/%s.lua layers=1 embed=32 heads=2 seq=64 batch=8"
                        " vocab=2048 sample=0 warmup=1 lr=3e-3",
                        model);
    process_step *whole = process_train(room, STEPS, "MLUA_CHUNK=0", wide);
    process_compare(process_train(room, STEPS, "MLUA_CHUNK=1", wide), whole, STEPS, 1e-5,
                    "in chunks");
    return whole;
}

PROCESS_TEST(chunks_of_logits) {
    char *wide;
    (void)check_chunks(room, "llama", &wide);
    process_step *whole = check_chunks(room, "gpt", &wide);
    process_compare(process_train(room, STEPS, "MLUA_CHUNK=1",
                                  ml_arena_format(room->arena, "%s accum=2", wide)),
                    whole, STEPS, 1e-5, "in chunks of microbatches");
    char *split = ml_arena_format(room->arena, "%s -n 2 --mesh tp=2", wide);
    process_compare(process_train(room, STEPS, "MLUA_CHUNK=1", split), whole, STEPS, 1e-5,
                    "in chunks, the vocabulary over two ranks");
    for (int i = 0; i < 2; i++) {
        process_result plan = process_run(room, 0, "MLUA_CHUNK=1 MLUA_DEBUG=5", "check %s%s", wide,
                                          i ? " --mesh tp=2" : "");
        process_expect(&plan, "\nchunk_logits: ");
    }
}

typedef struct {
    double gib, ms; /* at the peak; of a step, predicted */
} usage;

static usage planned(process_room *room, const char *environment, const char *arguments) {
    process_result plan = process_run(room, 0, environment,
                                      "check \"$ROOT\"/models/%s --device h200 --json", arguments);
    return (usage){process_number(plan.output, "\"peak_bytes\":") / (1 << 30),
                   1e3 * process_number(plan.output, "\"seconds\":")};
}

static double planned_gib(process_room *room, const char *environment, const char *arguments) {
    return planned(room, environment, arguments).gib;
}

/* GiB that PyTorch needs for the same model and batch, and the share of it in which a step takes at
 * most 2.1 % longer than with all memory. In FP8 two plans need 0.4 and 3 % more. */
PROCESS_TEST(memory_of_presets) {
    static const struct {
        const char *arguments;
        double peer, share;
    } models[] = {{"gpt.lua preset=gpt2-124m", 28.5, 0.75},
                  {"gpt.lua preset=gpt-1.3b", 46.2, 1},
                  {"gpt.lua preset=gpt2-1.5b", 64.7, 1},
                  {"llama.lua preset=llama-1b", 44.7, 0.75},
                  {"llama.lua preset=llama-3b", 69.7, 1},
                  {"gpt_moe.lua preset=moe-8x", 95.7, 1},
                  {"gpt_moe.lua preset=moe-64x", 118.9, 1},
                  {"llama.lua preset=llama-3b --dtype fp8", 54.4, 1.004},
                  {"llama.lua preset=llama-1b --dtype fp8", 33.8, 0.9},
                  {"gpt.lua preset=gpt-1.3b --dtype fp8", 31.9, 1.03}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const char *arguments = models[i].arguments;
        double budget = models[i].share * models[i].peer;
        const double outside = (double)ml_process_bytes(0, false) / (1 << 30);
        usage all = planned(room, "", arguments);
        usage less = planned(
            room, "",
            ml_arena_format(room->arena, "%s --memory %.2fGiB", arguments, budget + outside));
        EXPECT(less.gib > 0 && less.gib <= budget && less.ms < 1.021 * all.ms,
               "%s is planned with %.2f GiB, %.1f ms where all take %.1f", arguments, less.gib,
               less.ms, all.ms);
    }
    const char *gpt2 = models[0].arguments;
    double usual = planned_gib(room, "", gpt2), kept = planned_gib(room, "MLUA_RECOMPUTE=0", gpt2);
    CHECK(kept < 0.8 * planned_gib(room, "MLUA_CHUNK=0 MLUA_RECOMPUTE=0", gpt2)); /* 6.1: logits */
    CHECK(usual == kept);
    CHECK(planned_gib(room, "MLUA_RECOMPUTE=1", gpt2) < 0.95 * usual);
}

static int planned_kernels(process_room *room, const char *environment, const char *arguments) {
    process_result plan =
        process_run(room, 0, environment, "check \"$ROOT\"/models/%s --device h200", arguments);
    const char *line = strstr(plan.output, "\nsteps ");
    EXPECT(line != NULL, "mlua check reports no steps:\n%s", plan.output);
    return line ? atoi(line + strlen("\nsteps ")) : 0;
}

/* No kernel casts a weight at each step; and the optimizer does not launch one a parameter. */
PROCESS_TEST(kernels_of_presets) {
    const char *gpt2 = "gpt.lua preset=gpt2-124m";
    int copied = planned_kernels(room, "MLUA_BATCH=0", gpt2),
        most = planned_kernels(room, "", gpt2);
    CHECK(copied <=
          planned_kernels(room, "MLUA_BATCH=0 MLUA_PARAM_CACHE=0", gpt2) - 70); /* 76 casts */
    CHECK(most > 0 && most <= copied / 2);
    /* Sums of squares of gains and biases, each behind its own sum over ranks, in few launches. */
    CHECK(planned_kernels(room, "", "gpt.lua preset=gpt2-124m --mesh tp=2") < 380); /* 347 */
}

/* Kernels of a step of llama-3b in zero-bubble stages, whose plan has to fit the device. */
static int staged_kernels(process_room *room, const char *environment, const char *device,
                          int seq) {
    process_result plan =
        process_run(room, 0, environment,
                    "check \"$ROOT\"/models/llama.lua preset=llama-3b batch=48 "
                    "seq=%d accum=16 schedule=zero-bubble --mesh pp=4 --device %s",
                    seq, device);
    const char *line = strstr(plan.output, "\nsteps ");
    CHECK(process_number(strstr(plan.output, "\npeak memory"), "peak memory") <
          (strcmp(device, "h100") == 0 ? 79.1 : 139));
    return line ? atoi(line + strlen("\nsteps ")) : 0;
}

/* Pipeline stages cast weights once a step and keep what deferred weight gradients need.
 * Where memory is short they first compute some of that again; then they offload, or without
 * pinned host memory cast at each product. */
PROCESS_TEST(kernels_of_stages) {
    const char *gpt = "gpt.lua preset=gpt-1.3b batch=32 accum=16 --mesh pp=4";
    int copied = planned_kernels(room, "", gpt);
    CHECK(copied > 0 && copied <= planned_kernels(room, "MLUA_PARAM_CACHE=0", gpt) - 50);
    int kept = staged_kernels(room, "", "h200", 4224),
        again = staged_kernels(room, "", "h100", 4224),
        offloaded = staged_kernels(room, "", "h100", 4864),
        cast = staged_kernels(room, "MLUA_HOST_LINK=0", "h100", 4864);
    CHECK(kept > 0 && kept < again && again <= cast - 50 && offloaded == again);
}

static double json_number(const process_result *result, const char *key) {
    const char *at = strstr(result->output, key);
    EXPECT(at != NULL, "no %s in\n%s", key, result->output);
    return at ? strtod(at + strlen(key), NULL) : 0;
}

/* Stages offload what they save, and computation waits for no copy. */
PROCESS_TEST(offload_of_stages) {
    process_result plan = process_run(
        room, 0, "MLUA_HOST_LINK=50",
        "check \"$ROOT\"/models/llama.lua layers=8 embed=2048 heads=16 kv_heads=8 ffn=5632 --json "
        "vocab=1000 batch=16 seq=4096 accum=8 --mesh pp=2 --device h200 --memory 6.8GiB");
    CHECK(json_number(&plan, "\"process_bytes\":") <= 6.8 * (1 << 30));
    CHECK(json_number(&plan, "\"host_copies\":") > 0.01);
    CHECK(json_number(&plan, "\"host_wait\":") < 0.0005);
}

/* However many programs train a model, memory holds one set of copies of its weights. */
PROCESS_TEST(memory_of_copies) {
    process_write(
        room, "two.lua",
        "local m, core = require 'mlua', require 'mlua.core'\n"
        "local cfg = m.config { programs = 1 }\n"
        "local A = m.axes { embed = 64, ffn = 256, vocab = 512, batch = 4 }\n"
        "local Net = m.module('Net', function(self)\n"
        "  self.table, self.out = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }\n"
        "  self.gate, self.up = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }\n"
        "  self.down = m.param { A.ffn, A.embed }\n"
        "end)\n"
        "function Net:forward(tokens)\n"
        "  local x = self.table:gather(tokens, 'vocab')\n"
        "  local y = m.silu(x:dot(self.gate, 'embed')) * x:dot(self.up, 'embed')\n"
        "  return (x + y:dot(self.down, 'ffn')):dot(self.out, 'embed')\n"
        "end\n"
        "local net, programs = Net(), {}\n"
        "for i = 1, cfg.programs do\n"
        "  programs[i] = m.step_program({ model = net, batch = A.batch, clip = 1,\n"
        "    seq = core.axis('seq', 64 // i), optimizer = m.adamw {} }, m.parameters(net))\n"
        "end\n"
        "core.report(programs)\n");
    for (int programs = 1; programs <= 2; programs++) {
        process_result plan =
            process_run(room, 0, "", "check two.lua --device h200 programs=%d", programs);
        process_expect(&plan, "cached 160.0 KiB in 3,"); /* gate and up side by side, down, out */
    }
}

/* With accumulation the update writes what microbatches cache; and what these gather of frozen
 * weights is gathered before the first step alone: no step sends it. */
PROCESS_TEST(memory_of_cached_parameters_after_microbatches) {
    const char *small = "layers=1 embed=64 heads=4 kv_heads=2 ffn=128 batch=8 accum=2";
    process_result update = process_run(room, 0, "MLUA_DUMP=param_cache@update",
                                        "check \"$ROOT/models/llama.lua\" %s --device h200", small);
    process_expect(&update, "blocks.1.wq in bf16 = %");
    process_expect(&update, "blocks.1.down in bf16 = %");
    process_result sent = process_run(
        room, 0, "", "check \"$ROOT/models/lora.lua\" %s pretrain=0 --mesh dp=2 --device cpu",
        small);
    process_expect(&sent, "all_gather over dp to f32[embed=64, rank=8]");
    CHECK(strstr(sent.output, "all_gather over dp to f32[embed=64, ffn=128]") == NULL);
}

/* What runs between steps counts in memory and in what is sent, but is no work of a step. */
PROCESS_TEST(memory_between_steps) {
    process_write(room, "between.lua",
                  "local m, core = require 'mlua', require 'mlua.core'\n"
                  "local cfg = m.config { every = 0, large = 8 }\n"
                  "local A = m.axes { embed = 32, vocab = 256, seq = 16, batch = 8 }\n"
                  "local Net = m.module('Net', function(self) self.table = m.param { A.vocab, "
                  "A.embed } end)\n"
                  "function Net:forward(tokens)\n"
                  "  return self.table:gather(tokens, 'vocab'):dot(self.table, 'embed')\n"
                  "end\n"
                  "if cfg.large == 8 then\n"
                  "  m.train { model = Net(), batch = A.batch, seq = A.seq, steps = 2, optimizer = "
                  "m.sgd {},\n"
                  "    eval_every = cfg.every, layout = m.layout.fsdp {} }\n"
                  "else\n"
                  "  local function squares(size)\n"
                  "    local wide = { core.axis('wide', size) }\n"
                  "    return m.compile(function(feeds)\n"
                  "      return { y = (feeds.x:sort('wide') * feeds.x):sum('wide') }\n"
                  "    end, { x = { wide[1], dtype = 'f32' } })\n"
                  "  end\n"
                  "  core.report({ squares(8), squares(cfg.large) }, { step = 1 })\n"
                  "end\n");
    process_result without =
        process_run(room, 0, "", "check between.lua --json --mesh dp=2 --device h200");
    process_result with =
        process_run(room, 0, "", "check between.lua --json --mesh dp=2 --device h200 every=1");
    CHECK(strstr(without.output, "between_steps") == NULL);
    const char *between = strstr(with.output, "\"between_steps\":");
    CHECK(between && strstr(between, "\"dp\":{\"all-reduce\":{\"count\":2"));
    CHECK(json_number(&with, "\"flops\":") == json_number(&without, "\"flops\":"));
    process_result large =
        process_run(room, 0, "", "check between.lua --json --device h200 large=1048576");
    CHECK(json_number(&large, "\"peak_bytes\":") > 8e6);
    CHECK(json_number(&large, "\"flops\":") < 1e4);
}

/* A program that runs often keeps what it gathers, until something sets a parameter. */
PROCESS_TEST(gathered_once) {
    process_write(
        room, "often.lua",
        "local m, core = require 'mlua', require 'mlua.core'\n"
        "local cfg = m.config { often = true, zero = true }\n"
        "local A = m.axes { embed = 16, ffn = 32, vocab = 64 }\n"
        "local Net = m.module('Net', function(self)\n"
        "  self.table, self.up = m.param { A.vocab, A.embed }, m.param { A.embed, A.ffn }\n"
        "end)\n"
        "function Net:forward(tokens) return self.table:gather(tokens, 'vocab'):dot(self.up, "
        "'embed') end\n"
        "local net, seq = Net(), core.axis('seq', 1024)\n"
        "local layout = cfg.zero and m.layout.megatron { zero = true } or m.layout.fsdp {}\n"
        "local program = m.compile(function(f) return { y = net(f.tokens):max('ffn') } end,\n"
        "  { tokens = { seq, dtype = 'i32' } }, { layout = layout, often = cfg.often })\n"
        "if core.options().mode == 'check' then core.report { program } return end\n"
        "local tokens = core.host('i32', 1024)\n"
        "for run = 1, 4 do\n"
        "  for i = 1, 1024 do tokens[i] = (i * run) % 64 end\n"
        "  local y = program { tokens = tokens }.y\n"
        "  print(y[1], y[7], y[1024])\n"
        "  if run == 2 then\n"
        "    local up = net.up:get()\n"
        "    for i = 1, #up do up[i] = 3 * up[i] end\n"
        "    net.up:set(up)\n"
        "  end\n"
        "end\n");
    for (int zero = 0; zero < 2; zero++) {
        const char *at = zero ? "zero=true" : "zero=false";
        const char *run = "run often.lua --device cpu -n 2 --mesh dp=2";
        process_result once = process_run(room, 0, "MLUA_VERIFY=1", "%s %s", run, at);
        process_result each = process_run(room, 0, "", "%s %s often=false", run, at);
        CHECK_TEXT(once.output, each.output);
        CHECK(strstr(once.output, "\n") != NULL);
        process_result kept = process_run(room, 0, "", "check often.lua --mesh dp=2 %s", at);
        process_result not =
            process_run(room, 0, "", "check often.lua --mesh dp=2 %s often=false", at);
        process_expect(&kept, "state up, gathered");
        CHECK(!strstr(not .output, ", gathered") && strstr(not .output, "all_gather over dp"));
        if (zero) CHECK(!strstr(kept.output, "all_gather over dp"));
    }
}

/* With accumulation, all states of both programs are there while activations are. */
PROCESS_TEST(memory_of_two_programs) {
    process_result plan =
        process_run(room, 0, "",
                    "check \"$ROOT\"/models/gpt.lua --json --device h200 layers=2 "
                    "embed=1024 heads=8 seq=64 batch=64 accum=4 sample=0");
    double activations = json_number(&plan, "\"activations\":");
    CHECK(activations > 16e6);
    CHECK(json_number(&plan, "\"peak_bytes\":") >=
          json_number(&plan, "\"state_bytes\":") + activations);
}

/* core.fitting drops what was made where a program does not fit: the memory is there for others. */
PROCESS_TEST(programs_that_do_not_fit_are_dropped) {
    process_write(
        room, "fitting.lua",
        "local m, core = require 'mlua', require 'mlua.core'\n"
        "local small = m.param { core.axis('n', 200000), name = 'small' }\n"
        "local large = m.param { core.axis('l', 1 << 20), name = 'large' }\n"
        "local function sum(p)\n"
        "  return m.compile(function() return { out = p:read():sum() } end, {}, {})\n"
        "end\n"
        "local dropped = setmetatable({}, { __mode = 'v' })\n"
        "local function made(p)\n"
        "  local program = sum(p)\n"
        "  dropped[#dropped + 1] = program\n"
        "  return program\n"
        "end\n"
        "print(core.fitting(function() return made(small), made(large) end))\n"
        "print(core.fitting(function() made(small) end))\n"
        "print('left', next(dropped))\n"
        "print(select(2, core.fitting(function() return made(small), 7 end)))\n"
        "print(pcall(core.fitting, function() error('its own', 0) end))\n"
        "print(pcall(core.fitting, function() pcall(made, large) error('after it', 0) end))\n"
        "sum(large)\n");
    process_result r = process_run(room, 1, "", "run fitting.lua --device cpu --memory 2MiB 2>&1");
    process_expect(&r, "\n\nleft\tnil\n7\nfalse\tits own\nfalse\tafter it\n");
    process_expect(&r, "fitting.lua:5: the program needs");
}
