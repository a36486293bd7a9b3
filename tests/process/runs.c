/* Folders of runs (--out): what they hold, that they are not overwritten, and TensorBoard's files,
 * which a reader of its own takes apart here: bit by bit CRC-32C, protobuf's fields by number. */
#include <glob.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "tests/process/support.h"

static const char script[] =
    "local m = require 'mlua'\n"
    "local cfg = m.config { steps = 4, width = 8 }\n"
    "local sizes = require 'lib.sizes'\n"
    "local A = m.axes { embed = cfg.width, vocab = 256, seq = 4, batch = sizes.batch }\n"
    "local Model = m.module('Model', function(self)\n"
    "  self.table, self.up = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }\n"
    "end)\n"
    "function Model:forward(tokens)\n"
    "  return self.table:gather(tokens, 'vocab'):dot(self.up, 'embed')\n"
    "end\n"
    "m.train { model = Model(), batch = A.batch, seq = A.seq, vocab = 256, steps = cfg.steps,\n"
    "  layout = m.layout { mesh = { { 'dp', 1 } }, acts = { dp = { 'batch' } } },\n"
    "  on_step = function(step, out) return { half_loss = out.loss / 2 } end }\n"
    "print 'the script is over'\n";

static void write_script(process_room *room) {
    process_shell(room, 0, "mkdir -p lib");
    process_write(room, "a.lua", script);
    process_write(room, "lib/sizes.lua", "return { batch = 4 }\n");
}

/* ---- Metrics -----------------------------------------------------------------------------------
 */

enum { MOST_LINES = 256 };
typedef struct {
    json_t *line[MOST_LINES];
    int count;
} metrics;

static void read_metrics(process_room *room, const char *folder, metrics *all) {
    char *text = test_read_file(
        room->arena, ml_arena_format(room->arena, "%s/%s/metrics.jsonl", room->folder, folder));
    all->count = 0;
    REQUIRE(text != NULL);
    for (char *end; (end = strchr(text, '\n')) != NULL && all->count < MOST_LINES; text = end + 1)
        if ((all->line[all->count] = json_loadb(text, (size_t)(end - text), 0, NULL)) != NULL)
            all->count++;
        else
            test_fail("no JSON: %.*s", (int)(end - text), text);
}

static void free_metrics(metrics *all) {
    for (int i = 0; i < all->count; i++) json_decref(all->line[i]);
}

static double field(const json_t *line, const char *name) {
    const json_t *value = json_object_get(line, name);
    return json_is_number(value) ? json_number_value(value) : -1;
}

/* The line of a step, and no line of an evaluation or event; NULL where there is none. */
static const json_t *step_line(const metrics *all, int step) {
    const json_t *found = NULL;
    for (int i = 0; i < all->count; i++)
        if (field(all->line[i], "step") == step && json_object_get(all->line[i], "loss")) {
            EXPECT(!found, "step %d has two lines", step);
            found = all->line[i];
        }
    return found;
}

/* ---- TensorBoard -------------------------------------------------------------------------------
 */

static uint32_t masked_crc(const uint8_t *data, size_t size) {
    uint32_t c = ~0u;
    for (size_t i = 0; i < size; i++) {
        c ^= data[i];
        for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? 0x82F63B78u : 0);
    }
    c = ~c;
    return (c >> 15 | c << 17) + 0xA282EAD8u;
}

typedef struct {
    const uint8_t *at, *end;
} cursor;

static uint64_t varint(cursor *c) {
    uint64_t value = 0;
    for (int shift = 0; c->at < c->end; shift += 7) {
        uint8_t byte = *c->at++;
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) break;
    }
    return value;
}

/* The next field: its number, 0 at the end; what it holds, a number as its bits or a message. */
static int next_field(cursor *c, uint64_t *value, cursor *inside) {
    if (c->at >= c->end) return 0;
    uint64_t key = varint(c);
    size_t size = 0;
    *value = 0;
    switch (key & 7) {
    case 0: *value = varint(c); break;
    case 1: size = 8; break;
    case 2: size = (size_t)varint(c); break;
    case 5: size = 4; break;
    default: test_fail("wire type %d", (int)(key & 7)); return 0;
    }
    REQUIRE(size <= (size_t)(c->end - c->at));
    *inside = (cursor){c->at, c->at + size};
    if (size == 4 || size == 8) memcpy(value, c->at, size);
    c->at += size;
    return (int)(key >> 3);
}

