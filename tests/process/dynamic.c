/* Dynamic context parallelism against one rank, over many drawn batches of lengths. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

#define TRAIN "run --device cpu --quiet $ROOT/tests/lua/lib/drawn_documents.lua "

/* Lognormal lengths, `times` as long, in JSON lines of letters. */
static void write_longer_documents(process_room *room, unsigned seed, int times) {
    enum { DOCUMENTS = 3000, LONGEST = 150 };
    char *text = ml_arena_alloc(room->arena, (size_t)(DOCUMENTS * (LONGEST * times + 16)));
    char *at = text;
    for (int i = 0; i < DOCUMENTS; i++) {
        double u = (rand_r(&seed) + 1.0) / (RAND_MAX + 2.0), v = rand_r(&seed) / (double)RAND_MAX;
        double spread = 0.5 + rand_r(&seed) % 3 * 0.5;
        double length = exp(2.5 + spread * sqrt(-2 * log(u)) * cos(2 * M_PI * v));
        int count = times * (length < 1 ? 1 : length > LONGEST ? LONGEST : (int)length);
        at += sprintf(at, "{\"text\":\"");
        for (int k = 0; k < count; k++) *at++ = (char)("0123456789 <=>?"[rand_r(&seed) % 15]);
        at += sprintf(at, "\"}\n");
    }
    process_write(room, "text.jsonl", text);
}
static void write_documents(process_room *room, unsigned seed) {
    write_longer_documents(room, seed, 1);
}

static void drawn_batches(process_room *room) {
    static const char *const layouts[] = {
        "accum=8 -n 2 --mesh cp=2",
        "accum=4 -n 3 --mesh cp=3 --layout cp=dynamic,cp_tokens=24",
        "accum=4 -n 4 --mesh dp=2,cp=2 --layout cp=dynamic,cp_tokens=32,context=ring",
        "accum=8 -n 4 --mesh cp=2,tp=2 --layout cp=dynamic,cp_tokens=32",
        "accum=4 -n 6 --mesh cp=6 --layout cp=dynamic,cp_tokens=24",
        "accum=8 -n 8 --mesh cp=8 --layout cp=dynamic,cp_tokens=8,zero=true",
        "accum=2 -n 8 --mesh dp=2,cp=2,tp=2",
        "accum=8 -n 4 --mesh pp=2,cp=2 --layout cp=dynamic,cp_tokens=32,schedule=zero-bubble",
        "accum=4 -n 8 --mesh pp=2,cp=2,tp=2",
        "accum=4 -n 6 --mesh pp=2,dp=3 --layout cp=dynamic,cp_tokens=24,zero=true",
        "accum=4 -n 4 --mesh ep=2,cp=2 --layout cp=dynamic,cp_tokens=32,exchange=1 experts=4 "
        "steps=50",
        "accum=2 -n 8 --mesh pp=2,ep=2,cp=2 --layout cp=dynamic experts=4 steps=50",
        "accum=8 -n 4 --mesh cp=4 --layout cp=dynamic,cp_tokens=16,preset=fsdp",
        "accum=4 -n 8 --mesh pp=2,dp=2,cp=2 --layout cp=dynamic,preset=fsdp",
        "accum=8 -n 4 --mesh cp=4 --layout cp=dynamic,cp_tokens=16 recurrent=true learned=true "
        "steps=50"};
    for (int i = 0; i < (int)(sizeof layouts / sizeof *layouts); i++) {
        const char *settings = strstr(layouts[i], "recurrent");
        if (!settings) settings = strstr(layouts[i], "experts");
        write_documents(room, (unsigned)i + 1);
        process_result one =
            process_run(room, 0, "", TRAIN "seed=%d %s", i, settings ? settings : "");
        process_result many =
            process_run(room, 0, "", TRAIN "seed=%d %s %s", i, layouts[i],
                        strstr(layouts[i], "--layout") ? "" : "--layout cp=dynamic");
        process_compare_steps(layouts[i], many.output, one.output);
    }
}

