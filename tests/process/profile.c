/* --profile: the trace is whole and right, the numbers add up, and nothing that is learned changes;
 * doctor --bench. */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/device.h"
#include "tests/process/support.h"

static const char gpt[] =
    "\"$ROOT\"/models/gpt.lua layers=2 embed=64 heads=4 seq=64 batch=8 sample=0"
    " warmup=1 lr=3e-3";
static const char small[] = "\"$ROOT\"/models/gpt.lua layers=1 embed=32 heads=2 seq=16 batch=4"
                            " sample=0 warmup=1 lr=3e-3";

/* ---- Reading a trace ---- */
enum { RANKS = 4, THREADS = 16 };

static json_t *load_trace(process_room *room, const char *name) {
    json_error_t error;
    json_t *root = json_load_file(ml_arena_format(room->arena, "%s/%s", room->folder, name),
                                  JSON_REJECT_DUPLICATES, &error);
    if (!root) ml_raise(ML_IO, "%s, line %d: %s", name, error.line, error.text);
    return root;
}

static const char *text_of(const json_t *event, const char *key) {
    const char *text = json_string_value(json_object_get(event, key));
    return text ? text : "";
}
static double number_of(const json_t *event, const char *key) {
    return json_number_value(json_object_get(event, key));
}
static int64_t step_of(const json_t *event) {
    return json_integer_value(json_object_get(json_object_get(event, "args"), "step"));
}

typedef struct {
    int64_t pid, step;
    double wall, run, steps, host; /* microseconds; run: from the first of the steps to the last */
    int count;
} step_time;

static bool is_work(const json_t *event) {
    const char *category = text_of(event, "cat");
    return category[0] && strcmp(category, "host") != 0 && strcmp(category, "run") != 0 &&
           strcmp(category, "step") != 0;
}

static step_time time_of(const json_t *events, int64_t pid, int64_t step) {
    step_time t = {.pid = pid, .step = step};
    size_t i;
    json_t *event;
    json_array_foreach(events, i, event) {
        if (json_integer_value(json_object_get(event, "pid")) != pid || step_of(event) != step)
            continue;
        if (is_work(event)) t.steps += number_of(event, "dur"), t.count++;
        if (strcmp(text_of(event, "cat"), "step") == 0) t.wall += number_of(event, "dur");
        if (strcmp(text_of(event, "cat"), "run") == 0) t.run += number_of(event, "dur");
        /* what the host does while no step runs: programs run inside of "start" on the CPU */
        if (strcmp(text_of(event, "name"), "data") == 0) t.host += number_of(event, "dur");
    }
    return t;
}

/* Every event has what viewers need, and every step of a program its place in the script. */
static void check_events(const json_t *events) {
    size_t i;
    json_t *event;
    double last_end[RANKS][THREADS] = {0};
    json_array_foreach(events, i, event) {
        REQUIRE(json_is_integer(json_object_get(event, "pid")) &&
                json_is_integer(json_object_get(event, "tid")) && text_of(event, "name")[0]);
        if (strcmp(text_of(event, "ph"), "M") == 0) continue;
        CHECK_TEXT(text_of(event, "ph"), "X");
        CHECK(number_of(event, "ts") > 0 && number_of(event, "dur") >= 0);
        if (!is_work(event)) continue;
        const json_t *args = json_object_get(event, "args");
        int64_t pid = json_integer_value(json_object_get(event, "pid"));
        CHECK(strstr(text_of(args, "line"), "gpt.lua:") != NULL);
        CHECK(json_is_string(json_object_get(args, "module")));
        CHECK(number_of(args, "bytes") > 0 && number_of(args, "flops") >= 0);
        if (strcmp(text_of(event, "cat"), "collective") != 0)
            CHECK(number_of(args, "best us") > 0 && number_of(args, "share of ceiling") > 0);
        /* in one stream steps do not overlap (times are printed to the nanosecond) */
        int64_t tid = json_integer_value(json_object_get(event, "tid"));
        REQUIRE(pid < RANKS && tid < THREADS);
        CHECK(number_of(event, "ts") >= last_end[pid][tid] - 0.01);
        last_end[pid][tid] = number_of(event, "ts") + number_of(event, "dur");
    }
}

