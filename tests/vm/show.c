/* mlua show: runs, checkpoints and safetensors files that are written here; what it prints is
 * compared with tests/vm/show/NAME.out. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/graph/ops.h"
#include "runtime/io/manifest.h"
#include "runtime/io/tensor_hash.h"
#include "tests/process/support.h"

#define SHOW_TEST(name)                                                                            \
    static void show_##name(process_room *room);                                                   \
    TEST(vm, show_##name) {                                                                        \
        process_in_room(show_##name);                                                              \
    }                                                                                              \
    static void show_##name(process_room *room)

static const char plain[] = "LC_ALL=C COLUMNS=80";

static FILE *create(process_room *room, const char *name) {
    char *path = ml_arena_format(room->arena, "%s/%s", room->folder, name);
    for (char *slash = path + strlen(room->folder) + 1; (slash = strchr(slash, '/'));
         *slash++ = '/') {
        *slash = 0;
        mkdir(path, 0777);
    }
    FILE *file = fopen(path, "wb");
    if (!file) ml_raise(ML_IO, "cannot write %s", path);
    return file;
}

static void write_text(process_room *room, const char *name, const char *text) {
    FILE *file = create(room, name);
    fputs(text, file);
    fclose(file);
}

/* A header, that many bytes of data; `length` -1: of the header. */
static void write_tensors(process_room *room, const char *name, const char *header, int64_t length,
                          int bytes) {
    FILE *file = create(room, name);
    uint64_t size = length < 0 ? strlen(header) : (uint64_t)length;
    for (int i = 0; i < 8; i++) fputc((int)(size >> 8 * i & 255), file);
    fputs(header, file);
    for (int i = 0; i < bytes; i++) fputc(i & 255, file);
    fclose(file);
}