/* Convolutions and scans begin anew in each document, wherever it is placed. */
PROCESS_TEST(dynamic_context_of_recurrences) {
    write_documents(room, 99);
    process_result one = process_run(room, 0, "", TRAIN "steps=3 recurrent=true");
    process_result many = process_run(room, 0, "",
                                      TRAIN "steps=3 recurrent=true accum=8 -n 2 "
                                            "--mesh cp=2 --layout cp=dynamic,cp_tokens=32");
    process_compare_steps("recurrences", many.output, one.output);
}

/* With ZeRO-1 parameters lie in parts, even or not, which all ranks gather before the first
 * microbatch that any of them computes after an update; also where nothing else is cached. */
PROCESS_TEST(dynamic_context_with_parameters_in_parts) {
    static const char *const layouts[] = {
        "accum=8 -n 4 --mesh cp=4 --layout cp=dynamic,cp_tokens=16,zero=true",
        "accum=4 -n 3 --mesh cp=3 --layout cp=dynamic,cp_tokens=24,zero=true",
        "accum=2 -n 8 --mesh dp=2,cp=2,tp=2 --layout cp=dynamic,cp_tokens=32,zero=true",
        "accum=4 -n 4 --mesh ep=2,cp=2 --layout cp=dynamic,cp_tokens=32,zero=true,exchange=1 "
        "experts=4"};
    for (int i = 0; i < 5; i++) {
        const char *layout = layouts[i % 4], *settings = strstr(layout, "experts");
        write_documents(room, (unsigned)i + 31);
        process_result one =
            process_run(room, 0, "", TRAIN "steps=4 seed=%d %s", i, settings ? settings : "");
        process_result many = process_run(room, 0, i < 4 ? "" : "MLUA_PARAM_CACHE=0",
                                          TRAIN "steps=4 seed=%d %s", i, layout);
        process_compare_steps(layout, many.output, one.output);
    }
}

/* Ranks collect the programs of a training that has ended at other times than one another. */
PROCESS_TEST(dynamic_context_after_another_training) {
    write_documents(room, 41);
    process_write(
        room, "again.lua",
        "local m = require 'mlua'\n"
        "local cfg = m.config { accum = 1 }\n"
        "local A = m.axes { embed = 16, heads = 4, head_dim = 4, vocab = 64, seq = 32, batch = 8 "
        "}\n"
        "local Net = m.module('Net', function(self)\n"
        "  self.table, self.wq = m.param { A.vocab, A.embed, init = 0.5 }, m.param { A.embed, "
        "A.heads, A.head_dim }\n"
        "  self.wo = m.param { A.heads, A.head_dim, A.embed }\n"
        "end)\n"
        "function Net:forward(tokens)\n"
        "  local x = self.table:gather(tokens, 'vocab')\n"
        "  local q = m.rope(x:dot(self.wq, 'embed'))\n"
        "  x = x + m.attention(q, q, q, { causal = true }):dot(self.wo, 'heads', 'head_dim')\n"
        "  return x:dot(self.table, 'embed')\n"
        "end\n"
        "local net = Net()\n"
        "for i = 1, 3 do\n"
        "  local r = m.train { model = net, batch = A.batch, seq = A.seq, accum = cfg.accum, "
        "steps = 2, data = 'text.jsonl', pack = 'document', optimizer = m.sgd { lr = 0.02 }, "
        "eval_every = 1, eval_batches = 1, layout = m.layout.megatron { zero = true } }\n"
        "  if m.rank() == i % 2 then collectgarbage() end\n"
        "  if m.rank() == 0 then\n"
        "    print(('step %d %.9g %.9g'):format(i, r.loss, r.eval_loss))\n"
        "  end\n"
        "end\n");
    process_result one = process_run(room, 0, "", "run --device cpu --quiet again.lua");
    process_result many = process_run(room, 0, "MLUA_TIMEOUT=20",
                                      "run --device cpu --quiet again.lua accum=4 -n 4 --mesh cp=4 "
                                      "--layout cp=dynamic,cp_tokens=8");
    process_compare_steps("three trainings", many.output, one.output);
}