/* Of all steps that are called `name` in `module`: the line of the script, which they share. */
static int line_of(const json_t *events, const char *category, const char *module) {
    size_t i;
    json_t *event;
    json_array_foreach(events, i, event) {
        const json_t *args = json_object_get(event, "args");
        if (strcmp(text_of(event, "cat"), category) == 0 &&
            strcmp(text_of(args, "module"), module) == 0)
            return (int)strtol(strrchr(text_of(args, "line"), ':') + 1, NULL, 10);
    }
    return 0;
}

/* The number of the first line of the model that has this text. */
static int model_line(process_room *room, const char *text) {
    process_result r = process_shell(room, 0, "grep -nF -m 1 '%s' \"$ROOT\"/models/gpt.lua", text);
    return (int)strtol(r.output, NULL, 10);
}

/* ---- What is checked on every device ---- */
/* The shortest times of several steps of the training, microseconds: what disturbs the machine
 * delays other steps of the program, or what lies between others, each time. */
enum { MOST = 512 };
typedef struct {
    double work[MOST],
        pause[MOST];         /* steps of the program; from the one before, or the run's begin */
    double last, host, rest; /* after the last one; the host's; all else outside of runs */
    int count;
} shortest_times;

static void shorten(double *shortest, double time) {
    if (time < *shortest) *shortest = time;
}

/* A run's steps come before it. */
static void shorten_steps(shortest_times *s, const json_t *events, const step_time *t) {
    double begin[MOST], work[MOST];
    double last = 0;
    int count = 0, first = 0;
    size_t i;
    json_t *event;
    json_array_foreach(events, i, event) {
        if (json_integer_value(json_object_get(event, "pid")) != t->pid ||
            step_of(event) != t->step)
            continue;
        if (is_work(event)) {
            REQUIRE(count < s->count);
            begin[count] = number_of(event, "ts");
            work[count++] = number_of(event, "dur");
        }
        if (strcmp(text_of(event, "cat"), "run") != 0) continue;
        double at = number_of(event, "ts"), end = at + number_of(event, "dur");
        for (; first < count; first++) {
            shorten(&s->work[first], work[first]);
            shorten(&s->pause[first], begin[first] - at);
            at = begin[first] + work[first];
        }
        last += end - at;
    }
    CHECK_EQ_INT(first, s->count);
    shorten(&s->last, last);
    shorten(&s->host, t->host);
    shorten(&s->rest, t->wall - t->run - t->host);
}

static shortest_times shortest_of(int count) {
    shortest_times s = {.last = INFINITY, .host = INFINITY, .rest = INFINITY, .count = count};
    REQUIRE(count <= MOST);
    for (int i = 0; i < count; i++) s.work[i] = s.pause[i] = INFINITY;
    return s;
}

/* Nearly all of a run is its steps, between which `pause` microseconds may pass; and on the CPU,
 * nearly all of what passes is the run and the host's. */
static void check_sum(const shortest_times *s, double pause) {
    bool on_gpu = pause > 0;
    double steps = 0, run = s->last;
    for (int i = 0; i < s->count; i++) steps += s->work[i], run += s->work[i] + s->pause[i];
    EXPECT(steps + pause * s->count >= 0.8 * run, "%d steps take %.1f us of a run's %.1f us",
           s->count, steps, run);
    double wall = run + s->host + s->rest;
    EXPECT(on_gpu || run + s->host >= 0.8 * wall,
           "a run takes %.1f us and the host %.1f us of %.1f us", run, s->host, wall);
}

static void check_trace(process_room *room, const char *device, const char *model, double pause) {
    process_result r =
        process_run(room, 0, "", "run --device %s %s steps=8 --profile=trace.json", device, model);
    process_expect(&r, "profile of steps 3 to 5");
    process_expect(&r, "blocks.*.attention");
    process_expect(&r, "run whole");
    process_expect(&r, "sum of best times");
    json_t *root = load_trace(room, "trace.json");
    const json_t *events = json_object_get(root, "traceEvents");
    check_events(events);
    step_time first = time_of(events, 0, 3);
    shortest_times shortest = shortest_of(first.count);
    for (int step = 3; step <= 5; step++) {
        step_time t = time_of(events, 0, step);
        CHECK(t.count > 20);
        CHECK_EQ_INT(t.count, first.count);
        CHECK(t.steps <= t.run && t.run + t.host <= t.wall);
        shorten_steps(&shortest, events, &t);
    }
    check_sum(&shortest, pause);
    for (int step = 1; step <= 7; step++) {
        CHECK(time_of(events, 0, step).wall > 0);
        if (step < 3 || step > 5) CHECK_EQ_INT(time_of(events, 0, step).count, 0);
    }
    CHECK_EQ_INT(time_of(events, 0, 8).count, 0);
    CHECK_EQ_INT(line_of(events, "GEMM", "blocks.1.mlp"), model_line(room, "m.gelu("));
    CHECK_EQ_INT(line_of(events, "attention", "blocks.1.attention"),
                 model_line(room, "m.attention("));
    CHECK_EQ_INT(line_of(events, "optimizer", "optimizer"), model_line(room, "m.train {"));
    CHECK(line_of(events, "cross-entropy", "loss") != 0);
    json_decref(root);
}

