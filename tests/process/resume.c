/* Runs that end and are continued: signals, deaths, other layouts, damage, changes, NaN. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

enum { STEPS = 8 };

/* A rank signals itself after the step `at`, in a run's first start alone; the loss of the step
 * `bad` is not finite before that step's samples have been left out. */
static const char script[] =
    "local m, core = require 'mlua', require 'mlua.core'\n"
    "local cfg = m.config { steps = 8, at = 0, victim = 0, signal = 'TERM', width = 8, lr = 0.01,\n"
    "  bad = 0 }\n"
    "local A = m.axes { embed = cfg.width, vocab = 256, seq = 4, batch = 4 }\n"
    "local Model = m.module('Model', function(self)\n"
    "  self.table, self.up = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }\n"
    "end)\n"
    "function Model:forward(tokens)\n"
    "  return self.table:gather(tokens, 'vocab'):dot(self.up, 'embed')\n"
    "end\n"
    "local function rate(step) return cfg.bad == step and 1e30 or 1 end\n"
    "local first = not io.open 'started'\n"
    "if cfg.at > 0 and core.options().rank == cfg.victim then io.open('started', 'w'):close() end\n"
    "local result = m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = 256,\n"
    "  steps = cfg.steps, optimizer = m.adamw { lr = cfg.lr }, schedule = m.constant(),\n"
    "  layout = m.layout { mesh = { { 'dp', 1 } }, acts = { dp = { 'batch' } } },\n"
    "  on_step = function(step)\n"
    "    if step ~= cfg.at or not first or core.options().rank ~= cfg.victim then return end\n"
    "    io.popen('kill -' .. cfg.signal .. ' $PPID'):close()\n"
    "  end }\n"
    "print(('end %d %.17g'):format(result.steps, result.loss))\n";

/* The steps of a run with their losses, as text: one line a step, in order. */
static char *losses(process_room *room, const char *folder) {
    process_result r = process_shell(
        room, 0,
        "sed -n 's/^{\"step\":\\([0-9]*\\),\"loss\":\\([^,]*\\),\"grad_norm\":\\([^,]*\\),.*/step "
        "\\1 \\2 \\3/p' %s/metrics.jsonl",
        folder);
    return r.output;
}

static char *undisturbed(process_room *room, const char *more) {
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out whole %s", more);
    return losses(room, "whole");
}

#define ENDS "end 8 "

PROCESS_TEST(resume_after_signals) {
    static const struct {
        const char *signal;
        int code;
    } cases[] = {{"TERM", 75}, {"USR1", 75}, {"INT", 130}};
    process_write(room, "a.lua", script);
    char *expected = undisturbed(room, "");
    for (int i = 0; i < 3; i++) {
        process_shell(room, 0, "rm -rf r started");
        process_result r =
            process_run(room, cases[i].code, "",
                        "run a.lua --device cpu --quiet --out r --resume at=%d signal=%s", i + 2,
                        cases[i].signal);
        process_expect(
            &r, ml_arena_format(room->arena, "stopped at step %d; --resume continues r", i + 2));
        CHECK(strstr(r.output, "end ") == NULL);
        r = process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume at=%d",
                        i + 2);
        process_expect(&r, ENDS);
        CHECK_TEXT(losses(room, "r"), expected);
    }
    process_result again =
        process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume");
    process_expect(&again, ENDS); /* nothing is left to do */
    CHECK_TEXT(losses(room, "r"), expected);
}

PROCESS_TEST(resume_in_other_layouts) {
    process_write(room, "a.lua", script);
    char *expected = undisturbed(room, "");
    process_result r = process_run(
        room, 75, "", "run a.lua --device cpu --quiet --out r -n 2 --mesh dp=2 at=3 victim=1");
    process_shell(room, 0, "rm started");
    process_run(room, 75, "", "run a.lua --device cpu --quiet --out r --resume at=6 lr=0.01");
    r = process_run(room, 0, "",
                    "run a.lua --device cpu --quiet --out r --resume -n 4 --mesh dp=4");
    process_expect(&r, "settings have changed: at=0, was 6\n");
    process_compare_lines(losses(room, "r"), expected, "continued by 1 and 4 ranks");
}

/* In f16 steps that overflow are skipped, on every rank alike, and the scale is part of what a run
 * continues with. */
