/* m.train with examples of a script's own: every layout trains on the same ones. */
#include <string.h>

#include "tests/process/support.h"

static const char *const layouts[] = {
    "-n 2 --mesh dp=2 %s parts=2",
    "-n 2 --mesh pp=2 %s accum=2",
    "-n 2 --mesh dp=2 %s parts=2 zero=true accum=2",
    "-n 2 --mesh tp=2 %s",
    "-n 2 --mesh cp=2 %s accum=4",
    "-n 4 --mesh dp=4 %s parts=4 fsdp=true",
    "-n 4 --mesh pp=2,dp=2 %s parts=2 schedule=zero-bubble",
    "-n 8 --mesh pp=2,dp=2,tp=2 %s parts=2 accum=2 schedule=interleaved",
};

static void compare(process_room *room, int first, int count) {
    const char *script = "\"$ROOT\"/tests/lua/lib/own_data.lua steps=8";
    process_result one = process_run(room, 0, "", "run --device cpu --quiet %s", script);
    for (int i = first; i < first + count; i++) {
        ml_text command = {.arena = room->arena};
        ml_text_add(&command, layouts[i], script);
        process_result r = process_run(room, 0, "", "run --device cpu --quiet %s", command.text);
        process_compare_lines(r.output, one.output, layouts[i]);
    }
}

DIST_TEST(own_data) {
    compare(room, 0, 2);
}

static void every_layout(process_room *room) {
    compare(room, 0, (int)(sizeof layouts / sizeof *layouts));
}

TEST(long, own_data) {
    process_in_room(every_layout);
}
