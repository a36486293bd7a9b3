/* The commands beside run: check, repl, doctor, help, editor; how long they may take. */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

#ifdef __SANITIZE_ADDRESS__
enum { SLOWER = 5, MOST_LAYERS = 250 }; /* sanitizers */
#else
enum { SLOWER = 1, MOST_LAYERS = 1000 };
#endif

/* 0.06 s; the bound leaves room for slower machines. */
PROCESS_TEST(check_is_quick) {
    process_result r =
        process_run(room, 0, "", "check \"$ROOT/models/gpt.lua\" preset=gpt2-124m --device h200");
    CHECK(r.cpu_seconds < 0.5 * SLOWER);
    process_expect(&r, "parameters      124.5 M in 196 tensors");
    process_expect(&r, "kept a token    36.0 KiB in 24 tensors, 36.0 MiB at seq=1024\n   24 x "
                       "bf16[heads=12, head_dim=64]");
    process_expect(&r, "peak memory");
}

/* What the step of generation keeps, or the line for which there is none. */
PROCESS_TEST(check_says_what_is_kept) {
    process_result r = process_run(room, 0, "", "check \"$ROOT/models/t5.lua\" layers=2 --json");
    process_expect(&r, "\"axis\":\"seq\",\"context\":29,\"context_bytes\":");
    process_expect(&r, "\"position_bytes\":3072,\"sequence_bytes\":393344,");
    r = process_run(room, 0, "", "check \"$ROOT/models/gemma.lua\" seq=2048");
    process_expect(&r, "kept a token    1.0 KiB in 2 tensors, 2.0 MiB at seq=2048\n");
    process_expect(&r, "kept a sequence 2.8 MiB in 10 tensors: the last positions, for windows\n"
                       "   10 x f32[positions=576, kv_heads=2, head_dim=64] ");
    r = process_run(room, 0, "", "check \"$ROOT/models/bert.lua\" --json");
    process_expect(&r, "\"problem\":\"attention without causal = true reads later positions\"}");
    r = process_run(room, 0, "", "check \"$ROOT/models/mamba.lua\" layers=1");
    process_expect(&r, "kept a sequence ");
    r = process_run(room, 0, "", "check \"$ROOT/models/bert.lua\"");
    process_expect(&r, "no increment    ");
    process_expect(&r, "bert.lua:33: attention without causal = true reads later positions");
    r = process_run(room, 0, "", "check \"$ROOT/models/vit.lua\"");
    CHECK(!strstr(r.output, "no increment") && !strstr(r.output, "kept"));
}

PROCESS_TEST(check_of_a_thousand_layers) {
    process_result r = process_run(room, 0, "",
                                   "check \"$ROOT/models/gpt.lua\" layers=%d embed=64 heads=2"
                                   " seq=64 batch=4 --device h200 --json",
                                   MOST_LAYERS);
    CHECK(r.cpu_seconds < 20 * SLOWER); /* 4 s */
    process_expect(&r, "\"parameters\":");
}

/* No layout of it fits: the first plan and the one of least memory are made, not all between. */
PROCESS_TEST(check_of_a_thousand_layers_without_room) {
    process_result r = process_run(
        room, 1, "",
        "check \"$ROOT/models/gpt.lua\" layers=1000 embed=16384 heads=128 seq=2048 vocab=51200"
        " batch=12500 accum=10 --device h200 --mesh pp=10,dp=125,tp=8");
    process_expect(&r, "pipeline        10 stages of blocks, 1f1b, 10 microbatches");
    process_expect(&r, "GiB of memory, and NVIDIA H200, 140 GiB has 137.66 GiB for it");
    CHECK(r.cpu_seconds < 20 * SLOWER); /* 6 s */
    CHECK(r.peak_bytes < (int64_t)SLOWER << 30);
}

/* Every preset of every model plans, and fits the card that it is for. */
static void check_presets(process_room *room, const char *const *presets, size_t count) {
    for (size_t i = 0; i < count; i++) {
        process_result r =
            process_run(room, 0, "", "check --json --device h200 \"$ROOT\"/models/%s", presets[i]);
        process_expect(&r, "\"peak_bytes\":");
    }
}