PROCESS_TEST(profile_trace) {
    check_trace(room, "cpu", gpt, 0);
}

/* The line of JSON that holds the profile. */
static json_t *load_profile(const char *output) {
    const char *line = strstr(output, "{\"profile\":");
    REQUIRE(line != NULL);
    json_t *root = json_loadb(line, strcspn(line, "\n"), JSON_REJECT_DUPLICATES, NULL);
    REQUIRE(root != NULL);
    return root;
}

static double sum_of(const json_t *rows, const char *key) {
    double sum = 0;
    size_t i;
    json_t *row;
    json_array_foreach(rows, i, row) sum += number_of(row, key);
    return sum;
}

/* The rows add up, and the work of a step is what was planned. */
static void check_sums(process_room *room, const char *device, const char *model) {
    process_result r = process_run(
        room, 0, "", "run --device %s --json %s steps=5 --profile-steps=4:5 --profile trace.json",
        device, model);
    json_t *root = load_profile(r.output);
    const json_t *profile = json_object_get(root, "profile");
    CHECK_EQ_INT(json_integer_value(json_object_get(profile, "first_step")), 4);
    CHECK_EQ_INT(json_integer_value(json_object_get(profile, "last_step")), 5);
    static const char *const rows[] = {"kinds", "modules"};
    double flops = 0;
    for (int i = 0; i < 2; i++) {
        const json_t *list = json_object_get(profile, rows[i]);
        CHECK_NEAR(sum_of(list, "ms"), number_of(profile, "device_ms"), 1e-9);
        CHECK_NEAR(sum_of(list, "roofline_ms"), number_of(profile, "roofline_ms"), 1e-9);
        if (i == 1) CHECK_NEAR(sum_of(list, "flops"), flops, 1e-9);
        flops = sum_of(list, "flops");
    }
    CHECK(number_of(profile, "roofline_ms") > 0 && number_of(profile, "copy_bytes_per_s") > 0);
    const char *step = strstr(r.output, "{\"step\":3,");
    REQUIRE(step != NULL);
    json_t *line = json_loadb(step, strcspn(step, "\n"), 0, NULL);
    double busy = number_of(line, "busy");
    CHECK(busy > 0.2 && busy <= 1);
    CHECK_NEAR(number_of(line, "device_ms"), busy * number_of(line, "step_ms"), 1e-6);
    json_decref(line);
    json_decref(root);
}

PROCESS_TEST(profile_sums) {
    check_sums(room, "cpu", gpt);
}

/* Repeating products alone leaves no trace in what is learned, sums over microbatches included. */
static void check_unchanged(process_room *room, const char *device, const char *model) {
    static const char form[] = "run --device %s --json %s steps=6 %s 2>/dev/null |"
                               " grep -o '\"step\":[0-9]*,\"loss\":[^,]*,\"grad_norm\":[^,]*'";
    process_result plain = process_run(room, 0, "", form, device, model, "");
    process_result profiled = process_run(room, 0, "", form, device, model, "--profile=p.json");
    CHECK(strstr(plain.output, "\"step\":6") != NULL);
    CHECK_TEXT(profiled.output, plain.output);
}

PROCESS_TEST(profile_changes_nothing) {
    check_unchanged(room, "cpu", ml_arena_format(room->arena, "%s accum=2", small));
    check_unchanged(room, "cpu",
                    "\"$ROOT\"/models/gpt_moe.lua layers=1 embed=32 heads=2 ffn=32 experts=4"
                    " seq=16 batch=4 sample=0");
}