static const char two_tensors[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"wte\":{\"dtype\":\"F32\",\"shape\":[8,4],\"data_offsets\":[0,128]},"
    "\"block.wq\":{\"dtype\":\"BF16\",\"shape\":[4,2,2],\"data_offsets\":[128,160]}}";

/* These tensors, of zeros. */
static void write_states(process_room *room, const char *folder, int step,
                         ml_manifest_tensor *tensors, int count) {
    ml_manifest *m;
    const char *text;
    static const char zeros[128];
    CHECK_STATUS(ml_manifest_new(&m), ML_OK);
    m->record = ml_arena_format(m->arena, "{\"step\":%d,\"seed\":0,\"layout\":{\"dp\":2}}", step);
    m->tensors = tensors, m->tensor_count = count;
    CHECK_STATUS(ml_manifest_place(m, 1 << 20), ML_OK);
    for (int i = 0; i < count; i++)
        tensors[i].hash = ml_tensor_hash(zeros, ml_dtypes[tensors[i].dtype].bytes, 0,
                                         tensors[i].bytes / ml_dtypes[tensors[i].dtype].bytes);
    for (int i = 0; i < m->file_count; i++) {
        const ml_manifest_file *f = &m->files[i];
        FILE *file = create(room, ml_arena_format(m->arena, "%s/%s", folder, f->name));
        fwrite(f->text, 1, (size_t)f->head, file);
        REQUIRE(fflush(file) == 0 && ftruncate(fileno(file), f->bytes) == 0);
        fclose(file);
    }
    CHECK_STATUS(ml_manifest_text(m, &text), ML_OK);
    write_text(room, ml_arena_format(m->arena, "%s/manifest.json", folder), text);
    ml_manifest_free(m);
}

/* Two parameters and a state. */
static void write_checkpoint(process_room *room, const char *folder, int step) {
    ml_manifest_tensor tensors[] = {
        {"wte", ML_F32, 2, {"vocab", "embed"}, {8, 4}, true},
        {"block.wq", ML_BF16, 3, {"embed", "heads", "head_dim"}, {4, 2, 2}, true},
        {"wte.m", ML_F32, 2, {"vocab", "embed"}, {8, 4}, false}};
    write_states(room, folder, step, tensors, 3);
}

/* Overwrite one byte, counted from the end. */
static void damage(process_room *room, const char *name, long from_end) {
    FILE *file = fopen(ml_arena_format(room->arena, "%s/%s", room->folder, name), "r+b");
    REQUIRE(file && fseek(file, -from_end, SEEK_END) == 0);
    fputc(1, file);
    fclose(file);
}

/* A run of `steps` of 200, evaluated every 50th; its last line is not whole. */
static void write_run(process_room *room, const char *folder, int steps, double lr) {
    write_text(
        room, ml_arena_format(room->arena, "%s/settings.json", folder),
        ml_arena_format(room->arena,
                        "{\"version\":\"0.1\",\"script\":\"gpt.lua\",\"command\":\"mlua run "
                        "gpt.lua lr=%g\",\"settings\":{\"layers\":2,\"lr\":%g,\"steps\":200},"
                        "\"seed\":7,\"device\":\"cpu\",\"layout\":{\"dp\":2},\"parameters\":"
                        "1234567,\"memory\":{\"parameters\":4938268,\"optimizer\":"
                        "9876536,\"gradients\":0},\"started\":\"2026-11-23T12:00:00Z\"}",
                        lr, lr));
    FILE *file = create(room, ml_arena_format(room->arena, "%s/metrics.jsonl", folder));
    for (int step = 1; step <= steps; step++) {
        fprintf(file,
                "{\"step\":%d,\"loss\":%.6f,\"grad_norm\":%.4f,\"lr\":%g,\"tokens\":%d,"
                "\"tokens_per_s\":%d,\"data_ms\":2.5,\"eval_ms\":0,\"mfu\":null,\"memory_gib\":0."
                "25,\"step_ms\":%d,"
                "\"accuracy\":0.5}\n",
                step, 1 + 9.0 / step, 2.0 / step, lr, step * 4096,
                step == 1 ? 100 : 4096 + step % 7, step == 1 ? 5000 : 1000);
        if (step % 50 == 0)
            fprintf(file, "{\"step\":%d,\"eval_loss\":%.6f}\n", step, 1 + 10.0 / step);
        if (step % 50 == 0)
            fprintf(file, "{\"step\":%d,\"event\":\"save\",\"seconds\":0.1}\n", step);
    }
    fprintf(file, "{\"step\":%d,\"lo", steps + 1);
    fclose(file);
}

/* Two steps of two kernels on each of two ranks, and what the host does. */
static void write_profile(process_room *room, const char *folder) {
    FILE *file = create(room, ml_arena_format(room->arena, "%s/profile.json", folder));
    fprintf(file, "{\"traceEvents\":[{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0}");
    for (int i = 0; i < 4; i++)
        fprintf(
            file,
            ",{\"ph\":\"X\",\"name\":\"gemm\",\"cat\":\"GEMM\",\"pid\":%d,\"dur\":30,\"args\":{"
            "\"step\":"
            "%d}},{\"ph\":\"X\",\"name\":\"add\",\"cat\":\"norm\",\"pid\":%d,\"dur\":10,\"args\":{"
            "\"step\":%d}},{\"ph\":\"X\",\"name\":\"data\",\"cat\":\"host\",\"pid\":0,\"dur\":9}",
            i / 2, 3 + i % 2, i / 2, 3 + i % 2);
    fputs("]}", file);
    fclose(file);
}

static void compare(process_room *room, const char *name, const char *environment,
                    const char *words) {
    process_result r = process_run(room, 0, environment, "%s", words);
    test_compare_file(room->arena, ml_arena_format(room->arena, "tests/vm/show/%s.out", name),
                      r.output);
}

SHOW_TEST(run) {
    write_run(room, "a", 120, 0.001);
    write_profile(room, "a");
    write_checkpoint(room, "a/checkpoints/step-00000050", 50);
    write_checkpoint(room, "a/checkpoints/step-00000100", 100);
    write_text(room, "a/checkpoints/step-00000100/state-00001-of-00001.safetensors", "");
    write_text(room, "a/checkpoints/step-00000110/model.safetensors.index.json", "{}");
    write_text(room, "a/checkpoints/step-00000120.tmp-0123456789abcdef/rest", "");
    compare(room, "run", plain, "show a/");
    compare(room, "run_utf8", "LC_ALL=C.UTF-8 COLUMNS=60", "show a");
}

SHOW_TEST(several_runs) {
    write_run(room, "a", 120, 0.001);
    write_run(room, "b", 200, 0.002);
    compare(room, "runs", plain, "show a b");
}

SHOW_TEST(checkpoint_and_file) {
    write_checkpoint(room, "c", 50);
    compare(room, "checkpoint", plain, "show c c/model-00001-of-00001.safetensors");
}

/* As many as a large mixture of experts has: 0.1 s. */
SHOW_TEST(many_tensors) {
    enum { COUNT = 10000 };
    ml_manifest_tensor *tensors = ML_NEW_ARRAY(room->arena, ml_manifest_tensor, COUNT);
    for (int i = 0; i < COUNT; i++)
        tensors[i] = (ml_manifest_tensor){
            .name = ml_arena_format(room->arena, "blocks.%d.experts.%d.up", i / 100, i % 100),
            .dtype = ML_BF16,
            .rank = 2,
            .axis = {"embed", "ffn"},
            .size = {2, 2},
            .model = true};
    write_states(room, "c", 1, tensors, COUNT);
    process_result r = process_run(room, 0, plain, "show c");
    process_expect(&r,
                   "tensors         10000 of 40.0 k elements, 78.1 KiB; bf16: 10000 of 78.1 KiB");
    process_expect(&r, "  blocks.99.experts.99.up  bf16  [embed=2, ffn=2]        8 B  model-00001");
    CHECK(r.cpu_seconds < 2); /* of a build without optimization, under sanitizers */
}

/* What only the hashes show, what the sizes show, and what is said of both. */
SHOW_TEST(verify) {
    static const char file[] = "a/checkpoints/step-00000050/state-00001-of-00001.safetensors";
    write_run(room, "a", 60, 0.001);
    write_checkpoint(room, "a/checkpoints/step-00000050", 50);
    process_result r = process_run(room, 0, plain, "show a/checkpoints/step-00000050 --verify");
    process_expect(&r, "state           whole; every tensor was read");
    damage(room, file, 3);
    r = process_run(room, 0, plain, "show a");
    process_expect(&r, "B  whole\n");
    r = process_run(room, 0, plain, "show a --verify");
    process_expect(&r,
                   "not whole: state-00001-of-00001.safetensors is damaged: tensor \"wte.m\" is "
                   "not the one that was written");
    r = process_run(room, 1, plain, "show a/checkpoints/step-00000050 --verify");
    process_expect(&r,
                   "mlua: a/checkpoints/step-00000050/state-00001-of-00001.safetensors is damaged");
    process_run(room, 0, plain, "show a/checkpoints/step-00000050");
    damage(room, file, 128 + 20);
    r = process_run(room, 1, plain, "show a/checkpoints/step-00000050");
    process_expect(&r, "safetensors is damaged: its header is not the one that was written");
    process_expect(&r, "help: mlua show FILE.safetensors shows the tensors of one file");
}

/* A folder of Hugging Face's shards, of which one tensor is missing. */
SHOW_TEST(shards) {
    write_tensors(room, "hf/model-00001-of-00002.safetensors", two_tensors, -1, 160);
    write_tensors(room, "hf/model-00002-of-00002.safetensors",
                  "{\"head\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", -1, 1);
    write_text(room, "hf/model.safetensors.index.json",
               "{\"weight_map\":{\"head\":\"model-00002-of-00002.safetensors\","
               "\"wte\":\"model-00001-of-00002.safetensors\","
               "\"norm\":\"model-00001-of-00002.safetensors\"}}");
    compare(room, "shards", plain, "show hf");
}

/* --json has what the text says, and is one object. */
SHOW_TEST(json) {
    write_run(room, "a", 120, 0.001);
    write_checkpoint(room, "a/checkpoints/step-00000100", 100);
    process_result r = process_run(room, 0, plain, "show a a/checkpoints/step-00000100 --json");
    json_error_t problem;
    json_t *all = json_loads(r.output, JSON_REJECT_DUPLICATES, &problem);
    REQUIRE(all != NULL);
    json_t *shown = json_object_get(all, "shown"), *run = json_array_get(shown, 0);
    CHECK_EQ_INT((int64_t)json_array_size(shown), 2);
    const char *kind, *state;
    int step, steps, torn, whole, tensors, bytes;
    double loss, lowest;
    CHECK(json_unpack(run, "{s:s,s:{s:i,s:i},s:{s:f},s:{s:f},s:b,s:[{s:b}]}", "kind", &kind,
                      "progress", "step", &step, "steps", &steps, "last", "loss", &loss,
                      "evaluation", "lowest", &lowest, "torn", &torn, "checkpoints", "whole",
                      &whole) == 0);
    CHECK_TEXT(kind, "run");
    CHECK(step == 120 && steps == 200 && torn && whole);
    CHECK_NEAR(loss, 1.075, 1e-9);
    CHECK_NEAR(lowest, 1.1, 1e-9);
    json_t *losses = json_object_get(json_object_get(run, "series"), "loss");
    CHECK_EQ_INT((int64_t)json_array_size(json_object_get(losses, "value")), 120);
    CHECK(json_unpack(json_array_get(shown, 1), "{s:s,s:{s:i,s:i}}", "kind", &state, "sums",
                      "tensors", &tensors, "bytes", &bytes) == 0);
    CHECK_TEXT(state, "checkpoint");
    CHECK(tensors == 3 && bytes == 288);
    json_decref(all);
}

/* A run and its checkpoints as they are written. */
SHOW_TEST(real_run) {
    process_write_text(room);
    process_run(room, 0, "",
                "run \"$ROOT/models/gpt.lua\" layers=1 embed=16 heads=1 seq=16 batch=4 steps=12 "
                "eval_every=4 save_every=5 data=text --device cpu --quiet --out a "
                "--profile=a/profile.json");
    process_result r =
        process_run(room, 0, plain, "show a a/checkpoints/step-00000010 --verify --json");
    json_t *all = json_loads(r.output, JSON_REJECT_DUPLICATES, NULL), *memory, *kernels;
    int step, steps, batch, evaluated, newest, whole, older, dp, parameter_bytes, first, verified;
    REQUIRE(all != NULL);
    const json_t *run = json_array_get(json_object_get(all, "shown"), 0);
    const json_t *checkpoint = json_array_get(json_object_get(all, "shown"), 1);
    CHECK(json_unpack((json_t *)run,
                      "{s:{s:i,s:i},s:{s:{s:i},s:{s:i},s:o},s:{s:i},s:[{s:i,s:b},{s:b}],s:{s:o}}",
                      "progress", "step", &step, "steps", &steps, "about", "settings", "batch",
                      &batch, "layout", "dp", &dp, "memory", &memory, "evaluation", "step",
                      &evaluated, "checkpoints", "step", &newest, "whole", &whole, "whole", &older,
                      "profile", "kernels", &kernels) == 0);
    CHECK(step == 12 && steps == 12 && batch == 4 && evaluated == 12 && newest == 12 && dp == 1);
    CHECK(whole && older && json_array_size(kernels) > 3);
    CHECK(json_integer_value(json_object_get(memory, "parameters")) > 0);
    CHECK_EQ_INT((int64_t)json_array_size(json_object_get(
                     json_object_get(json_object_get(run, "series"), "loss"), "value")),
                 12);
    CHECK(json_unpack((json_t *)checkpoint, "{s:b,s:{s:i},s:{s:{s:{s:i}}}}", "verified", &verified,
                      "record", "step", &first, "sums", "dtypes", "f32", "bytes",
                      &parameter_bytes) == 0);
    CHECK(verified && first == 10 && parameter_bytes > 0);
    json_decref(all);
}

/* The steps after the checkpoint from which a run was resumed are there twice. */
SHOW_TEST(resumed) {
    FILE *file = create(room, "a/metrics.jsonl");
    for (int step = 1; step <= 9; step++) fprintf(file, "{\"step\":%d,\"loss\":9}\n", step);
    fprintf(file, "{\"step\":7,\"event\":\"resume\"}\n{\"step\":9,\"eval_loss\":9}\n");
    for (int step = 7; step <= 8; step++)
        fprintf(file, "{\"step\":%d,\"loss\":%s, \"\\u0061\":1}\n", step, step == 8 ? "null" : "1");
    fclose(file);
    process_result r = process_run(room, 0, plain, "show a --json");
    process_expect(
        &r, "\"loss\":{\"step\":[1,2,3,4,5,6,7,8],\"value\":[9.0,9.0,9.0,9.0,9.0,9.0,1.0,null]}");
    process_expect(&r, "\"a\":{\"step\":[7,8],\"value\":[1.0,1.0]}");
    process_expect(&r, "\"evaluation\":null");
    r = process_run(room, 0, plain, "show a");
    process_expect(&r, "loss not finite");
}

/* As many bins as points that are shown; the least and the most of each are kept. */
SHOW_TEST(many_steps) {
    FILE *file = create(room, "a/metrics.jsonl");
    for (int step = 1; step <= 50000; step++)
        fprintf(file, "{\"step\":%d,\"loss\":%d}\n", step, step == 31000 ? -5 : step % 10);
    fclose(file);
    process_result r = process_run(room, 0, plain, "show a --json");
    json_t *all = json_loads(r.output, 0, NULL), *low, *high, *value;
    REQUIRE(json_unpack(all, "{s:[{s:{s:{s:o,s:o,s:o}}}]}", "shown", "series", "loss", "low", &low,
                        "high", &high, "value", &value) == 0);
    CHECK_EQ_INT((int64_t)json_array_size(low), 2000);
    CHECK_NEAR(json_number_value(json_array_get(low, 1239)), -5, 0);
    CHECK_NEAR(json_number_value(json_array_get(low, 1240)), 0, 0);
    CHECK_NEAR(json_number_value(json_array_get(high, 7)), 9, 0);
    CHECK_NEAR(json_number_value(json_array_get(value, 7)), 4.6, 0.1);
    json_decref(all);
}

SHOW_TEST(refuses) {
    const struct {
        const char *words, *error;
    } cases[] = {
        {"show", "mlua: show needs the folder of a run or a checkpoint"},
        {"show nothing", "mlua: cannot open nothing: No such file or directory"},
        {"show empty", "mlua: empty is empty: no run, checkpoint or safetensors files"},
        {"show other", "mlua: other is no run (settings.json, metrics.jsonl), no checkpoint"},
        {"show runs", "help: it holds others: mlua show runs/settings"},
        {"show other/text", "mlua: other/text is no safetensors file"},
        {"show broken", "mlua: broken/metrics.jsonl:2: not a JSON object: "},
        {"show stepless", "mlua: stepless/metrics.jsonl:1: the line has no step"},
        {"show runs/settings", "mlua: runs/settings/settings.json:2: not valid JSON: "},
        {"show cut.safetensors",
         "mlua: cut.safetensors is truncated: its header has 500 bytes, and 2 are there"},
        {"show short.safetensors",
         "mlua: short.safetensors is no safetensors file: it has 2 bytes"},
        {"show zip.safetensors", "mlua: zip.safetensors is no safetensors file: it is "},
        {"show text.safetensors", "mlua: text.safetensors: the header is not a JSON object: "},
        {"show size.safetensors",
         "mlua: size.safetensors: tensor \"w\" has another number of bytes"},
        {"show end.safetensors", "mlua: end.safetensors: tensor \"w\" is at bytes 0 to 16 of 12"},
        {"show a --color", "mlua: show has no option --color"},
    };
    write_text(room, "other/text", "text");
    write_text(room, "empty/.hidden", "");
    write_text(room, "broken/metrics.jsonl",
               "{\"step\":1,\"loss\":2}\n{\"step\":2,\"lo\n{\"step\":3}\n");
    write_text(room, "stepless/metrics.jsonl", "{\"loss\":2}\n");
    write_text(room, "runs/settings/settings.json", "{\n\"a\":}");
    write_tensors(room, "cut.safetensors", "{\"", 500, 0);
    write_text(room, "short.safetensors", "ab");
    write_text(room, "zip.safetensors", "PK\003\004abcdefghijklmn");
    write_tensors(room, "text.safetensors", "{\"w\" 1}", -1, 0);
    const char *one = "{\"w\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[0,16]}}";
    write_tensors(room, "size.safetensors", ml_arena_format(room->arena, one, 3), -1, 16);
    write_tensors(room, "end.safetensors", ml_arena_format(room->arena, one, 4), -1, 12);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_result r = process_run(room, PROCESS_ANY_CODE, plain, "%s", cases[i].words);
        CHECK(r.code == 1 || r.code == 2);
        process_expect(&r, cases[i].error);
    }
}

