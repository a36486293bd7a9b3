#include "runtime/data/text.h"

#include <jansson.h>
#include <string.h>

#include "runtime/data/inflate.h"
#include "runtime/data/store.h"
#include "runtime/text/buffer.h"

enum { PART = 1 << 28, BLOCK = 1 << 16 };

typedef struct {
    const char *path;
    inflater *in;
    ml_bytes held, document; /* not yet given on; of `messages` */
    int64_t line, offset;    /* of the text: where the held bytes begin */
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

/* ---- Lines of JSON --------------------------------------------------------------------------- */

static ml_status wrong(const reading *r, int64_t offset, const char *what) {
    ml_fail(ML_IO, "%s, line %lld, byte %lld%s: %s", r->path, (long long)r->line,
            (long long)(r->offset + offset), store_ends_in(r->path, ".jsonl") ? "" : " of the text",
            what);
    return ml_help("a line is {\"text\": \"...\"} or {\"messages\": [{\"role\": \"user\", "
                   "\"content\": \"...\"}, ...]}");
}

static ml_status add_message(reading *r, const json_t *message) {
    const json_t *role = json_object_get(message, "role");
    const json_t *content = json_object_get(message, "content");
    if (!json_is_string(role) || !json_is_string(content))
        return wrong(r, 0, "a message needs the strings role and content");
    const struct {
        const char *text;
        size_t bytes;
    } parts[] = {{"<|im_start|>", 12},
                 {json_string_value(role), json_string_length(role)},
                 {"\n", 1},
                 {json_string_value(content), json_string_length(content)},
                 {"<|im_end|>\n", 11}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        ML_TRY(ml_bytes_add(&r->document, parts[i].text, parts[i].bytes));
    return ML_OK;
}

static ml_status give_object(reading *r, const json_t *object) {
    const json_t *text = json_object_get(object, "text"), *message;
    const json_t *messages = json_object_get(object, "messages");
    size_t i;
    if (json_is_string(text))
        return r->sink(r->context, json_string_value(text), json_string_length(text), true);
    if (!json_is_array(messages))
        return wrong(r, 0, "neither the string text nor the list messages");
    r->document.count = 0;
    json_array_foreach(messages, i, message) ML_TRY(add_message(r, message));
    return r->sink(r->context, r->document.at ? r->document.at : "", r->document.count, true);
}

static ml_status give_line(reading *r, const char *line, size_t bytes) {
    json_error_t error;
    if (r->line++ == 0 && bytes >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0)
        line += 3, bytes -= 3; /* a byte order mark */
    if (strspn(line, " \t\r") >= bytes) return ML_OK;
    json_t *object = json_loadb(line, bytes, JSON_ALLOW_NUL, &error);
    if (!object) return wrong(r, error.position, error.text);
    ml_status status = give_object(r, object);
    json_decref(object);
    return status;
}

/* Each whole line of the held bytes; at the end of the file the last one without a newline. */
static ml_status give_lines(reading *r, size_t searched, bool end) {
    size_t first = 0;
    for (char *next; (next = memchr(r->held.at + searched, '\n', r->held.count - searched));) {
        size_t length = (size_t)(next - (r->held.at + first));
        *next = 0;
        ML_TRY(give_line(r, r->held.at + first, length));
        r->offset += (int64_t)length + 1;
        searched = first += length + 1;
    }
    r->held.count -= first;
    memmove(r->held.at, r->held.at + first, r->held.count);
    if (!end || r->held.count == 0) return ML_OK;
    ML_TRY(ml_bytes_add(&r->held, "", 1));
    return give_line(r, r->held.at, r->held.count - 1);
}

/* ---- Files ----------------------------------------------------------------------------------- */

/* Of a text too large for memory, what ends with a line. */
static ml_status give_part(reading *r) {
    size_t count = r->held.count;
    while (count > 1 && r->held.at[count - 1] != '\n') count--;
    if (count <= 1) count = r->held.count;
    ML_TRY(r->sink(r->context, r->held.at, count, false));
    r->held.count -= count;
    memmove(r->held.at, r->held.at + count, r->held.count);
    return ML_OK;
}

static ml_status read_all(reading *r) {
    bool lines = is_lines(r->path);
    for (size_t got = 1; got > 0;) {
        size_t before = r->held.count;
        ML_TRY(ml_bytes_reserve(&r->held, BLOCK + 1)); /* never NULL */
        ML_TRY(inflate_read(r->in, r->held.at + before, BLOCK, &got));
        r->held.count += got;
        if (lines) ML_TRY(give_lines(r, before, got == 0));
        if (lines && r->held.count > PART) return wrong(r, 0, "a line of more than 256 MiB");
        if (!lines && r->held.count > PART) ML_TRY(give_part(r));
    }
    return lines ? ML_OK : r->sink(r->context, r->held.at, r->held.count, true);
}

ml_status text_read(const char *path, text_sink *sink, void *context) {
    reading r = {.path = path, .sink = sink, .context = context};
    ml_status status = inflate_open(path, &r.in);
    if (status == ML_OK) status = read_all(&r);
    inflate_close(r.in);
    ml_bytes_free(&r.held);
    ml_bytes_free(&r.document);
    return status;
}
