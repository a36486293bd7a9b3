/* What must not change what is learned: repeating, threads, fusion, accumulation; and what must. */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

enum { STEPS = 5 };

static const char gpt[] =
    "\"$ROOT\"/models/gpt.lua layers=2 embed=64 heads=4 seq=64 batch=8 sample=0 warmup=1 lr=3e-3";
static const char llama[] = "\"$ROOT\"/models/llama.lua layers=2 embed=64 heads=4 kv_heads=2 ffn=96"
                            " seq=64 batch=8 sample=0 warmup=1 lr=3e-3";

static char *with(process_room *room, const char *model, const char *more) {
    return ml_arena_format(room->arena, "%s %s", model, more);
}

static void check_repeatable(process_room *room, const char *model) {
    process_step *first = process_train(room, STEPS, "", model);
    double start = strtod(first[0].loss, NULL), end = strtod(first[STEPS - 1].loss, NULL);
    CHECK_NEAR(start, 5.545, 0.05); /* log 256 */
    CHECK(end < start);
    process_compare(process_train(room, STEPS, "", model), first, STEPS, 0, "again");
    /* Whatever the threads are, the same sums are added in the same order. */
    for (int threads = 1; threads <= 3; threads++)
        process_compare(process_train(room, STEPS,
                                      ml_arena_format(room->arena, "MLUA_THREADS=%d", threads),
                                      model),
                        first, STEPS, 0, "another number of threads");
    process_compare(process_train(room, STEPS, "MLUA_BLAS=0", model), first, STEPS, 1e-5,
                    "built-in products");
    process_compare(process_train(room, STEPS, "MLUA_NOFUSE=1", model), first, STEPS, 1e-5,
                    "unfused");
    process_compare(process_train(room, STEPS, "", with(room, model, "accum=4")), first, STEPS,
                    1e-5, "in 4 microbatches");
    process_step *other = process_train(room, STEPS, "", with(room, model, "seed=2"));
    CHECK(strcmp(other[0].loss, first[0].loss) != 0);
    CHECK(strcmp(other[0].grad_norm, first[0].grad_norm) != 0);
}

PROCESS_TEST(gpt_is_repeatable) {
    check_repeatable(room, gpt);
}

PROCESS_TEST(llama_is_repeatable) {
    check_repeatable(room, llama);
}

/* Dropout draws from the same counter generator: the same bits again, others with another seed. */
PROCESS_TEST(dropout_is_repeatable) {
    char *model = with(room, gpt, "dropout=0.2");
    process_step *first = process_train(room, STEPS, "", model);
    process_step *plain = process_train(room, STEPS, "", gpt);
    process_compare(process_train(room, STEPS, "MLUA_THREADS=1", model), first, STEPS, 0, "again");
    process_compare(process_train(room, STEPS, "MLUA_NOFUSE=1", model), first, STEPS, 1e-5,
                    "unfused");
    CHECK(strcmp(plain[0].loss, first[0].loss) != 0);
}

/* Nor does it depend on what a step is cut into, which pipeline stages do by themselves. */
PROCESS_TEST(dropout_of_microbatches) {
    char *model = with(room, gpt, "dropout=0.2");
    process_step *first = process_train(room, STEPS, "", model);
    process_compare(process_train(room, STEPS, "", with(room, model, "accum=4")), first, STEPS,
                    1e-5, "in 4 microbatches");
    process_compare(
        process_train(room, STEPS, "", with(room, model, "accum=2 -n 4 --mesh pp=2,dp=2")), first,
        STEPS, 1e-5, "in 2 microbatches, pp=2,dp=2");
}

/* The mean of an added loss over microbatches is that over the batch where they count alike; else
 * that is reported. */
PROCESS_TEST(uneven_microbatches) {
    static const char *const words[] = {"masked=true", "accum=4", "accum=4 masked=true"};
    process_write(room, "added.lua",
                  "local m = require 'mlua'\n"
                  "local cfg = m.config { masked = false, accum = 1 }\n"
                  "local A = m.axes { batch = 8, seq = 8, embed = 16, vocab = 256 }\n"
                  "local w = m.param { A.vocab, A.embed }\n"
                  "local Net = m.module('Net', function(self) self.w = w end)\n"
                  "function Net:forward(tokens)\n"
                  "  local x = w:gather(tokens, 'vocab')\n"
                  "  m.add_loss((x * x):sum(), x:size 'batch')\n"
                  "  return x:dot(w, 'embed')\n"
                  "end\n"
                  "local net = Net()\n"
                  "m.train { model = net, batch = A.batch, seq = A.seq, steps = 3,\n"
                  "  loss = function(tokens, targets)\n"
                  "    if cfg.masked then targets = m.where(m.lt(tokens, 100), targets, -1) end\n"
                  "    return m.cross_entropy(net(tokens), targets)\n"
                  "  end }\n");
    for (int i = 0; i < 3; i++) {
        process_result r = process_run(room, 0, "", "run --device cpu added.lua %s", words[i]);
        const char *reported = strstr(r.output, "counts more positions in some of a step's 4");
        CHECK_EQ_INT(reported != NULL, i == 2);
        CHECK(!reported || !strstr(reported + 1, "counts more positions"));
    }
}