/* A page that opens without a network: no address in it, and no name in it ends its script. */
SHOW_TEST(page) {
    write_run(room, "</script><b>", 120, 0.001);
    write_run(room, "b", 200, 0.002);
    write_checkpoint(room, "c", 50);
    process_result r = process_run(room, 0, plain, "show '</script><b>' b c --html report.html");
    CHECK_TEXT(r.output, "");
    r = process_shell(room, 0, "cat report.html");
    process_expect(&r, "\\u003c/script>");
    CHECK(!strstr(r.output, "</script><b>") && !strstr(r.output, "@DATA@"));
    CHECK(!strstr(r.output, "://") && !strstr(r.output, "src=") && !strstr(r.output, "href="));
    r = process_run(room, 1, plain, "show b --html no/such/report.html");
    process_expect(&r, "mlua: cannot write no/such/report.html: No such file or directory");
}

/* Hover, zoom, smoothing, log scale and themes in a browser: show/drive.html says what it saw. */
SHOW_TEST(page_in_browser) {
    static const char browser[] = "$(command -v chromium || command -v chromium-browser || "
                                  "command -v google-chrome)";
    if (process_shell(room, PROCESS_ANY_CODE, "test -n \"%s\"", browser).code != 0)
        test_skip("no chromium is installed");
    write_run(room, "a</script><b>", 120, 0.001);
    write_profile(room, "a</script><b>");
    write_run(room, "b", 200, 0.002);
    process_run(room, 0, plain, "show 'a</script><b>' b --html report.html");
    process_result r = process_shell(
        room, 0,
        "cat report.html \"$ROOT/tests/vm/show/drive.html\" >page.html; timeout 60 %s --headless "
        "--no-sandbox --disable-gpu --user-data-dir=\"$PWD/profile\" --window-size=1300,900 "
        "--disable-dev-shm-usage --virtual-time-budget=1000 --dump-dom \"file://$PWD/page.html\""
        " 2>/dev/null || true",
        browser);
    if (!*r.output) test_skip("chromium does not start here");
    const char *result = strstr(r.output, "<pre id=\"result\">");
    test_compare_file(room->arena, "tests/vm/show/page.out",
                      ml_arena_format(room->arena, "%s\n", result ? result : "no result"));
}
