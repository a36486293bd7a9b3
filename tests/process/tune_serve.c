/* mlua tune --serve and mlua check --serve: what is chosen for generation, and by which bounds. */
#include "tests/process/support.h"

#include <string.h>

#define MODEL                                                                                      \
    "\"$ROOT/models/llama.lua\" layers=2 embed=512 heads=8 kv_heads=4 ffn=1024 vocab=512 seq=2048"

/* The first place in a report in JSON behind `from`. */
static double first_number(const char *from, const char *key) {
    const char *best = strstr(from, "\"best\":");
    REQUIRE(best != NULL);
    return process_number(best, key);
}

/* A bound on the time of a token excludes the number of texts that is best without it; what is
 * chosen then is within the bound, and check predicts the same of the command that is printed. */
PROCESS_TEST(tune_serve_keeps_to_a_latency) {
    static const char *const search =
        "tune " MODEL " --serve --device h200 --precision bf16 --within 60 --json";
    process_result r = process_run(room, 0, "", "%s", search);
    double free_slots = first_number(r.output, "\"slots\":");
    double free_seconds = first_number(r.output, "\"seconds\":");
    double free_rate = first_number(r.output, "\"tokens_per_s\":");
    r = process_run(room, 0, "", "%s --latency %.6f", search, 999 * free_seconds);
    double slots = first_number(r.output, "\"slots\":"),
           rate = first_number(r.output, "\"tokens_per_s\":");
    CHECK(slots < free_slots && slots >= 1);
    CHECK(rate < free_rate);
    CHECK(first_number(r.output, "\"seconds\":") <= 0.999 * free_seconds);
    process_expect(&r, "\"bound\":\"");
    process_expect(&r, "--from DIR --slots ");
    r = process_run(room, 0, "", "check " MODEL " --serve --slots %.0f --device h200 --json",
                    slots);
    double again = process_number(strstr(r.output, "\"predicted\":"), "\"tokens_per_s\":");
    CHECK(again > 0.999999 * rate && again < 1.000001 * rate);
}

/* Two GPUs are two servers, or one over both: each has its command. */
PROCESS_TEST(tune_serve_splits_over_ranks) {
    process_result r = process_run(
        room, 0, "",
        "tune " MODEL " --serve --gpus 2 --device h200 --precision bf16 --memory 1.62 --first 2 "
        "--within 60");
    process_expect(&r, " on each of 2 servers");
    process_expect(&r, " --mesh tp=2 -n 2");
    process_expect(&r, " fewer tokens/s: ");
    process_expect(&r, "GiB with 256 texts at once");
}

/* The model that is served is that of --from, whose positions its config.json names. */
PROCESS_TEST(tune_serve_from) {
    process_result r = process_run(
        room, 0, "",
        "tune \"$ROOT/models/llama.lua\" --from \"$ROOT/tests/hf/llama\" --serve --gpus 1 "
        "--device h200 --precision bf16 --latency 0.2 --json");
    double found = process_number(r.output, "\"memory_bytes\":");
    double slots = process_number(r.output, "\"slots\":");
    r = process_run(room, 0, "",
                    "check \"$ROOT/models/llama.lua\" --from \"$ROOT/tests/hf/llama\" --serve "
                    "--slots %.0f --device h200 --json",
                    slots);
    CHECK(process_number(r.output, "\"process_bytes\":") == found);
    r = process_run(room, 0, "",
                    "tune \"$ROOT/models/llama.lua\" seq=64 --serve --gpus 1 --device h200 "
                    "--precision bf16 --latency 0.2");
    process_expect(&r, "texts of 64 tokens, the first after prompts of 63;");
}

PROCESS_TEST(tune_serve_errors) {
    process_result r =
        process_run(room, 1, "", "tune " MODEL " --serve --device h200 --latency 0.001");
    process_expect(&r, "no layout is within the bounds: the fastest takes 0.");
    r = process_run(room, 2, "", "tune " MODEL " --serve --device h200 --batch 8");
    process_expect(&r, "--serve has no --batch: it chooses how many texts there are at once");
    r = process_run(room, 1, "", "tune " MODEL " --serve --device h200 --measure");
    process_expect(&r, "--measure runs on this machine, and --device h200 is for planning");
    r = process_run(room, 1, "", "tune \"$ROOT/models/bert.lua\" --serve --device h200");
    process_expect(&r, "bert.lua:33: attention without causal = true reads later positions");
    CHECK(strstr(r.output, "mlua: mlua: ") == NULL);
    r = process_run(room, 2, "", "tune " MODEL " --gpus 2 --latency 5");
    process_expect(&r, "--latency, --first, --prompt-tokens and --from belong to --serve");
    r = process_run(room, 2, "", "check " MODEL " --slots 4");
    process_expect(&r, "--slots, --weights, --chunk and --prompt-tokens belong to --serve");
    r = process_run(room, 1, "", "tune " MODEL " --serve --device h200 --precision int4");
    process_expect(&r, "--precision: there is no kind of weights \"int4\" here");
}
