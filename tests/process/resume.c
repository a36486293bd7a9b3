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
    process_expect(&r, "settings have changed: at=0, was 6");
    process_compare_lines(losses(room, "r"), expected, "continued by 1 and 4 ranks");
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