/* Each rank has its parts, and a copy in the dtype of products, which is all that is gathered. */
PROCESS_TEST(dynamic_context_gathers_parameters_as_products_read_them) {
    process_result r = process_run(
        room, 0, "",
        "check --device h200 --json \"$ROOT/models/llama.lua\" layers=2 embed=512 heads=8 "
        "kv_heads=8 ffn=1024 vocab=4096 seq=1024 batch=8 accum=8 pack=document --mesh cp=4 "
        "--layout cp=dynamic,zero=true");
    const double parts = 3.0 / 4, elements = process_number(r.output, "\"parameters\":");
    const char *dp = strstr(r.output, "\"dp\":{");
    const char *gathers = dp ? strstr(dp, "\"all-gather\":{") : NULL;
    CHECK(gathers != NULL);
    const double sent = process_number(gathers, "\"bytes\":"), wanted = 2 * parts * elements;
    EXPECT(sent >= wanted && sent <= 1.01 * wanted, "%.0f bytes are sent, not %.0f", sent, wanted);
}

/* A table over the window's positions is read at those of each document, on rows of any length. */
PROCESS_TEST(dynamic_context_of_learned_positions) {
    write_documents(room, 21);
    process_result one = process_run(room, 0, "", TRAIN "steps=3 learned=true");
    process_result many = process_run(room, 0, "",
                                      TRAIN "steps=3 learned=true accum=8 -n 2 "
                                            "--mesh cp=2 --layout cp=dynamic,cp_tokens=32");
    process_compare_steps("learned positions", many.output, one.output);
}

/* Sums, products and means over positions count what one rank's do, in losses and their results. */
PROCESS_TEST(dynamic_context_of_sums_over_positions) {
    static const char *const layouts[] = {"accum=8 -n 2 --mesh cp=2",
                                          "accum=2 -n 4 --mesh pp=2,cp=2"};
    write_documents(room, 23);
    process_result one = process_run(room, 0, "", TRAIN "steps=3 sums=true");
    for (int i = 0; i < 2; i++) {
        process_result many = process_run(
            room, 0, "", TRAIN "steps=3 sums=true --layout cp=dynamic,cp_tokens=32 %s", layouts[i]);
        process_compare_steps("sums over positions", many.output, one.output);
    }
}

/* The microbatches of a pipeline are of several programs, and their number varies by steps; with
 * two stages a rank in turns it is even. The programs share their stages' buffers: a run takes what
 * a check plans, and its channels. */
PROCESS_TEST(dynamic_context_in_stages) {
#define STAGES "layers=4 accum=4 --mesh pp=2,cp=2 --layout cp=dynamic,schedule=interleaved"
    enum { CHANNELS = 1 << 16 };
    write_documents(room, 5);
    process_result one = process_run(room, 0, "", TRAIN "steps=3 layers=4");
    process_result many = process_run(room, 0, "", TRAIN "steps=3 -n 4 --out run " STAGES);
    process_compare_steps("stages", many.output, one.output);
    process_result line = process_shell(room, 0, "grep memory_gib run/metrics.jsonl | tail -n 1");
    process_result check = process_run(
        room, 0, "", "check --device cpu --json $ROOT/tests/lua/lib/drawn_documents.lua " STAGES);
    double used = process_number(line.output, "\"memory_gib\":") * (1 << 30);
    double plan = process_number(check.output, "\"peak_bytes\":");
    EXPECT(used >= 0.99 * plan && used <= plan + CHANNELS, "%.0f bytes used of %.0f planned", used,
           plan);
}

/* The script that draws the documents of tests/dynamic.sh ends where it can draw none. */
PROCESS_TEST(dynamic_lengths_that_nothing_has) {
    process_result r = process_run(
        room, 1, "", "run --device cpu $ROOT/tests/dynamic_lengths.lua least=4096 each=2048");
    process_expect(&r, "least=4096 is not from 1 to each=2048 and most=4096");
}

/* Ranks of experts have a row each of every microbatch, and what fills rows up counts in no load.
 */
