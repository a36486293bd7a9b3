/* Where a run's data come from: files that change, seeds, and trainings one after another. */
#include <math.h>
#include <string.h>

#include "tests/process/support.h"

#define MODEL                                                                                      \
    "local m = require 'mlua'\n"                                                                   \
    "local A = m.axes { vocab = 256, embed = 8, seq = 16, batch = 4 }\n"                           \
    "local Model = m.module('Model', function(self) self.t = m.param { A.vocab, A.embed } end)\n"  \
    "function Model:forward(tokens)\n"                                                             \
    "  return self.t:gather(tokens, 'vocab'):dot(self.t, 'embed')\n"                               \
    "end\n"

/* A file that another process shortens is an error soon after, with the script's line: what was
 * read ahead by then is used. */
PROCESS_TEST(data_shortened_while_training) {
    process_write(room, "short.lua",
                  MODEL "local file = io.open('book.txt', 'w')\n"
                        "file:write(('a word or two '):rep(1000))\n"
                        "file:close()\n"
                        "m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 50,\n"
                        "  data = 'book.txt', on_step = function(step)\n"
                        "    if step == 2 then os.execute('truncate -s 20 book.txt') end\n"
                        "  end }\n");
    process_result r = process_run(room, 1, "", "run --device cpu --json short.lua");
    process_expect(&r, "short.lua:10: book.txt ends before byte ");
    process_expect(&r, ": it was 14000 bytes long when it was opened, and was shortened since");
    CHECK(strstr(r.output, "\"step\":2") && !strstr(r.output, "\"step\":20"));
}

/* Opening a pipe does not wait for a writer, and a signal ends a run at any time. */
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

/* What a loss draws is a sample's own, in training and in evaluation, whatever holds the sample. */
PROCESS_TEST(masks_under_layouts) {
    static const char *const words[] = {"", "accum=2", "-n 2 --mesh dp=2", "-n 2 --mesh pp=2",
                                        "-n 2 --mesh tp=2"};
    double loss[5], evaluation[5];
    process_write(
        room, "masked.lua",
        "local m = require 'mlua'\n"
        "local cfg = m.config { accum = 1, data = 'text' }\n"
        "local A = m.axes { embed = 8, vocab = 256, seq = 16, batch = 8, ffn = 16 }\n"
        "local Block = m.module('Block', function(self)\n"
        "  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }\n"
        "end)\n"
        "function Block:forward(x)\n"
        "  return x + m.gelu(x:dot(self.up, 'embed')):dot(self.down, 'ffn')\n"
        "end\n"
        "local Net = m.module('Net', function(self)\n"
        "  self.table, self.blocks = m.param { A.vocab, A.embed }, m.stack(4, Block)\n"
        "end)\n"
        "function Net:forward(tokens)\n"
        "  local x = self.table:gather(tokens, 'vocab')\n"
        "  for _, block in ipairs(self.blocks) do x = block(x) end\n"
        "  return x:dot(self.table, 'embed')\n"
        "end\n"
        "local net = Net()\n"
        "local r = m.train { model = net, batch = A.batch, seq = A.seq, steps = 3, eval_every = "
        "2,\n"
        "  eval_batches = 2, optimizer = m.adamw { lr = 0.01 }, layout = m.layout.megatron {},\n"
        "  loss = function(tokens, targets)\n"
        "    local hidden = m.random_mask(m.axes_of(tokens), 0.3)\n"
        "    return m.cross_entropy(net(m.where(hidden, 0, tokens)), m.where(hidden, targets, "
        "-1))\n"
        "  end }\n"
        "if m.rank() == 0 then print(('loss %.9f evaluation %.9f'):format(r.loss, r.eval_loss)) "
        "end\n");
    process_write_text(room);
    for (int i = 0; i < 5; i++) {
        process_result r =
            process_run(room, 0, "", "run --device cpu --quiet masked.lua %s", words[i]);
        const char *last = strstr(r.output, "loss 5");
        loss[i] = process_number(last, "loss ");
        evaluation[i] = process_number(last, "evaluation ");
        CHECK_NEAR(loss[i], loss[0], 1e-6);
        CHECK_NEAR(evaluation[i], evaluation[0], 1e-6);
    }
}

/* eval_data= is all that evaluations use, from the command line too; tokenizer= makes tokens. */
PROCESS_TEST(data_for_evaluation) {
    process_write(
        room, "eval.lua",
        MODEL
        "local r = m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 3,\n"
        "  eval_every = 3, eval_batches = 3, data = 'text', optimizer = m.sgd { lr = 0 } }\n"
        "if r.loss then print(('loss %.9f evaluation %.9f'):format(r.loss, r.eval_loss)) end\n");
    process_write_text(room);
    process_shell(room, 0, "printf '{\"text\":\"%%s\"}\\n' $(yes aaaa | head -99) > a.jsonl");
    process_shell(room, 0, "yes 'aaaa' | head -99 > a.txt");
    static const char *const words[] = {"", "eval_data=a.txt", "eval_data=a.jsonl tokenizer=bytes",
                                        "data=a.txt eval_data=text"};
    double loss[4], evaluation[4];
    for (int i = 0; i < 4; i++) {
        process_result r =
            process_run(room, 0, "", "run --device cpu --quiet eval.lua %s", words[i]);
        loss[i] = process_number(r.output, "loss ");
        evaluation[i] = process_number(r.output, "evaluation ");
    }
    CHECK_NEAR(evaluation[1], evaluation[2], 1e-7);
    CHECK(evaluation[0] != evaluation[1] && loss[0] != loss[3] && evaluation[3] != evaluation[0]);
}