typedef struct {
    int events, versions, starts, scalars;
    const metrics *expected;
} board;

static void take_value(cursor value, int step, board *b) {
    char tag[64] = "";
    float number = 0;
    uint64_t bits;
    cursor inside;
    for (int id; (id = next_field(&value, &bits, &inside)) != 0;)
        if (id == 1)
            snprintf(tag, sizeof tag, "%.*s", (int)(inside.end - inside.at), inside.at);
        else if (id == 2)
            memcpy(&number, &bits, sizeof number);
    const json_t *line = step_line(b->expected, step);
    REQUIRE(line != NULL);
    EXPECT((float)field(line, tag) == number, "step %d: %s is %g", step, tag, (double)number);
    b->scalars++;
}

static void take_event(cursor event, board *b) {
    uint64_t bits, step = 0;
    cursor inside, value;
    b->events++;
    for (int id; (id = next_field(&event, &bits, &inside)) != 0;) {
        if (id == 2) step = bits;
        if (id == 3) b->versions += memcmp(inside.at, "brain.Event:2", 13) == 0;
        if (id == 5)
            while (next_field(&inside, &bits, &value) == 1) take_value(value, (int)step, b);
        if (id == 7) b->starts += next_field(&inside, &bits, &value) == 1 && bits == 1;
    }
}

static void read_board(const char *path, board *b) {
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(path, "rb");
    REQUIRE(file != NULL);
    size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    for (size_t at = 0; at < size;) {
        uint64_t length;
        uint32_t crc;
        REQUIRE(size - at >= 16);
        memcpy(&length, bytes + at, 8);
        memcpy(&crc, bytes + at + 8, 4);
        CHECK_EQ_INT(crc, masked_crc(bytes + at, 8));
        REQUIRE(length <= size - at - 16);
        memcpy(&crc, bytes + at + 12 + length, 4);
        CHECK_EQ_INT(crc, masked_crc(bytes + at + 12, length));
        take_event((cursor){bytes + at + 12, bytes + at + 12 + length}, b);
        at += 16 + length;
    }
}

static void check_boards(process_room *room, const char *folder, board *b) {
    glob_t found;
    char *pattern =
        ml_arena_format(room->arena, "%s/%s/events.out.tfevents.*", room->folder, folder);
    REQUIRE(glob(pattern, 0, NULL, &found) == 0);
    for (size_t i = 0; i < found.gl_pathc; i++) read_board(found.gl_pathv[i], b);
    CHECK_EQ_INT(b->versions, (int64_t)found.gl_pathc);
    globfree(&found);
}

/* ---- Tests -------------------------------------------------------------------------------------
 */

static void check_steps(const metrics *all, int steps) {
    double loss = 0;
    for (int step = 1; step <= steps; step++) {
        const json_t *line = step_line(all, step);
        EXPECT(line != NULL, "step %d has no line", step);
        if (!line) continue;
        CHECK(field(line, "loss") > 0 && field(line, "loss") != loss);
        loss = field(line, "loss");
        CHECK_NEAR(field(line, "half_loss"), loss / 2, 1e-9);
        CHECK_EQ_INT((int64_t)field(line, "samples"), step * 4);
        CHECK_EQ_INT((int64_t)field(line, "tokens"), step * 16);
        CHECK(field(line, "data_ms") >= 0 && field(line, "eval_ms") >= 0);
    }
}