PROCESS_TEST(profile_of_ranks) {
    process_run(room, 0, "",
                "run -n 3 --mesh dp=3 --device cpu %s batch=6 steps=6 --profile=t.json", small);
    json_t *root = load_trace(room, "t.json");
    const json_t *events = json_object_get(root, "traceEvents");
    check_events(events);
    step_time first = time_of(events, 0, 4);
    for (int rank = 0; rank < 3; rank++) CHECK_EQ_INT(time_of(events, rank, 4).count, first.count);
    size_t i;
    json_t *event;
    int collectives[3] = {0};
    json_array_foreach(events, i, event) if (strcmp(text_of(event, "cat"), "collective") == 0)
        collectives[json_integer_value(json_object_get(event, "pid"))]++;
    CHECK(collectives[0] > 0 && collectives[1] == collectives[0] &&
          collectives[2] == collectives[0]);
    json_decref(root);
    process_result r = process_shell(room, 0, "ls");
    CHECK_TEXT(r.output, "t.json\n");
}

/* A step whose experts have too few places, and its repetition, whose kernels are others: each is a
 * program of its own name. */
PROCESS_TEST(profile_of_repeated_steps) {
    enum { STEPS = 512 };
    process_run(room, 0, "",
                "run --device cpu -n 2 --mesh ep=2 \"$ROOT\"/models/gpt_moe.lua layers=1 embed=32 "
                "heads=2 kv_heads=2 ffn=32 experts=4 seq=16 batch=8 accum=2 vocab=256 sample=0 "
                "warmup=1 exchange=1 steps=2 --profile=t.json --profile-steps=2");
    json_t *root = load_trace(room, "t.json");
    const char *names[2][STEPS] = {{0}}; /* of rank 0's steps, by program and index */
    int runs[2] = {0};
    size_t i;
    json_t *event;
    json_array_foreach(json_object_get(root, "traceEvents"), i, event) {
        const json_t *args = json_object_get(event, "args");
        const bool run = strcmp(text_of(event, "cat"), "run") == 0;
        const char *program = run ? text_of(event, "name") : text_of(args, "program");
        const bool repeated = strcmp(program, "microbatch, repeated") == 0;
        if (!repeated && strcmp(program, "microbatch") != 0) continue;
        if (run) runs[repeated]++;
        if (!is_work(event)) continue;
        const int64_t at = json_integer_value(json_object_get(args, "index"));
        REQUIRE(at < STEPS);
        const char **name = &names[repeated][at];
        if (*name != NULL) CHECK_TEXT(text_of(event, "name"), *name);
        *name = text_of(event, "name");
    }
    CHECK(runs[0] > 0 && runs[1] > 0 && names[0][0] != NULL && names[1][0] != NULL);
    json_decref(root);
}

/* Runs ahead of step 1, which make all rows' programs ready under cp = "dynamic", are no steps. */
PROCESS_TEST(profile_of_dynamic_context) {
    process_run(room, 0, "",
                "run --device cpu \"$ROOT\"/models/llama.lua layers=1 embed=32 heads=2 kv_heads=2 "
                "ffn=32 vocab=256 seq=32 batch=4 accum=2 pack=document sample=0 steps=3 -n 2 "
                "--mesh cp=2 --layout cp=dynamic --profile=t.json --profile-steps=2");
    json_t *root = load_trace(room, "t.json");
    const json_t *events = json_object_get(root, "traceEvents");
    int updates[4] = {0};
    size_t i;
    json_t *event;
    json_array_foreach(events, i, event) {
        if (strcmp(text_of(event, "cat"), "run") != 0 || step_of(event) > 3) continue;
        updates[step_of(event)] += strcmp(text_of(event, "name"), "update") == 0;
    }
    for (int step = 1; step <= 3; step++) CHECK_EQ_INT(updates[step], 2); /* one of each rank */
    json_decref(root);
}