/* Documents are each sample's own, whatever holds the sample. */
PROCESS_TEST(documents_under_layouts) {
    /* The first two ranks want the same tokens made. */
    static const char *const words[] = {
        "pack=concat -n 2 --mesh dp=2",
        "",
        "accum=2",
        "-n 2 --mesh dp=2",
        "-n 2 --mesh pp=2",
        "-n 2 --mesh cp=2",
        "accum=8 -n 2 --mesh cp=2 --layout cp=dynamic,cp_tokens=8",
        "accum=4 -n 4 --mesh dp=2,cp=2 --layout cp=dynamic,zero=true,cp_tokens=8"};
    enum { COUNT = sizeof words / sizeof *words };
    double loss[COUNT], evaluation[COUNT];
    process_write(
        room, "packed.lua",
        "local m = require 'mlua'\n"
        "local cfg = m.config { accum = 1, data = 'text.jsonl', pack = 'document' }\n"
        "local A = m.axes { embed = 8, heads = 2, head_dim = 4, vocab = 256, seq = 16, batch = 8 "
        "}\n"
        "local Block = m.module('Block', function(self)\n"
        "  self.wq = m.param { A.embed, A.heads, A.head_dim, init = 0.7 }\n"
        "  self.wo = m.param { A.heads, A.head_dim, A.embed, init = 0.7 }\n"
        "end)\n"
        "function Block:forward(x)\n"
        "  local q = m.rope(x:dot(self.wq, 'embed'))\n"
        "  return x + m.attention(q, q, q, { causal = true }):dot(self.wo, 'heads', 'head_dim')\n"
        "end\n"
        "local Net = m.module('Net', function(self)\n"
        "  self.table = m.param { A.vocab, A.embed, init = 0.7 }\n"
        "  self.blocks = m.stack(2, Block)\n"
        "end)\n"
        "function Net:forward(tokens)\n"
        "  local x = self.table:gather(tokens, 'vocab')\n"
        "  for _, block in ipairs(self.blocks) do x = block(x) end\n"
        "  return x:dot(self.table, 'embed')\n"
        "end\n"
        "local r = m.train { model = Net(), batch = A.batch, seq = A.seq, steps = 2, eval_every = "
        "2,\n"
        "  eval_batches = 2, pack = cfg.pack, layout = m.layout.megatron {} }\n"
        "if m.rank() == 0 then print(('loss %.9f evaluation %.9f'):format(r.loss, r.eval_loss)) "
        "end\n");
    process_shell(room, 0,
                  "i=0; while [ $i -lt 200 ]; do i=$((i+1)); "
                  "printf '{\"text\":\"%%s\"}\\n' \"word $((i * 7919 %% 1000)) of $i\"; "
                  "done > text.jsonl");
    for (int i = 0; i < COUNT; i++) {
        process_result r =
            process_run(room, 0, "", "run --device cpu --quiet packed.lua %s", words[i]);
        loss[i] = process_number(strstr(r.output, "loss "), "loss ");
        evaluation[i] = process_number(strstr(r.output, "evaluation "), "evaluation ");
        if (i > 0) CHECK_NEAR(loss[i], loss[1], 1e-5);
        if (i > 0) CHECK_NEAR(evaluation[i], evaluation[1], 1e-5);
    }
    CHECK(fabs(loss[0] - loss[1]) > 1e-2);
}

/* The share that evaluations take decides which samples training sees. */
PROCESS_TEST(data_of_a_run_that_continues) {
    process_write(room, "go.lua",
                  MODEL "local cfg = m.config { steps = 1, data = 'text' }\n"
                        "m.train { model = Model(), batch = A.batch, seq = A.seq }\n");
    process_write_text(room);
    process_run(room, 0, "", "run --device cpu --quiet go.lua --out kept");
    process_run(room, 0, "", "run --device cpu --quiet go.lua steps=2 --out kept --resume");
    process_result r = process_run(
        room, 1, "", "run --device cpu --quiet go.lua steps=3 eval_every=1 --out kept --resume");
    process_expect(
        &r, "the run's data are others than before: training uses 0.9 of them, and used 1\n");
    process_run(room, 0, "",
                "run --device cpu --quiet go.lua steps=3 eval_every=1 eval_data=go.lua "
                "--out kept --resume");
    process_shell(room, 0, "echo '-- more' >> go.lua");
    r = process_run(room, 0, "",
                    "run --device cpu --quiet go.lua steps=4 eval_every=1 eval_data=go.lua "
                    "--out kept --resume");
    process_expect(&r, "eval_data are others than before: go.lua of ");
}
