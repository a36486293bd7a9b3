/* What a line of a .jsonl file holds. */
#include <jansson.h>
#include <string.h>

#include "runtime/data/store.h"
#include "runtime/data/text.h"
#include "runtime/text/unicode.h"

static ml_status wrong(const text_place *place, int64_t offset, const char *what) {
    ml_fail(ML_IO, "%s, line %lld, byte %lld%s: %s", place->path, (long long)place->line,
            (long long)(place->offset + offset),
            store_ends_in(place->path, ".jsonl") ? "" : " of the text", what);
    return ml_help("a line is {\"text\": \"...\"} or {\"messages\": [{\"role\": \"user\", "
                   "\"content\": \"...\"}, ...]}");
}

/* ---- {"text": "..."} and nothing else ----------------------------------------------------------
 *
 * Most lines are that: one pass over their bytes. Any other line, and any that may be wrong, is the
 * parser's. */

typedef const unsigned char *byte;

static byte skip_blanks(byte at, byte end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r')) at++;
    return at;
}

static byte expect(byte at, byte end, const char *token) {
    size_t bytes = strlen(token);
    if (!at) return NULL;
    at = skip_blanks(at, end);
    return (size_t)(end - at) >= bytes && memcmp(at, token, bytes) == 0 ? at + bytes : NULL;
}

/* The four digits behind \u; false: they are none. */
static bool read_unit(byte at, byte end, unsigned *unit) {
    *unit = 0;
    for (int i = 0; i < 4; i++) {
        static const char digits[] = "0123456789abcdefABCDEF";
        const char *digit = at + i < end && at[i] ? strchr(digits, at[i]) : NULL;
        if (!digit) return false;
        unsigned value = (unsigned)(digit - digits);
        *unit = *unit << 4 | (value < 16 ? value : value - 6);
    }
    return true;
}

/* What stands behind a backslash; NULL: it may be wrong. */
static byte unescape(byte at, byte end, char **to) {
    static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
    unsigned unit, low;
    if (at == end || !*at) return NULL;
    if (*at != 'u') {
        const char *found = strchr(from, *at);
        if (!found) return NULL;
        *(*to)++ = into[found - from];
        return at + 1;
    }
    if (!read_unit(at + 1, end, &unit)) return NULL;
    at += 5;
    if (unit >= 0xD800 && unit < 0xE000) {
        if (unit >= 0xDC00 || end - at < 6 || at[0] != '\\' || at[1] != 'u') return NULL;
        if (!read_unit(at + 2, end, &low) || low < 0xDC00 || low >= 0xE000) return NULL;
        unit = 0x10000 + ((unit - 0xD800) << 10 | (low - 0xDC00));
        at += 6;
    }
    *to += unicode_write(unit, *to);
    return at;
}

/* A text's bytes up to its closing quote; NULL: something may be wrong. */
static byte read_text(byte at, byte end, char **to) {
    while (at < end && *at != '"') {
        byte first = at;
        while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\') at++;
        memcpy(*to, first, (size_t)(at - first));
        *to += at - first;
        if (at == end || *at == '"') break;
        if (*at == '\\') {
            if (!(at = unescape(at + 1, end, to))) return NULL;
        } else {
            int length;
            if (*at < 0x20 || unicode_read(at, end, &length) >= TEXT_NO_CHARACTER) return NULL;
            memcpy(*to, at, (size_t)length);
            *to += length;
            at += length;
        }
    }
    return at < end ? at + 1 : NULL;
}

static bool is_plain_object(byte at, byte end, char *to, size_t *length) {
    char *past = to;
    at = expect(at, end, "{");
    at = expect(at, end, "\"text\"");
    at = expect(at, end, ":");
    at = expect(at, end, "\"");
    if (at) at = read_text(at, end, &past);
    at = expect(at, end, "}");
    *length = (size_t)(past - to);
    return at && skip_blanks(at, end) == end;
}

/* ---- Any object -------------------------------------------------------------------------------
 */

static ml_status add_message(const text_place *place, const json_t *message, ml_bytes *to) {
    const json_t *role = json_object_get(message, "role");
    const json_t *content = json_object_get(message, "content");
    if (!json_is_string(role) || !json_is_string(content))
        return wrong(place, 0, "a message needs the strings role and content");
    const struct {
        const char *text;
        size_t bytes;
    } parts[] = {{"<|im_start|>", 12},
                 {json_string_value(role), json_string_length(role)},
                 {"\n", 1},
                 {json_string_value(content), json_string_length(content)},
                 {"<|im_end|>\n", 11}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        ML_TRY(ml_bytes_add(to, parts[i].text, parts[i].bytes));
    return ML_OK;
}

static ml_status add_object(const text_place *place, const json_t *object, ml_bytes *to) {
    const json_t *text = json_object_get(object, "text"), *message;
    const json_t *messages = json_object_get(object, "messages");
    size_t i;
    if (json_is_string(text))
        return ml_bytes_add(to, json_string_value(text), json_string_length(text));
    if (!json_is_array(messages))
        return wrong(place, 0, "neither the string text nor the list messages");
    json_array_foreach(messages, i, message) ML_TRY(add_message(place, message, to));
    return ML_OK;
}

static ml_status add_line(const text_place *place, const char *line, size_t bytes, ml_bytes *to) {
    json_error_t error;
    json_t *object = json_loadb(line, bytes, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &error);
    if (!object) return wrong(place, error.position, error.text);
    to->count = 0;
    ml_status status = add_object(place, object, to);
    json_decref(object);
    return status;
}

ml_status text_of(text_place place, const char *bytes, size_t count, ml_bytes *held,
                  const char **text, size_t *length) {
    *text = bytes, *length = count;
    if (!place.json) return ML_OK;
    if (place.line == 1 && count >= 3 && memcmp(bytes, "\xef\xbb\xbf", 3) == 0)
        bytes += 3, count -= 3; /* a byte order mark */
    byte at = (byte)bytes;
    *text = NULL;
    if (skip_blanks(at, at + count) == at + count) return ML_OK;
    held->count = 0;
    ML_TRY(ml_bytes_reserve(held, count));
    *text = held->at;
    if (is_plain_object(at, at + count, held->at, length)) return ML_OK;
    ML_TRY(add_line(&place, bytes, count, held));
    *text = held->at, *length = held->count;
    return ML_OK;
}