PROCESS_TEST(check_of_every_preset) {
    static const char *const presets[] = {
        "gpt.lua preset=demo",
        "gpt.lua preset=gpt2-124m",
        "gpt.lua preset=gpt2-1.5b",
        "gpt.lua preset=gpt-1.3b",
        "gpt.lua preset=gpt2-124m layout=ddp --mesh dp=8",
        "gpt.lua preset=gpt2-124m layout=fsdp reshard=false --mesh dp=8",
        "llama.lua preset=demo",
        "llama.lua preset=llama-1b",
        "llama.lua preset=llama-3b",
        "llama.lua preset=llama-1b accum=4",
        "llama.lua preset=llama-1b layout=ddp --mesh dp=2",
        "gpt_moe.lua preset=demo",
        "gpt_moe.lua preset=moe-8x",
        "gpt_moe.lua preset=moe-64x",
        "gpt_moe.lua preset=moe-64x batch=32 exchange=1.5 --mesh ep=8",
        "gemma.lua preset=demo",
        "gemma.lua preset=gemma3-1b",
        "deepseek.lua preset=demo",
        "mamba.lua preset=demo",
        "mamba.lua preset=mamba2-1.3b",
        "deltanet.lua preset=demo",
        "deltanet.lua preset=demo decay_per=key",
        "deltanet.lua preset=gdn-1.3b",
        "deltanet.lua preset=kda-1.3b",
        "hybrid.lua preset=demo",
        "hybrid.lua preset=next-1.3b",
        "hybrid.lua preset=ssm-1.3b",
        "rwkv.lua preset=demo",
        "rwkv.lua preset=rwkv7-1.5b"};
    check_presets(room, presets, sizeof presets / sizeof *presets);
    process_result r = process_run(room, 1, "", "check \"$ROOT/models/gpt.lua\" preset=gpt2");
    process_expect(&r, "gpt2-124m");
}

PROCESS_TEST(check_of_every_preset_with_examples) {
    static const char *const presets[] = {"bert.lua preset=demo",
                                          "bert.lua preset=bert-base",
                                          "bert.lua preset=bert-large --mesh dp=2",
                                          "t5.lua preset=demo",
                                          "t5.lua preset=t5-small",
                                          "t5.lua preset=t5-base --mesh tp=2",
                                          "t5.lua preset=t5-large",
                                          "vit.lua preset=demo",
                                          "vit.lua preset=vit-b16",
                                          "vit.lua preset=vit-l16",
                                          "llava.lua preset=demo",
                                          "llava.lua preset=llava-7b --mesh dp=2,tp=4",
                                          "lora.lua preset=demo",
                                          "lora.lua preset=llama-1b"};
    check_presets(room, presets, sizeof presets / sizeof *presets);
}

/* `check` never runs a step, opens no device and needs no compiler. */
PROCESS_TEST(check_needs_nothing) {
    process_run(room, 0, "CC=/no/such/cc MLUA_CACHE=/no/such/cache PATH=/usr/bin:/bin",
                "check \"$ROOT/models/llama.lua\" --device cpu");
    process_run(room, 0, "CC=/no/such/cc CUDA_VISIBLE_DEVICES= PATH=/usr/bin:/bin",
                "check \"$ROOT/models/llama.lua\" --device b200 --types");
}

/* What looks like scores and is none is reported in a check, and by --json. */
PROCESS_TEST(check_hints) {
    process_write(room, "scores.lua",
                  "local m = require 'mlua'\n"
                  "local A = m.axes { seq = 4, head_dim = 2 }\n"
                  "m.compile(function(i)\n"
                  "  return i.q:dot(i.k, 'head_dim'):softmax 'seq'\n"
                  "end, { q = { A.seq, A.head_dim }, k = { A.seq, A.head_dim } })\n");
    process_result r = process_run(room, 0, "", "check --device cpu scores.lua");
    process_expect(&r, "scores.lua:4: hint: this product keeps \"seq\" of both operands");
    process_expect(&r, "i.k:rename(\"seq\", \"kv_seq\")\n    4 |   return i.q:dot(");
    r = process_run(room, 0, "", "check --device cpu --json scores.lua");
    process_expect(&r, "\"hints\":[{\"file\":\"scores.lua\",\"line\":4,\"text\":");
}

