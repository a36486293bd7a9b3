/* Ranks of a real training run that die or stop at each stage of it, and scripts that differ. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/process/support.h"

enum { RANKS = 3 };

/* The rank `victim` signals itself at the place `at`; each rank prints its process id. */
static const char script[] =
    "local m, core = require 'mlua', require 'mlua.core'\n"
    "local cfg = m.config { steps = 4, at = 'never', victim = -1, signal = 'KILL' }\n"
    "local rank = core.options().rank\n"
    "local function reach(place)\n"
    "  if place ~= cfg.at or rank ~= cfg.victim then return end\n"
    "  os.execute('echo pid $PPID >&2; kill -' .. cfg.signal .. ' $PPID')\n"
    "end\n"
    "reach 'start'\n"
    "local A = m.axes { embed = 8, vocab = 256, seq = 4, batch = 6 }\n"
    "local Model = m.module('Model', function(self)\n"
    "  self.table, self.up = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }\n"
    "end)\n"
    "function Model:forward(tokens)\n"
    "  reach 'trace'\n"
    "  local x = self.table:gather(tokens, 'vocab')\n"
    "  if cfg.at == 'differ' and rank == cfg.victim then x = x * 2 end\n"
    "  return x:dot(self.up, 'embed')\n"
    "end\n"
    "local layout = m.layout { mesh = { { 'dp', 1 } }, acts = { dp = { 'batch' } } }\n"
    "m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = 256, steps = cfg.steps,\n"
    "  layout = layout, on_step = function(step) if step == 2 then reach 'step' end end }\n"
    "reach 'end'\n";

static void check_ended(const char *text) {
    const char *reported = strstr(text, "pid ");
    int pid = reported ? atoi(reported + 4) : 0;
    if (pid <= 0)
        test_fail("no rank prints its process id:\n%s", text);
    else if (kill(pid, 0) == 0)
        test_fail("process %d stays behind:\n%s", pid, text);
}

PROCESS_TEST(rank_dies_at_any_stage) {
    static const char *const places[] = {"start", "trace", "step", "end"};
    process_write(room, "a.lua", script);
    process_run(room, 0, "", "run a.lua --device cpu --quiet -n %d --mesh dp=%d", RANKS, RANKS);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        for (int victim = 0; victim < RANKS; victim++) {
            process_result r =
                process_run(room, 128 + SIGKILL, "",
                            "run a.lua --device cpu --quiet -n %d --mesh dp=%d at=%s victim=%d",
                            RANKS, RANKS, places[i], victim);
            char *named = ml_arena_format(room->arena, "mlua: rank %d (pid ", victim);
            process_expect(&r, named);
            process_expect(&r, "was killed by signal 9 (Killed)");
            check_ended(r.output);
            EXPECT(r.seconds <= 30, "it takes %.1f s", r.seconds);
        }
}

PROCESS_TEST(rank_stops) {
    process_write(room, "a.lua", script);
    process_run(room, 0, "", "run a.lua --device cpu --quiet -n %d --mesh dp=%d", RANKS, RANKS);
    process_result r = process_run(
        room, 76, "MLUA_TIMEOUT=3",
        "run a.lua --device cpu --quiet -n %d --mesh dp=%d at=step victim=1 signal=STOP", RANKS,
        RANKS);
    process_expect(&r, "mlua: rank 1 (pid ");
    process_expect(&r, "has been stopped or frozen for");
    process_expect(&r, "a.lua:");
    check_ended(r.output);
}

PROCESS_TEST(rank_runs_another_script) {
    process_write(room, "a.lua", script);
    for (int victim = 0; victim < RANKS; victim++) {
        process_result r = process_run(
            room, 1, "", "run a.lua --device cpu --quiet -n %d --mesh dp=%d at=differ victim=%d",
            RANKS, RANKS, victim);
        process_expect(&r, ml_arena_format(room->arena, "of rank %d differs from rank %d's", victim,
                                           victim == 0));
    }
}