PROCESS_TEST(resume_f16) {
    static const char scales[] = "sed -n 's/^{\"step\":\\([0-9]*\\),\"loss\":\\([^,]*\\),.*"
                                 "\"loss_scale\":\\([^,}]*\\).*/\\1 \\2 \\3/p' %s/metrics.jsonl";
    static const char run[] = "run b.lua --device cpu --dtype f16 --quiet -n 2 --mesh dp=2 --out";
    process_write(room, "a.lua", script);
    process_shell(room, 0, "sed 's/optimizer = /loss_scale = 2.0 ^ 22, &/' a.lua >b.lua");
    process_run(room, 0, "", "%s whole", run);
    process_run(room, 75, "", "%s r at=3 victim=1", run);
    process_run(room, 0, "", "%s r --resume at=0", run);
    process_result whole = process_shell(room, 0, scales, "whole");
    CHECK_TEXT(process_shell(room, 0, scales, "r").output, whole.output);
    CHECK(strstr(whole.output, "1 5.5") && strstr(whole.output, " 4194304\n") &&
          strstr(whole.output, " 2097152\n"));
}

/* Scales are those of a step: nothing of them is kept, so a run may go on in bf16, and back. */
PROCESS_TEST(resume_in_fp8_and_bf16) {
    static const char *const dtypes[] = {"fp8", "bf16", "fp8"};
    process_write_text(room);
    static const char run[] =
        "run \"$ROOT/models/llama.lua\" --device cpu --quiet --out r data=text layers=1 embed=64 "
        "heads=2 kv_heads=1 ffn=64 seq=16 batch=2 sample=0 warmup=1";
    for (int i = 0; i < 3; i++)
        process_run(room, 0, "", "%s --dtype %s steps=%d %s", run, dtypes[i], 2 * (i + 1),
                    i ? "--resume" : "");
    const char *all = losses(room, "r");
    for (int i = 0; i < 6; i++) {
        const char *line = strstr(all, ml_arena_format(room->arena, "step %d ", i + 1));
        EXPECT(line, "step %d is missing in\n%s", i + 1, all);
        const double loss = line ? strtod(line + 7, NULL) : 0;
        EXPECT(loss > 0 && loss < 6, "the loss of step %d is %g", i + 1, loss);
    }
}

PROCESS_TEST(resume_restarts) {
    process_write(room, "a.lua", script);
    char *expected = undisturbed(room, "-n 2 --mesh dp=2");
    process_result r = process_run(room, 0, "",
                                   "run a.lua --device cpu --quiet --out r -n 2 --mesh dp=2 "
                                   "--restarts 2 save_every=2 at=5 victim=1 signal=KILL");
    process_expect(&r, "was killed by signal 9 (Killed)");
    process_expect(&r, "mlua: the ranks ended with exit code 137; restart 1 of 2");
    process_expect(&r, "continues r from step-0000000"); /* 4, or 2 where that was being written */
    process_expect(&r, ENDS);
    CHECK_TEXT(losses(room, "r"), expected);
}

PROCESS_TEST(resume_second_signal) {
    process_write(room, "a.lua", script);
    process_result r = process_run(room, 130, "",
                                   "run a.lua --device cpu --quiet --out r at=3 save_every=0 "
                                   "signal='INT $PPID; sleep 1.2; kill -INT'");
    CHECK(strstr(r.output, "stopped at") == NULL);
    process_shell(room, 0, "[ ! -e r/checkpoints/step-00000003 ]");
}

/* The newest is damaged in its tensors, then the one before it in its manifest. */
PROCESS_TEST(resume_damaged) {
    process_write(room, "a.lua", script);
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out r save_every=2 keep=2,2");
    process_shell(room, 0,
                  "[ \"$(ls r/checkpoints | tr '\\n' ' ')\" = 'step-00000002 step-00000004 "
                  "step-00000006 step-00000008 ' ] && printf x | dd of=$(ls "
                  "r/checkpoints/step-00000008/model-*) bs=1 seek=9000 conv=notrunc 2>/dev/null && "
                  "echo '{' >r/checkpoints/step-00000006/manifest.json");
    char *expected = losses(room, "r");
    process_result r = process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume");
    process_expect(&r, "r/checkpoints/step-00000008 is damaged: "
                       "r/checkpoints/step-00000008/model-00001-of-00001.safetensors is damaged");
    process_expect(&r, "r/checkpoints/step-00000006 is no checkpoint to continue from: "
                       "r/checkpoints/step-00000006/manifest.json is damaged");
    process_expect(&r, "continues r from step-00000004: step 4");
    CHECK_TEXT(losses(room, "r"), expected);
    /* keep=2, the default: the two newest whole ones, whatever was damaged. */
    process_shell(room, 0,
                  "[ -e r/checkpoints/step-00000004 ] && [ -e r/checkpoints/step-00000008 ]"
                  " && [ -e r/damaged/step-00000008-* ] && "
                  "[ ! -e r/checkpoints/step-00000002 ]");
}

