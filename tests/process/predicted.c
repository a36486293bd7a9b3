/* What `mlua check` predicts, beside figures that an H200 measured (tests/README.md has them all).
 */
#include "tests/process/support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double predicted(process_room *room, const char *arguments, const char *key) {
    process_result r = process_run(room, 0, "", "check --json --device h200 %s", arguments);
    const char *at = strstr(r.output, "\"predicted\":");
    CHECK(at != NULL);
    return process_number(at, key);
}

PROCESS_TEST(check_predicts_what_was_measured) {
    static const struct {
        const char *arguments;
        double measured, within; /* tokens a second of a GPU */
        int gpus;
    } known[] = {
        {"\"$ROOT/models/gpt.lua\" preset=gpt2-124m", 641167, 0.06, 1},
        {"\"$ROOT/models/llama.lua\" preset=llama-3b", 25652, 0.06, 1},
        {"\"$ROOT/models/gpt_moe.lua\" preset=moe-64x", 69324, 0.06, 1},
        {"\"$ROOT/models/gpt.lua\" preset=gpt-1.3b batch=32 --mesh dp=4", 64119, 0.1, 4},
        {"\"$ROOT/models/gpt.lua\" preset=gpt-1.3b batch=16 --mesh tp=2", 60545, 0.1, 2},
        {"\"$ROOT/models/gpt.lua\" preset=gpt-1.3b batch=32 accum=16 --mesh pp=4", 53419, 0.1, 4},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double rate = predicted(room, known[i].arguments, "\"tokens_per_s\":") / known[i].gpus;
        if (fabs(rate / known[i].measured - 1) > known[i].within)
            test_fail("%s: %.0f tokens/s, measured %.0f", known[i].arguments, rate,
                      known[i].measured);
        test_checked();
    }
}

/* Documents of which most are far shorter than a row: by their lengths, where the data are at hand;
 * else each row is one. */
PROCESS_TEST(check_predicts_by_the_lengths_of_documents) {
    const char *const model =
        "whole.lua preset=llama-1b batch=16 accum=4 pack=document --mesh cp=2";
    static const struct {
        const char *budget;
        double measured; /* s */
    } known[] = {{"26GiB", 0.495}, {"20GiB", 0.569}};
    /* The layout of which steps were measured: parameters whole between steps. */
    process_shell(
        room, 0,
        "sed 's/layout = m.layout\\[cfg.layout\\] {.*},/layout = m.layout { mesh = { { "
        "\"pp\", 1 }, { \"dp\", 1 }, { \"cp\", \"dynamic\" }, { \"tp\", 1 } }, acts = { cp = { "
        "\"seq\" }, dp = { \"batch\" } }, state = { dp = \"flat\" } },/' "
        "\"$ROOT/models/llama.lua\" > whole.lua && grep -q 'dp = \"flat\"' whole.lua");
    process_run(room, 0, "", "run \"$ROOT/tests/dynamic_lengths.lua\" out=. --device cpu --quiet");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double seconds = predicted(
            room,
            ml_arena_format(room->arena, "%s --memory %s data=all.bin", model, known[i].budget),
            "\"seconds\":");
        EXPECT(fabs(seconds / known[i].measured - 1) < 0.05, "%s: %.3f s, measured %.3f",
               known[i].budget, seconds, known[i].measured);
    }
}