PROCESS_TEST(dynamic_context_of_experts) {
    write_documents(room, 7);
    process_result one = process_run(room, 0, "", TRAIN "steps=3 experts=4");
    process_result many = process_run(
        room, 0, "",
        TRAIN "steps=3 experts=4 accum=4 -n 4 --mesh ep=2,cp=2 --layout cp=dynamic,cp_tokens=32");
    process_compare_steps("experts", many.output, one.output);
    many = process_run(
        room, 0, "",
        TRAIN "steps=3 experts=4 accum=8 -n 2 --mesh cp=2 --layout cp=dynamic,cp_tokens=32");
    process_compare_steps("experts, each rank's tokens sorted apart", many.output, one.output);
}

/* A script's trainings have totals of their own, of other sizes too. */
PROCESS_TEST(dynamic_context_of_two_mixtures) {
    write_documents(room, 7);
    process_result one = process_run(room, 0, "", TRAIN "steps=2 experts=4 second=6");
    process_result many = process_run(room, 0, "",
                                      TRAIN "steps=2 experts=4 second=6 accum=8 -n 2 --mesh cp=2 "
                                            "--layout cp=dynamic,cp_tokens=32");
    process_compare_steps("two mixtures of experts", many.output, one.output);
}

/* Ranks of cp sort their own tokens by experts: none does another's work. */
PROCESS_TEST(experts_with_split_positions) {
    write_documents(room, 7);
    process_result plan = process_run(room, 0, "",
                                      "check --device cpu $ROOT/tests/lua/lib/drawn_documents.lua "
                                      "experts=4 accum=4 --mesh cp=2");
    process_expect(&plan, "ranks           2: ");
    CHECK(strstr(plan.output, "work alike") == NULL);
    CHECK(strstr(plan.output, "[tokens=") == NULL); /* gathered */
}

static double planned_bytes(process_room *room, int code, const char *settings) {
    process_result r =
        process_run(room, code, "",
                    "check --json --device h200 \"$ROOT/models/llama.lua\" embed=256 heads=4 "
                    "ffn=1024 seq=512 pack=document --mesh dp=2 %s",
                    settings);
    return process_number(r.output, "\"peak_bytes\":");
}

/* Each of the programs saves as much memory by recomputation as the first one: where nothing fits,
 * rows are a quarter longer than the static layout's, and need little more. */
PROCESS_TEST(dynamic_context_in_little_memory) {
    const double still = planned_bytes(room, 1, "layers=6 batch=32 accum=4 --memory 0.1GiB");
    const double least =
        planned_bytes(room, 1, "layers=6 batch=32 accum=4 --memory 0.1GiB --layout cp=dynamic");
    EXPECT(still > 0 && least < 1.25 * still, "%.0f beside %.0f", least, still);
}

static int64_t longest_row(process_room *room, const char *budget) {
    static const char text[] = "in rows of up to ";
    process_result r =
        process_run(room, 0, "",
                    "check --device h200 \"$ROOT/models/llama.lua\" embed=256 heads=4 ffn=1024 "
                    "seq=512 pack=document layers=3 batch=32 accum=8 --mesh dp=2 --layout "
                    "cp=dynamic %s",
                    budget);
    const char *at = strstr(r.output, text);
    return at != NULL ? atoll(at + sizeof text - 1) : 0;
}

/* Rows are as long as memory allows: a step's eight microbatches of 1,024 tokens fill a row of a
 * rank but for an eighth, or two, where ranks have sequences of larger groups besides. */
PROCESS_TEST(dynamic_context_rows_by_memory) {
    CHECK_EQ_INT(longest_row(room, ""), 9216);
    CHECK_EQ_INT(longest_row(room, "--layout cp_tokens=256"), 4608);
    const int64_t least = longest_row(room, "--memory 1.14GiB");
    CHECK(least >= 1280 && least < 3072);
}

/* Of a program of many nodes a check without documents plans the longest row alone, and estimates
 * another one where that does not store all values. Rows are as long as memory allows. */
