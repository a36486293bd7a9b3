#include "runtime/data/text.h"

#include <string.h>

#include "runtime/data/inflate.h"
#include "runtime/data/store.h"

enum { PART = 1 << 28, BLOCK = 1 << 18 };

typedef struct {
    inflater *in;
    ml_bytes held; /* not yet given on */
    text_place place;
    text_sink *sink;
    void *context;
} reading;

bool text_is_plain(const char *path) {
    return !store_ends_in(path, ".jsonl") && !store_ends_in(path, ".gz") &&
           !store_ends_in(path, ".zst");
}

static bool is_lines(const char *path) {
    return store_ends_in(path, ".jsonl") || store_ends_in(path, ".jsonl.gz") ||
           store_ends_in(path, ".jsonl.zst");
}

bool text_is_name(const char *path) {
    return store_ends_in(path, ".txt") || store_ends_in(path, ".txt.gz") ||
           store_ends_in(path, ".txt.zst") || is_lines(path);
}

static ml_status give(reading *r, const char *bytes, size_t count) {
    return r->sink(r->context, r->place, bytes, count);
}

/* Each whole line of the held bytes; at the end of the file the last one without a newline. */
static ml_status give_lines(reading *r, size_t searched, bool end) {
    size_t first = 0;
    for (char *next; (next = memchr(r->held.at + searched, '\n', r->held.count - searched));) {
        size_t length = (size_t)(next - (r->held.at + first));
        r->place.line++;
        ML_TRY(give(r, r->held.at + first, length));
        r->place.offset += (int64_t)length + 1;
        searched = first += length + 1;
    }
    r->held.count -= first;
    memmove(r->held.at, r->held.at + first, r->held.count);
    r->place.line += end && r->held.count;
    if (r->held.count > PART)
        return ml_fail(ML_IO, "%s, line %lld: a line of more than 256 MiB", r->place.path,
                       (long long)r->place.line + 1);
    return end && r->held.count ? give(r, r->held.at, r->held.count) : ML_OK;
}

/* Of a text too large for memory, what ends with a line. */
static ml_status give_part(reading *r) {
    size_t count = r->held.count;
    while (count > 1 && r->held.at[count - 1] != '\n') count--;
    if (count <= 1) count = r->held.count;
    r->place.ends = false;
    ML_TRY(give(r, r->held.at, count));
    r->place.ends = true;
    r->held.count -= count;
    memmove(r->held.at, r->held.at + count, r->held.count);
    return ML_OK;
}

static ml_status read_all(reading *r) {
    for (size_t got = 1; got > 0;) {
        size_t before = r->held.count;
        ML_TRY(ml_bytes_reserve(&r->held, BLOCK + 1)); /* never NULL */
        ML_TRY(inflate_read(r->in, r->held.at + before, BLOCK, &got));
        r->held.count += got;
        if (r->place.json) ML_TRY(give_lines(r, before, got == 0));
        if (!r->place.json && r->held.count > PART) ML_TRY(give_part(r));
    }
    return r->place.json ? ML_OK : give(r, r->held.at, r->held.count);
}

ml_status text_read(const char *path, text_sink *sink, void *context) {
    reading r = {.place = {.path = path, .json = is_lines(path), .ends = true},
                 .sink = sink,
                 .context = context};
    ml_status status = inflate_open(path, &r.in);
    if (status == ML_OK) status = read_all(&r);
    inflate_close(r.in);
    ml_bytes_free(&r.held);
    return status;
}
