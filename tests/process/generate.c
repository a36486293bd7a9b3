/* mlua generate: prompts of a file, samples, conversations, stops, the context; from a run's folder
 * and from one of Hugging Face. */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

/* A model of a line that it knows by heart: run, its export out, its tokenizer in both. */
static void learn(process_room *room) {
    process_shell(room, 0,
                  "for i in $(seq 200); do printf 'the cat sat on the mat. '; done >t.txt");
    process_run(room, 0, "", "tokenize --train 270 t.txt -o own.json");
    process_run(room, 0, "",
                "run --device cpu --quiet \"$ROOT\"/models/llama.lua layers=1 embed=32 heads=2 "
                "kv_heads=2 ffn=64 seq=32 batch=8 steps=300 lr=0.01 vocab=270 data=t.txt "
                "tokenizer=own.json sample=0 --out run");
    process_run(room, 0, "", "export run out --hf --device cpu");
}

static void prompts(process_room *room) {
    process_write(room, "p.jsonl",
                  "{\"prompt\": \"the cat\", \"id\": 7}\n\"on the\"\n\n{\"prompt\": \"sat\"}\n");
    process_write(room, "p.txt", "the cat\non the\n\nsat\n");
    process_result lines =
        process_run(room, 0, "", "generate --device cpu --from run --prompts p.jsonl --tokens 6");
    process_expect(&lines, "\"id\":7,");
    process_shell(room, 0,
                  "g='generate --device cpu --tokens 6 --quiet'; "
                  "$MLUA $g --from run --prompts p.txt --rows 2 >a && "
                  "$MLUA $g --from out --prompts p.txt >b && cmp a b && test $(wc -l <a) = 3 && "
                  "for p in 'the cat' 'on the' sat; do "
                  "$MLUA $g --from out --prompt \"$p\" --json; done | "
                  "sed 's/\"index\":0/\"index\":N/' >alone && "
                  "sed 's/\"index\":[0-9]/\"index\":N/' a | cmp - alone");
}

/* To the last bit of their log probabilities, in the last of sixteen rows as in the first. */
static void batch_invariance(process_room *room) {
    process_shell(room, 0,
                  "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo \"the cat $i\"; done >many.txt; "
                  "g='generate --device cpu --from run --tokens 20 --temperature 1 --seed 3 --json "
                  "--logprobs 1 --batch-invariant'; $MLUA $g --prompts many.txt | tail -1 | "
                  "sed 's/\"index\":11/\"index\":0/' >beside && "
                  "$MLUA $g --prompt 'the cat 12' | cmp - beside");
}

static void samples(process_room *room) {
    process_shell(room, 0,
                  "g='generate --device cpu --from run --tokens 6 --temperature 2 --json --prompt "
                  "the'; $MLUA $g --samples 2 --seed 4 >two && test $(wc -l <two) = 2 && "
                  "$MLUA $g --seed 5 | sed 's/\"sample\":0/\"sample\":1/' >one && "
                  "tail -1 two | cmp - one && ! head -1 two | cmp -s - one");
    process_result r = process_run(room, 0, "",
                                   "generate --device cpu --from run --tokens 3 --json --prompt "
                                   "'the cat' --logprobs 2 --top_k 5 --min_p 0.1 "
                                   "--repetition_penalty 1.1 --presence_penalty 0.1");
    process_expect(&r, "\"top\":[[{\"id\":");
}

static void stops(process_room *room) {
    process_result r = process_run(room, 0, "",
                                   "generate --device cpu --from run --prompt 'the cat' --tokens "
                                   "40 seq=64 --json --stop zz --stop 'e ma'");
    process_expect(&r, "\"finish_reason\":\"stop\"");
    process_expect(&r, " on th\"");
    r = process_run(room, 0, "",
                    "generate --device cpu --from run --prompt 'the cat' --tokens 400 --json");
    process_expect(&r, "\"finish_reason\":\"length\"");
    r = process_run(room, 1, "",
                    "generate --device cpu --from run --tokens 4 --prompt "
                    "'Neither of these words is known, so each letter is a token'");
    process_expect(&r, "and the context is seq=32 with the answer");
    /* What ends an answer by the folder's own word: the dot of the text. */
    process_shell(room, 0,
                  "dot=$(printf . >dot.txt; $MLUA tokenize own.json dot.txt --json | tr -d '[]'); "
                  "mkdir ended && cp out/* ended && "
                  "echo '{\"eos_token_id\": [255, '$dot']}' >ended/generation_config.json && "
                  "$MLUA generate --device cpu --from ended --prompt 'the cat' --tokens 40 >text "
                  "&& $MLUA generate --device cpu --from out --prompt 'the cat' --tokens 40 | "
                  "cut -d. -f1 | cmp - text");
}