PROCESS_TEST(help_of_every_command) {
    process_result all = process_run(room, 0, "", "--help");
    static const char *const commands[] = {"run", "check", "repl", "doctor", "editor"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        process_expect(&all, commands[i]);
        process_result help = process_run(room, 0, "", "%s --help", commands[i]);
        process_expect(&help, ml_arena_format(room->arena, "usage: mlua %s", commands[i]));
        CHECK(!strstr(help.output, " \n"));
        process_result same = process_run(room, 0, "", "help %s", commands[i]);
        CHECK_TEXT(same.output, help.output);
        if (strcmp(commands[i], "editor") != 0) {
            process_result bad = process_run(room, 2, "", "%s --no-such-option", commands[i]);
            CHECK(bad.output[0] != 0);
        }
    }
    /* What is asked for is printed on stdout, errors on stderr. */
    process_result out = process_shell(room, 0, "\"$MLUA\" --help 2>&1 >help");
    CHECK_TEXT(out.output, "");
    out = process_shell(room, 2, "\"$MLUA\" no-such-command 2>errors");
    CHECK_TEXT(out.output, "");
    out = process_shell(room, 1, "\"$MLUA\" run no_such_file.lua 2>errors");
    CHECK_TEXT(out.output, "");
}

PROCESS_TEST(doctor) {
    process_result r = process_run(room, 0, "", "doctor");
    process_expect(&r, "C compiler");
    r = process_run(room, 0, "CC=/no/such/cc", "doctor");
    process_expect(&r, "/no/such/cc");
}

PROCESS_TEST(repl_from_a_pipe) {
    process_write(room, "model.lua",
                  "local m = require 'mlua'\n"
                  "A = m.axes { seq = 8, embed = 16 }\n"
                  "x = m.input('x', { A.seq, A.embed })\n");
    process_write(room, "lines",
                  "x\n"
                  "x:sum('embde')\n"
                  "for i = 1, 2 do\n"
                  "  print(i)\n"
                  "end\n"
                  "error('caught')\n"
                  "x:sum 'embed'\n"
                  "1 +\n"
                  "41\n"
                  "os.exit(3)\n");
    process_result r = process_run(room, 3, "HOME=\"$PWD\" XDG_STATE_HOME=\"$PWD/state\"",
                                   "repl --device cpu model.lua < lines");
    process_expect(&r, "f32[seq=8, embed=16]  512 B");
    process_expect(&r, "did you mean \"embed\"?");
    process_expect(&r, "1\n2\n");
    process_expect(&r, "caught");
    process_expect(&r, "f32[seq=8]  32 B");
    process_expect(&r, "42\n");
    /* An unfinished line at the end of the input is an error, not waited for. */
    process_shell(room, 0, "printf 'for i = 1, 2 do\\n' | timeout 20 \"$MLUA\" repl --device cpu");
    /* A program runs in it. */
    process_write(room, "lines",
                  "f = m.compile(function(i) return i.a:sum() end, { a = { m.axis('n', 3) } })\n"
                  "f { a = { 1, 2, 4 } }\n");
    r = process_run(room, 0, "", "repl --device cpu < lines");
    process_expect(&r, "7.0");
}

/* The script that README shows runs as it stands. */
PROCESS_TEST(script_of_the_readme) {
    process_result r = process_shell(room, 0,
                                     "sed -n '/^```lua/,/^```/p' \"$ROOT/README.md\" | sed "
                                     "'/^```/d' | \"$MLUA\" run --device cpu "
                                     "- layers=1 embed=16 heads=2 seq=8 batch=2 steps=2");
    process_expect(&r, "step 2/2  loss ");
    process_expect(&r, "local function ");
}

/* Each block of Lua in the language's guide is a script that runs as it stands, on two ranks too.
 */
