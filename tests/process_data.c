/* Where a run's data come from: files that change, seeds, and trainings one after another. */
#include <string.h>

#include "tests/process_support.h"

#define MODEL                                                                                      \
    "local m = require 'mlua'\n"                                                                   \
    "local A = m.axes { vocab = 256, embed = 8, seq = 16, batch = 4 }\n"                           \
    "local Model = m.module('Model', function(self) self.t = m.param { A.vocab, A.embed } end)\n"  \
    "function Model:forward(tokens)\n"                                                             \
    "  return self.t:gather(tokens, 'vocab'):dot(self.t, 'embed')\n"                               \
    "end\n"

/* A file that another process shortens is an error of the next step, with the script's line. */
PROCESS_TEST(data_shortened_while_training) {
    process_write(room, "short.lua",
                  MODEL "local file = io.open('book.txt', 'w')\n"
                        "file:write(('a word or two '):rep(1000))\n"
                        "file:close()\n"
                        "m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 5,\n"
                        "  data = 'book.txt', on_step = function(step)\n"
                        "    if step == 2 then os.execute('truncate -s 20 book.txt') end\n"
                        "  end }\n");
    process_result r = process_run(room, 1, "", "run --device cpu --json short.lua");
    process_expect(&r, "short.lua:10: book.txt ends before byte ");
    process_expect(&r, ": it had 14000 bytes when it was opened, and was shortened since");
    CHECK(strstr(r.output, "\"step\":2") && !strstr(r.output, "\"step\":4"));
}

/* Opening a pipe waits for nobody, and a signal ends a run at any time. */
PROCESS_TEST(data_from_a_pipe) {
    process_write(room, "pipe.lua",
                  MODEL "local cfg = m.config { data = 'pipe' }\n"
                        "m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 5 }\n");
    process_shell(room, 0, "mkfifo pipe");
    process_result r =
        process_shell(room, 1, "timeout -s KILL 60 \"$MLUA\" run --device cpu pipe.lua");
    process_expect(&r, "pipe.lua:8: cannot read data from pipe: it is a pipe\n");
    r = process_shell(room, 1,
                      "cat pipe.lua | timeout -s KILL 60 \"$MLUA\" run --device cpu "
                      "pipe.lua data=/dev/stdin");
    process_expect(&r, "cannot read data from /dev/stdin: it is a pipe\n");
    r = process_shell(room, 0,
                      "timeout -s KILL 60 \"$MLUA\" run --device cpu pipe.lua "
                      "data=/dev/stdin < pipe.lua");
    process_expect(&r, "step 5/5");
}