/* Weights of 8 bits: the text and its log-likelihood, on one rank and where weights are split. */
static void weights(process_room *room) {
    process_write(room, "w.txt", "the cat sat on the mat. the cat sat on the mat.");
    process_shell(room, 0,
                  "g='generate --device cpu --from run --quiet --weights'; "
                  "for w in int8 fp8; do $MLUA $g $w --score w.txt --json >s-$w && "
                  "$MLUA $g $w --prompt 'the cat' --tokens 12 >t-$w || exit 1; done && "
                  "grep -q 'sat on the mat' t-int8 && cmp t-int8 t-fp8 && ! cmp -s s-int8 s-fp8 && "
                  "grep -q '\"weights_logprob\":-' s-fp8 && "
                  "$MLUA $g int8 --prompt 'the cat' --tokens 12 -n 2 --mesh tp=2 | cmp - t-int8");
    process_result r =
        process_run(room, 1, "", "generate --device cpu --from run --score nothing.txt");
    process_expect(&r, "--score: nothing.txt cannot be read");
}

static void conversations(process_room *room) {
    process_write(room, "out/chat_template.jinja",
                  "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}. {% else %}"
                  "{{ m.content }}{% endif %}{% endfor %}");
    process_result r = process_run(room, 0, "",
                                   "generate --device cpu --from out --chat --prompt 'the cat' "
                                   "--system 'the mat' --tokens 12");
    process_expect(&r, " sat on the");
    process_result lines = process_shell(
        room, 0,
        "printf 'the cat\\n the\\n' | $MLUA generate --device cpu --from out --chat --tokens 2 "
        "--json --quiet seq=64");
    process_expect(&lines, "\"prompt\":\"the cat\"");
    process_expect(&lines, "\"prompt\":\" the\"");
}

static void mistakes(process_room *room) {
    static const char *const given[][2] = {
        {"--prompt a --ids 1", "--prompt and --ids are both a prompt"},
        {"--prompts p.txt --ids 1", "--prompts and --ids are both prompts"},
        {"--chat --ids 1", "--chat takes a text, and --ids are none"},
        {"--prompt a --system b", "it needs --chat"},
        {"--min_p 2", "--min_p takes a number from 0 to 1, not \"2\""},
        {"--samples 0", "--samples takes an integer, 1 or more, not \"0\""},
        {"--stop ''", "--stop takes a text that is not empty"},
    };
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        process_result r = process_run(room, 2, "", "generate --from run %s", given[i][0]);
        process_expect(&r, given[i][1]);
    }
    process_result r = process_run(room, 1, "", "generate --device cpu --from run --prompts none");
    process_expect(&r, "--prompts none cannot be read");
    process_write(room, "bad.jsonl", "{\"prompt\": \"a\"}\n{\"text\": 5}\n");
    r = process_run(room, 1, "", "generate --device cpu --from run --prompts bad.jsonl");
    process_expect(&r, "bad.jsonl:2: a prompt is a text, or an object with prompt, ids or");
    r = process_run(room, 1, "", "generate --device cpu --from run --prompt a --logprobs 30");
    process_expect(&r, "logprobs must be an integer from 0 to 20, got 30");
}

PROCESS_TEST(generate_command) {
    learn(room);
    prompts(room);
    batch_invariance(room);
    samples(room);
    stops(room);
    weights(room);
    conversations(room);
    mistakes(room);
}

/* A script that samples after training on microbatches: the batch of neither is the script's. */
PROCESS_TEST(generate_after_training) {
    process_run(room, 0, "",
                "run --device cpu --quiet \"$ROOT\"/models/deepseek.lua layers=1 embed=16 heads=2 "
                "seq=32 batch=4 accum=2 steps=1 sample=4");
}

/* T5 answers what it reads: padded, in a batch, on ranks; what reads more than tokens is refused.
 */