PROCESS_TEST(dynamic_context_of_many_layers) {
    static const struct {
        const char *memory, *planned;
        int longest;
    } cases[] = {{"140GiB", "24 programs, 1 of them planned here, 0 estimated", 18432},
                 {"10GiB", "24 programs, 1 of them planned here, 1 estimated", 9216}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_result r = process_run(
            room, 0, "",
            "check --device h200 \"$ROOT/models/llama.lua\" layers=600 embed=64 heads=1 kv_heads=1 "
            "ffn=128 vocab=256 pack=document batch=16 seq=2048 accum=8 --mesh dp=2 "
            "--layout cp=dynamic --memory %s",
            cases[i].memory);
        process_expect(&r, cases[i].planned);
        CHECK_EQ_INT((int)process_number(r.output, "in rows of up to "), cases[i].longest);
    }
}

/* Documents of such a program are placed by estimates of some rows, between which the others' times
 * are: about as by plans of these rows. */
PROCESS_TEST(dynamic_context_of_many_layers_and_documents) {
    double seconds[2], bytes[2];
    process_shell(room, 0,
                  "$MLUA run $ROOT/tests/dynamic_lengths.lua most=2048 each=1024 --device cpu");
    for (int fold = 0; fold < 2; fold++) {
        process_result r = process_run(
            room, 0, fold ? "MLUA_FOLD=1" : "MLUA_FOLD=0",
            "check --json --device h200 \"$ROOT/models/llama.lua\" layers=520 embed=64 heads=1 "
            "kv_heads=1 ffn=128 vocab=32000 data=all.bin pack=document batch=32 seq=2048 accum=4 "
            "--mesh dp=4 --layout cp=dynamic,cp_tokens=1024 --memory 9GiB");
        process_expect(&r, fold ? ": 31 programs, 1 of them planned here, 4 estimated\""
                                : ": 31 programs, 5 of them planned here, 0 estimated\"");
        process_expect(&r, "\"documents\":\"documents of ");
        seconds[fold] = process_number(r.output, "\"predicted\":{\"seconds\":");
        bytes[fold] = process_number(r.output, "\"peak_bytes\":");
    }
    EXPECT(fabs(seconds[1] - seconds[0]) < 0.03 * seconds[0] &&
               fabs(bytes[1] - bytes[0]) < 0.02 * bytes[0],
           "%.4f s in %.0f bytes, by plans %.4f s in %.0f", seconds[1], bytes[1], seconds[0],
           bytes[0]);
}

static void expect_program(const process_result *explained, const char *rows, int tokens) {
    char text[64];
    snprintf(text, sizeof text, "program \"microbatch of %s x %d\"", rows, tokens);
    process_expect(explained, text);
}

/* Where a rank's tokens are known, rows are finely as long as these: a step's 8,192 here. Where the
 * largest groups have sequences too, several of their rows are a microbatch. */
PROCESS_TEST(dynamic_context_rows_of_programs) {
    static const char script[] =
        "check --explain --device h200 \"$ROOT/models/llama.lua\" embed=256 heads=4 ffn=1024 "
        "seq=512 pack=document layers=1 batch=32 accum=8 --mesh dp=2 --layout cp=dynamic%s";
    process_result alone = process_run(room, 0, "", script, "");
    for (int tokens = 8192 - 9 * 128; tokens <= 8192 + 8 * 128; tokens += 128)
        expect_program(&alone, "1", tokens);
    expect_program(&alone, "1", 1024);
    CHECK(strstr(alone.output, "rows of 2") == NULL);
    process_result split = process_run(room, 0, "", script, ",cp_tokens=256");
    expect_program(&split, "2 rows of 2", 256);
    expect_program(&split, "4 rows of 2", 256);
    CHECK(strstr(split.output, "microbatch of 1 x 8192") == NULL);
    process_result longer = process_run(room, 0, "", script, " seq=2048 batch=16");
    expect_program(&longer, "1", 18432);
    process_run(room, 0, "", script, " batch=256 accum=64");
}