PROCESS_TEST(check_predicts_by_documents_at_hand) {
    static const char *const layouts[] = {"", "--mesh cp=2", "--mesh cp=2 --layout context=ring",
                                          "--mesh pp=2,cp=2 --layout cp=dynamic",
                                          "--mesh cp=2 --layout cp=dynamic,preset=fsdp"};
    const char *const model =
        "check --device h200 \"$ROOT/models/llama.lua\" preset=llama-1b layers=2 "
        "batch=16 accum=4 pack=document";
    process_run(room, 0, "", "run \"$ROOT/tests/dynamic_lengths.lua\" out=. --device cpu --quiet");
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        process_result whole = process_run(room, 0, "", "%s data=none.bin %s", model, layouts[i]);
        process_result rows = process_run(room, 0, "", "%s data=all.bin %s", model, layouts[i]);
        process_expect(&whole, strstr(layouts[i], "dynamic") /* as long as a microbatch */
                                   ? "documents of 8192 tokens: no data at hand)"
                                   : "each row one document: no data at hand)");
        process_expect(&rows, "documents of 5");
        process_expect(&rows, " tokens at the mean, from all.bin)");
        double one = process_number(whole.output, "predicted step  ");
        double many = process_number(rows.output, "predicted step  ");
        EXPECT(many < one && many > 0.6 * one, "%s: %g ms, %g as one", layouts[i], many, one);
    }
    /* Text is at hand once its tokens are made, which a check does not do. */
    process_write(room, "text.jsonl", "{\"text\":\"ab\"}\n{\"text\":\"abcd\"}\n");
    process_result r = process_run(room, 0, "MLUA_CACHE=cache", "%s seq=4 data=text.jsonl", model);
    process_expect(&r, "no data at hand)");
    process_run(room, 0, "MLUA_CACHE=cache",
                "run --device cpu \"$ROOT/models/llama.lua\" layers=1 embed=16 heads=2 kv_heads=2 "
                "ffn=16 vocab=256 seq=4 batch=1 steps=1 pack=document data=text.jsonl --quiet");
    r = process_run(room, 0, "MLUA_CACHE=cache", "%s seq=4 data=text.jsonl", model);
    process_expect(&r, "at the mean, from text.jsonl)");
}

/* More microbatches leave less of a bubble; a slow network shows where a mesh leaves the host. */
PROCESS_TEST(check_predicts_bubbles_and_networks) {
    const char *const model = "\"$ROOT/models/gpt.lua\" preset=gpt2-124m batch=1024";
    double bubble[2], exposed[2];
    for (int i = 0; i < 2; i++) {
        ml_arena *a = room->arena;
        bubble[i] = predicted(
            room, ml_arena_format(a, "%s accum=%d --mesh pp=4", model, i ? 32 : 8), "\"bubble\":");
        exposed[i] = predicted(room, ml_arena_format(a, "%s --mesh dp=%d", model, i ? 16 : 8),
                               "\"exposed\":");
    }
    CHECK(bubble[0] > 0.25 && bubble[0] < 0.4 && bubble[1] < 0.7 * bubble[0]);
    CHECK(exposed[1] > exposed[0]);
}

/* Computation, communication, waits of stages and for copies to the host are all of a step. */
PROCESS_TEST(check_predicts_all_of_a_step) {
    static const char *const layouts[] = {"--mesh pp=3,dp=2 accum=4 batch=8",
                                          "--mesh pp=2,tp=2 --layout schedule=zero-bubble accum=2",
                                          "--memory 21GiB"};
    static const char *const shares[] = {"\"products\":", "\"attention\":", "\"memory\":",
                                         "\"other\":",    "\"exposed\":",   "\"bubble\":"};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        process_result r = process_run(
            room, 0, "", "check --json --device h200 \"$ROOT/models/gpt.lua\" preset=gpt-1.3b %s",
            layouts[i]);
        const char *at = strstr(r.output, "\"predicted\":");
        CHECK(at != NULL);
        double sum = process_number(at, "\"host_wait\":") / process_number(at, "\"seconds\":");
        for (size_t k = 0; k < sizeof shares / sizeof *shares; k++)
            sum += process_number(at, shares[k]);
        EXPECT(fabs(sum - 1) < 1e-4, "%s: shares are %.5f in all", layouts[i], sum);
    }
    process_result r = process_run(
        room, 0, "", "check --device h200 \"$ROOT/models/gpt.lua\" preset=gpt-1.3b %s", layouts[2]);
    process_expect(&r, ", waits for host copies ");
}

static int timed_entries(process_room *room) {
    process_result r = process_shell(room, 0, "ls cache | grep -c '\\.timed$' || true");
    return (int)strtol(r.output, NULL, 10);
}