PROCESS_TEST(generate_of_encoders) {
    process_run(room, 0, "",
                "run --device cpu --quiet \"$ROOT\"/models/t5.lua layers=2 embed=16 heads=2 "
                "head_dim=8 ffn=32 seq=48 batch=4 steps=12 lr=0.02 warmup=1 --out run");
    process_write(room, "p.txt", "local <1> = <2>\nx\n");
    process_shell(room, 0,
                  "g='generate --device cpu --from run --tokens 5 --temperature 1 --json'; "
                  "$MLUA $g --prompts p.txt --seed 3 >two && $MLUA $g --prompt x --seed 3 seq=24 | "
                  "sed 's/\"index\":0/\"index\":1/' >one && tail -1 two | cmp - one && "
                  "grep -q '<[0-9]*>' two && "
                  "$MLUA $g --prompts p.txt --seed 3 -n 2 --mesh pp=2 --quiet | cmp - two");
    static const char *const refused[][2] = {
        {"t5.lua --chat --prompt a", "--chat is of models that continue their prompt"},
        {"t5.lua --prompt 'a text that is longer than the forty-eight tokens of the input'",
         "a longer seq: on the command line"},
        {"bert.lua --prompt a", "attention without causal = true reads later positions"},
        {"llava.lua --prompt a", "the model reads image beside its tokens"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        process_result r = process_run(
            room, 1, "", "generate --device cpu --from run \"$ROOT\"/models/%s", refused[i][0]);
        process_expect(&r, refused[i][1]);
    }
    process_result r =
        process_run(room, 1, "", "serve --device cpu --from run \"$ROOT\"/models/llava.lua");
    process_expect(&r, "the model reads image beside its tokens");
}

/* Ids that the tokenizer, of bytes, has not: they have no text. */
PROCESS_TEST(generate_beyond_bytes) {
    process_shell(
        room, 0,
        "$MLUA run --device cpu --quiet \"$ROOT\"/models/gpt.lua layers=1 embed=16 heads=2 "
        "seq=64 batch=2 vocab=300 steps=1 sample=0 --out run && "
        "$MLUA generate --device cpu --from run --prompt a --tokens 40 --temperature 1 "
        "--json >lines && grep -Eq '\"ids\":\\[.*(25[6-9]|2[6-9][0-9])' lines");
}

/* Of two lists of answers: the log probabilities within 1e-5, all else the same text. */
static void compare_answers(char *got, char *expected) {
    static const char key[] = "\"logprob\":";
    char *a, *b;
    while ((a = strstr(got, key)) != NULL && (b = strstr(expected, key)) != NULL) {
        *a = *b = 0;
        CHECK_TEXT(got, expected);
        CHECK_NEAR(strtod(a + strlen(key), &got), strtod(b + strlen(key), &expected), 1e-5);
    }
    CHECK_TEXT(got, expected);
}

/* What a trained model answers on one rank and in these layouts; in the first, greedily too. */
static void in_layouts(process_room *room, const char *const *layouts, int count) {
    static const char generate[] = "\"$MLUA\" generate --from run --device cpu --dtype f64 --quiet "
                                   "%s --prompts p.txt --tokens 12 --temperature %s --samples 2";
    process_write(room, "p.txt", "ab\nlocal x\nfoo bar\n");
    for (int draws = 0; draws < 2; draws++) {
        const char *temperature = draws ? "1" : "0";
        process_result one = process_shell(room, 0, generate, "", temperature);
        CHECK(strstr(one.output, "\"index\":2") != NULL);
        for (int i = 0; i < (draws ? count : 1); i++) {
            process_result r = process_shell(room, 0, generate, layouts[i], temperature);
            compare_answers(r.output, ml_arena_format(room->arena, "%s", one.output));
        }
    }
}

/* A dump of the step of ranks that have half of each weight: what they gather is of the rows. */
static void gathers_no_weight(char *dump) {
    CHECK(strstr(dump, "f32[embed=16, heads=2, head_dim=16] = state") != NULL);
    CHECK(strstr(dump, " = all_reduce ") != NULL);
    for (char *line = strtok(dump, "\n"); line != NULL; line = strtok(NULL, "\n"))
        if (strstr(line, " = all_gather ")) CHECK(strstr(line, "row=1") != NULL);
}

/* Tensor, data and pipeline parallel ranks decode what one does, also from weights that FSDP
 * splits, of which a step gathers none: it sums products of parts. */
DIST_TEST(generate_in_every_layout) {
    static const char *const layouts[] = {"-n 4 --mesh tp=2,pp=2", "-n 2 --mesh tp=2",
                                          "-n 2 --mesh dp=2", "-n 2 --mesh dp=2 layout=fsdp",
                                          "-n 2 --mesh pp=2 batch=1"};
    process_run(room, 0, "",
                "run --dtype f64 --quiet --device cpu \"$ROOT\"/models/llama.lua layers=2 embed=32 "
                "heads=2 kv_heads=2 ffn=64 seq=32 batch=8 steps=30 lr=0.02 warmup=1 sample=0 --out "
                "run");
    in_layouts(room, layouts, sizeof layouts / sizeof *layouts);
    for (int fsdp = 0; fsdp < 2; fsdp++) {
        process_result r = process_run(room, 0, "MLUA_DUMP=shard@step",
                                       "generate --from run --device cpu --quiet --tokens 2 -n 2 "
                                       "--mesh dp=2 layout=%s 2>&1",
                                       fsdp ? "fsdp" : "megatron");
        gathers_no_weight(r.output);
    }
}

DIST_TEST(generate_expert_parallel) {
    static const char *const layouts[] = {"-n 2 --mesh ep=2"};
    process_run(
        room, 0, "",
        "run --dtype f64 --quiet --device cpu \"$ROOT\"/models/gpt_moe.lua layers=1 embed=16 "
        "heads=2 kv_heads=2 ffn=16 experts=4 seq=32 batch=8 steps=20 lr=0.02 warmup=1 "
        "sample=0 --out run");
    in_layouts(room, layouts, 1);
}