/* What the script saves among the run's checkpoints is none of those that keep counts. */
PROCESS_TEST(resume_others_saved) {
    process_write(room, "a.lua", script);
    process_shell(
        room, 0,
        "{ sed 's/model = Model()/model = all/; s/^local result/local all = Model()\\n&/' "
        "a.lua; echo \"m.save('r/checkpoints/step-00000099', all)\"; } >b.lua");
    process_run(room, 0, "", "run b.lua --device cpu --quiet --out r steps=2");
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume save_every=3 keep=1");
    process_shell(room, 0,
                  "[ \"$(ls r/checkpoints | tr '\\n' ' ')\" = 'step-00000008 step-00000099 ' ]");
}

/* Settings on which the samples depend, and --seed where there is no such setting. */
PROCESS_TEST(resume_other_samples) {
    static const char others[] = "; the next samples are not those of an uninterrupted run\n";
    process_write(room, "a.lua", script);
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out r steps=2");
    process_result r = process_run(
        room, 0, "", "run a.lua --device cpu --quiet --out r --resume --seed 7 steps=3");
    process_expect(&r, ml_arena_format(room->arena, "--seed 7, was 0; steps=3, was 2%s", others));
    process_shell(room, 0, "sed -i 's/^  bad = 0/  bad = 0, seed = 7/' a.lua");
    r = process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume steps=4");
    process_expect(&r, ml_arena_format(room->arena, "seed=7, was none; steps=4, was 3%s", others));
}

/* Where nothing whole is left, a run is not begun anew over it; nor by two processes at once. */
PROCESS_TEST(resume_nothing_whole) {
    process_write(room, "a.lua", script);
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out r steps=2");
    process_shell(room, 0,
                  "printf x | dd of=$(ls r/checkpoints/step-00000002/model-*) bs=1 "
                  "seek=9000 conv=notrunc 2>/dev/null");
    char *before = losses(room, "r");
    process_result r;
    for (int i = 0; i < 2; i++) { /* it stays where it is */
        r = process_run(room, 1, "", "run a.lua --device cpu --quiet --out r --resume");
        process_expect(&r, "r/checkpoints/step-00000002 is damaged");
        process_expect(&r, "r has no whole checkpoint");
    }
    CHECK_TEXT(losses(room, "r"), before);
    process_shell(room, 0,
                  "sed 's/^  on_step = function(step)/& core.sleep(0.5)/' a.lua >slow.lua");
    r = process_shell(room, 0,
                      "\"$MLUA\" run slow.lua --device cpu --quiet --out s & main=$!; for i in "
                      "$(seq 100); do [ -s s/metrics.jsonl ] && break; sleep 0.05; done; \"$MLUA\" "
                      "run a.lua --device cpu --quiet --out s --resume; code=$?; kill -KILL $main; "
                      "[ $code = 1 ]");
    process_expect(&r, "another process is running this run");
}

static void two_trainings(process_room *room) {
    process_write(
        room, "b.lua",
        "local m, core = require 'mlua', require 'mlua.core'\n"
        "local A = m.axes { embed = 8, vocab = 256, seq = 4, batch = 4 }\n"
        "local function train(name)\n"
        "  local Model = m.module(name, function(self)\n"
        "    self.table = m.param { A.vocab, A.embed }\n"
        "    self.up = m.param { A.embed, A.vocab }\n"
        "  end)\n"
        "  function Model:forward(tokens)\n"
        "    return self.table:gather(tokens, 'vocab'):dot(self.up, 'embed')\n"
        "  end\n"
        "  local r = m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = 256,\n"
        "    steps = 3, eval_every = 2, eval_batches = 1,\n"
        "    on_step = function() if core.options().out == 's' then m.save 'own' end end }\n"
        "  print(('%s %d %.17g %.17g'):format(name, r.steps, r.loss, r.eval_loss))\n"
        "end\n"
        "train 'One'\n"
        "train 'Two'\n");
}