/* Of the longest rows all programs fit, or rows are shorter: here logits of 3,072 tokens are whole,
 * and need more memory than those of the longest row, 6,144 tokens, which are computed in chunks.
 */
PROCESS_TEST(dynamic_context_rows_of_which_all_fit) {
    process_result r = process_run(
        room, 0, "",
        "check --device h200 \"$ROOT/models/llama.lua\" preset=llama-1b layers=1 batch=8 accum=8 "
        "pack=document --mesh cp=2 --layout cp=dynamic,zero=false --memory 7.6GiB");
    process_expect(&r, "in rows of up to 3072");
}

/* Rows that are compared and not taken leave nothing behind: a run takes the memory that a check
 * plans, and --explain shows the programs that are made. */
PROCESS_TEST(dynamic_context_of_rows_that_are_not_taken) {
    static const char script[] = "--device cpu $ROOT/tests/lua/lib/drawn_documents.lua seq=256 "
                                 "accum=4 --mesh cp=2 --layout cp=dynamic --memory 0.7MiB";
    write_documents(room, 5);
    process_result check = process_run(room, 0, "", "check --json %s", script);
    process_expect(&check, "in rows of up to 320");
    const double plan = process_number(check.output, "\"peak_bytes\":");
    process_run(room, 0, "", "run --quiet -n 2 --out run %s steps=1", script);
    process_result line = process_shell(room, 0, "grep memory_gib run/metrics.jsonl | tail -n 1");
    const double used = process_number(line.output, "\"memory_gib\":") * (1 << 30);
    EXPECT(used >= 0.99 * plan && used <= plan, "%.0f bytes used of %.0f planned", used, plan);
    process_result explained = process_run(room, 0, "", "check --explain %s", script);
    process_expect(&explained, "program \"microbatch of 1 x 320\"");
    CHECK(strstr(explained.output, "program \"microbatch of 1 x 512\"") == NULL);
}

/* A check says of all programs whether steps are done again, as a run finds it; the inputs of those
 * that are made count once. */
PROCESS_TEST(dynamic_context_repeats_steps_where_a_check_says_so) {
    static const char script[] = "--device cpu $ROOT/tests/lua/lib/drawn_documents.lua experts=4 "
                                 "steps=1 accum=4 --mesh ep=2,cp=2 --layout cp=dynamic,exchange=1";
    static const char absent[] = "no memory is left for steps that are done again";
    write_documents(room, 7);
    for (int i = 0; i < 2; i++) {
        const char *budget = i ? "0.5MiB" : "0.45MiB";
        process_result check =
            process_run(room, 0, "", "check --json %s --memory %s", script, budget);
        process_expect(&check, i ? "\"repeats_steps\":true" : "\"repeats_steps\":false");
        process_result run = process_run(room, PROCESS_ANY_CODE, "",
                                         "run --quiet -n 4 %s --memory %s 2>&1", script, budget);
        CHECK((strstr(run.output, absent) == NULL) == i);
        CHECK(!i || run.code == 0);
    }
}

/* Of a budget they leave to the update what its layout needs, where ranks split the moments, and no
 * more: 143.7 MiB of 1.16 GiB are for plans. */
PROCESS_TEST(dynamic_context_fills_its_budget) {
    const double used =
        planned_bytes(room, 0, "layers=3 batch=8 accum=2 --memory 1.16GiB --layout cp=dynamic");
    EXPECT(used > 0.97 * 150.68e6 && used < 150.68e6, "%.0f bytes are used", used);
}

/* Programs of longer rows, which reserve more for inputs of the others, fit beside those of shorter
 * rows that have filled the budget before, with as little computed again. */
PROCESS_TEST(dynamic_context_programs_of_one_budget) {
    process_result r = process_run(
        room, 0, "",
        "check --json --device h200 \"$ROOT/models/llama.lua\" preset=llama-1b batch=16 accum=4 "
        "pack=document --mesh cp=2 --layout cp=dynamic --memory 20GiB");
    const char *at = strstr(r.output, "\"predicted\":");
    CHECK(at != NULL);
    const double seconds = process_number(at, "\"seconds\":");
    EXPECT(seconds < 0.69, "%g s", seconds); /* 0.722 with the least kept */
}

