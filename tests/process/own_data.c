/* m.train with examples of a script's own: every layout trains on the same ones. */
#include <string.h>

#include "tests/process/support.h"

static const char *const layouts[] = {
    "-n 2 --mesh dp=2 %s rows=4,4",
    "-n 2 --mesh pp=2 %s accum=2 rows=8,8",
    "-n 2 --mesh dp=2 %s rows=4,4 zero=true accum=2",
    "-n 2 --mesh tp=2 %s rows=8,8",
    "-n 2 --mesh cp=2 %s accum=4 rows=8,8",
    "-n 4 --mesh dp=4 %s rows=2,2,2,2 fsdp=true",
    "-n 4 --mesh pp=4 %s rows=8,0,0,8",
    "-n 4 --mesh pp=2,dp=2 %s rows=4,4,4,4 schedule=zero-bubble",
    "-n 8 --mesh pp=2,dp=2,tp=2 %s rows=4,4,4,4,4,4,4,4 accum=2 schedule=interleaved",
};

static void compare(process_room *room, int first, int count) {
    const char *script = "\"$ROOT\"/tests/lua/lib/own_data.lua steps=8";
    process_result one = process_run(room, 0, "", "run --device cpu --quiet %s", script);
    for (int i = first; i < first + count; i++) {
        ml_text command = {.arena = room->arena};
        ml_text_add(&command, layouts[i], script);
        process_result r = process_run(room, 0, "", "run --device cpu --quiet %s", command.text);
        process_compare_lines(r.output, one.output, layouts[i]);
    }
}

DIST_TEST(own_data) {
    compare(room, 0, 2);
}

/* A run that continues in another layout asks for the examples that follow, and for no others. */
DIST_TEST(own_data_resumed) {
    const char *script = "\"$ROOT\"/tests/lua/lib/own_data.lua steps=8 save_every=4";
    process_result whole =
        process_run(room, 0, "", "run --device cpu --quiet --out run %s", script);
    process_shell(room, 0, "rm -r run/checkpoints/step-00000008");
    process_result rest = process_shell(room, 0,
                                        "\"$MLUA\" run --device cpu --quiet -n 2 --mesh dp=2 --out "
                                        "run --resume %s accum=2 rows=4,4 done=4 "
                                        "2>/dev/null",
                                        script);
    process_compare_lines(rest.output, strstr(whole.output, "step 5 "), "resumed");
}

/* What a loss returns beside its sum and count, of the default data too: in --json, metrics.jsonl,
 * on_step and the result. */
PROCESS_TEST(extra_results) {
    process_write(
        room, "extra.lua",
        "local m = require 'mlua'\n"
        "local A = m.axes { vocab = 256, embed = 4, seq = 4, batch = 4 }\n"
        "local Model = m.module('Model', function(self) self.table = m.param { A.vocab, A.embed } "
        "end)\n"
        "function Model:forward(t) return self.table:gather(t, 'vocab'):dot(self.table, 'embed') "
        "end\n"
        "local model, seen = Model(), 0\n"
        "local r = m.train { model = model, batch = A.batch, seq = A.seq, steps = 2, eval_every = "
        "2, accum = 2,\n"
        "  loss = function(tokens, targets)\n"
        "    local sum, count = m.cross_entropy(model(tokens), targets)\n"
        "    return sum, count, { double = { 2 * sum, count }, none = { 0 * sum, 0 } }\n"
        "  end,\n"
        "  on_step = function(_, out) seen = seen + math.abs(out.double - 2 * out.loss) end }\n"
        "assert(seen < 1e-4 and math.abs(r.double - 2 * r.loss) < 1e-4)\n"
        "assert(math.abs(r.eval_double - 2 * r.eval_loss) < 1e-4 and r.none ~= r.none)\n");
    process_result r =
        process_shell(room, 0,
                      "\"$MLUA\" run --device cpu --json --out run extra.lua >json; "
                      "for f in json run/metrics.jsonl; do grep -c '\"double\":[0-9.]*,' $f; "
                      "grep -c '\"none\":null' $f; grep -c '\"eval_double\":1' $f; done");
    process_expect(&r, "2\n2\n1\n2\n2\n1\n");
}

static void every_layout(process_room *room) {
    compare(room, 0, (int)(sizeof layouts / sizeof *layouts));
}

TEST(long, own_data) {
    process_in_room(every_layout);
}