PROCESS_TEST(scripts_of_the_guide) {
    process_result r = process_shell(
        room, 0,
        "awk '/^```lua/ { n++; on = 1; next } /^```/ { on = 0 }"
        " on { print > (\"guide\" n \".lua\") }' \"$ROOT/stdlib/README.md\"\n"
        "for f in guide*.lua; do \"$MLUA\" run --device cpu $f >out 2>&1 || { cat out; exit 1; };"
        " echo ran $f; done; \"$MLUA\" run --device cpu -n 2 --mesh tp=2 "
        "$(grep -l 'm.layout {' guide*.lua)");
    for (int i = 1; i <= 8; i++)
        process_expect(&r, ml_arena_format(room->arena, "ran guide%d.lua", i));
}

PROCESS_TEST(script_from_stdin) {
    process_result r = process_shell(room, 0, "echo 'print(1 + 1)' | \"$MLUA\" run --device cpu -");
    CHECK_TEXT(r.output, "2\n");
}

/* What a closed pipe at the reader's end does: the run stops, no message storm, no crash. */
PROCESS_TEST(closed_pipe) {
    process_write(room, "loop.lua", "for i = 1, 1e6 do print(i) end\n");
    process_result r = process_shell(room, 0, "\"$MLUA\" run --device cpu loop.lua | head -2");
    CHECK_TEXT(r.output, "1\n2\n");
}

/* What cannot be written shows in the exit code, whichever part writes it. */
PROCESS_TEST(full_disk) {
    process_write(room, "long.lua", "for i = 1, 3000 do print(i) end\n");
    static const char *const commands[] = {"run --device cpu long.lua", "check models.lua",
                                           "--version", "help run"};
    process_write(room, "models.lua",
                  "local m = require 'mlua'\n"
                  "m.compile(function(i) return i.x * 3 end, { x = { m.axis('a', 4) } })\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        process_result r = process_shell(room, 1, "\"$MLUA\" %s 2>&1 >/dev/full", commands[i]);
        CHECK_TEXT(r.output, "mlua: cannot write to standard output\n");
    }
}

PROCESS_TEST(binary_needs_only_the_c_library) {
    process_result r =
        process_shell(room, 0,
                      "ldd \"$MLUA\" | grep -vE 'linux-vdso|lib(c|m|dl|pthread)\\.so|ld-linux"
                      "|lib(asan|ubsan|gcc_s|stdc\\+\\+)\\.so' || true");
    CHECK_TEXT(r.output, "");
}

PROCESS_TEST(unwritable_home) {
    process_write(room, "kernel.lua",
                  "local m = require 'mlua'\n"
                  "local run = m.compile(function(i) return i.x * 3 end, { x = {} })\n"
                  "print(run { x = 2 })\n");
    process_result r = process_shell(
        room, 0, "unset MLUA_CACHE HOME XDG_CACHE_HOME; \"$MLUA\" run --device cpu kernel.lua");
    process_expect(&r, "6.0\n");
    r = process_shell(
        room, 0,
        "unset MLUA_CACHE XDG_CACHE_HOME; HOME=/proc \"$MLUA\" run --device cpu kernel.lua");
    process_expect(&r, "6.0\n");
}

static int occurrences(const char *text, const char *part) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)); at += strlen(part)) count++;
    return count;
}

/* A step of a model with a large vocabulary and a long sequence holds the logits once (their
 * gradient takes their place) and never the scores of attention. */
PROCESS_TEST(logits_once_and_scores_never) {
    static const char *const devices[] = {"cpu", "h200"};
    for (int i = 0; i < 2; i++) {
        process_result r =
            process_run(room, 0, "",
                        "check \"$ROOT/models/llama.lua\" layers=1 heads=2 kv_heads=1 embed=64"
                        " ffn=64 batch=2 seq=1024 vocab=32000 --device %s",
                        devices[i]);
        CHECK_EQ_INT(occurrences(r.output, "[batch=2, seq=1024, vocab=32000]"), 1);
        CHECK_EQ_INT(occurrences(r.output, "seq=1024, kv_seq=1024"), 0);
        /* MiB: one buffer of logits, and less than half of another for all else but the 64 of a
         * library's workspace. */
        double logits = 2.0 * 1024 * 32000 * (i == 0 ? 4 : 2) / (1 << 20);
        const char *peak = strstr(r.output, "peak memory");
        REQUIRE(peak != NULL);
        CHECK(strtod(peak + strlen("peak memory"), NULL) < 1.5 * logits + 64);
    }
}