/* A resumed run returns what its trainings have returned, evaluations and further results included.
 * If the second training has no undamaged checkpoint, a further start begins from the first. */
PROCESS_TEST(resume_results) {
    two_trainings(room);
    process_result r = process_run(room, 0, "", "run b.lua --device cpu --quiet --out r");
    const char *expected = r.output;
    r = process_run(room, 0, "", "run b.lua --device cpu --quiet --out r --resume");
    for (const char *name = "One"; name; name = *name == 'O' ? "Two" : NULL) {
        const char *line = strstr(expected, name);
        CHECK(line != NULL);
        process_expect(&r, ml_arena_format(room->arena, "%.*s", (int)strcspn(line, "\n"), line));
    }
    process_shell(room, 0,
                  "printf x | dd of=$(ls r/checkpoints/step-00000006/model-*.safetensors) "
                  "bs=1 seek=$((8 + $(od -An -tu8 -N8 r/checkpoints/step-00000006/model-*s))) "
                  "conv=notrunc 2>/dev/null");
    r = process_run(room, 1, "", "run b.lua --device cpu --quiet --out r --resume");
    process_expect(&r, "r/checkpoints/step-00000003 is of an earlier training of the script");
    r = process_run(room, 0, "", "run b.lua --device cpu --quiet --out r --resume");
    process_expect(&r,
                   ml_arena_format(room->arena, "%.*s", (int)strcspn(strstr(expected, "Two"), "\n"),
                                   strstr(expected, "Two")));
}

/* The run's own saves are noted, and old ones removed, where the script saves too. */
PROCESS_TEST(resume_own_saves) {
    two_trainings(room);
    process_run(room, 0, "", "run b.lua --device cpu --quiet --out s save_every=1");
    process_shell(room, 0,
                  "[ $(grep -c '\"event\":\"save\"' s/metrics.jsonl) = 6 ] && "
                  "[ $(ls s/checkpoints | wc -l) = 2 ] && [ -e own/manifest.json ]");
}

PROCESS_TEST(resume_changed) {
    process_write(room, "a.lua", script);
    process_shell(room, 0, "cat a.lua a.lua a.lua >text; tr a-z A-Z <text >other");
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out r steps=2 data=text");
    process_result r = process_run(
        room, 1, "", "run a.lua --device cpu --quiet --out r --resume width=16 data=text");
    process_expect(&r, "settings have changed: steps=8, was 2; width=16, was 8");
    process_expect(&r, "r/checkpoints/step-00000002 does not fit the script: table: "
                       "f32[vocab=256, embed=8] in the checkpoint, f32[vocab=256, embed=16] here");
    r = process_run(room, 1, "", "run a.lua --device cpu --quiet --out r --resume data=other");
    process_expect(&r, "the run's data are others than before: other of ");
    process_shell(room, 0, "mkdir elsewhere && mv text elsewhere"); /* the same contents */
    process_shell(room, 0, "sed -i 's/^local first/-- a comment\\n&/' a.lua");
    r = process_run(room, 0, "",
                    "run a.lua --device cpu --quiet --out r --resume steps=4 data=elsewhere/text");
    process_expect(&r, "the script has changed: script.lua");
    process_shell(room, 0, "cmp a.lua r/script.lua && [ -s r/script.lua.before-step-2 ]");
    r = process_run(room, 0, "",
                    "run a.lua --device cpu --quiet --out r --resume --new-data data=other");
    process_expect(&r, ENDS);
    /* Its weights alone begin another run. */
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out s --from r steps=1 lr=0");
}

/* One sample makes the loss infinite: steps 5 and 6 are made again of other samples. */
PROCESS_TEST(resume_not_finite) {
    process_write(
        room, "a.lua",
        "local m = require 'mlua'\n"
        "local batch = m.axis('batch', 4)\n"
        "local Model = m.module('Model', function(self) self.w = m.param { m.axis('a', 4) } end)\n"
        "function Model:forward(x) return self.w:sum 'a' * x end\n"
        "local model = Model()\n"
        "m.train { model = model, batch = batch, steps = 8, inputs = { x = { batch } },\n"
        "  sample = function(index) return { x = index == 22 and 1e30 or index % 7 } end,\n"
        "  loss = function(i) return ((model(i.x) - 1) ^ 2):sum(), 4 end }\n");
    process_result r = process_run(room, 1, "", "run a.lua --device cpu --quiet --out r");
    process_expect(&r, "step 6: loss inf");
    r = process_run(room, 0, "", "run a.lua --device cpu --quiet --out s on_nan=skip save_every=2");
    process_expect(&r, "step 6: its numbers are not finite; back to step-00000004, and the samples "
                       "since then are left out");
    process_shell(room, 0,
                  "[ $(grep -c '\"loss\"' s/metrics.jsonl) = 8 ] && "
                  "grep -q '^{\"step\":4,\"event\":\"skip\",\"bad_step\":6,\"samples\":8' "
                  "s/metrics.jsonl");
}