/* A file of text, and one of 16-bit tokens that hold the same, train alike. */
PROCESS_TEST(text_and_token_files) {
    process_write(room, "write.lua",
                  "local text = {}\n"
                  "for i = 1, 3000 do text[i] = ('%d is not %d, '):format(i, i * i % 97) end\n"
                  "text = table.concat(text)\n"
                  "local file = assert(io.open('book.txt', 'wb'))\n"
                  "file:write(text)\n"
                  "file:close()\n"
                  "file = assert(io.open('book.bin', 'wb'))\n"
                  "file:write((text:gsub('.', '%0\\0')))\n"
                  "file:close()\n");
    process_run(room, 0, "", "run --device cpu write.lua");
    process_step *text = process_train(room, STEPS, "", with(room, gpt, "data=book.txt"));
    process_step *tokens = process_train(room, STEPS, "", with(room, gpt, "data=./book.bin"));
    process_step *other = process_train(room, STEPS, "", gpt);
    process_compare(tokens, text, STEPS, 0, "16-bit tokens");
    CHECK(strcmp(other[0].loss, text[0].loss) != 0);
    process_result r = process_run(room, 1, "", "run --device cpu %s data=book.bin vocab=100", gpt);
    process_expect(&r, "is not below vocab=100");
}

static const char eval_script[] =
    "local m = require 'mlua'\n"
    "local cfg = m.config { data = 'text' }\n"
    "local A = m.axes { vocab = 256, embed = 32, seq = 32, batch = 8 }\n"
    "local Bigram = m.module('Bigram', function(self)\n"
    "  self.table, self.out = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }\n"
    "end)\n"
    "function Bigram:forward(tokens) return self.table:gather(tokens, 'vocab'):dot(self.out, "
    "'embed') end\n"
    "local r = m.train { model = Bigram(), batch = A.batch, seq = A.seq, vocab = 256, steps = 20,\n"
    "  data = cfg.data, eval_every = 8, optimizer = m.adamw { lr = 0.02 }, seed = 3 }\n"
    "print('last', r.eval_loss)\n";

/* Of steps 8, 16 and 20, as eval.lua prints them. */
static char *evaluate(process_room *room, const char *arguments, double losses[3]) {
    process_result r = process_run(room, 0, "", "run --device cpu --json eval.lua %s", arguments);
    const char *line = r.output;
    for (int i = 0; i < 3; i++) {
        int step = i < 2 ? 8 * (i + 1) : 20;
        line = strstr(line, ml_arena_format(room->arena, "{\"step\":%d,\"eval_loss\":", step));
        REQUIRE(line != NULL);
        losses[i] = strtod(strstr(line, "loss\":") + 6, NULL);
    }
    return r.output;
}

/* The evaluation loss falls, is printed every 8 steps and at the end, and is that of other data
 * than what the steps see: it stays where the text's last tenth is of letters that the rest lacks.
 */
PROCESS_TEST(evaluation) {
    double losses[3], others[3];
    process_write_text(room);
    process_write(room, "eval.lua", eval_script);
    const char *last = strstr(evaluate(room, "", losses), "last\t");
    REQUIRE(last != NULL);
    CHECK_NEAR(strtod(last + 5, NULL), losses[2], 1e-12);
    CHECK(losses[0] < 5.4 && losses[1] < losses[0] && losses[2] < losses[1]);
    process_result again = process_run(room, 0, "MLUA_THREADS=1", "run --device cpu eval.lua");
    process_expect(&again, ml_arena_copy(room->arena, last, strcspn(last, "\n")));

    process_write(room, "write.lua",
                  "local f <close> = assert(io.open('parts', 'w'))\n"
                  "f:write(('begin'):rep(3600), ('THE ENDS.'):rep(222), 'E.')\n");
    process_run(room, 0, "", "run --device cpu write.lua");
    evaluate(room, "data=parts", others);
    for (int i = 0; i < 3; i++) CHECK_NEAR(others[i], 5.545, 0.01); /* log 256 */
}

