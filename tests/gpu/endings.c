/* How ranks on GPUs end that cannot go on while NCCL still connects them: with the message, once,
 * and exit code 1. ENDINGS is how often each is tried. */
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

#ifdef MLUA_CUDA
#include "tests/gpu/bench.h"

/* Milliseconds that the emulator takes to connect: none, some, more than the end waits for. */
static const int connects[] = {1500, 20, 300, 0, 900, 100, 5000, 40};
enum { CONNECTS = sizeof connects / sizeof *connects };

static int tries(void) {
    const char *text = getenv("ENDINGS");
    return text && atoi(text) > 0 ? atoi(text) : 3;
}

static int occurrences(const char *text, const char *word) {
    int count = 0;
    for (; (text = strstr(text, word)); text++) count++;
    return count;
}

/* Numbers differ from run to run: what is free on a GPU. */
static char *without_numbers(ml_arena *arena, const char *text) {
    char *copy = ml_arena_copy(arena, text, strlen(text)), *to = copy;
    for (const char *at = copy; *at; at++)
        if (!strchr("0123456789.", *at)) *to++ = *at;
    *to = 0;
    return copy;
}

/* `mlua run ARGUMENTS -n 2` on GPUs, so often, with nothing on stderr but one message of so many
 * lines that says `says`; "": with nothing. */
static void check_endings(process_room *room, int times, int code, const char *says, int lines,
                          const char *arguments) {
    char *first = NULL;
    gpu_need(2);
    for (int i = 0; i < times; i++) {
        process_result r = process_shell(
            room, code,
            "EMULATOR_CONNECTS=%d TRY=%d timeout 60 \"$MLUA\" run --device cuda -n 2 %s 2>&1 "
            ">/dev/null",
            connects[i % CONNECTS], i, arguments);
        char *text = without_numbers(room->arena, r.output);
        if (!first) first = text;
        bool right = *says ? occurrences(r.output, says) == 1 : !*r.output;
        right = right && occurrences(r.output, "\n") == lines && !strstr(r.output, "mlua: ");
        EXPECT(right, "try %d of %s says\n%s", i, arguments, r.output);
        EXPECT(strcmp(text, first) == 0, "and before\n%s\nbut now\n%s", first, text);
        CHECK(r.code != 124);
    }
}
#define ENDING(name, ...)                                                                          \
    static void ending_##name(process_room *room) {                                                \
        check_endings(room, tries(), __VA_ARGS__);                                                 \
    }                                                                                              \
    TEST(gpu_endings, name) {                                                                      \
        process_in_room(ending_##name);                                                            \
    }

ENDING(planning, 1, "cannot cut \"blocks\", 1 layers, into 2 pipeline stages", 3,
       "\"$ROOT/models/gpt.lua\" layers=1 --mesh pp=2")
ENDING(mesh_axis, 1, "--mesh: the layout has no mesh axis \"zz\"", 3,
       "\"$ROOT/models/gpt.lua\" --mesh zz=2")
ENDING(memory, 1, "the program needs ", 15, "\"$ROOT/models/gpt.lua\" --mesh dp=2 batch=10000000")

/* The GPUs are being connected once a program is compiled under a layout, though its plan fails. */
#define SCRIPT                                                                                     \
    "local m = require 'mlua'\n"                                                                   \
    "local A = m.axes { batch = 1 << 45 }\n"                                                       \
    "local layout = m.layout.ddp { dp = 2 }\n"                                                     \
    "local function sum(feeds) return (feeds.x * feeds.x):sum 'batch' end\n"                       \
    "assert(not pcall(m.compile, sum, { x = { A.batch } }, { layout = layout }))\n"                \
    "os.execute('sleep 0.' .. os.getenv 'TRY' % 10)\n"

static void check_script(process_room *room, int times, int code, const char *says, int lines,
                         const char *last_line) {
    process_write(room, "script.lua", ml_arena_format(room->arena, "%s%s\n", (SCRIPT), last_line));
    check_endings(room, times, code, says, lines, "script.lua");
}

static void ending_script(process_room *room) {
    check_script(room, tries(), 1, ": this script ends here", 2, "error 'this script ends here'");
}
TEST(gpu_endings, script) {
    process_in_room(ending_script);
}

/* One rank alone fails; the script just ends; it leaves by os.exit. */
static void ending_others(process_room *room) {
    process_write(room, "one.lua",
                  SCRIPT "if require 'mlua.core'.options().rank == 1 then\n"
                         "  error 'this rank ends here'\nend\n");
    process_result r = process_shell(
        room, 1, "EMULATOR_CONNECTS=5000 TRY=0 \"$MLUA\" run --device cuda -n 2 one.lua");
    process_expect(&r, "[rank 1] one.lua:8: this rank ends here\n");
    process_expect(&r, "mlua: rank 1 failed; the other ranks were stopped\n");
    CHECK_EQ_INT(occurrences(r.output, "\n"), 3);
    check_script(room, 3, 0, "", 0, "");
    check_script(room, 3, 0, "", 0, "os.exit()");
    check_script(room, 1, 0, "", 0, "os.exit(true, true)");
    process_write(room, "code.lua", SCRIPT "os.exit(3)\n");
    r = process_shell(room, 3,
                      "EMULATOR_CONNECTS=600 TRY=0 \"$MLUA\" run --device cuda -n 2 code.lua");
    process_expect(&r, "ended with exit code 3; the other ranks were stopped\n");
    CHECK_EQ_INT(occurrences(r.output, "\n"), 1);
}
TEST(gpu_endings, others) {
    gpu_need(2);
    process_in_room(ending_others);
}
#else
TEST(gpu_endings, all) {
    test_skip("built without the CUDA toolkit's headers");
}
#endif