/* Trainings that were over are not repeated; the one under way continues. */
PROCESS_TEST(resume_second_training) {
    process_write(
        room, "a.lua",
        "local m = require 'mlua'\n"
        "local cfg = m.config { at = 0 }\n"
        "local A = m.axes { embed = 8, vocab = 256, seq = 4, batch = 4 }\n"
        "local Model = m.module('Model', function(self)\n"
        "  self.table, self.up = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }\n"
        "end)\n"
        "function Model:forward(tokens)\n"
        "  return self.table:gather(tokens, 'vocab'):dot(self.up, 'embed')\n"
        "end\n"
        "local model, all = Model(), 0\n"
        "for i = 1, 3 do\n"
        "  local r = m.train { model = model, batch = A.batch, seq = A.seq, vocab = 256, steps = "
        "4,\n"
        "    optimizer = m.adamw { lr = 0.01 / i }, on_step = function()\n"
        "      all = all + 1\n"
        "      if all == cfg.at then io.popen('kill -TERM $PPID'):close() end\n"
        "    end }\n"
        "  print(i, r.steps, r.loss)\n"
        "end\n");
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out whole >printed");
    process_run(room, 75, "", "run a.lua --device cpu --quiet --out r at=6");
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume >again");
    CHECK_TEXT(losses(room, "r"), losses(room, "whole"));
    process_shell(room, 0, "cmp printed again");
}

/* A rank that dies in each start: the next one does without it. */
PROCESS_TEST(resume_elastic) {
    process_write(room, "a.lua", script);
    char *expected = undisturbed(room, "");
    process_shell(
        room, 0,
        "{ echo \"local o = require 'mlua.core'.options()\"; echo \"if o.rank == 3 and "
        "o.resume then io.popen('kill -KILL \\$PPID'):close() end\"; cat a.lua; } >b.lua");
    process_result r = process_run(room, 0, "",
                                   "run b.lua --device cpu --quiet --out r -n 4 --mesh dp=4 "
                                   "--restarts 3 --elastic save_every=1 at=3 victim=1 signal=KILL");
    process_expect(&r, "restart 2 of 3, with 2 ranks instead of 4 (dp=2)");
    process_expect(&r, ENDS);
    process_compare_lines(losses(room, "r"), expected, "by fewer ranks");
    r = process_run(room, 1, "", "run a.lua --device cpu --out s --elastic");
    process_expect(&r, "--elastic restarts with fewer data-parallel ranks");
}

/* What cannot be saved is reported; training continues, and what was saved stays. */
PROCESS_TEST(resume_unwritable) {
    process_write(room, "a.lua", script);
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out r steps=2");
    process_shell(room, 0, "mv r/checkpoints kept && echo >r/checkpoints");
    process_result r =
        process_run(room, 73, "", "run a.lua --device cpu --quiet --out r --resume save_every=4");
    process_expect(&r, "step-00000004 could not be saved: ");
    process_expect(&r, "training continues");
    process_expect(&r, ENDS);
    process_expect(&r,
                   "mlua: the end of this run is not saved: there is no whole checkpoint of r\n");
    process_shell(room, 0,
                  "grep -q '\"event\":\"save_failed\"' r/metrics.jsonl && "
                  "rm r/checkpoints && mv kept r/checkpoints");
    r = process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume steps=2");
    process_expect(&r, "continues r from step-00000002: step 2");
    process_shell(room, 0, "{ cat a.lua; echo 'os.exit()'; } >b.lua");
    r = process_run(room, 73, "",
                    "run b.lua --device cpu --quiet --out r --resume -n 2 --mesh dp=2 at=3 "
                    "signal='0 $PPID; mv r/checkpoints kept; echo >r/checkpoints; kill -0'");
    process_expect(&r, "mlua: the end of this run is not saved: the last whole checkpoint is "
                       "step-00000002 of r\n");
}

/* The process ends at some of the operations on files of a save (long ones: tests of checkpoints).
 */