/* Where parameters are split, all groups run microbatches of one size at once. */
PROCESS_TEST(dynamic_context_of_split_parameters) {
    write_documents(room, 11);
    process_result one = process_run(room, 0, "", TRAIN "steps=3");
    process_result many = process_run(
        room, 0, "",
        TRAIN "steps=3 accum=8 -n 4 --mesh cp=4 --layout cp=dynamic,cp_tokens=16,preset=fsdp");
    process_compare_steps("FSDP", many.output, one.output);
}

/* Rows so long that attention reads gathered keys in the order of ranks, those of groups too. */
PROCESS_TEST(context_in_the_order_of_ranks) {
    static const char *const layouts[] = {"-n 2 --mesh cp=2",
                                          "-n 4 --mesh cp=2,tp=2 --layout sp=false"};
    write_longer_documents(room, 13, 8);
    process_result one = process_run(room, 0, "", TRAIN "steps=2 layers=1 seq=512");
    for (int i = 0; i < 2; i++) {
        process_result many =
            process_run(room, 0, "", TRAIN "steps=2 layers=1 seq=512 accum=8 %s", layouts[i]);
        process_compare_steps(layouts[i], many.output, one.output);
    }
    process_result plan = process_run(room, 0, "MLUA_DUMP=simplify_decomposed",
                                      "check --device cpu $ROOT/tests/lua/lib/drawn_documents.lua "
                                      "seq=2048 accum=8 --mesh cp=2 --layout cp=dynamic");
    process_expect(&plan, "seq=1280, heads=4, head_dim=4] = attention ");
    process_expect(&plan, " placed key_ranks=2 ");
    process_result ranks =
        process_run(room, 0, "MLUA_DUMP=trade_once",
                    "check --device cpu $ROOT/tests/lua/dist_context_ranked.lua");
    process_expect(&ranks, " placed key_ranks=2 ");
}

/* One rank compiles the kernels of all programs, and the others wait for it longer than for a sign
 * of progress; where it fails, its error ends the job. */
PROCESS_TEST(dynamic_context_while_kernels_compile) {
    write_documents(room, 99);
    process_write(room, "slow_cc", "#!/bin/sh\nsleep 1\necho 'error: out of cheese' >&2\nexit 1\n");
    process_shell(room, 0, "chmod +x slow_cc");
    process_result r = process_run(room, 1, "CC=./slow_cc MLUA_CACHE=\"$PWD/cache\" MLUA_TIMEOUT=1",
                                   TRAIN "steps=1 layers=1 accum=4 -n 2 --mesh cp=2 "
                                         "--layout cp=dynamic");
    process_expect(&r, "out of cheese");
    CHECK(strstr(r.output, "progress") == NULL);
}

/* A rank that dies between two steps of groups is named as in any layout. */
PROCESS_TEST(dynamic_context_with_a_killed_rank) {
    write_documents(room, 99);
    process_result r = process_run(room, 128 + SIGKILL, "",
                                   TRAIN "steps=9 victim=2 accum=8 -n 4 --mesh dp=2,cp=2 --layout "
                                         "cp=dynamic,cp_tokens=16");
    process_expect(&r, "mlua: rank 2 (pid ");
    process_expect(&r, "was killed by signal 9 (Killed)");
}

/* A probe of all windows finds the module where numbers went bad. */
PROCESS_TEST(dynamic_context_with_numbers_that_are_not_finite) {
    write_documents(room, 99);
    process_result r =
        process_run(room, 1, "",
                    TRAIN "lr=1e20 accum=8 -n 4 --mesh dp=2,cp=2 --layout cp=dynamic,cp_tokens=16");
    process_expect(&r, "step 2: loss nan, gradient norm nan: ");
    process_expect(&r, "the first output that is not finite is that of blocks.1");
}

TEST(long, dynamic_context_of_1950_drawn_batches) {
    process_in_room(drawn_batches);
}