/* A trained model continues a text that it has learned by heart: windows of 35 begin at each of its
 * 24 letters. */
PROCESS_TEST(generation) {
    process_write(room, "book.lua",
                  "local f = assert(io.open('book.txt', 'w'))\n"
                  "f:write(('the cat sat on the mat. '):rep(400))\n"
                  "f:close()\n");
    process_run(room, 0, "", "run --device cpu book.lua");
    process_write(
        room, "learn.lua",
        "local m = require 'mlua'\n"
        "local train, generate = m.train, m.generate\n"
        "local model\n"
        "function m.train(o) model = o; return train(o) end\n"
        "function m.generate(net, o)\n"
        "  local _, text = generate(net, { prompt = 'the cat sat', tokens = 60, seq = o.seq,\n"
        "    temperature = 0, quiet = true })\n"
        "  print('greedy:' .. text)\n"
        "  for seed = 1, 2 do\n"
        "    local first, drawn = generate(net, { prompt = 'a', tokens = 20, seq = o.seq, seed = "
        "seed, quiet = true })\n"
        "    local second, same = generate(net, { prompt = 'a', tokens = 20, seq = o.seq, seed = "
        "seed, quiet = true })\n"
        "    assert(drawn == same and #first == 21)\n"
        "  end\n"
        "end\n"
        "dofile(os.getenv 'ROOT' .. '/models/gpt.lua')\n");
    process_result r = process_run(room, 0, "",
                                   "run --device cpu learn.lua layers=1 embed=64 heads=2 seq=35"
                                   " batch=16 steps=200 lr=0.005 data=book.txt sample=1");
    process_expect(&r, "greedy: on the mat. the cat sat on the mat. the cat sat on the ma");
}

/* MLUA_CHECK compares every step with the reference: in bf16 kernels round less than it does. */
PROCESS_TEST(checked_training) {
    static const char *const models[] = {"gpt", "llama", "gpt_moe"};
    for (int i = 0; i < 6; i++) {
        const char *dtype = i % 2 ? "bf16" : "f32";
        process_write(room, "checked.lua",
                      ml_arena_format(room->arena,
                                      "require('mlua').compute_dtype '%s'\n"
                                      "dofile(os.getenv 'ROOT' .. '/models/%s.lua')\n",
                                      dtype, models[i / 2]));
        process_result r = process_run(room, 0, "MLUA_CHECK=cpu",
                                       "run --device cpu checked.lua layers=1 embed=32 heads=2"
                                       " ffn=48 seq=20 batch=3 steps=2 sample=0");
        process_expect(&r, "step 2/2");
    }
}

/* Seeds of draws have more bits than doubles hold, in which the reference gets what steps read. */
PROCESS_TEST(checked_draws) {
    process_write(room, "draws.lua",
                  "local m, Decoder = require 'mlua', require 'mlua.decode'\n"
                  "local A = m.axes { embed = 8, vocab = 16, seq = 16 }\n"
                  "local words = m.param { name = 'words', A.vocab, A.embed }\n"
                  "local function model(ids)\n"
                  "  return words:gather(ids, 'vocab'):dot(words, 'embed')\n"
                  "end\n"
                  "local d = Decoder.new(model, { seq = A.seq, slots = 1 })\n"
                  "local s = d:open({ 1, 2 }, { temperature = 1, seed = 7 })\n"
                  "for _ = 1, 4 do d:step { s } end\n"
                  "print('drew ' .. #s.ids)\n");
    process_result r = process_run(room, 0, "MLUA_CHECK=cpu", "run --device cpu draws.lua");
    process_expect(&r, "drew 6");
}

/* Both gradients of tied embeddings are added to the sum of microbatches where it is, and all sums
 * begin in one launch. */
PROCESS_TEST(sums_over_microbatches_in_place) {
    process_result r = process_run(room, 0, "MLUA_DEBUG=3",
                                   "check --device h200 $ROOT/models/llama.lua layers=1 embed=64"
                                   " heads=2 kv_heads=2 ffn=96 seq=64 batch=4 accum=2 sample=0");
    const char *step = strstr(r.output, "kernel scatter_add of ");
    REQUIRE(step != NULL);
    const char *end = strchr(step, '\n'), *writes = strstr(step, ", writes ");
    REQUIRE(writes != NULL && writes < end);
    const char *state = strstr(writes, " in state ");
    CHECK(state != NULL && state < end);
    const char *begin = strstr(r.output, "kernel reset of ");
    REQUIRE(begin != NULL);
    CHECK(strstr(begin + 1, "kernel reset of ") == NULL);
    CHECK(begin < strstr(r.output, "accumulate"));
}