PROCESS_TEST(resume_crashed_save) {
    process_write(room, "a.lua", script);
    char *expected = undisturbed(room, "");
    for (int operation = 2; operation <= 30; operation += 14) {
        process_shell(room, 0, "rm -rf r");
        char *knob = ml_arena_format(room->arena, "MLUA_FAULT_IO=%d", operation);
        process_run(room, 128 + SIGKILL, knob,
                    "run a.lua --device cpu --quiet --out r save_every=2 keep=1");
        process_result r =
            process_run(room, 0, "", "run a.lua --device cpu --quiet --out r --resume");
        process_expect(&r, ENDS);
        CHECK_TEXT(losses(room, "r"), expected);
    }
}

/* One bit of a rank's copy changes: the rank and the state are named, and nothing is saved; ranks
 * that are started again continue from before. It is a bit of the value of the largest magnitude,
 * which the update of step 6 cannot round away: of a small value that grows, two units in the last
 * place are half a unit of the sum, and rounding, which depends on the processor, may drop them. */
static const char bit_flip[] =
    "\n"
    "local function flip_bit()\n"
    "  local p, at = m.parameters(all)[1], 1\n"
    "  local v = p:get()\n"
    "  for i = 1, #v do if math.abs(v[i]) > math.abs(v[at]) then at = i end end\n"
    "  if core.options().rank == 1 then\n"
    "    v[at] = ('<f'):unpack(('<I4'):pack(('<I4'):unpack(('<f'):pack(v[at])) ~ 1 << 4))\n"
    "  end\n"
    "  p:set(v)\n"
    "end\n";

PROCESS_TEST(resume_replicas) {
    process_write(room, "a.lua", script);
    process_write(room, "flip", bit_flip);
    process_shell(room, 0,
                  "sed 's/model = Model()/model = all/; s/^local result/local result\\n&/; "
                  "s/^    if step ~= cfg.at.*/    if step == 5 and not core.options().resume then "
                  "flip_bit() end/; /io.popen/d' a.lua | sed -e '/^local result$/{s/.*/local all "
                  "= Model()/;r flip' -e '}' >b.lua");
    char *expected = undisturbed(room, "-n 4 --mesh dp=4");
    process_result r = process_run(room, 0, "",
                                   "run b.lua --device cpu --quiet --out r -n 4 --mesh dp=4 "
                                   "--restarts 1 check_every=3 save_every=2");
    process_expect(&r, "step 6: rank 1 (state \"");
    process_expect(&r, "exit code 74; restart 1 of 1");
    process_expect(&r, "continues r from step-0000000"); /* 4, or 2 where that was being written */
    CHECK_TEXT(losses(room, "r"), expected);
}

/* KILLS ranks are killed at random moments; losses are those of a run without. */
static void killed_ranks(process_room *room) {
    enum { KILLS = 200, LONG_STEPS = 1500 };
    process_write(room, "a.lua", script);
    process_shell(room, 0, "sed -i 's/^  on_step = function(step)/& core.sleep(0.1)/' a.lua");
    process_shell(room, 0, "sed 's/core.sleep(0.1)//' a.lua >b.lua");
    process_run(room, 0, "", "run b.lua --device cpu --quiet --out w -n 3 --mesh dp=3 steps=%d",
                LONG_STEPS);
    process_shell(room, 0,
                  "\"$MLUA\" run a.lua --device cpu --quiet --out r -n 3 --mesh dp=3 steps=%d "
                  "save_every=10 --restarts %d >log 2>&1 & main=$!; killed=0; "
                  "while [ $killed -lt %d ] && kill -0 $main; do "
                  "sleep $(awk \"BEGIN { print 0.1 + $(od -An -N2 -tu2 /dev/urandom) / 40000 }\"); "
                  "victim=$(cat /proc/$main/task/$main/children | tr ' ' '\\n' | shuf -n 1); "
                  "[ \"$victim\" ] && kill -KILL $victim 2>/dev/null && killed=$((killed + 1)); "
                  "done; wait $main; code=$?; echo $killed killed, exit code $code; tail -3 log; "
                  "[ $killed = %d ] && [ $code = 0 ]",
                  LONG_STEPS, KILLS + 50, KILLS, KILLS);
    CHECK_TEXT(losses(room, "r"), losses(room, "w"));
}

TEST(long, killed_ranks) {
    process_in_room(killed_ranks);
}
