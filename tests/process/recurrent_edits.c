/* Changes of one line of recurrent models: the scan stays in chunks, or the report says why not. */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

typedef struct {
    const char *model, *settings, *edit, *expected;
} change;

#define CHUNKS "scan over seq   products over "
#define LOOP "scan over seq   loop over 64 positions"

static const change changes[] = {
    /* a second decay: a number a head, or one for each channel of the keys */
    {"mamba", "", "s/s.S \\* m.exp(-t.dt/s.S * m.sigmoid(t.dt) * m.exp(-t.dt/", CHUNKS},
    {"mamba", "", "s/s.S \\*/s.S * m.outer(m.sigmoid(t.B), t.dt) */", CHUNKS},
    {"deltanet", "", "s/s.S \\* t.decay/s.S * t.decay * m.sigmoid(t.beta)/", CHUNKS},
    {"deltanet", "", "s/s.S \\* t.decay/s.S * m.outer(m.sigmoid(t.q), t.decay)/", CHUNKS},
    {"deltanet", "decay_per=key", "s/s.S \\* t.decay/s.S * t.decay * m.sigmoid(t.beta)/", CHUNKS},
    {"rwkv", "", "s/s.S \\* t.w /s.S * t.w * m.sigmoid(t.a) /", CHUNKS},
    {"hybrid", "pattern=D", "s/s.S \\* t.decay/s.S * t.decay * m.sigmoid(t.beta)/", CHUNKS},
    {"hybrid", "pattern=M", "s/s.S \\* m.exp/s.S * m.sigmoid(t.dt) * m.exp/", CHUNKS},
    /* a different gate of what comes in */
    {"mamba", "", "s/m.outer(t.B, t.x)$/m.outer(t.B * m.sigmoid(t.C), m.tanh(t.x))/", CHUNKS},
    {"deltanet", "", "s/(t.v - S:dot/(m.silu(t.v) - m.sigmoid(t.beta) * S:dot/", CHUNKS},
    {"deltanet", "decay_per=key", "s/(t.v - S:dot/(m.silu(t.v) - S:dot/", CHUNKS},
    {"rwkv", "", "s/m.outer(t.k, t.v)$/m.outer(t.k, m.sigmoid(t.v))/", CHUNKS},
    {"hybrid", "pattern=M", "s/m.outer(t.B, t.u)$/m.outer(t.B, m.tanh(t.u))/", CHUNKS},
    {"hybrid", "pattern=D", "s/(t.v - S:dot/(m.silu(t.v) - S:dot/", CHUNKS},
    /* a normalised key */
    {"mamba", "", "s/m.outer(t.B, t.x)$/m.outer(m.l2_norm(t.B, \"state\"), t.x)/", CHUNKS},
    {"deltanet", "", "s/S:dot(t.k,/S:dot(m.l2_norm(t.k, \"key_dim\"),/", CHUNKS},
    {"rwkv", "", "s/m.outer(t.k, t.v)$/m.outer(m.l2_norm(t.k, \"key\"), t.v)/", CHUNKS},
    {"hybrid", "pattern=D", "s/S:dot(t.k,/S:dot(m.l2_norm(t.k, \"key_dim\"),/", CHUNKS},
    /* another replacement: RWKV-7's beside the delta rule, two delta rules */
    {"rwkv", "", "s/m.outer(t.k, t.v)$/m.outer(t.k, t.v - s.S:dot(t.k, \"key\"))/", CHUNKS},
    {"deltanet", "", "s/^    S = S + /    S = S + m.outer(t.q, t.v - S:dot(t.q, \"key_dim\")) + /",
     CHUNKS},
    /* what no chunks have */
    {"mamba", "", "s/return { S = S }/return { S = m.tanh(S) }/", "no chunks: tanh of a state"},
    {"mamba", "", "s/m.exp(-t.dt.*read()))/m.sigmoid(s.S)/", "no chunks: sigmoid of a state"},
    {"deltanet", "", "s/t.beta \\* (\\(.*\\)))$/t.beta * m.tanh(\\1))/",
     "no chunks: tanh of a state"},
    {"deltanet", "", "s/return { S = S }/return { S = S * S }/", "no chunks: mul of a state"},
    {"rwkv", "", "s/return { S = S }/return { S = m.tanh(S) }/", "no chunks: tanh of a state"},
    {"hybrid", "pattern=D", "s/return { S = S }/return { S = m.tanh(S) }/", "no chunks: tanh of"},
};

PROCESS_TEST(changed_recurrences) {
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        const change *c = &changes[i];
        process_shell(room, 0,
                      "sed '%s' \"$ROOT/models/%s.lua\" >changed.lua && "
                      "! cmp -s changed.lua \"$ROOT/models/%s.lua\"",
                      c->edit, c->model, c->model);
        process_result r = process_run(room, 0, "",
                                       "check --device cpu changed.lua preset=demo layers=1 seq=64 "
                                       "batch=2 %s",
                                       c->settings);
        process_expect(&r, c->expected);
        if (strcmp(c->expected, CHUNKS) != 0) {
            process_expect(&r, LOOP);
            process_expect(&r, "is not linear in it   changed.lua:");
        }
    }
}

/* Kernels to compile of a stack of so many layers, each with an LSTM and a gated delta rule. */
static double to_compile(process_room *room, int layers) {
    static const char script[] =
        "local m = require 'mlua'\n"
        "local A = m.axes { batch = 2, seq = 64, h = 8, e = 8, k = 4, v = 8 }\n"
        "local Layer = m.module('Layer', function(self)\n"
        "  self.W, self.K = m.param { A.e, A.h }, m.param { A.h, A.k }\n"
        "end)\n"
        "function Layer:forward(x)\n"
        "  local y = m.scan(function(s, t)\n"
        "    local new = m.tanh(s:rename('h', 'e'):dot(self.W, 'e') + t)\n"
        "    return new, new\n"
        "  end, { axis = 'seq', state = m.zeros { A.batch, A.h }, inputs = x })\n"
        "  local z = m.scan(function(S, t)\n"
        "    S = S * 0.9\n"
        "    S = S + m.outer(t.k, t.v - S:dot(t.k, 'k'))\n"
        "    return S, S:dot(t.k, 'k')\n"
        "  end, { axis = 'seq', state = m.zeros { A.batch, A.k, A.v },\n"
        "         inputs = { k = x:dot(self.K, 'h'), v = x:rename('h', 'v') } })\n"
        "  return x + y + z:rename('v', 'h')\n"
        "end\n"
        "local layers = m.stack(%d, Layer)\n"
        "m.compile(function(i)\n"
        "  local x = i.x\n"
        "  for _, layer in ipairs(layers) do x = layer(x) end\n"
        "  return { g = m.grad((x * x):sum(), { i.x })[1] }\n"
        "end, { x = { A.batch, A.seq, A.h } })\n";
    process_write(room, "stack.lua", ml_arena_format(room->arena, script, layers));
    process_result r = process_run(room, 0, "", "check --device cpu stack.lua");
    const char *at = strstr(r.output, " kernels (");
    EXPECT(at != NULL, "the report counts kernels: %s", r.output);
    return at ? strtod(at + strlen(" kernels ("), NULL) : 0;
}

PROCESS_TEST(bodies_of_a_stack_compile_once) {
    const double three = to_compile(room, 3);
    CHECK(three > 0);
    CHECK_NEAR(to_compile(room, 9), three, 0);
}