PROCESS_TEST(run_folder) {
    write_script(room);
    process_result r = process_run(
        room, 0, "", "run a.lua --device cpu --out runs/a width=16 log_every=1 eval_every=2");
    process_expect(&r, "step 3/4"); /* log_every of a script that declares none */
    process_shell(room, 0,
                  "cmp a.lua runs/a/script.lua && cmp lib/sizes.lua runs/a/files/lib/sizes.lua && "
                  "grep -q 'step 3/4 .*loss' runs/a/log.txt && grep -q 'evaluation loss' "
                  "runs/a/log.txt");
    metrics all;
    read_metrics(room, "runs/a", &all);
    check_steps(&all, 4);
    int evaluations = 0;
    for (int i = 0; i < all.count; i++)
        evaluations += json_object_get(all.line[i], "eval_loss") != NULL;
    CHECK_EQ_INT(evaluations, 2);
    free_metrics(&all);
    char *text = test_read_file(
        room->arena, ml_arena_format(room->arena, "%s/runs/a/settings.json", room->folder));
    json_t *settings = json_loads(text, 0, NULL);
    REQUIRE(settings != NULL);
    const json_t *values = json_object_get(settings, "settings");
    CHECK_EQ_INT((int64_t)field(values, "width"), 16);
    CHECK_EQ_INT((int64_t)field(values, "eval_every"), 2);
    CHECK_EQ_INT((int64_t)field(settings, "parameters"), 2 * 16 * 256);
    json_decref(settings);
}

PROCESS_TEST(run_curves) {
    write_script(room);
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out b -n 2 --mesh dp=2");
    metrics all;
    read_metrics(room, "b", &all);
    check_steps(&all, 4);
    board b = {.expected = &all};
    check_boards(room, "b", &b);
    CHECK_EQ_INT(b.events, 1 + 4); /* the version, and each step */
    CHECK(b.scalars >= 4 * 8);
    free_metrics(&all);
}

/* TensorBoard's own reader, where it is installed. */
PROCESS_TEST(run_curves_in_tensorboard) {
    process_result r = process_shell(room, PROCESS_ANY_CODE, "python3 -c 'import tensorboard'");
    if (r.code != 0) test_skip("python3 has no tensorboard");
    write_script(room);
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out b");
    process_write(room, "read.py",
                  "from tensorboard.backend.event_processing.event_accumulator import *\n"
                  "events = EventAccumulator('b')\n"
                  "events.Reload()\n"
                  "print(*[e.step for e in events.Scalars('loss')])\n");
    r = process_shell(room, 0, "python3 read.py 2>&1 | tail -1");
    CHECK_TEXT(r.output, "1 2 3 4\n");
}

PROCESS_TEST(run_folder_refused) {
    write_script(room);
    process_run(room, 0, "", "run a.lua --device cpu --quiet --out c --resume steps=1");
    process_shell(room, 0, "cp c/metrics.jsonl before");
    for (int ranks = 1; ranks <= 2; ranks++) {
        process_result r = process_run(room, 1, "", "run a.lua --device cpu --out c -n %d", ranks);
        process_expect(&r, "mlua: --out c: the folder holds a run already");
        process_expect(&r, "--resume continues it");
    }
    process_shell(room, 0, "cmp before c/metrics.jsonl");
    process_result r = process_run(room, 1, "", "run a.lua --device cpu --resume");
    process_expect(&r, "--resume is of a run that a folder keeps");
    r = process_run(room, 1, "", "run a.lua --device cpu --out a.lua");
    process_expect(&r, "it is a file, and no folder");
    r = process_run(room, 1, "", "run a.lua --device cpu --out \"$(printf 'd\\377')\"");
    process_expect(&r, "mlua: --out d\377: the path is not UTF-8");
    r = process_run(room, 1, "", "run a.lua --device cpu --out d \"data=$(printf '\\377')\"");
    process_expect(&r, "mlua: --out keeps the command line, which is not UTF-8");
    r = process_run(room, 1, "", "run a.lua --device cpu --out d save_every=often");
    process_expect(&r, "save_every=often: save_every is a number of steps or a time");
    r = process_run(room, 1, "", "run a.lua --device cpu --out d keeep=2");
    process_expect(&r, "this script has no setting \"keeep\"");
    process_write(room, "fails.lua", "require 'mlua'\nerror 'no training'\n");
    process_run(room, 1, "", "run fails.lua --device cpu --out d");
    process_shell(room, 0, "[ ! -e d ]"); /* what fails before its first step leaves nothing */
}
