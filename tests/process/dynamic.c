/* Dynamic context parallelism against one rank, over many drawn batches of lengths. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

/* Trains by plain SGD without clipping, so that a wrong gradient moves all that follows; prints
 * each step's loss and norm, and the sum and norm of all weights in the end. */
static const char SCRIPT[] =
    "local m = require 'mlua'\n"
    "local cfg = m.config { accum = 1, steps = 150, data = 'text.jsonl', pack = 'document', seed = "
    "1 }\n"
    "local A = m.axes { embed = 16, heads = 4, head_dim = 4, ffn = 32, vocab = 64, seq = 64, batch "
    "= 8 }\n"
    "local Block = m.module('Block', function(self)\n"
    "  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, "
    "A.head_dim }\n"
    "  self.wv, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, "
    "A.embed }\n"
    "  self.norm, self.up, self.down = m.rms_norm { A.embed }, m.param { A.embed, A.ffn }, m.param "
    "{ A.ffn, A.embed }\n"
    "end)\n"
    "function Block:forward(x)\n"
    "  local h = self.norm(x)\n"
    "  local q, k, v = h:dot(self.wq, 'embed'), h:dot(self.wk, 'embed'), h:dot(self.wv, 'embed')\n"
    "  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, 'heads', "
    "'head_dim')\n"
    "  return x + m.silu(x:dot(self.up, 'embed')):dot(self.down, 'ffn')\n"
    "end\n"
    "local Net = m.module('Net', function(self)\n"
    "  self.table, self.blocks = m.param { A.vocab, A.embed, init = 0.5 }, m.stack(2, Block)\n"
    "end)\n"
    "function Net:forward(tokens)\n"
    "  local x = self.table:gather(tokens, 'vocab')\n"
    "  for _, block in ipairs(self.blocks) do x = block(x) end\n"
    "  return x:dot(self.table, 'embed')\n"
    "end\n"
    "local net = Net()\n"
    "m.train { model = net, batch = A.batch, seq = A.seq, steps = cfg.steps, accum = cfg.accum, "
    "seed = cfg.seed, clip = 0,\n"
    "  pack = cfg.pack, layout = m.layout.megatron {}, optimizer = m.sgd { lr = 0.02 }, on_step = "
    "function(step, out)\n"
    "    if m.rank() == 0 then print(('step %d %.9g %.9g'):format(step, out.loss, out.grad_norm)) "
    "end\n"
    "  end }\n"
    "local total = m.compile(function()\n"
    "  local sum, square = 0, 0\n"
    "  for _, p in ipairs(m.parameters(net)) do sum, square = sum + p:read():sum(), square + "
    "(p:read() ^ 2):sum() end\n"
    "  return { sum = sum, square = square }\n"
    "end, {})\n"
    "local t = total {}\n"
    "if m.rank() == 0 then print(('step weights %.9g %.9g'):format(t.sum, t.square)) end\n";

/* Lognormal lengths, in JSON lines of letters. */
static void write_documents(process_room *room, unsigned seed) {
    enum { DOCUMENTS = 3000, LONGEST = 150 };
    char *text = ml_arena_alloc(room->arena, DOCUMENTS * (LONGEST + 16)), *at = text;
    for (int i = 0; i < DOCUMENTS; i++) {
        double u = (rand_r(&seed) + 1.0) / (RAND_MAX + 2.0), v = rand_r(&seed) / (double)RAND_MAX;
        double spread = 0.5 + rand_r(&seed) % 3 * 0.5;
        double length = exp(2.5 + spread * sqrt(-2 * log(u)) * cos(2 * M_PI * v));
        int count = length < 1 ? 1 : length > LONGEST ? LONGEST : (int)length;
        at += sprintf(at, "{\"text\":\"");
        for (int k = 0; k < count; k++) *at++ = (char)("0123456789 <=>?"[rand_r(&seed) % 15]);
        at += sprintf(at, "\"}\n");
    }
    process_write(room, "text.jsonl", text);
}

/* Every number of two outputs within 1e-5. */
static void compare(const char *layout, const char *actual, const char *expected) {
    int lines = 0;
    for (;; lines++) {
        actual = strstr(actual, "step "), expected = strstr(expected, "step ");
        if (!actual || !expected) break;
        for (int i = 0; i < 2; i++) {
            char *end[2];
            const char *from[2] = {actual + 5, expected + 5};
            for (int k = 0; k < 2; k++) {
                from[k] += strcspn(from[k], " ");
                if (i) from[k] += 1 + strcspn(from[k] + 1, " ");
            }
            double a = strtod(from[0], &end[0]), b = strtod(from[1], &end[1]);
            EXPECT(fabs(a - b) <= 1e-5 * (1 + fabs(b)), "%s: %g in place of %g in line %d", layout,
                   a, b, lines + 1);
        }
        actual += 5, expected += 5;
    }
    CHECK(!actual && !expected && lines > 1);
}

static void drawn_batches(process_room *room) {
    static const char *const layouts[] = {
        "accum=8 -n 2 --mesh cp=2",
        "accum=4 -n 3 --mesh cp=3",
        "accum=4 -n 4 --mesh dp=2,cp=2 --layout cp=dynamic,context=ring",
        "accum=8 -n 4 --mesh cp=2,tp=2",
        "accum=4 -n 6 --mesh cp=6",
        "accum=8 -n 8 --mesh cp=8 --layout cp=dynamic,zero=true",
        "accum=2 -n 8 --mesh dp=2,cp=2,tp=2"};
    process_write(room, "drawn.lua", SCRIPT);
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++) {
        write_documents(room, (unsigned)i + 1);
        process_result one =
            process_run(room, 0, "", "run --device cpu --quiet drawn.lua seed=%d", i);
        process_result many =
            process_run(room, 0, "", "run --device cpu --quiet drawn.lua seed=%d %s %s", i,
                        layouts[i], strstr(layouts[i], "--layout") ? "" : "--layout cp=dynamic");
        compare(layouts[i], many.output, one.output);
    }
}

TEST(long, dynamic_context_of_1050_drawn_batches) {
    process_in_room(drawn_batches);
}