/* Without m.train a run of a program is a step; names of any kind are escaped. */
PROCESS_TEST(profile_of_programs) {
    process_write(room, "a \"b\\\xc3\xa9\xff.lua",
                  "local m = require 'mlua'\n"
                  "local x = m.axis('x', 4096)\n"
                  "local double = m.compile(function(i) return i.a + i.a end, { a = { x } })\n"
                  "local numbers = {}\n"
                  "for i = 1, 4096 do numbers[i] = i end\n"
                  "for i = 1, 5 do assert(double { a = numbers }[7] == 14) end\n");
    process_run(room, 0, "", "run --device cpu --profile=t.json --profile-steps=4 a*.lua");
    json_t *root = load_trace(room, "t.json");
    const json_t *events = json_object_get(root, "traceEvents");
    CHECK_EQ_INT(time_of(events, 0, 4).count, 1);
    CHECK_EQ_INT(time_of(events, 0, 3).count, 0);
    size_t i;
    json_t *event;
    json_array_foreach(events, i, event) if (is_work(event)) CHECK(
        strstr(text_of(json_object_get(event, "args"), "line"), "a \"b\\\xc3\xa9?.lua:3") != NULL);
    json_decref(root);
}

PROCESS_TEST(profile_errors) {
    process_result r = process_run(room, 1, "", "run %s --profile=/no/such/folder/t.json", small);
    process_expect(&r, "cannot write the profile to /no/such/folder/t.json");
    CHECK(!strstr(r.output, "step 1")); /* reported before training */
    r = process_run(room, 2, "", "run %s --profil=t.json", small);
    process_expect(&r, "did you mean --profile?");
    static const char *const wrong[] = {"1:3", "5:4", "3", "x", "3:", "3:4:5"};
    for (int i = 0; i < 6; i++) {
        bool right = i == 2; /* and then there is no --profile */
        r = process_run(room, 2, "", "run %s --profile-steps=%s", small, wrong[i]);
        process_expect(&r, right ? "--profile=trace.json" : "takes A:B with 2 <= A <= B");
    }
    r = process_run(room, 1, "", "run --device cpu %s steps=4 --profile=t.json --profile-steps=3:9",
                    small);
    process_expect(&r, "the training makes 4 steps");
    CHECK(!strstr(r.output, "step 1"));
    r = process_run(room, 1, "", "run --device cpu %s steps=1 --profile=t.json", small);
    process_expect(&r, "makes one step only");
    r = process_run(room, 1, "", "run --device null %s --profile=t.json", small);
    process_expect(&r, "the device null runs nothing");
    process_write(room, "hello.lua", "print 'hello'");
    r = process_run(room, 1, "", "run --device cpu hello.lua --profile=t.json");
    process_expect(&r, "nothing was measured");
    r = process_shell(room, 0, "ls");
    CHECK_TEXT(r.output, "hello.lua\n");
}

/* What was measured when the user stops a training is printed. */
PROCESS_TEST(profile_of_an_interrupted_run) {
    process_result r = process_shell(
        room, PROCESS_ANY_CODE,
        "\"$MLUA\" run --device cpu %s steps=1000000 --profile=t.json >out 2>&1 & mlua=$!; "
        "for i in $(seq 600); do grep -q 'profile of' out && break; sleep 0.05; done; "
        "kill -INT $mlua; wait $mlua; echo code $?; "
        "\"$MLUA\" run --device cpu %s steps=1000000 --profile=late.json --profile-steps=3:900000 "
        ">out 2>&1 & mlua=$!; "
        "for i in $(seq 600); do grep -q 'first step' out && break; sleep 0.05; done; sleep 0.3; "
        "kill -INT $mlua; wait $mlua; echo code $?; cat out",
        small, small);
    process_expect(&r, "code 130");
    process_expect(&r, "the trace is in late.json");
    json_decref(load_trace(room, "t.json"));
    json_decref(load_trace(room, "late.json"));
}

/* Fewer steps than the default ones: the last ones are measured. */
PROCESS_TEST(profile_of_few_steps) {
    process_result r =
        process_run(room, 0, "", "run --device cpu %s steps=2 --profile=t.json", small);
    process_expect(&r, "profile of steps 2 to 2");
    r = process_run(room, 0, "", "run --device cpu %s steps=4 --quiet --profile=t.json", small);
    CHECK(!strstr(r.output, "profile of"));
}

PROCESS_TEST(profile_debug) {
    process_result r = process_run(room, 0, "MLUA_DEBUG=2", "run --device cpu %s steps=1", small);
    process_expect(&r, "blocks.1.mlp");
    process_expect(&r, "GFLOP/s");
    process_expect(&r, "cross-entropy");
}