/* Products of this machine's CPU are timed once; a table's device has none. */
static void check_times_products_once(process_room *room, const char *check) {
    CHECK(timed_entries(room) == 0);
    process_run(room, 0, "MLUA_CACHE=cache",
                "check --device h200 \"$ROOT/models/gpt.lua\" preset=demo");
    CHECK(timed_entries(room) == 0);
    process_result first = process_run(room, 0, "MLUA_CACHE=cache", "%s --mesh dp=2 --json", check);
    const int entries = timed_entries(room);
    CHECK(entries > 0);
    process_result again = process_run(room, 0, "MLUA_CACHE=cache", "%s --mesh dp=2 --json", check);
    CHECK(timed_entries(room) == entries);
    const char *one = strstr(first.output, "\"predicted\":");
    const char *other = strstr(again.output, "\"predicted\":");
    REQUIRE(one != NULL && other != NULL);
    double seconds = process_number(one, "\"seconds\":");
    CHECK(seconds > 0 && process_number(other, "\"seconds\":") == seconds);
    /* Others later: by what the same product takes beside them and took beside the first ones. */
    process_result later =
        process_run(room, 0, "MLUA_CACHE=cache MLUA_DEBUG=1", "%s batch=2 --mesh dp=2", check);
    CHECK(timed_entries(room) > entries);
    double scale = process_number(later.output, "ranks at once, scaled by");
    EXPECT(scale > 0 && scale != 1, "scaled by %g", scale);
}

/* A device without a table has no prediction until it is measured; then the day is printed. */
PROCESS_TEST(check_predicts_by_what_doctor_measured) {
    const char *check = "check --device cpu \"$ROOT/models/gpt.lua\" preset=demo";
    process_result before = process_run(room, 0, "MLUA_CACHE=cache", "%s", check);
    process_expect(&before, "predicted step  not known: no table has the rates of ");
    process_expect(&before, "; mlua doctor --bench measures this machine's");
    process_run(room, 0, "MLUA_CACHE=cache", "doctor --bench");
    check_times_products_once(room, check);
    process_result after = process_run(room, 0, "MLUA_CACHE=cache", "%s", check);
    process_expect(&after, "(by rates measured here on 20");
    CHECK(process_number(after.output, "predicted step  ") > 0);
    CHECK(strstr(after.output, "MFU") == NULL); /* no data sheet says what it should reach */
    process_result two = process_run(room, 0, "MLUA_CACHE=cache", "%s --json --mesh dp=2", check);
    const char *rates = strstr(two.output, "\"predicted\":");
    double link = process_number(rates, "\"link_bytes\":");
    double memory = process_number(rates, "\"memory_bytes\":"); /* of a rank: half */
    CHECK(link > 0 && fabs(link / (memory / 2) - 1) > 1e-9);    /* not a quarter of the whole */
    process_result tuned = process_run(
        room, 0, "MLUA_CACHE=cache",
        "tune \"$ROOT/models/gpt.lua\" layers=1 embed=32 heads=2 seq=16 batch=4 --gpus 2 "
        "--device cpu --within 1 --measure --tries 1");
    process_expect(&tuned, "1  ");
    process_expect(&tuned, " (measured ");
    process_result served = process_run(
        room, 0, "MLUA_CACHE=cache",
        "tune \"$ROOT/models/gpt.lua\" layers=1 embed=32 heads=2 seq=64 --serve --device cpu "
        "--precision f32 --prompt-tokens 8 --memory 0.6MiB --measure --tries 1 --json");
    CHECK(process_number(served.output, "\"measured\":") > 0);
    CHECK(process_number(served.output, "\"measured_first_seconds\":") > 0);
}

/* Rows of cp = "dynamic" may be longer than a microbatch: a step then has fewer of them. */
PROCESS_TEST(check_counts_the_work_of_dynamic_context_once) {
    double flops[2];
    for (int i = 0; i < 2; i++) {
        process_result r = process_run(
            room, 0, "",
            "check --json --device h200 $ROOT/tests/lua/lib/drawn_documents.lua accum=4 "
            "--mesh dp=2 %s",
            i ? "--layout cp=dynamic" : "");
        flops[i] = process_number(r.output, "\"flops\":");
    }
    EXPECT(flops[1] > 0 && flops[1] == flops[0], "%.0f in place of %.0f", flops[1], flops[0]);
}
