/* Lines of metrics, altered at random: exactly those are read that jansson reads and that have a
 * step; others are refused with an error. */
#define _GNU_SOURCE /* memfd_create */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/test.h"
#include "vm/show/show.h"

enum { MOST = 4096 };

/* Between one and four bytes are changed, inserted or removed, or a piece is repeated. */
static size_t alter(uint64_t *seed, char *text, size_t length) {
    static const char marks[] = "{}[]\",:0123456789.-+eE\\ntfu \n";
    for (int64_t turns = test_range(seed, 1, 4); turns > 0 && length > 1; turns--) {
        size_t at = (size_t)test_range(seed, 0, (int64_t)length - 1);
        size_t count = (size_t)test_range(seed, 1, 8), rest = length - at;
        char mark = test_range(seed, 0, 3) ? marks[test_range(seed, 0, sizeof marks - 2)]
                                           : (char)test_random(seed);
        switch (test_range(seed, 0, 3)) {
        case 0: text[at] = mark; break;
        case 1:
            count = count < rest ? count : rest;
            memmove(text + at, text + at + count, rest - count), length -= count;
            break;
        case 2:
            if (length + 1 < MOST)
                memmove(text + at + 1, text + at, rest), text[at] = mark, length++;
            break;
        default:
            count = count < rest ? count : rest;
            if (length + count >= MOST) break;
            memmove(text + at + count, text + at, rest), length += count;
        }
    }
    return length;
}

static void write_bytes(const char *path, const char *text, size_t length) {
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fwrite(text, 1, length, file) == length);
    fclose(file);
}

/* Whether a line that ends is one of metrics. */
static bool is_line(const char *line, size_t length) {
    json_t *object = json_loadb(line, length, JSON_REJECT_DUPLICATES, NULL);
    json_t *step = json_object_get(object, "step");
    double value = json_is_number(step) ? json_number_value(step) : -1;
    bool good = json_is_object(object) &&
                (json_is_string(json_object_get(object, "event")) || (value >= 0 && value < 9e15));
    json_decref(object);
    bool blank = strspn(line, " \t\r\n") >= length;
    return good || blank;
}

static void fuzz_line(uint64_t *seed, const char *path) {
    static const char line[] = "{\"step\":12,\"loss\":5.5e-1,\"grad_norm\":-0.25,\"mfu\":null,"
                               "\"event\":\"a\\n\",\"extra\":[1,{\"a\":true}]}";
    static const char flat[] = "{\"step\":12,\"loss\":5.5e-1, \"grad_norm\":-0.25,\"mfu\":null}";
    char text[2 * MOST];
    const char *from = test_range(seed, 0, 1) ? line : flat;
    memcpy(text, from, strlen(from));
    size_t length = alter(seed, text, strlen(from)), begin = 0;
    bool good = true;
    text[length++] = '\n';
    for (size_t i = 0; i < length; i++)
        if (text[i] == '\n') good = good && is_line(text + begin, i + 1 - begin), begin = i + 1;
    length += (size_t)sprintf(text + length, "{\"step\":99,\"loss\":1}\n{\"st");
    write_bytes(path, text, length);
    json_t *run = json_object();
    bool read = show_read_metrics(path, run) == ML_OK;
    EXPECT(read == good, "%s, and jansson %s it: %.*s%s", read ? "read" : "refused",
           good ? "reads" : "refuses", (int)length, text, read ? "" : ml_error_last()->text);
    if (read) EXPECT(json_is_true(json_object_get(run, "torn")), "the last line is torn");
    json_decref(run);
}

static void fuzz(int64_t inputs, uint64_t seed) {
    char path[64];
    int file = memfd_create("show", MFD_CLOEXEC); /* no disk's speed */
    REQUIRE(file >= 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    for (int64_t i = 0; i < inputs; i++) fuzz_line(&seed, path);
    close(file);
}

TEST(vm, show_altered_files) {
    fuzz(2000, 1);
}

TEST(long, show_altered_files) {
    const char *seed = getenv("SHOW_SEED");
    fuzz(500000, seed ? strtoull(seed, NULL, 10) : 2);
}