/* ---- Ceilings ---- */
PROCESS_TEST(doctor_bench) {
    process_result r = process_run(room, 0, "", "doctor --bench -n 2");
    const char *line = strstr(r.output, "CPU bench");
    REQUIRE(line != NULL);
    double copy = strtod(strstr(line, "copy ") + 5, NULL);
    double gemm = strtod(strstr(line, "GEMM ") + 5, NULL);
    CHECK(copy > 0.2 && copy < 20000 && gemm > 1e-5 && gemm < 1000);
    line = strstr(r.output, "all-reduce");
    REQUIRE(line != NULL);
    CHECK(strstr(line, "among 2 ") != NULL && strtod(line + strlen("all-reduce"), NULL) > 0);
    r = process_run(room, 2, "", "doctor -n 2");
    process_expect(&r, "which only --bench asks for");
    r = process_run(room, 2, "", "doctor --bensh");
    process_expect(&r, "did you mean --bench?");
    r = process_run(room, 2, "", "doctor now");
    process_expect(&r, "takes no arguments");
}

/* Sends and receives of pipeline stages are the host's. */
PROCESS_TEST(profile_of_a_pipeline) {
    process_run(
        room, 0, "",
        "run -n 2 --mesh pp=2 --device cpu \"$ROOT\"/models/gpt.lua layers=2 embed=32 heads=2"
        " seq=16 batch=4 accum=2 sample=0 steps=6 --profile=t.json");
    json_t *root = load_trace(room, "t.json");
    size_t i;
    json_t *event;
    int sent[2] = {0}, received[2] = {0};
    json_array_foreach(json_object_get(root, "traceEvents"), i, event) {
        int64_t pid = json_integer_value(json_object_get(event, "pid"));
        if (step_of(event) != 4) continue;
        if (strcmp(text_of(event, "name"), "send") == 0) sent[pid]++;
        if (strcmp(text_of(event, "name"), "receive") == 0) received[pid]++;
    }
    CHECK(sent[0] >= 2 && sent[1] >= 2 && received[0] >= 2 && received[1] >= 2);
    json_decref(root);
}

/* ---- The same on a GPU ---- */
/* A GPU pauses for the events around a step, 1.4 us measured on an H200, and where steps are as
 * short as in the small model, 5.5 us, for the host too: 2.9 us. */
static void gpu_trace(process_room *room) {
    static const char large[] =
        "\"$ROOT\"/models/gpt.lua layers=1 embed=1024 heads=16 seq=1024 batch=16"
        " sample=0 warmup=1";
    check_trace(room, "cuda", getenv("EMULATOR") ? small : large, 1);
}
TEST(gpu_profile, trace) {
    process_in_room(gpu_trace);
}
static void gpu_sums(process_room *room) {
    check_sums(room, "cuda", small);
}
TEST(gpu_profile, sums) {
    process_in_room(gpu_sums);
}
static void gpu_unchanged(process_room *room) {
    check_unchanged(room, "cuda", ml_arena_format(room->arena, "%s accum=2", small));
}
TEST(gpu_profile, changes_nothing) {
    process_in_room(gpu_unchanged);
}

#ifdef MLUA_CUDA
/* Collectives go on beside the rest, in a stream of their own. */
static void gpu_ranks(process_room *room) {
    if (ml_cuda_count() < 2) test_skip("it takes 2 GPUs");
    process_result r =
        process_run(room, 0, "",
                    "run -n 2 --mesh dp=2 --device cuda --json %s steps=6 --profile=t.json", small);
    json_t *profile = load_profile(r.output), *root = load_trace(room, "t.json");
    const json_t *sums = json_object_get(profile, "profile");
    const json_t *events = json_object_get(root, "traceEvents");
    double all = number_of(sums, "collective_ms"),
           exposed = number_of(sums, "exposed_collective_ms");
    CHECK(all > 0 && exposed >= 0 && exposed <= all * (1 + 1e-9));
    check_events(events);
    size_t i;
    json_t *event;
    int beside[2] = {0};
    json_array_foreach(events, i, event) if (strcmp(text_of(event, "cat"), "collective") == 0)
        beside[json_integer_value(json_object_get(event, "pid"))] +=
        json_integer_value(json_object_get(event, "tid")) > 2;
    CHECK(beside[0] > 0 && beside[1] == beside[0]);
    json_decref(root);
    json_decref(profile);
}
TEST(gpu_profile, ranks) {
    process_in_room(gpu_ranks);
}
#endif
